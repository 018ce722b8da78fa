"""Multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form.

The cache holds one row per token: the normed latent of kv_lora_rank columns, then the rotated key of rope_dim columns
that all heads share. kv_b_proj, which would expand the latent to keys and values of every head, is split per head and
applied to the query (W_uk) and to the attended latent (W_uv) instead, for prefill and decode alike: the same
operations, so the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from proa.attention.backend import AttentionStep
from proa.attention.gpu import GpuAttentionStep
from proa.device.backend import HeadsWeight
from proa.layers.linear import Linear
from proa.layers.norm import RMSNorm
from proa.layers.parameters import ParameterReader
from proa.layers.rotary import RotaryEmbedding, RotarySpec
from proa.layers.workspace import Workspace
from proa.weights.linear import RawLinear
from proa.weights.quantization import FP8_BLOCK

__all__ = ["LatentAttention", "MlaRows", "MlaSpec"]

# So many tokens of a pass attend at a time in the absorbed form: a token's rows of it are 4 times those of its heads.
ATTEND_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """`q_lora_rank` None: queries come from one q_proj. `norm_eps`: of the norms on the two latents."""

    hidden: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rotary: RotarySpec
    norm_eps: float
    bias: bool = False

    @property
    def latent_dim(self) -> int:
        """Columns of the cache."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def input_dim(self) -> int:
        """Columns of the query side of the input projection: the query latent, or the queries themselves."""
        return self.num_heads * (self.nope_dim + self.rope_dim) if self.q_lora_rank is None else self.q_lora_rank

    @property
    def scale(self) -> float:
        yarn = self.rotary.yarn
        return math.pow(self.nope_dim + self.rope_dim, -0.5) * (1.0 if yarn is None else yarn.softmax_factor())


class MlaRows:
    """Scratch of T tokens, shared by all layers of one spec; `query` and `attended` of up to ATTEND_TOKENS of them."""

    __slots__ = (
        "attended",
        "heads",
        "heads_rows",
        "input",
        "latent",
        "latent_norm",
        "latent_rope",
        "q_heads",
        "q_latent",
        "q_nope",
        "q_projected",
        "q_rope",
        "query",
        "query_absorbed",
        "query_rope",
    )

    def __init__(self, spec: MlaSpec, workspace: Workspace, tokens: int) -> None:
        heads, rank, head_dim = spec.num_heads, spec.kv_lora_rank, spec.nope_dim + spec.rope_dim
        self.input = workspace.rows("mla.input", tokens, spec.input_dim + spec.latent_dim)
        self.q_latent = self.input[:, : spec.input_dim]
        self.latent = self.input[:, spec.input_dim :]
        self.latent_norm = self.latent[:, :rank]
        self.latent_rope = self.latent.unsqueeze(1)
        if spec.q_lora_rank is None:
            self.q_projected = self.q_latent
        else:
            self.q_projected = workspace.rows("mla.query", tokens, heads * head_dim)
        self.q_heads = self.q_projected.view(tokens, heads, head_dim)
        self.q_nope, self.q_rope = self.q_heads[:, :, : spec.nope_dim], self.q_heads[:, :, spec.nope_dim :]
        few, capacity = (min(count, ATTEND_TOKENS) for count in (tokens, workspace.max_tokens))
        self.query = workspace.rows("mla.absorbed", few, heads, spec.latent_dim, capacity=capacity)
        self.query_absorbed, self.query_rope = self.query[:, :, :rank], self.query[:, :, rank:]
        self.attended = workspace.rows("mla.attended", few, heads, rank, capacity=capacity)
        self.heads = workspace.rows("mla.heads", tokens, heads, spec.value_dim)
        self.heads_rows = self.heads.flatten(1)


class LatentAttention:
    """Attention of one layer."""

    __slots__ = (
        "_input",
        "_kv_norm",
        "_layer",
        "_nope_dim",
        "_output",
        "_q_norm",
        "_query",
        "_rank",
        "_rotary",
        "_scale",
        "_w_uk",
        "_w_uv",
    )

    def __init__(
        self,
        spec: MlaSpec,
        layer: int,
        rotary: RotaryEmbedding,
        *,
        input_: Linear,
        q_norm: RMSNorm | None,
        query: Linear | None,
        kv_norm: RMSNorm,
        w_uk: HeadsWeight,
        w_uv: HeadsWeight,
        output: Linear,
    ) -> None:
        self._layer = layer
        self._rotary = rotary
        self._rank = spec.kv_lora_rank
        self._nope_dim = spec.nope_dim
        self._scale = spec.scale
        self._input = input_
        self._q_norm = q_norm
        self._query = query
        self._kv_norm = kv_norm
        self._w_uk = w_uk
        self._w_uv = w_uv
        self._output = output

    @classmethod
    def load(
        cls, reader: ParameterReader, prefix: str, spec: MlaSpec, layer: int, rotary: RotaryEmbedding
    ) -> LatentAttention:
        """Reads `{prefix}.q_proj` or `{q_a_proj, q_a_layernorm, q_b_proj}`, `kv_a_proj_with_mqa`, `kv_a_layernorm`,
        `kv_b_proj` and `o_proj`."""
        q_name, q_norm, query = "q_proj", None, None
        if spec.q_lora_rank is not None:
            q_name = "q_a_proj"
            q_norm = RMSNorm.load(reader, f"{prefix}.q_a_layernorm", size=spec.q_lora_rank, eps=spec.norm_eps)
            width = spec.num_heads * (spec.nope_dim + spec.rope_dim)
            query = Linear.load(reader, [f"{prefix}.q_b_proj"], out_features=[width], in_features=spec.q_lora_rank)
        input_ = _load_input(reader, prefix, q_name, spec)
        w_uk, w_uv = _load_absorbed(reader, f"{prefix}.kv_b_proj", spec)
        output = Linear.load(
            reader,
            [f"{prefix}.o_proj"],
            out_features=[spec.hidden],
            in_features=spec.num_heads * spec.value_dim,
            bias=spec.bias,
        )
        kv_norm = RMSNorm.load(reader, f"{prefix}.kv_a_layernorm", size=spec.kv_lora_rank, eps=spec.norm_eps)
        return cls(
            spec,
            layer,
            rotary,
            input_=input_,
            q_norm=q_norm,
            query=query,
            kv_norm=kv_norm,
            w_uk=w_uk,
            w_uv=w_uv,
            output=output,
        )

    @property
    def nbytes(self) -> int:
        linears = (self._input, self._output) if self._query is None else (self._input, self._query, self._output)
        return sum(part.nbytes for part in (*linears, self._w_uk, self._w_uv))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, rows: MlaRows, step: AttentionStep, out: torch.Tensor
    ) -> None:
        """`x`, `out` float32 `[T, hidden]`, `positions` int32 `[T]`."""
        self._input.forward(x, rows.input)
        if self._q_norm is not None and self._query is not None:
            self._q_norm.forward(rows.q_latent, rows.q_latent)
            self._query.forward(rows.q_latent, rows.q_projected)
        self._kv_norm.forward(rows.latent_norm, rows.latent_norm)
        self._rotary.forward(rows.latent_rope, positions, offset=self._rank)
        self._rotary.forward(rows.q_heads, positions, offset=self._nope_dim)
        step.store(self._layer, rows.latent, None)
        for short in self._attend_long(rows, step):
            self._attend_absorbed(rows, short, step)
        self._output.forward(rows.heads_rows, out)

    def _attend_long(self, rows: MlaRows, step: AttentionStep) -> Sequence[slice]:
        """Long chunks on a GPU with expanded keys and values; the rows that are left."""
        if not isinstance(step, GpuAttentionStep) or not step.long_spans:
            return [slice(0, len(rows.heads))]
        for index, span in enumerate(step.long_spans):
            chunk = slice(span.first, span.first + span.count)
            step.attend_long(
                self._layer,
                index,
                query=rows.q_heads[chunk],
                w_uk=self._w_uk,
                w_uv=self._w_uv,
                scale=self._scale,
                out=rows.heads[chunk],
            )
        return step.short_ranges

    def _attend_absorbed(self, rows: MlaRows, part: slice, step: AttentionStep) -> None:
        for first in range(part.start, part.stop, ATTEND_TOKENS):
            some = slice(first, min(first + ATTEND_TOKENS, part.stop))
            count = some.stop - first
            self._w_uk.forward(rows.q_nope[some], rows.query_absorbed[:count])
            rows.query_rope[:count].copy_(rows.q_rope[some])
            attended = rows.attended[:count]
            step.attend_rows(self._layer, some, query=rows.query[:count], scale=self._scale, out=attended)
            self._w_uv.forward(attended, rows.heads[some])


def _load_input(reader: ParameterReader, prefix: str, q_name: str, spec: MlaSpec) -> Linear:
    """The projections of the hidden state, query side first; q_a_proj has a bias where kv_a has, q_proj never."""
    names = [f"{prefix}.{q_name}", f"{prefix}.kv_a_proj_with_mqa"]
    widths = [spec.input_dim, spec.latent_dim]
    parts = reader.pack(names, widths, spec.hidden)
    if not spec.bias:
        return Linear(parts)
    q_bias = torch.zeros(widths[0])
    if spec.q_lora_rank is not None:
        q_bias = reader.vector(f"{names[0]}.bias", widths[0])
    bias = torch.cat([q_bias, reader.vector(f"{names[1]}.bias", widths[1])])
    return Linear(parts, reader.device.place(bias))


def _load_absorbed(reader: ParameterReader, name: str, spec: MlaSpec) -> tuple[HeadsWeight, HeadsWeight]:
    """Per head: W_uk `[rank, nope_dim]`, the key rows of kv_b_proj transposed, and W_uv `[value_dim, rank]`."""
    head_rows = spec.nope_dim + spec.value_dim
    raw = reader.raw_linear(name, spec.num_heads * head_rows, spec.kv_lora_rank)
    if not _splits_exactly(raw, spec):
        values = reader.values(raw)
        raw = RawLinear("f32", raw.out_features, raw.in_features, values, None)
    starts = range(0, raw.out_features, head_rows)
    w_uk = reader.pack_heads([_transposed(_rows(raw, start, start + spec.nope_dim)) for start in starts])
    w_uv = reader.pack_heads([_rows(raw, start + spec.nope_dim, start + head_rows) for start in starts])
    reader.packed(name)
    return w_uk, w_uv


def _splits_exactly(raw: RawLinear, spec: MlaSpec) -> bool:
    """Whether a head's rows can be cut out and transposed in their own format; others are expanded to float32."""
    if raw.format == "fp8_block128":
        return spec.nope_dim % FP8_BLOCK == 0 and spec.value_dim % FP8_BLOCK == 0
    return raw.format in ("f32", "bf16")


def _rows(raw: RawLinear, start: int, stop: int) -> RawLinear:
    scales = None if raw.scales is None else raw.scales[start // FP8_BLOCK : stop // FP8_BLOCK]
    return RawLinear(raw.format, stop - start, raw.in_features, raw.data[start:stop], scales)


def _transposed(raw: RawLinear) -> RawLinear:
    scales = None if raw.scales is None else np.ascontiguousarray(raw.scales.T)
    return RawLinear(raw.format, raw.in_features, raw.out_features, np.ascontiguousarray(raw.data.T), scales)
