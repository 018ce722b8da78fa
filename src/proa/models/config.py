"""One normalised model configuration out of the config.json spellings of every supported family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from proa.core.errors import UnsupportedError
from proa.models.config_fields import ConfigFields
from proa.weights.checkpoint import Checkpoint

__all__ = ["SUPPORTED_MODEL_TYPES", "LatentAttention", "ModelConfig", "MoeConfig", "RopeConfig"]

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

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Normalise config.json, with the end-of-sequence ids of generation_config.json added."""
        where = str(checkpoint.path / "config.json")
        return cls.from_dict(checkpoint.config, where, checkpoint.generation_config)

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], where: str = "config.json", generation_config: dict[str, Any] | None = None
    ) -> ModelConfig:
        """Normalise a parsed config.json.

        CheckpointError naming the key for a missing or wrong value; UnsupportedError for an architecture or option
        proa lacks.
        """
        fields = _text_fields(ConfigFields(config, where))
        model_type = fields.string("model_type")
        if model_type not in _FAMILIES:
            expected = f"model_type out of {', '.join(SUPPORTED_MODEL_TYPES)}"
            raise UnsupportedError(f"{where}: model_type", expected, repr(model_type)[:200])
        activation = fields.string("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedError(f"{where}: hidden_act", "silu", repr(activation)[:200])
        generation = ConfigFields(generation_config or {}, "generation_config.json")
        return _normalise(fields, _FAMILIES[model_type], generation)

    def is_moe_layer(self, layer: int) -> bool:
        return layer in self.moe.layers


@dataclass(frozen=True, slots=True)
class _Family:
    """What config.json of a family does not say, or spells its own way."""

    name: str
    moe: Callable[[ConfigFields, int], MoeConfig]
    latent: bool = False
    qk_norm: bool | None = None  # None: read use_qk_norm
    partial_rotary_factor: float = 1.0
    default_theta: float | None = None


def _text_fields(fields: ConfigFields) -> ConfigFields:
    """The language model's part: multimodal wrappers nest it in `text_config`."""
    return fields.object("text_config") or fields


def _normalise(fields: ConfigFields, family: _Family, generation: ConfigFields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", 1, 4096)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    latent = _latent_attention(fields) if family.latent else None
    num_kv_heads, head_dim = _heads(fields, latent, hidden_size, num_heads)
    moe = family.moe(fields, num_layers)
    _refuse_sliding_window(fields, max_positions)
    return ModelConfig(
        family=family.name,
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
        qk_norm=fields.boolean("use_qk_norm", False) if family.qk_norm is None else family.qk_norm,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        rope=_rope(fields, family, head_dim, max_positions),
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


def _rope(fields: ConfigFields, family: _Family, head_dim: int, max_positions: int) -> RopeConfig:
    # New checkpoints write rope_parameters with everything inside, old ones rope_scaling with rope_theta beside it.
    scaling = fields.object("rope_parameters") or fields.object("rope_scaling") or ConfigFields({}, fields.where)
    source = scaling if "rope_theta" in scaling else fields
    theta = source.number("rope_theta", 1.0, 1e15, family.default_theta)
    partial = scaling if "partial_rotary_factor" in scaling else fields
    rotary_factor = partial.number("partial_rotary_factor", 0.0, 1.0, family.partial_rotary_factor)
    full_dim = fields.integer("qk_rope_head_dim", 2, 8192) if family.latent else head_dim
    dim = int(full_dim * rotary_factor)
    if dim < 2 or dim % 2:
        raise partial.error("partial_rotary_factor", f"an even share of the {full_dim} head elements", rotary_factor)
    interleaved = fields.boolean("rope_interleave", True) if family.latent else False
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


def _sigmoid_moe(fields: ConfigFields, num_layers: int) -> MoeConfig:
    """DeepSeek-V3's `noaux_tc` router, shared experts and leading dense layers."""
    for key, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.string(key, supported) != supported:
            raise UnsupportedError(f"{fields.where}: {key}", supported, repr(fields.string(key))[:200])
    if fields.integer("moe_layer_freq", 1, 4096, 1) != 1:
        raise UnsupportedError(f"{fields.where}: moe_layer_freq", "1", fields.integer("moe_layer_freq", 1, 4096))
    num_experts, top_k = _experts(fields)
    num_groups = fields.integer("n_group", 1, num_experts)
    top_groups = fields.integer("topk_group", 1, num_groups)
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        raise fields.error("n_group", f"groups of equal size, two or more experts each, of {num_experts}", num_groups)
    if top_k > top_groups * (num_experts // num_groups):
        raise fields.error("topk_group", f"groups holding at least {top_k} experts", top_groups)
    intermediate_size = fields.integer("moe_intermediate_size", 1, MAX_WIDTH)
    first_moe_layer = fields.integer("first_k_dense_replace", 0, num_layers)
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        shared_intermediate_size=fields.integer("n_shared_experts", 0, 1024, 0) * intermediate_size,
        score="sigmoid",
        choice_bias=True,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=fields.boolean("norm_topk_prob"),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", 0.0, 1e6),
        layers=frozenset(range(first_moe_layer, num_layers)),
    )


def _qwen3_moe(fields: ConfigFields, num_layers: int) -> MoeConfig:
    step = fields.integer("decoder_sparse_step", 1, 4096, 1)
    dense = set(fields.integers("mlp_only_layers", 0, num_layers - 1))
    layers = frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    intermediate_size = fields.integer("moe_intermediate_size", 1, MAX_WIDTH)
    return _softmax_moe(fields, intermediate_size, fields.boolean("norm_topk_prob"), layers)


def _mixtral_moe(fields: ConfigFields, num_layers: int) -> MoeConfig:
    intermediate_size = fields.integer("intermediate_size", 1, MAX_WIDTH)
    return _softmax_moe(fields, intermediate_size, True, frozenset(range(num_layers)))


def _softmax_moe(fields: ConfigFields, intermediate_size: int, renormalize: bool, layers: frozenset[int]) -> MoeConfig:
    num_experts, top_k = _experts(fields)
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        shared_intermediate_size=0,
        score="softmax",
        choice_bias=False,
        num_groups=1,
        top_groups=1,
        renormalize=renormalize,
        epsilon=0.0,
        scale=1.0,
        layers=layers,
    )


def _experts(fields: ConfigFields) -> tuple[int, int]:
    num_experts = fields.integer(fields.first_of("n_routed_experts", "num_experts", "num_local_experts"), 1, 65536)
    return num_experts, fields.integer("num_experts_per_tok", 1, num_experts)


_DEEPSEEK_V3 = _Family("deepseek_v3", _sigmoid_moe, latent=True, qk_norm=False)
_FAMILIES: dict[str, _Family] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe": _Family("glm4_moe", _sigmoid_moe, partial_rotary_factor=0.5),
    "qwen3_moe": _Family("qwen3_moe", _qwen3_moe, qk_norm=True),
    "mixtral": _Family("mixtral", _mixtral_moe, qk_norm=False, default_theta=1e6),
}

SUPPORTED_MODEL_TYPES = (*_FAMILIES, "kimi_k25 (text)")
