"""What went wrong in a forward, without the exception, whose frames keep the tensors of the step alive."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["StepFailure"]

# Libraries that allocate beside torch raise RuntimeErrors of their own: Triton when it loads a kernel, cuBLAS.
_ALLOCATION_TEXTS = ("out of memory", "ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class StepFailure:
    """`text` is for the client."""

    text: str
    is_out_of_memory: bool

    @classmethod
    def of(cls, error: Exception) -> StepFailure:
        if isinstance(error, MemoryError):
            return cls(_out_of_memory("RAM"), is_out_of_memory=True)
        if isinstance(error, torch.OutOfMemoryError) or _is_allocation(error):
            return cls(_out_of_memory("GPU memory"), is_out_of_memory=True)
        return cls(f"{type(error).__name__}: {error}", is_out_of_memory=False)


def _is_allocation(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATION_TEXTS)


def _out_of_memory(where: str) -> str:
    return f"[{where}] expected room for a step of this request, got none. Fix: retry later, or shorten the prompt"
