"""Scratch tensors of a forward pass, allocated once and shared by all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch

from proa.device.backend import Device
from proa.native.ops import ExpertWorkspace

__all__ = ["ExpertPlan", "Workspace", "measuring_workspace"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Which routed experts are in GPU memory and which go through it.

    on_gpu: bool `[MoE layers, experts]`. stream_from: in forwards of so many tokens and more other experts stream
    through `ring_bytes` of GPU memory, as many as is fastest, with `stream_all` all of them; None: they run on the CPU.
    moves: experts that may change places at a time, each with a slot of GPU memory to come to; 0: they stay. ram_slots:
    of each layer, for those that leave the GPU. max_deferred: slots of a token whose experts on the CPU may come one
    layer late in a decode step. shares: float64 `[MoE layers, experts]`, how many of a token's slots are expected at
    each, where that is known.
    """

    on_gpu: np.ndarray
    stream_from: int | None = None
    ring_bytes: int = 0
    stream_all: bool = False
    moves: int = 0
    ram_slots: int = 0
    max_deferred: int = 0
    shares: np.ndarray | None = None

    @property
    def uses_gpu(self) -> bool:
        """Whether any expert runs on the GPU."""
        return self.stream_from is not None or bool(self.on_gpu.any())

    @property
    def uses_cpu(self) -> bool:
        """Whether any runs on the CPU, or may once experts have moved."""
        return self.moves > 0 or not self.on_gpu.all()


class Workspace:
    """Named buffers of `max_tokens` rows on the device of the trunk.

    Layers of one kind ask for the same names and so share the memory. `experts` is the scratch of every expert layer
    on the CPU, grown by each while it is loaded to what it needs.

    `expert_plan`: for routed experts under a trunk on a GPU; None: all are in RAM and run there. `cpu_tokens`: most
    tokens whose experts the CPU computes at a time, None: `max_tokens`.
    """

    __slots__ = (
        "_buffers",
        "_cpu_tokens",
        "_experts",
        "_host_buffers",
        "_last",
        "_shared",
        "device",
        "expert_plan",
        "max_tokens",
    )

    def __init__(
        self,
        device: Device,
        max_tokens: int,
        expert_plan: ExpertPlan | None = None,
        *,
        cpu_tokens: int | None = None,
    ) -> None:
        self.device = device
        self._cpu_tokens = cpu_tokens or max_tokens
        self.expert_plan = expert_plan
        self._experts: ExpertWorkspace | None = None
        self.max_tokens = max_tokens
        self._buffers: dict[str, torch.Tensor] = {}
        self._host_buffers: dict[str, torch.Tensor] = {}
        self._shared: dict[str, Any] = {}
        self._last: list[Callable[[], None]] = []

    @property
    def experts(self) -> ExpertWorkspace:
        """Scratch of expert layers on the CPU."""
        if self._experts is None:
            self._experts = ExpertWorkspace(self.device.runtime.pool, self._cpu_tokens)
        return self._experts

    def shared(self, name: str, create: Callable[[], T]) -> T:
        """What layers of one kind use in turn, made by the first of them."""
        if name not in self._shared:
            self._shared[name] = create()
        value: T = self._shared[name]
        return value

    def made(self, name: str) -> Any:
        """What `shared` made, None if it did not."""
        return self._shared.get(name)

    def when_loaded(self, call: Callable[[], None]) -> None:
        """Has `call` called once the last layer is loaded."""
        self._last.append(call)

    def loaded(self) -> None:
        """The last layer is loaded."""
        for call in self._last:
            call()
        self._last.clear()
        if self._experts is not None:
            self._experts.touch()

    def rows(
        self,
        name: str,
        tokens: int,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        capacity: int | None = None,
    ) -> torch.Tensor:
        """The first `tokens` rows of buffer `name`, `[tokens, *shape]`, contiguous; contents are undefined.

        The buffer is allocated at the first call, with `capacity` rows, None: `max_tokens`; later calls must agree on
        shape and dtype.
        """
        return self._rows(self._buffers, self.device.rows, name, tokens, shape, dtype, capacity)

    def host_rows(self, name: str, tokens: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Like `rows`, in CPU memory that the device copies from and to directly."""
        return self._rows(self._host_buffers, self.device.host_rows, name, tokens, shape, dtype, None)

    def _rows(
        self,
        buffers: dict[str, torch.Tensor],
        allocate: Callable[..., torch.Tensor],
        name: str,
        tokens: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        capacity: int | None,
    ) -> torch.Tensor:
        buffer = buffers.get(name)
        if buffer is None:
            buffer = buffers[name] = allocate(capacity or self.max_tokens, *shape, dtype=dtype)
        assert tokens <= buffer.shape[0], f"workspace buffer {name} of {buffer.shape[0]} rows"
        assert buffer.shape[1:] == shape and buffer.dtype == dtype, f"workspace buffer {name} has two shapes"
        return buffer[:tokens]

    @property
    def nbytes(self) -> int:
        """In CPU memory."""
        on_cpu = self._host_buffers if self.device.name != "cpu" else self._buffers | self._host_buffers
        experts = 0 if self._experts is None else self._experts.nbytes
        return experts + sum(buffer.nbytes for buffer in on_cpu.values())

    @property
    def device_bytes(self) -> int:
        """In the memory of a GPU; 0 without one."""
        return 0 if self.device.name == "cpu" else sum(buffer.nbytes for buffer in self._buffers.values())


def measuring_workspace(max_tokens: int) -> Workspace:
    """One whose buffers take no memory: its `device_bytes` tell what they would take on a GPU."""
    return Workspace(cast("Device", _MetaRows()), max_tokens)


class _MetaRows:
    """As much of a Device as buffers need."""

    name = "meta"

    def rows(self, num_rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device="meta")
