"""Rotary tables against transformers, over the spellings and options of config.json."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.models.variants import COMMON, GQA, MLA, SIGMOID_MOE

from proa.core.errors import UnsupportedError
from proa.device.cpu import CpuDevice
from proa.layers.rotary import RotaryEmbedding
from proa.models.registry import decoder_spec, read_config

POSITIONS = 200
QWEN = COMMON | GQA | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def yarn(**options):
    base = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    return {"rope_scaling": base | options, "rope_theta": 50000.0}


CASES = [
    ("deepseek_v3", MLA | {"rope_theta": 50000.0}),
    ("deepseek_v3", MLA | {"rope_interleave": False}),
    ("deepseek_v3", MLA | yarn()),
    ("deepseek_v3", MLA | yarn(mscale=1.0, mscale_all_dim=1.0, beta_fast=1, beta_slow=1)),
    ("deepseek_v3", MLA | yarn(mscale=0.707, mscale_all_dim=1.3)),
    ("deepseek_v3", MLA | yarn(mscale_all_dim=0.5)),
    ("deepseek_v3", MLA | yarn(attention_factor=1.25)),
    ("deepseek_v3", MLA | yarn(truncate=False, beta_fast=24, beta_slow=2)),
    ("deepseek_v3", MLA | {"rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 256}}),
    ("glm4_moe", SIGMOID_MOE | GQA),
    ("glm4_moe", SIGMOID_MOE | GQA | {"partial_rotary_factor": 0.25} | yarn()),
    ("glm4_moe", SIGMOID_MOE | GQA | {"partial_rotary_factor": 1.0}),
    ("qwen3_moe", QWEN | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    ("mixtral", COMMON | {"num_key_value_heads": 2, "num_local_experts": 4}),
]


@pytest.mark.parametrize(("model_type", "values"), CASES)
def test_tables_and_softmax_scale_equal_transformers(model_type, values, runtime):
    reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **values))
    spec = decoder_spec(read_config(reference.config.to_dict())).attention
    rotary = spec.rotary
    where = torch.arange(POSITIONS)[None]
    cos, sin = (table[0, :, : rotary.dim // 2] for table in reference.model.rotary_emb(torch.zeros(1), where))

    # An identity matrix as heads: rotating the first and the second element of each pair shows both tables.
    x = torch.eye(rotary.dim).repeat(POSITIONS, 1, 1)
    RotaryEmbedding(CpuDevice(runtime), rotary, POSITIONS).forward(x, torch.arange(POSITIONS, dtype=torch.int32))
    pairs = torch.arange(rotary.dim)
    first, second = (pairs[0::2], pairs[1::2]) if rotary.interleaved else pairs.chunk(2)
    assert rotary.interleaved == (model_type == "deepseek_v3" and values.get("rope_interleave", True))
    assert torch.equal(x[:, first, first], cos)
    assert torch.equal(x[:, second, second], cos)
    assert torch.equal(x[:, first, second], sin)
    assert torch.equal(x[:, second, first], -sin)
    if model_type == "deepseek_v3":
        scaling = reference.model.layers[0].self_attn.scaling
        assert spec.scale == pytest.approx(scaling, rel=4 * 2**-52)  # four float64 operations, in another order


@pytest.mark.parametrize("scaling", [{"type": "dynamic", "factor": 2.0}, {"rope_type": "llama3", "factor": 8.0}])
def test_other_context_extensions_are_refused(scaling):
    with pytest.raises(UnsupportedError, match="rope_type"):
        read_config(
            QWEN | {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope_scaling": scaling}
        )
