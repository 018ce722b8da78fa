"""What went wrong, without the exception, whose frames keep tensors alive; and whether it was memory."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["StepFailure", "lacking_memory"]

# Libraries that allocate beside torch raise RuntimeErrors of their own: Triton when it loads a kernel, cuBLAS.
_GPU_TEXTS = ("out of memory", "ALLOC_FAILED")
_RAM_TEXT = "can't allocate memory"  # torch's allocator on the CPU


@dataclass(frozen=True, slots=True)
class StepFailure:
    """`text` is for the client."""

    text: str
    is_out_of_memory: bool

    @classmethod
    def of(cls, error: Exception) -> StepFailure:
        where = lacking_memory(error)
        if where is None:
            return cls(f"{type(error).__name__}: {error}", is_out_of_memory=False)
        text = f"[{where}] expected room for a step of this request, got none. Fix: retry later, or shorten the prompt"
        return cls(text, is_out_of_memory=True)


def lacking_memory(error: Exception) -> Literal["RAM", "GPU memory"] | None:
    """Which memory `error` found none of."""
    if isinstance(error, torch.OutOfMemoryError):
        return "GPU memory"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "RAM"
    if not isinstance(error, RuntimeError):
        return None
    if _RAM_TEXT in str(error):
        return "RAM"
    return "GPU memory" if any(text in str(error) for text in _GPU_TEXTS) else None
