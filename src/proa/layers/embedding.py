"""Token embedding, read from the mapped checkpoint, and the output head."""

from __future__ import annotations

import numpy as np
import torch

from proa.layers.linear import Linear
from proa.layers.parameters import ParameterReader
from proa.native import ops
from proa.native.runtime import CpuRuntime
from proa.weights.linear import RawLinear

__all__ = ["Embedding", "load_output_head"]


class Embedding:
    """Rows of a table `[vocab, hidden]` (float32, or bf16 as uint16) that stays in the mapped checkpoint file."""

    __slots__ = ("_pool", "table")

    def __init__(self, runtime: CpuRuntime, table: np.ndarray) -> None:
        self._pool = runtime.pool
        self.table = table

    @classmethod
    def load(cls, reader: ParameterReader, name: str, *, vocab_size: int, hidden: int) -> Embedding:
        return cls(reader.runtime, reader.table(f"{name}.weight", vocab_size, hidden))

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """`token_ids` int32 `[T]`, each below vocab; `out` float32 `[T, hidden]`."""
        ops.embedding_rows(self._pool, self.table, token_ids, out)


def load_output_head(reader: ParameterReader, name: str, embedding: Embedding, *, tied: bool) -> Linear:
    """The linear from hidden states to logits; `tied`: its weight is the embedding table, packed a second time."""
    vocab_size, hidden = embedding.table.shape
    if not tied:
        return Linear.load(reader, [name], out_features=[vocab_size], in_features=hidden)
    weight_format = "bf16" if embedding.table.dtype == np.uint16 else "f32"
    raw = RawLinear(weight_format, vocab_size, hidden, embedding.table, None)
    return Linear(reader.runtime, [reader.pack_raw(raw)])
