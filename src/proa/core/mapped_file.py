"""Maps a weight file for reading, and tells when it has been cut short since."""

from __future__ import annotations

import mmap
from pathlib import Path

from proa.core.errors import CheckpointError

__all__ = ["REDOWNLOAD", "check_end", "map_file"]

REDOWNLOAD = "download the file again"


def map_file(path: Path, what: str, min_bytes: int) -> mmap.mmap:
    """The whole of `path`, read-only. CheckpointError when it is no `what`: not there, no file, below `min_bytes`."""
    where = str(path)
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise CheckpointError(where, "a regular file", "something else")
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < min_bytes:
                raise CheckpointError(where, what, f"{size} bytes", REDOWNLOAD)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CheckpointError(where, "a file", "nothing", REDOWNLOAD) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(where, "a readable file", error) from None


def check_end(mapping: mmap.mmap, end: int, where: str) -> None:
    """CheckpointError when the mapped file ends before byte `end` by now: touching what is gone ends the process."""
    size = mapping.size()  # of the file, as it is at this moment
    if end > size:
        raise CheckpointError(where, f"bytes up to {end}", f"a file that ends at {size}", REDOWNLOAD)
