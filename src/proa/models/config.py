"""One normalised model configuration out of the config.json spellings of every supported family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from proa.core.errors import UnsupportedError
from proa.models.config_fields import ConfigFields

__all__ = ["ConfigRules", "LatentAttention", "ModelConfig", "MoeConfig", "RopeConfig", "normalise"]

MAX_POSITIONS = 1 << 24
MAX_VOCAB = 1 << 22
MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of `dim` elements of each head.

    `factor` and below apply to kind "yarn" (and `factor` to "linear"). `attention_factor`, `mscale` and
    `mscale_all_dim` are None where config.json has none; the cos/sin factor follows from them (Peng et al. 2023).
    """

    theta: float
    dim: int
    interleaved: bool
    kind: Literal["default", "linear", "yarn"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA dimensions. `q_lora_rank` None: queries are projected directly (`q_proj`)."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Router and experts, the same in every MoE layer.

    `renormalize`: divide the chosen weights by their sum plus `epsilon`; then multiply by `scale`.
    `num_groups` / `top_groups`: group-limited choice, 1 / 1 for none. `choice_bias`: the router adds
    `e_score_correction_bias` to the scores it chooses by. `layers`: indices of the MoE layers.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int  # 0: no shared experts
    score: Literal["sigmoid", "softmax"]
    choice_bias: bool
    num_groups: int
    top_groups: int
    renormalize: bool
    epsilon: float
    scale: float
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A validated config.json. `intermediate_size` is the width of the dense layers (0 when all layers are MoE)."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    rope: RopeConfig
    moe: MoeConfig
    latent: LatentAttention | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_mtp_layers: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """What config.json of a family does not say, or spells its own way.

    `moe` reads the experts, given the fields and the number of layers. `latent`: MLA. `qk_norm` None: read use_qk_norm.
    """

    moe: Callable[[ConfigFields, int], MoeConfig]
    latent: bool = False
    qk_norm: bool | None = None
    partial_rotary_factor: float = 1.0
    default_theta: float | None = None


def normalise(fields: ConfigFields, family: str, rules: ConfigRules, generation: ConfigFields) -> ModelConfig:
    """The language model's config.json (`fields`) and generation_config.json as one ModelConfig.

    CheckpointError naming the key for a missing or wrong value; UnsupportedError for an option proa lacks.
    """
    activation = fields.string("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedError(f"{fields.where}: hidden_act", "silu", repr(activation)[:200])
    num_layers = fields.integer("num_hidden_layers", 1, 4096)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    latent = _latent_attention(fields) if rules.latent else None
    num_kv_heads, head_dim = _heads(fields, latent, hidden_size, num_heads)
    moe = rules.moe(fields, num_layers)
    _refuse_sliding_window(fields, max_positions)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH) if len(moe.layers) < num_layers else 0,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0),
        attention_bias=fields.boolean("attention_bias", False),
        qk_norm=fields.boolean("use_qk_norm", False) if rules.qk_norm is None else rules.qk_norm,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        rope=_rope(fields, rules, head_dim, max_positions),
        moe=moe,
        latent=latent,
        bos_token_id=next(iter(fields.integers("bos_token_id", 0, vocab_size - 1)), None),
        eos_token_ids=_eos_token_ids(fields, generation, vocab_size),
        num_mtp_layers=_optional_count(fields, "num_nextn_predict_layers", "num_mtp_layers"),
        dtype=fields.string("dtype", fields.string("torch_dtype", "bfloat16")),
    )


def _optional_count(fields: ConfigFields, *keys: str) -> int:
    present = [key for key in keys if key in fields]
    return fields.integer(present[0], 0, 64) if present else 0


def _heads(fields: ConfigFields, latent: LatentAttention | None, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """`(num_kv_heads, head_dim)`; for MLA the width of a query head, every head having a key of its own."""
    if latent is not None:
        return num_heads, latent.qk_nope_head_dim + latent.qk_rope_head_dim
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of {num_heads} attention heads", num_kv_heads)
    if "head_dim" not in fields and hidden_size % num_heads:
        raise fields.error("num_attention_heads", f"a divisor of hidden_size {hidden_size}", num_heads)
    head_dim = fields.integer("head_dim", 2, 8192, max(hidden_size // num_heads, 1))
    return num_kv_heads, head_dim


def _latent_attention(fields: ConfigFields) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=fields.integer("q_lora_rank", 1, MAX_WIDTH) if "q_lora_rank" in fields else None,
        kv_lora_rank=fields.integer("kv_lora_rank", 1, MAX_WIDTH),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", 1, 8192),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", 2, 8192),
        v_head_dim=fields.integer("v_head_dim", 1, 8192),
    )


def _refuse_sliding_window(fields: ConfigFields, max_positions: int) -> None:
    if "sliding_window" not in fields or not fields.boolean("use_sliding_window", True):
        return
    window = fields.integer("sliding_window", 1, MAX_POSITIONS)
    if window < max_positions:
        where = f"{fields.where}: sliding_window"
        raise UnsupportedError(where, f"none, or at least max_position_embeddings {max_positions}", window)


def _eos_token_ids(fields: ConfigFields, generation: ConfigFields, vocab_size: int) -> tuple[int, ...]:
    # The two files often disagree (end of text / end of turn): each of their ids ends an answer.
    ids = fields.integers("eos_token_id", 0, vocab_size - 1)
    return tuple(dict.fromkeys(ids + generation.integers("eos_token_id", 0, vocab_size - 1)))


def _rope(fields: ConfigFields, rules: ConfigRules, head_dim: int, max_positions: int) -> RopeConfig:
    # New checkpoints write rope_parameters with everything inside, old ones rope_scaling with rope_theta beside it.
    scaling = fields.object("rope_parameters") or fields.object("rope_scaling") or ConfigFields({}, fields.where)
    source = scaling if "rope_theta" in scaling else fields
    theta = source.number("rope_theta", 1.0, 1e15, rules.default_theta)
    partial = scaling if "partial_rotary_factor" in scaling else fields
    rotary_factor = partial.number("partial_rotary_factor", 0.0, 1.0, rules.partial_rotary_factor)
    full_dim = fields.integer("qk_rope_head_dim", 2, 8192) if rules.latent else head_dim
    dim = int(full_dim * rotary_factor)
    if dim < 2 or dim % 2:
        raise partial.error("partial_rotary_factor", f"an even share of the {full_dim} head elements", rotary_factor)
    interleaved = fields.boolean("rope_interleave", True) if rules.latent else False
    kind = scaling.string("rope_type" if "rope_type" in scaling else "type", "default")
    if kind == "default":
        return RopeConfig(theta, dim, interleaved)
    if kind == "linear":
        return RopeConfig(theta, dim, interleaved, "linear", scaling.number("factor", 1.0, 1e4))
    if kind != "yarn":
        raise UnsupportedError(f"{scaling.where}: rope_type", "default, linear or yarn", repr(kind)[:200])
    return RopeConfig(
        theta,
        dim,
        interleaved,
        "yarn",
        factor=scaling.number("factor", 1.0, 1e4),
        original_max_positions=scaling.integer("original_max_position_embeddings", 1, max_positions),
        beta_fast=scaling.number("beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=scaling.number("beta_slow", 1e-3, 1e6, 1.0),
        mscale=_optional_number(scaling, "mscale"),
        mscale_all_dim=_optional_number(scaling, "mscale_all_dim"),
        attention_factor=_optional_number(scaling, "attention_factor"),
        truncate=scaling.boolean("truncate", True),
    )


def _optional_number(fields: ConfigFields, key: str) -> float | None:
    return fields.number(key, 0.0, 1e4) if key in fields else None
