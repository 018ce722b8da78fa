"""Sizes of published models, and what is refused."""

from __future__ import annotations

import json

import pytest
from tests.plan.models import FP8, KIMI_K2, write_config

from proa.core.errors import CheckpointError, UnsupportedError
from proa.kvcache.pool import kv_bytes_per_token
from proa.plan.model_sizes import ModelSizes, read_sizes


@pytest.fixture(scope="module")
def kimi(tmp_path_factory) -> ModelSizes:
    return read_sizes(write_config(tmp_path_factory.mktemp("kimi"), KIMI_K2))


def test_kimi_k2_has_its_published_sizes(kimi):
    # 1014.7 billion weights of routed experts in 4.5 bits, 11.7 billion others in bf16; 24.77 MB an expert.
    assert kimi.expert_parameters == pytest.approx(1014.7e9, rel=1e-4)
    assert kimi.expert_bytes == pytest.approx(570.8e9, rel=1e-3)
    assert kimi.bytes_per_expert == pytest.approx(24.77e6, rel=1e-3)
    assert kimi.trunk_bytes == pytest.approx(2 * 11.7e9, rel=5e-3)
    assert kimi.gpu_trunk_bytes == pytest.approx(kimi.trunk_bytes, rel=1e-4)
    # 10.4 billion weights outside the experts are multiplied with for a token; 32.9 with the embedding and 8 experts.
    assert kimi.trunk_parameters == pytest.approx(10.4e9, rel=2e-2)
    active = kimi.trunk_parameters + kimi.expert_parameters * 8 / 384 + 163840 * 7168
    assert active == pytest.approx(32.9e9, rel=1e-2)
    # (512 + 64) numbers of 2 bytes in 61 layers.
    assert kv_bytes_per_token(kimi.info.layout, "bfloat16") == 70272


def test_a_wrapper_and_fp8(tmp_path, kimi):
    wrapped = {"model_type": "kimi_k25", "text_config": KIMI_K2}
    assert read_sizes(write_config(tmp_path / "wrapped", wrapped)).packed_bytes == kimi.packed_bytes
    fp8 = read_sizes(write_config(tmp_path / "fp8", KIMI_K2 | {"quantization_config": FP8}))
    # Published: 1014.9 GB of experts, 44.05 MB each. In memory 16 rows have the scales of their blocks, in whole lines.
    panels = 2 * 2048 // 16 * (16 * 7168 + 256), 7168 // 16 * (16 * 2048 + 64)
    assert fp8.expert_bytes == 60 * 384 * sum(panels)
    assert fp8.bytes_per_expert == sum(panels) == pytest.approx(44.05e6, rel=2e-3)
    # Embedding, head and routers stay bf16.
    assert fp8.trunk_bytes == pytest.approx(11.7e9 + 2 * 163840 * 7168 + 60 * 384 * 7168, rel=5e-3)


def test_an_index_tells_what_is_quantized(tmp_path, kimi):
    quantization = KIMI_K2["quantization_config"] | {"ignore": []}
    directory = write_config(tmp_path, KIMI_K2 | {"quantization_config": quantization})
    assert read_sizes(directory).trunk_bytes < 0.5 * kimi.trunk_bytes
    name = "language_model.model.layers.0.self_attn.o_proj.weight_packed"
    index = {"weight_map": {name: "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    saved = 7168 * 64 * 128 * (2 - 0.5625)
    assert read_sizes(directory).trunk_bytes == kimi.trunk_bytes - saved


def test_smaller_experts(kimi):
    smaller = kimi.with_expert_format("Q2_K")
    assert smaller.expert_bytes == pytest.approx(1014.7e9 * 2.625 / 8, rel=1e-4)
    assert smaller.trunk_bytes == kimi.trunk_bytes


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"model_type": "llama"}, UnsupportedError, r"model_type\] expected model_type out of"),
        ({"hidden_size": None}, CheckpointError, r"hidden_size\] expected a value"),
        ({"torch_dtype": "int3"}, UnsupportedError, r"dtype\] expected float32 or float16 or bfloat16, got 'int3'"),
        ({"quantization_config": {"quant_method": "magic"}}, UnsupportedError, "quant_method 'magic'"),
        ({"quantization_config": FP8 | {"ignore": 7}}, None, ""),
    ],
)
def test_faulty_configurations(change, error, match, tmp_path):
    directory = write_config(tmp_path, KIMI_K2 | {"num_hidden_layers": 2, "n_routed_experts": 8} | change)
    if error is None:
        read_sizes(directory)
        return
    with pytest.raises(error, match=match):
        read_sizes(directory)


def test_no_model(tmp_path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / "a\0b"):
        with pytest.raises(CheckpointError, match=r"config\.json\] expected a file, got nothing"):
            read_sizes(path)
