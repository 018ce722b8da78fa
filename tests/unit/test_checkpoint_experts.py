"""Experts under the name of every family: checkpoints that transformers saves, and those published fused or packed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from proa.core.errors import CheckpointError
from proa.weights.checkpoint import Checkpoint
from proa.weights.experts import ExpertWeights, StoredExperts, read_experts
from proa.weights.quantize import dequantize, quantize

H, I, E = 64, 96, 4  # noqa: E741
SIZES: dict[str, int] = {"num_experts": E, "hidden": H, "intermediate": I}
COMMON = {
    "vocab_size": 32,
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": I,
    "moe_intermediate_size": I,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "num_experts_per_tok": 2,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}

# What differs from COMMON.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "olmoe": {},
    "glm4_moe": GROUPS,
    "glm4_moe_lite": GROUPS | MLA | {"num_key_value_heads": 4},
    "deepseek_v3": GROUPS | MLA | {"num_key_value_heads": 4},
    "deepseek_v32": GROUPS | MLA | INDEXER | {"num_key_value_heads": 4},
    "glm_moe_dsa": GROUPS | MLA | INDEXER | {"num_key_value_heads": 4},
    "minimax_m2": {"rotary_dim": 8},
    "qwen3_next": {"shared_expert_intermediate_size": 32},
    "qwen3_5_moe_text": {"shared_expert_intermediate_size": 32},
    "deepseek_v4": INDEXER
    | {"num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32}
    | {"o_lora_rank": 16, "o_groups": 2},
    "gpt_oss": {},
}


def save_model(model_type: str, directory: Path) -> dict[str, torch.Tensor]:
    """A tiny checkpoint of random weights; returns the parameters as transformers has them in memory."""
    config = transformers.AutoConfig.for_model(model_type, **COMMON | FAMILIES[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0, 1, generator=generator)
    model.to(torch.bfloat16).save_pretrained(directory)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write(directory: Path, tensors: dict[str, torch.Tensor], quantization: Any = None) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": quantization}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return Checkpoint.open(directory)


def values(expert: ExpertWeights) -> tuple[np.ndarray, ...]:
    return tuple(dequantize(linear) for linear in (expert.gate, expert.up, expert.down))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_saved_by_transformers(tmp_path: Path, model_type: str) -> None:
    parameters = save_model(model_type, tmp_path)
    prefix = next(n for n in parameters if "layers.1." in n and n.endswith("experts.gate_up_proj"))[
        : -len("gate_up_proj")
    ]
    gate_up, down = (parameters[f"{prefix}{name}"].float().numpy() for name in ("gate_up_proj", "down_proj"))
    experts = read_experts(Checkpoint.open(tmp_path), 1, **SIZES)
    assert len(experts) == E
    for index, expert in enumerate(experts):
        if model_type == "gpt_oss":  # [E, in, out], gate and up columns in turn
            expected = (gate_up[index, :, 0::2].T, gate_up[index, :, 1::2].T, down[index].T)
        else:
            expected = (gate_up[index, :I], gate_up[index, I:], down[index])
        assert all(np.array_equal(got, want) for got, want in zip(values(expert), expected, strict=True))
        biases = [linear.bias for linear in (expert.gate, expert.up, expert.down)]
        if model_type == "gpt_oss":
            gate_up_bias = parameters[f"{prefix}gate_up_proj_bias"][index].float().numpy()
            down_bias = parameters[f"{prefix}down_proj_bias"][index].float().numpy()
            for got, want in zip(biases, (gate_up_bias[0::2], gate_up_bias[1::2], down_bias), strict=True):
                assert got is not None
                assert got.dtype == np.float32
                assert np.array_equal(got, want)
        else:
            assert biases == [None] * 3


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tensors_are_those_below_the_prefix(tmp_path: Path, model_type: str) -> None:
    save_model(model_type, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    experts = StoredExperts.find(checkpoint, 1, **SIZES)
    used = {name for expert in range(E) for name in experts.tensors(expert)}
    assert used == {name for name in checkpoint.names if name.startswith(f"{experts.prefix}.")}


def fused(rows: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Qwen3.5 as published."""
    generator = torch.Generator().manual_seed(2)
    prefix = "model.language_model.layers.1.mlp.experts"
    return {
        f"{prefix}.gate_up_proj": torch.randn(E, 2 * I, H, generator=generator).to(rows),
        f"{prefix}.down_proj": torch.randn(E, H, I, generator=generator).to(rows),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_fused_rows_are_views_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = fused(dtype)
    gate_up, down = tensors.values()
    for index, expert in enumerate(read_experts(write(tmp_path, tensors), 1, **SIZES)):
        expected = (gate_up[index, :I], gate_up[index, I:], down[index])
        for linear, want in zip((expert.gate, expert.up, expert.down), expected, strict=True):
            assert np.array_equal(dequantize(linear), want.float().numpy())
            assert linear.data.flags.c_contiguous
            assert not linear.data.flags.owndata


def gpt_oss_blocks() -> dict[str, torch.Tensor]:
    """Random codes, scales of 2^-17 .. 2^22."""
    generator = torch.Generator().manual_seed(3)

    def part(name: str, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        groups = in_features // 32
        return {
            f"{name}_blocks": torch.randint(0, 256, (E, out_features, groups, 16), generator=generator).byte(),
            f"{name}_scales": torch.randint(110, 150, (E, out_features, groups), generator=generator).byte(),
            f"{name}_bias": torch.randn(E, out_features, generator=generator).bfloat16(),
        }

    prefix = "model.layers.1.mlp.experts"
    return part(f"{prefix}.gate_up_proj", 2 * I, H) | part(f"{prefix}.down_proj", H, I)


def test_gpt_oss_mxfp4_equals_transformers(tmp_path: Path) -> None:
    tensors = gpt_oss_blocks()
    checkpoint = write(tmp_path, tensors, {"quant_method": "mxfp4"})
    prefix = "model.layers.1.mlp.experts"
    gate_up, down = (
        convert_moe_packed_tensors(tensors[f"{prefix}.{name}_blocks"], tensors[f"{prefix}.{name}_scales"])
        .float()
        .numpy()
        for name in ("gate_up_proj", "down_proj")
    )  # [E, in, out]
    for index, expert in enumerate(read_experts(checkpoint, 1, **SIZES)):
        assert {linear.format for linear in (expert.gate, expert.up, expert.down)} == {"mxfp4"}
        expected = (gate_up[index, :, 0::2].T, gate_up[index, :, 1::2].T, down[index].T)
        assert all(np.array_equal(got, want) for got, want in zip(values(expert), expected, strict=True))
        assert expert.up.bias is not None
        bias = tensors[f"{prefix}.gate_up_proj_bias"][index, 1::2]
        assert np.array_equal(expert.up.bias, bias.float().numpy())
        assert not expert.down.data.flags.owndata


def packed(prefix: str, names: tuple[str, str, str], store: Callable[[Any], dict[str, torch.Tensor]], to: str) -> Any:
    """Tensors of every expert, and the values they stand for."""
    rng = np.random.default_rng(4)
    tensors: dict[str, torch.Tensor] = {}
    expected = []
    for expert in range(E):
        shapes = ((I, H), (I, H), (H, I))
        linears = [quantize(rng.standard_normal(shape).astype(np.float32), to) for shape in shapes]
        expected.append(tuple(dequantize(linear) for linear in linears))
        for name, linear in zip(names, linears, strict=True):
            tensors |= {f"{prefix}.{expert}.{name}.{suffix}": tensor for suffix, tensor in store(linear).items()}
    return tensors, expected


def as_torch(array: np.ndarray | None, dtype: torch.dtype) -> torch.Tensor:
    assert array is not None
    return torch.from_numpy(array.copy()).view(dtype)


OWN, W = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

PUBLISHED: dict[str, Callable[[], Any]] = {
    "DeepSeek-V4 fp4": lambda: packed(
        "layers.1.ffn.experts",
        W,
        lambda raw: {"weight": as_torch(raw.data, torch.int8), "scale": as_torch(raw.scales, E8M0)},
        "mxfp4",
    ),
    "MiniMax-M3 mxfp8": lambda: packed(
        "language_model.model.layers.1.block_sparse_moe.experts",
        W,
        lambda raw: {"weight": as_torch(raw.data, E4M3), "weight_scale_inv": as_torch(raw.scales, torch.uint8)},
        "mxfp8",
    ),
    "MiniMax-M2 fp8": lambda: packed(
        "model.layers.1.block_sparse_moe.experts",
        W,
        lambda raw: {"weight": as_torch(raw.data, E4M3), "weight_scale_inv": torch.from_numpy(raw.scales)},
        "fp8_block128",
    ),
    "Kimi-K2.5 int4": lambda: packed(
        "language_model.model.layers.1.mlp.experts",
        OWN,
        lambda raw: {
            "weight_packed": as_torch(raw.data, torch.int32),
            "weight_scale": as_torch(raw.scales, torch.bfloat16),
            "weight_shape": torch.tensor([raw.out_features, raw.in_features]),
        },
        "int4_g32",
    ),
    "GLM-4.7 fp8": lambda: packed(
        "model.layers.1.mlp.experts",
        OWN,
        lambda raw: {"weight": as_torch(raw.data, E4M3), "weight_scale": torch.from_numpy(raw.scales)[:, None]},
        "fp8_channel",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_quantized_experts(tmp_path: Path, name: str) -> None:
    tensors, expected = PUBLISHED[name]()
    experts = read_experts(write(tmp_path, tensors), 1, **SIZES)
    for expert, want in zip(experts, expected, strict=True):
        assert all(np.array_equal(got, value) for got, value in zip(values(expert), want, strict=True))


def faulty(build: Callable[[], dict[str, torch.Tensor]], name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = build()
    key = next(key for key in tensors if key.endswith(name))
    return {**tensors, key: tensor}


FAULTS: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], str, str, str]] = {
    "transposed": (
        lambda: faulty(fused, "gate_up_proj", torch.zeros(E, H, 2 * I)), "gate_up_proj", "192, 64", "64, 192"),
    "one expert too few": (
        lambda: faulty(fused, "down_proj", torch.zeros(E - 1, H, I)), "down_proj", "4 experts", "[3, 64, 96]"),
    "fp8 without scales": (
        lambda: faulty(fused, "down_proj", torch.zeros(E, H, I).to(E4M3)), "down_proj", "BF16", "F8_E4M3"),
    "block rows": (
        lambda: faulty(gpt_oss_blocks, "gate_up_proj_blocks", torch.zeros(E, I, 2, 16).byte()),
        "gate_up_proj_blocks", "192, 2, 16", "[4, 96, 2, 16]"),
    "scales of 16": (
        lambda: faulty(gpt_oss_blocks, "down_proj_scales", torch.zeros(E, H, 6).byte()),
        "down_proj_scales", "64, 3", "[4, 64, 6]"),
    "nan scale": (
        lambda: faulty(gpt_oss_blocks, "down_proj_scales", torch.full((E, H, 3), 255).byte()),
        "down_proj_scales", "finite", "inf or NaN"),
    "bias": (
        lambda: faulty(gpt_oss_blocks, "down_proj_bias", torch.zeros(E, H - 1)), "down_proj_bias", "64", "[4, 63]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_file_tensor_expected_and_found(tmp_path: Path, fault: str) -> None:
    build, tensor, expected, got = FAULTS[fault]
    with pytest.raises(CheckpointError) as caught:
        read_experts(write(tmp_path, build()), 1, **SIZES)
    text = str(caught.value)
    assert str(tmp_path / "model.safetensors") in text
    assert tensor in text
    assert expected in text.split("expected")[1].split("got", maxsplit=1)[0]
    assert got in text.split("got")[1]


def test_a_layer_without_experts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="layer 3"):
        read_experts(write(tmp_path, fused()), 3, **SIZES)


def test_blocks_under_another_quantization(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(CheckpointError, match="as quantization_config says"):
        read_experts(write(tmp_path, gpt_oss_blocks(), fp8), 1, **SIZES)


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    parameters = save_model("qwen3_moe", tmp_path)
    assert parameters
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[name]
    with pytest.raises(CheckpointError, match=name):
        read_experts(write(tmp_path, tensors), 1, **SIZES)


def test_an_expert_with_a_bias_of_its_own(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.bias"
    tensors[name] = torch.randn(I).bfloat16()
    checkpoint = write(tmp_path, tensors)
    expert = read_experts(checkpoint, 1, **SIZES)[2]
    assert expert.up.bias is not None
    assert np.array_equal(expert.up.bias, tensors[name].float().numpy())
    assert expert.gate.bias is None
    assert name in StoredExperts.find(checkpoint, 1, **SIZES).tensors(2)
