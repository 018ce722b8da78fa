"""From a normalised configuration to the specs of the layers: what families have in common."""

from __future__ import annotations

from proa.layers.gqa import GqaSpec
from proa.layers.mla import MlaSpec
from proa.layers.mlp import SILU, MlpNames
from proa.layers.rotary import RotarySpec, YarnSpec
from proa.models.config import ModelConfig, RopeConfig
from proa.models.decoder_layer import DecoderSpec
from proa.moe.layer import MoeSpec
from proa.moe.router import RouterSpec

__all__ = ["build_spec", "gqa_spec", "mla_spec", "moe_spec"]


def build_spec(config: ModelConfig, attention: GqaSpec | MlaSpec, moe: MoeSpec) -> DecoderSpec:
    """The decoder around `attention` and `moe`."""
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden=config.hidden_size,
        num_layers=config.num_layers,
        norm_eps=config.rms_norm_eps,
        tied_head=config.tie_word_embeddings,
        attention=attention,
        moe=moe,
        moe_layers=config.moe.layers,
        dense_intermediate=config.intermediate_size,
    )


def gqa_spec(config: ModelConfig, *, output_bias: bool = False) -> GqaSpec:
    """`attention_bias` gives q, k and v a bias; whether o_proj has one too differs between families."""
    return GqaSpec(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary=_rotary_spec(config.rope),
        qkv_bias=config.attention_bias,
        output_bias=output_bias,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
    )


def mla_spec(config: ModelConfig, *, norm_eps: float) -> MlaSpec:
    """`norm_eps`: of q_a_layernorm and kv_a_layernorm."""
    latent = config.latent
    assert latent is not None, "a family with latent attention has its dimensions"
    return MlaSpec(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        q_lora_rank=latent.q_lora_rank,
        kv_lora_rank=latent.kv_lora_rank,
        nope_dim=latent.qk_nope_head_dim,
        rope_dim=latent.qk_rope_head_dim,
        value_dim=latent.v_head_dim,
        rotary=_rotary_spec(config.rope),
        norm_eps=norm_eps,
        bias=config.attention_bias,
    )


def moe_spec(config: ModelConfig, *, block: str = "mlp", names: MlpNames | None = None) -> MoeSpec:
    """`block`: the module of a layer that holds router and experts; `names`: of the projections of an expert."""
    moe = config.moe
    router = RouterSpec(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        score=moe.score,
        bias=moe.choice_bias,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        renormalize=moe.renormalize,
        eps=moe.epsilon,
        scale=moe.scale,
    )
    return MoeSpec(
        hidden=config.hidden_size,
        intermediate=moe.intermediate_size,
        router=router,
        activation=SILU,
        shared_intermediate=moe.shared_intermediate_size,
        block=block,
        names=names or MlpNames(),
    )


def _rotary_spec(rope: RopeConfig) -> RotarySpec:
    if rope.kind == "yarn":
        yarn = YarnSpec(
            factor=rope.factor,
            original_max_positions=rope.original_max_positions,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            mscale=rope.mscale,
            mscale_all_dim=rope.mscale_all_dim,
            attention_factor=rope.attention_factor,
            truncate=rope.truncate,
        )
        return RotarySpec(rope.dim, rope.theta, rope.interleaved, yarn=yarn)
    return RotarySpec(rope.dim, rope.theta, rope.interleaved, linear_factor=rope.factor)
