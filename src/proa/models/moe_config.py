"""The two kinds of MoE block in config.json: DeepSeek-V3's sigmoid router, and softmax routers."""

from __future__ import annotations

from proa.core.errors import UnsupportedError
from proa.models.config import MAX_WIDTH, MoeConfig
from proa.models.config_fields import ConfigFields

__all__ = ["sigmoid_moe", "softmax_moe"]


def sigmoid_moe(fields: ConfigFields, num_layers: int) -> MoeConfig:
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


def softmax_moe(fields: ConfigFields, intermediate_size: int, renormalize: bool, layers: frozenset[int]) -> MoeConfig:
    """Softmax over all experts, no shared experts; `layers`: indices of the MoE layers."""
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
