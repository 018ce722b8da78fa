"""read_linear detects the stored format per tensor and checks shapes; the encoders match the libraries bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file

from proa.core.errors import CheckpointError, UnsupportedError
from proa.weights.checkpoint import Checkpoint
from proa.weights.linear import linear_tensor_names, read_array, read_linear
from proa.weights.quantize import dequantize

OUT, IN = 160, 192


def open_with(directory: Path, **tensors: torch.Tensor) -> Checkpoint:
    (directory / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    save_file({f"p.{name}": tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return Checkpoint.open(directory)


def random_weight(out_features: int = OUT, in_features: int = IN) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(3))


def int4_tensors() -> dict[str, torch.Tensor]:
    """Kimi's layout, packed by the library itself."""
    weight = random_weight()
    scale = (weight.reshape(OUT, -1, 32).abs().amax(-1) / 7.5).bfloat16()
    quants = (weight / scale.float().repeat_interleave(32, 1)).round().clamp(-8, 7).to(torch.int8)
    return {
        "weight_packed": pack_to_int32(quants, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor([OUT, IN]),
    }


def fp8_tensors() -> dict[str, torch.Tensor]:
    return {"weight": random_weight().to(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(2, 2) + 0.5}


@pytest.mark.parametrize(
    ("dtype", "expected", "stored"),
    [(torch.float32, "f32", np.float32), (torch.bfloat16, "bf16", np.uint16), (torch.float16, "f16", np.uint16)],
)
def test_plain_weights(tmp_path: Path, dtype: torch.dtype, expected: str, stored: Any) -> None:
    weight = random_weight().to(dtype)
    linear = read_linear(open_with(tmp_path, weight=weight), "p", (OUT, IN))
    assert (linear.format, linear.out_features, linear.in_features, linear.scales) == (expected, OUT, IN, None)
    assert linear.data.dtype == stored
    assert np.array_equal(dequantize(linear), weight.float().numpy())


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_int4(tmp_path: Path, index_dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    tensors = int4_tensors()
    tensors["weight_shape"] = tensors["weight_shape"].to(index_dtype)
    scale = tensors["weight_scale"]
    tensors["weight_scale"] = scale.to(scale_dtype)
    checkpoint = open_with(tmp_path, **tensors)
    linear = read_linear(checkpoint, "p", (OUT, IN))
    assert (linear.format, linear.data.dtype, linear.data.shape) == ("int4_g32", np.uint8, (OUT, IN // 2))
    assert linear.scales is not None
    assert (linear.scales.dtype, linear.scales.shape) == (np.uint16, (OUT, IN // 32))
    assert linear.nbytes == OUT * IN * 9 // 16
    quants = (random_weight() / scale.float().repeat_interleave(32, 1)).round().clamp(-8, 7)
    assert np.array_equal(dequantize(linear), (quants * scale.float().repeat_interleave(32, 1)).numpy())
    assert sorted(linear_tensor_names(checkpoint, "p")) == sorted(f"p.{name}" for name in tensors)


def test_int4_nibble_order(tmp_path: Path) -> None:
    packed = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)] * 2], dtype=torch.int32)
    scale = torch.ones(1, 1, dtype=torch.bfloat16)
    linear = read_linear(
        open_with(tmp_path, weight_packed=packed, weight_scale=scale, weight_shape=torch.tensor([1, 32])), "p"
    )
    assert linear.data[0, :8].tobytes().hex(" ") == "10 32 54 76 98 ba dc fe"
    assert dequantize(linear)[0, :16].tolist() == list(range(-8, 8))


def test_fp8_with_ragged_blocks(tmp_path: Path) -> None:
    tensors = fp8_tensors()
    linear = read_linear(open_with(tmp_path, **tensors), "p", (OUT, IN))
    assert (linear.format, linear.data.dtype) == ("fp8_block128", np.uint8)
    expanded = tensors["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:OUT, :IN]
    assert np.array_equal(dequantize(linear), (tensors["weight"].float() * expanded).numpy())


WRONG = {
    "plain shape": ({"weight": torch.zeros(OUT + 1, IN)}, r"\[160, 192\].*\[161, 192\]"),
    "plain rank": ({"weight": torch.zeros(OUT * IN)}, r"\[160, 192\].*\[30720\]"),
    "transposed": ({"weight": torch.zeros(IN, OUT)}, r"\[160, 192\].*\[192, 160\]"),
    "missing": ({"other": torch.zeros(1)}, "p.weight"),
    "int4 declared shape": ({**int4_tensors(), "weight_shape": torch.tensor([OUT, IN * 2])}, r"\[160, 192\].*384"),
    "int4 negative shape": ({**int4_tensors(), "weight_shape": torch.tensor([-OUT, IN])}, "weight_shape"),
    "int4 shape rank": ({**int4_tensors(), "weight_shape": torch.tensor([[OUT, IN]])}, "weight_shape"),
    "int4 shape dtype": ({**int4_tensors(), "weight_shape": torch.tensor([160.0, 192.0])}, "weight_shape"),
    "int4 packed shape": ({**int4_tensors(), "weight_packed": torch.zeros(OUT, 23, dtype=torch.int32)}, r"24\].*23\]"),
    "int4 packed dtype": ({**int4_tensors(), "weight_packed": torch.zeros(OUT, 24)}, "weight_packed"),
    "int4 scale shape": ({**int4_tensors(), "weight_scale": torch.zeros(OUT, 7).bfloat16()}, r"6\].*7\]"),
    "int4 scale dtype": ({**int4_tensors(), "weight_scale": torch.zeros(OUT, 6, dtype=torch.int8)}, "weight_scale"),
    "fp8 scale grid": ({**fp8_tensors(), "weight_scale_inv": torch.ones(2, 1)}, r"\[2, 2\].*\[2, 1\]"),
    "fp8 floor grid": ({**fp8_tensors(), "weight_scale_inv": torch.ones(1, 1)}, r"\[2, 2\].*\[1, 1\]"),
    "fp8 without scale": ({"weight": fp8_tensors()["weight"]}, "weight_scale_inv"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_tensors_name_file_tensor_and_both_shapes(tmp_path: Path, fault: str) -> None:
    tensors, text = WRONG[fault]
    checkpoint = open_with(tmp_path, **tensors)
    with pytest.raises(CheckpointError, match=text) as caught:
        read_linear(checkpoint, "p", (OUT, IN))
    assert str(tmp_path) in str(caught.value)


def test_int4_without_scales(tmp_path: Path) -> None:
    checkpoint = open_with(tmp_path, **{n: part for n, part in int4_tensors().items() if n != "weight_scale"})
    with pytest.raises(CheckpointError, match="weight_scale"):
        read_linear(checkpoint, "p")


def test_int4_input_features_must_fill_groups(tmp_path: Path) -> None:
    parts = {
        "weight_packed": torch.zeros(2, 5, dtype=torch.int32),
        "weight_scale": torch.zeros(2, 1).bfloat16(),
        "weight_shape": torch.tensor([2, 40]),
    }
    with pytest.raises(CheckpointError, match="groups of 32"):
        read_linear(open_with(tmp_path, **parts), "p")


@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": torch.zeros(OUT, IN, dtype=torch.int8)},
        {**int4_tensors(), "weight_scale": torch.full((OUT, IN // 32), 0.1)},
        {**int4_tensors(), "weight_zero_point": torch.zeros(OUT // 8, 6, dtype=torch.int32)},
        {**int4_tensors(), "weight_g_idx": torch.arange(IN) % 6},
    ],
    ids=["int8", "int4 with f32 scales", "asymmetric int4", "int4 in another order"],
)
def test_formats_proa_lacks(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UnsupportedError, match="compressed-tensors pack-quantized"):
        read_linear(open_with(tmp_path, **tensors), "p", (OUT, IN))


def test_read_array(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.25, 1e-3])
    checkpoint = open_with(tmp_path, f=values, b=values.bfloat16(), h=values.half(), i=torch.arange(3))
    for name, expected in (("f", values), ("b", values.bfloat16()), ("h", values.half())):
        assert np.array_equal(read_array(checkpoint, f"p.{name}", (3,)), expected.float().numpy())
    with pytest.raises(CheckpointError, match=r"\[4\].*\[3\]"):
        read_array(checkpoint, "p.f", (4,))
    with pytest.raises(CheckpointError, match="I64"):
        read_array(checkpoint, "p.i", (3,))
