"""Tells directories of converted experts apart by names alone, without numpy: the API process asks too."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["MANIFEST", "is_converted", "is_kt_kernel"]

MANIFEST = "proa_experts.json"

# kt-kernel's own converter writes packed bytes of one NUMA count, without a format or version: folders of .kt files, or
# safetensors with these names.
_KT_FOLDER = re.compile(r"_layer_[0-9]+")
_KT_TENSOR = re.compile(rb'"blk\.[0-9]+\.ffn_(up|gate|down)(_bwd)?_exps\.[0-9]+\.numa\.[0-9]+\.(weight|scale)"')
_LOOKED_AT_BYTES = 1 << 20


def is_converted(path: Path) -> bool:
    """Whether a finished `proa convert` wrote the directory `path`."""
    return (path / MANIFEST).is_file()


def is_kt_kernel(path: Path) -> bool:
    """Whether kt-kernel's converter wrote the directory `path`."""
    try:
        names = sorted(item.name for item in path.iterdir())
        if any(_KT_FOLDER.fullmatch(name) for name in names):
            return True
        headers = [name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))]
        return any(_KT_TENSOR.search(_beginning(path / name)) for name in headers[:2])
    except OSError:
        return False


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LOOKED_AT_BYTES)
