"""Grouped-query attention with optional bias, per-head QK norm and partial rotary embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from proa.attention.backend import AttentionStep
from proa.layers.linear import Linear
from proa.layers.norm import RMSNorm
from proa.layers.parameters import ParameterReader
from proa.layers.rotary import RotaryEmbedding, RotarySpec
from proa.layers.workspace import Workspace

__all__ = ["GqaRows", "GqaSpec", "GroupedQueryAttention"]


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """`qk_norm_eps`: epsilon of the norm over each query and key head, None where the model has none."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None

    @property
    def widths(self) -> list[int]:
        """Columns of q, k and v."""
        return [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]


class GqaRows:
    """Scratch of T tokens, shared by all layers of one spec."""

    __slots__ = ("attended", "attended_rows", "key", "key_rows", "qkv", "query", "value_rows")

    def __init__(self, spec: GqaSpec, workspace: Workspace, tokens: int) -> None:
        q, k, v = spec.widths
        self.qkv = workspace.rows("gqa.qkv", tokens, q + k + v)
        self.query = self.qkv[:, :q].view(tokens, spec.num_heads, spec.head_dim)
        self.key_rows = self.qkv[:, q : q + k]
        self.key = self.key_rows.view(tokens, spec.num_kv_heads, spec.head_dim)
        self.value_rows = self.qkv[:, q + k :]
        self.attended_rows = workspace.rows("gqa.attended", tokens, q)
        self.attended = self.attended_rows.view(tokens, spec.num_heads, spec.head_dim)


class GroupedQueryAttention:
    """Attention of one layer. Keys are cached after norm and rotation."""

    __slots__ = ("_k_norm", "_layer", "_output", "_q_norm", "_qkv", "_rotary", "_scale")

    def __init__(
        self,
        spec: GqaSpec,
        layer: int,
        rotary: RotaryEmbedding,
        *,
        qkv: Linear,
        output: Linear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> None:
        self._layer = layer
        self._rotary = rotary
        self._qkv = qkv
        self._output = output
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._scale = math.pow(spec.head_dim, -0.5)

    @classmethod
    def load(
        cls, reader: ParameterReader, prefix: str, spec: GqaSpec, layer: int, rotary: RotaryEmbedding
    ) -> GroupedQueryAttention:
        """Reads `{prefix}.{q,k,v,o}_proj` and, with QK norm, `{prefix}.{q,k}_norm`."""
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        qkv = Linear.load(reader, names, out_features=spec.widths, in_features=spec.hidden, bias=spec.qkv_bias)
        output = Linear.load(
            reader,
            [f"{prefix}.o_proj"],
            out_features=[spec.hidden],
            in_features=spec.widths[0],
            bias=spec.output_bias,
        )
        q_norm = k_norm = None
        if spec.qk_norm_eps is not None:
            q_norm = RMSNorm.load(reader, f"{prefix}.q_norm", size=spec.head_dim, eps=spec.qk_norm_eps)
            k_norm = RMSNorm.load(reader, f"{prefix}.k_norm", size=spec.head_dim, eps=spec.qk_norm_eps)
        return cls(spec, layer, rotary, qkv=qkv, output=output, q_norm=q_norm, k_norm=k_norm)

    @property
    def nbytes(self) -> int:
        return self._qkv.nbytes + self._output.nbytes

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, rows: GqaRows, step: AttentionStep, out: torch.Tensor
    ) -> None:
        """`x`, `out` float32 `[T, hidden]`, `positions` int32 `[T]`."""
        self._qkv.forward(x, rows.qkv)
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.forward(rows.query, rows.query)
            self._k_norm.forward(rows.key, rows.key)
        self._rotary.forward(rows.query, positions)
        self._rotary.forward(rows.key, positions)
        step.attend(
            self._layer,
            query=rows.query,
            key=rows.key_rows,
            value=rows.value_rows,
            scale=self._scale,
            out=rows.attended,
        )
        self._output.forward(rows.attended_rows, out)
