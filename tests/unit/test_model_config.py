"""config.json of every supported family becomes one ModelConfig; everything else is a typed error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.core.errors import CheckpointError, ProaError, UnsupportedError
from proa.models.registry import SUPPORTED_MODEL_TYPES, read_config

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}

GLM4_MOE: dict[str, Any] = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "partial_rotary_factor": 0.5,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "vocab_size": 151552,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "use_qk_norm": True,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}

ALL = {"deepseek_v3": DEEPSEEK_V3, "kimi_k2": KIMI_K2, "glm4_moe": GLM4_MOE, "qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL}


def test_deepseek_v3() -> None:
    config = read_config(DEEPSEEK_V3)
    assert (config.family, config.num_layers, config.num_mtp_layers) == ("deepseek_v3", 61, 1)
    assert config.latent is not None
    assert (config.latent.kv_lora_rank, config.latent.q_lora_rank, config.head_dim) == (512, 1536, 192)
    assert (config.rope.kind, config.rope.dim, config.rope.factor, config.rope.interleaved) == ("yarn", 64, 40.0, True)
    assert (config.rope.mscale, config.rope.original_max_positions, config.rope.theta) == (1.0, 4096, 10000.0)
    moe = config.moe
    assert (moe.num_experts, moe.top_k, moe.num_groups, moe.top_groups) == (256, 8, 8, 4)
    assert (moe.score, moe.choice_bias, moe.renormalize, moe.scale, moe.epsilon) == ("sigmoid", True, True, 2.5, 1e-20)
    assert moe.shared_intermediate_size == 2048
    assert [layer in config.moe.layers for layer in (0, 2, 3, 60)] == [False, False, True, True]


def test_kimi_k2_is_deepseek_v3_flat_or_wrapped() -> None:
    flat = read_config(KIMI_K2)
    assert (flat.family, flat.moe.num_experts, flat.moe.scale, flat.rope.theta) == ("deepseek_v3", 384, 2.827, 50000.0)
    assert read_config({"model_type": "kimi_k25", "text_config": KIMI_K2, "eos_token_id": 5}) == flat


def test_glm4_moe() -> None:
    config = read_config(GLM4_MOE)
    assert (config.attention_bias, config.qk_norm, config.latent) == (True, True, None)
    assert (config.rope.dim, config.rope.interleaved, config.rope.kind) == (64, False, "default")
    assert config.eos_token_ids == (151329, 151336, 151338)


def test_qwen3_moe() -> None:
    config = read_config({**QWEN3_MOE, "mlp_only_layers": [1], "decoder_sparse_step": 2})
    assert (config.qk_norm, config.head_dim, config.num_kv_heads, config.moe.score) == (True, 128, 4, "softmax")
    assert config.moe.layers == frozenset(range(3, 48, 2))
    assert (config.intermediate_size, config.moe.intermediate_size) == (6144, 768)


def test_mixtral_head_dim_defaults_to_an_equal_share() -> None:
    config = read_config(MIXTRAL)
    assert (config.head_dim, config.moe.intermediate_size, config.intermediate_size) == (128, 14336, 0)
    assert (config.moe.renormalize, config.moe.num_experts) == (True, 8)


def test_rope_parameters_of_new_checkpoints_equal_rope_scaling_of_old_ones() -> None:
    new = copy.deepcopy(DEEPSEEK_V3)
    rope = new.pop("rope_scaling")
    rope["rope_type"] = rope.pop("type")
    rope["rope_theta"] = new.pop("rope_theta")
    assert read_config({**new, "rope_parameters": rope}) == read_config(DEEPSEEK_V3)


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_expert_count_spellings(spelling: str) -> None:
    config = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert read_config({**config, spelling: 128}).moe.num_experts == 128


def test_eos_ids_of_both_files_count_once() -> None:
    config = read_config(KIMI_K2, generation_config={"eos_token_id": [163586, 163585]})
    assert config.eos_token_ids == (163585, 163586)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "", "../../x"])
def test_unsupported_architecture_lists_the_supported_ones(model_type: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_config({**MIXTRAL, "model_type": model_type})
    assert all(name in str(caught.value) for name in SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (MIXTRAL, {"hidden_act": "gelu"}),
        (MIXTRAL, {"sliding_window": 4096}),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}),
        (DEEPSEEK_V3, {"topk_method": "greedy"}),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}),
        (MIXTRAL, {"rope_scaling": {"rope_type": "longrope", "factor": 2}}),
    ],
)
def test_options_proa_lacks_are_named(base: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_config({**base, **change})
    assert (set(change) | {"rope_type"}) & set(str(caught.value).replace(":", " ").replace("]", " ").split())


REQUIRED = [
    (name, key)
    for name, keys in {
        "deepseek_v3": "kv_lora_rank qk_nope_head_dim v_head_dim n_group topk_group routed_scaling_factor",
        "glm4_moe": "moe_intermediate_size first_k_dense_replace norm_topk_prob n_routed_experts rope_theta",
        "qwen3_moe": "num_experts num_experts_per_tok norm_topk_prob rms_norm_eps",
        "mixtral": "model_type hidden_size num_hidden_layers num_attention_heads vocab_size intermediate_size",
    }.items()
    for key in keys.split()
]


@pytest.mark.parametrize(("name", "key"), REQUIRED)
def test_missing_key_is_named(name: str, key: str) -> None:
    config = {other: value for other, value in ALL[name].items() if other != key}
    with pytest.raises(CheckpointError, match=key):
        read_config(config)


NUMERIC_KEYS = [
    (name, key) for name, config in ALL.items() for key, value in config.items() if type(value) in (int, float)
]
WRONG_NUMBERS = ["64", -1, 10**30, float("inf"), float("nan"), [], {}, True, 1e308, "\ud800"]


@pytest.mark.parametrize("value", WRONG_NUMBERS, ids=lambda value: repr(value)[:10])
@pytest.mark.parametrize(("name", "key"), NUMERIC_KEYS)
def test_wrong_number_is_named(name: str, key: str, value: Any) -> None:
    ignored = {"num_key_value_heads"} if name in ("deepseek_v3", "kimi_k2") else set()
    if (key in ignored) or (value == [] and key.endswith("token_id")):
        return  # MLA has no key-value head count; an empty list of ids is none
    if name == "qwen3_moe" and key == "intermediate_size":
        return  # no dense layers
    with pytest.raises(CheckpointError, match=key):
        read_config({**ALL[name], key: value})


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("mixtral", {"num_key_value_heads": 7}, "num_key_value_heads"),
        ("mixtral", {"hidden_size": 4097}, "num_attention_heads"),
        ("mixtral", {"eos_token_id": 32000}, "eos_token_id"),
        ("mixtral", {"rope_scaling": [1]}, "rope_scaling"),
        ("mixtral", {"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ("deepseek_v3", {"n_group": 7}, "n_group"),
        ("deepseek_v3", {"n_group": 256}, "n_group"),
        ("deepseek_v3", {"n_group": 128, "topk_group": 3}, "topk_group"),
        ("deepseek_v3", {"first_k_dense_replace": 62}, "first_k_dense_replace"),
        ("deepseek_v3", {"qk_rope_head_dim": 63}, "partial_rotary_factor"),
        ("glm4_moe", {"partial_rotary_factor": 0}, "partial_rotary_factor"),
        ("glm4_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("qwen3_moe", {"mlp_only_layers": [48]}, "mlp_only_layers"),
    ],
)
def test_inconsistent_values_are_named(name: str, change: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        read_config({**ALL[name], **change})


@pytest.mark.parametrize("value", [[], "x", 3])
def test_text_config_must_be_an_object(value: Any) -> None:
    with pytest.raises(CheckpointError, match="text_config"):
        read_config({"model_type": "kimi_k25", "text_config": value})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from(sorted(ALL)), data=st.data())
def test_any_json_is_a_config_or_a_typed_error(name: str, data: st.DataObject) -> None:
    config = copy.deepcopy(ALL[name])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=4)):
        config[key] = data.draw(json_values)
    try:
        read_config(config)
    except ProaError as error:
        if not str(error).startswith("[") or len(str(error)) > 2000:
            raise AssertionError(str(error)[:3000]) from error
