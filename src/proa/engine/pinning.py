"""Whether the driver pins memory at all, asked before experts are loaded that have to cross the bus."""

from __future__ import annotations

import ctypes
import mmap

from proa.core.errors import MemoryShortageError
from proa.moe.hybrid_layers import PINNING_FIX
from proa.native._C import CudaDriver, CudaError

__all__ = ["check_pinning"]

_PROBE_BYTES = 64 * 2**20


def check_pinning(driver: CudaDriver, nbytes: int) -> None:
    """Pins a little and lets it go. `nbytes`: that are to be pinned.

    What bounds it is the driver and the machine (a container, WSL's half of the RAM); RLIMIT_MEMLOCK does not.

    Raises:
        MemoryShortageError: refused.
    """
    with mmap.mmap(-1, _PROBE_BYTES) as memory:
        view = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(view)
        del view  # a mapping that is looked at cannot be closed
        try:
            driver.pin([(start, _PROBE_BYTES)])
        except CudaError as error:
            expected = f"{nbytes / 2**30:.2f} GiB of RAM that the driver can pin"
            got = f"{error} at the first {_PROBE_BYTES / 2**20:.0f} MiB"
            raise MemoryShortageError("pinned memory", expected, got, PINNING_FIX) from error
        driver.unpin(start)
