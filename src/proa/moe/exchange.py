"""Memory through which a GPU hands tokens to CPU experts and gets their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from proa.kernels.hand_over import hand_over
from proa.moe.deferral import split_slots
from proa.moe.router import TopK

__all__ = ["ExpertExchange", "device_view"]

_TYPES = {torch.float32: "<f4", torch.int32: "<i4", torch.uint8: "|u1"}


@dataclass(frozen=True, slots=True)
class _Mapped:
    """Pinned CPU memory as an array of the device (CUDA array interface, version 3)."""

    host: torch.Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape, type_name = tuple(self.host.shape), _TYPES[self.host.dtype]
        return {"shape": shape, "typestr": type_name, "data": (self.host.data_ptr(), False), "version": 3}


def device_view(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned `host` as a tensor of `device` that kernels read and write over the bus; `host` must outlive it."""
    return torch.as_tensor(_Mapped(host), device=device) if device.type == "cuda" else host


class ExpertExchange:
    """Rows of up to `max_tokens` tokens: `x`, `ids`, `late_ids`, `weights`, `tokens` for the CPU, `out` and `late_out`
    from it; what is late has no rows without `late`.

    Each is a tensor of pinned CPU memory; kernels use the same memory through views of their own: no copies are
    queued, a kernel's stores are on their way while it runs.
    """

    __slots__ = ("_device", "ids", "late_ids", "late_out", "max_tokens", "out", "tokens", "weights", "x")

    def __init__(self, device: torch.device, max_tokens: int, hidden: int, top_k: int, *, late: bool = False) -> None:
        pinned = device.type == "cuda"
        self.max_tokens = max_tokens
        self.x, self.out, self.late_out = (
            torch.zeros(rows, hidden, pin_memory=pinned) for rows in (max_tokens, max_tokens, max_tokens * late)
        )
        self.ids, self.late_ids = (
            torch.full((rows, top_k), -1, dtype=torch.int32, pin_memory=pinned)
            for rows in (max_tokens, max_tokens * late)
        )
        self.weights = torch.zeros(max_tokens, top_k, pin_memory=pinned)
        self.tokens = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        hosts = ("x", "ids", "weights", "tokens", "out", *(("late_ids", "late_out") if late else ()))
        self._device = {name: device_view(getattr(self, name), device) for name in hosts}

    def give(self, x: torch.Tensor, topk: TopK, table: torch.Tensor, num_late: int = 0) -> None:
        """Tokens and routing to the CPU. x float32 `[T, H]`; `table` int64 `[E, 3]`: `GpuExperts.table`.

        `num_late`: slots of a token that may come late (`split_slots`), as `late_ids`.
        """
        device = self._device
        if x.device.type == "cuda":
            host = (device["x"], device["ids"], device["weights"], device["tokens"])
            hand_over(x, topk.ids, topk.weights, table, host, device["late_ids"] if num_late else None, num_late)
            return
        tokens, ids = x.shape[0], topk.ids
        if num_late:
            ids, late = split_slots(topk, num_late, table)
            self.late_ids[:tokens] = late
        self.x[:tokens] = x
        on_gpu = table[ids.clamp(min=0).long(), 0] >= 0
        self.ids[:tokens] = ids.masked_fill(on_gpu, -1)
        self.weights[:tokens] = topk.weights
        self.tokens[0] = tokens

    def take(self, out: torch.Tensor) -> None:
        """Adds the CPU's result to `out` float32 `[T, H]`."""
        out.add_(self._device["out"][: out.shape[0]])

    def take_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Adds it to rows `rows`, int64 `[T]` and distinct, of `out`."""
        out.index_add_(0, rows, self._device["out"][: rows.shape[0]])

    def take_late(self, out: torch.Tensor) -> None:
        """The same with what came late."""
        out.add_(self._device["late_out"][: out.shape[0]])
