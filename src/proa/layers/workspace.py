"""Scratch tensors of a forward pass, allocated once and shared by all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from proa.device.backend import Device
from proa.native.ops import ExpertWorkspace

__all__ = ["Workspace"]


class Workspace:
    """Named buffers of `max_tokens` rows on the device of the trunk.

    Layers of one kind ask for the same names and so share the memory. `experts` is the scratch of every expert layer
    on the CPU, grown by each while it is loaded to what it needs.
    """

    __slots__ = ("_buffers", "_host_buffers", "device", "experts", "max_tokens")

    def __init__(self, device: Device, max_tokens: int) -> None:
        self.device = device
        self.experts = ExpertWorkspace(device.runtime.pool, max_tokens)
        self.max_tokens = max_tokens
        self._buffers: dict[str, torch.Tensor] = {}
        self._host_buffers: dict[str, torch.Tensor] = {}

    def rows(self, name: str, tokens: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The first `tokens` rows of buffer `name`, `[tokens, *shape]`, contiguous; contents are undefined.

        The buffer is allocated at the first call; later calls must agree on shape and dtype.
        """
        return self._rows(self._buffers, self.device.rows, name, tokens, shape, dtype)

    def host_rows(self, name: str, tokens: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Like `rows`, in CPU memory that the device copies from and to directly."""
        return self._rows(self._host_buffers, self.device.host_rows, name, tokens, shape, dtype)

    def _rows(
        self,
        buffers: dict[str, torch.Tensor],
        allocate: Callable[..., torch.Tensor],
        name: str,
        tokens: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        buffer = buffers.get(name)
        if buffer is None:
            buffer = buffers[name] = allocate(self.max_tokens, *shape, dtype=dtype)
        assert buffer.shape[1:] == shape and buffer.dtype == dtype, f"workspace buffer {name} has two shapes"
        return buffer[:tokens]

    @property
    def nbytes(self) -> int:
        """In CPU memory."""
        on_cpu = self._host_buffers if self.device.name != "cpu" else self._buffers | self._host_buffers
        return self.experts.nbytes + sum(buffer.nbytes for buffer in on_cpu.values())

    @property
    def device_bytes(self) -> int:
        """In the memory of a GPU; 0 without one."""
        return 0 if self.device.name == "cpu" else sum(buffer.nbytes for buffer in self._buffers.values())
