"""Token embedding and output head."""

from __future__ import annotations

import numpy as np
import torch

from proa.device.backend import Device
from proa.layers.linear import Linear
from proa.layers.parameters import ParameterReader
from proa.weights.linear import RawLinear

__all__ = ["Embedding", "load_output_head"]


class Embedding:
    """Rows of a table.

    `stored`: `[vocab, hidden]`, float32, or bf16 as uint16, in the mapped checkpoint file; the CPU reads it from there.
    """

    __slots__ = ("_embedding_rows", "_table", "stored")

    def __init__(self, device: Device, stored: np.ndarray) -> None:
        self._embedding_rows = device.embedding_rows
        self._table = device.place_table(stored)
        self.stored = stored

    @classmethod
    def load(cls, reader: ParameterReader, name: str, *, vocab_size: int, hidden: int) -> Embedding:
        return cls(reader.device, reader.table(f"{name}.weight", vocab_size, hidden))

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """`token_ids` int32 `[T]`, each below vocab; `out` float32 `[T, hidden]`."""
        self._embedding_rows(self._table, token_ids, out)


def load_output_head(reader: ParameterReader, name: str, embedding: Embedding, *, tied: bool) -> Linear:
    """The linear from hidden states to logits; `tied`: its weight is the embedding table, packed a second time."""
    vocab_size, hidden = embedding.stored.shape
    if not tied:
        return Linear.load(reader, [name], out_features=[vocab_size], in_features=hidden)
    weight_format = "bf16" if embedding.stored.dtype == np.uint16 else "f32"
    raw = RawLinear(weight_format, vocab_size, hidden, embedding.stored, None)
    return Linear([reader.pack_raw(raw)])
