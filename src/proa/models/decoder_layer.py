"""One layer of the decoder all families share, what it is made from, and the scratch that layers use in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from proa.attention.backend import AttentionStep
from proa.attention.shape import HeadShape
from proa.kvcache.layout import KVLayout
from proa.layers.gqa import GqaRows, GqaSpec, GroupedQueryAttention
from proa.layers.mla import LatentAttention, MlaRows, MlaSpec
from proa.layers.mlp import GatedMLP, MlpNames, load_mlp
from proa.layers.norm import RMSNorm
from proa.layers.parameters import ParameterReader
from proa.layers.rotary import RotaryEmbedding
from proa.layers.workspace import Workspace
from proa.moe.layer import MoeLayer, MoeRows, MoeSpec
from proa.moe.stats import RoutingCounts
from proa.moe.traffic import ExpertTraffic

__all__ = ["DecoderLayer", "DecoderSpec", "Lane", "Rows"]


class Lane(Enum):
    """Whose rows last from one layer to the next: forwards of different lanes may stand between layers at once."""

    PASS = ("", None)  # as many tokens as the scratch holds
    SHORT = ("short.", 2048)  # a pass between the layers of another one
    STEP = ("beside.", 1024)  # the largest decode step (engine.config)

    def tokens(self, most: int) -> int:
        """Of a forward in this lane; `most`: of any."""
        limit = self.value[1]
        return most if limit is None else min(limit, most)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Everything the decoder needs to know of a model.

    `dense_intermediate`: width of the MLP of the layers outside `moe_layers`.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    norm_eps: float
    tied_head: bool
    attention: GqaSpec | MlaSpec
    moe: MoeSpec
    moe_layers: frozenset[int]
    dense_intermediate: int

    @property
    def layout(self) -> KVLayout:
        """What a token occupies in the KV cache."""
        spec = self.attention
        if isinstance(spec, MlaSpec):
            return KVLayout(self.num_layers, 1, spec.latent_dim, spec.kv_lora_rank, latent=True)
        return KVLayout(self.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim)

    @property
    def head_shape(self) -> HeadShape:
        """What attention backends size their scratch by."""
        spec = self.attention
        value_dim = spec.kv_lora_rank if isinstance(spec, MlaSpec) else spec.head_dim
        return HeadShape(spec.num_heads, value_dim)


class Rows:
    """Scratch views for T tokens, used by every layer in turn.

    From one layer to the next only `residual` and `delta` last; they are of the lane's own memory.
    """

    __slots__ = ("attention", "delta", "moe", "normed", "residual")

    def __init__(self, spec: DecoderSpec, workspace: Workspace, tokens: int, lane: Lane = Lane.PASS) -> None:
        prefix, capacity = lane.value[0], lane.tokens(workspace.max_tokens)
        self.residual = workspace.rows(f"{prefix}residual", tokens, spec.hidden, capacity=capacity)
        self.delta = workspace.rows(f"{prefix}delta", tokens, spec.hidden, capacity=capacity)
        self.normed = workspace.rows("normed", tokens, spec.hidden)
        if isinstance(spec.attention, MlaSpec):
            self.attention: GqaRows | MlaRows = MlaRows(spec.attention, workspace, tokens)
        else:
            self.attention = GqaRows(spec.attention, workspace, tokens)
        self.moe = MoeRows(spec.moe, workspace, tokens)


class DecoderLayer:
    """Pre-norm attention and pre-norm MLP; each adds its output to the residual in the next norm."""

    __slots__ = ("_attend", "_attention_norm", "_mlp", "_mlp_norm", "nbytes")

    def __init__(
        self,
        attention: GroupedQueryAttention | LatentAttention,
        mlp: GatedMLP | MoeLayer,
        *,
        attention_norm: RMSNorm,
        mlp_norm: RMSNorm,
    ) -> None:
        self._attend: Callable[..., None] = attention.forward
        self._mlp = mlp
        self._attention_norm = attention_norm
        self._mlp_norm = mlp_norm
        self.nbytes = attention.nbytes + mlp.nbytes

    @classmethod
    def load(
        cls,
        reader: ParameterReader,
        spec: DecoderSpec,
        layer: int,
        rotary: RotaryEmbedding,
        workspace: Workspace,
        counts: RoutingCounts,
    ) -> DecoderLayer:
        prefix = f"model.layers.{layer}"
        attention_norm = RMSNorm.load(reader, f"{prefix}.input_layernorm", size=spec.hidden, eps=spec.norm_eps)
        mlp_norm = RMSNorm.load(reader, f"{prefix}.post_attention_layernorm", size=spec.hidden, eps=spec.norm_eps)
        attention: GroupedQueryAttention | LatentAttention
        if isinstance(spec.attention, MlaSpec):
            attention = LatentAttention.load(reader, f"{prefix}.self_attn", spec.attention, layer, rotary)
        else:
            attention = GroupedQueryAttention.load(reader, f"{prefix}.self_attn", spec.attention, layer, rotary)
        mlp: GatedMLP | MoeLayer
        if layer in spec.moe_layers:
            row = counts.of_layer(sorted(spec.moe_layers).index(layer))
            mlp = MoeLayer.load(reader, prefix, spec.moe, layer, workspace, row)
        else:
            mlp = load_mlp(
                reader,
                f"{prefix}.mlp",
                workspace,
                hidden=spec.hidden,
                intermediate=spec.dense_intermediate,
                activation=spec.moe.activation,
                names=MlpNames(),
            )
        return cls(attention, mlp, attention_norm=attention_norm, mlp_norm=mlp_norm)

    @property
    def is_capturable(self) -> bool:
        """Whether its experts let a decode step be part of a CUDA graph."""
        return not isinstance(self._mlp, MoeLayer) or self._mlp.is_capturable

    @property
    def traffic(self) -> ExpertTraffic:
        """Of the routed experts; none in a dense layer."""
        return self._mlp.traffic if isinstance(self._mlp, MoeLayer) else ExpertTraffic()

    def attend(self, rows: Rows, delta: torch.Tensor | None, positions: torch.Tensor, step: AttentionStep) -> None:
        """Adds `delta`, the output of the layer before (None: there is none), to the residual, then attends.

        Leaves the attention's output in `rows.delta`.
        """
        if delta is None:
            self._attention_norm.forward(rows.residual, rows.normed)
        else:
            self._attention_norm.add_forward(rows.residual, delta, rows.normed)
        self._attend(rows.normed, positions, rows.attention, step, rows.delta)

    def feed_forward(self, rows: Rows, *, defers: bool) -> None:
        """Adds `rows.delta` to the residual and replaces it by the output of the MLP or the experts.

        `defers`: see `LayerContext`.
        """
        self._mlp_norm.add_forward(rows.residual, rows.delta, rows.normed)
        if isinstance(self._mlp, MoeLayer):
            self._mlp.forward(rows.normed, rows.moe, rows.delta, defers=defers)
        else:
            self._mlp.forward(rows.normed, rows.delta)
