"""Every way a checkpoint stores a quantized linear, with the values that the libraries give it; and every fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from proa.core.errors import CheckpointError, UnsupportedError
from proa.weights.checkpoint import Checkpoint
from proa.weights.linear import linear_tensor_names, read_linear
from proa.weights.quantize import dequantize

OUT, IN = 160, 256
Tensors = dict[str, torch.Tensor]


def open_with(directory: Path, tensors: Tensors, quantization: Any = None) -> Checkpoint:
    config = {"model_type": "mixtral", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({f"p.{name}": tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return Checkpoint.open(directory)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator())


def random_e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator()).to(torch.float8_e4m3fn)


def random_scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator()) + 0.5


def random_e8m0(*shape: int) -> torch.Tensor:
    """2^-127 .. 2^120: what a float32 holds beside the largest element."""
    codes = torch.randint(0, 248, shape, dtype=torch.uint8, generator=generator())
    codes.view(-1)[:2] = torch.tensor([0, 247], dtype=torch.uint8)
    return codes


def decompressed(format: str, scheme: QuantizationScheme, tensors: Tensors) -> torch.Tensor:
    """compressed-tensors' own value."""
    return BaseCompressor.get_value_from_registry(format).decompress(dict(tensors), scheme)["weight"].double()


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """[out, in] by the rule of the OCP specification: 1 sign, 2 exponent bits with a bias of 1, 1 mantissa bit."""
    bits = torch.stack([packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4], -1).flatten(-2).int()
    exponent, mantissa = bits >> 1 & 3, bits & 1
    magnitude = torch.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1).double())
    return torch.where(bits & 8 != 0, -magnitude, magnitude).double()


@dataclass(frozen=True)
class Case:
    """`exact`: values in float64, of which ours must be the float32 next to them."""

    format: str
    tensors: Tensors
    exact: torch.Tensor


def int4(group: int, scale_dtype: torch.dtype, storage: torch.dtype = torch.int32, shape: bool = True) -> Case:
    packed = random_bytes(OUT, IN // 2)
    tensors = {"weight_packed": packed.view(storage), "weight_scale": random_scales(OUT, IN // group).to(scale_dtype)}
    if shape:
        tensors["weight_shape"] = torch.tensor([OUT, IN])
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    known = {**tensors, "weight_packed": packed.view(torch.int32), "weight_scale": tensors["weight_scale"].double()}
    known["weight_shape"] = torch.tensor([OUT, IN])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    suffix = "_f16" if scale_dtype == torch.float16 else ""
    return Case(f"int4_g{group}{suffix}", tensors, decompressed("pack-quantized", scheme, known))


def mxfp4(names: tuple[str, str], data: torch.dtype, scale: torch.dtype) -> Case:
    packed, scales = random_bytes(OUT, IN // 2), random_e8m0(OUT, IN // 32)
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    exact = decompressed("mxfp4-pack-quantized", scheme, {"weight_packed": packed, "weight_scale": scales})
    return Case("mxfp4", {names[0]: packed.view(data), names[1]: scales.view(scale)}, exact)


def nvfp4_modelopt(shape: tuple[int, ...]) -> Case:
    packed, scale = random_bytes(OUT, IN // 2), random_e4m3(OUT, IN // 16)
    second = torch.full(shape, 0.0123)
    exact = e2m1(packed) * scale.double().repeat_interleave(16, 1) * second.double()
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": second, "input_scale": torch.ones(shape)}
    return Case("nvfp4", tensors, exact)


def nvfp4_compressed() -> Case:
    """A divisor that is a power of two, so that the library, which divides the scales, is exact too."""
    packed, scale = random_bytes(OUT, IN // 2), random_e4m3(OUT, IN // 16)
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([512.0])}
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    library = decompressed("nvfp4-pack-quantized", scheme, tensors)
    exact = e2m1(packed) * scale.double().repeat_interleave(16, 1) / 512
    assert torch.equal(library, exact.bfloat16().double())
    return Case("nvfp4", {**tensors, "input_global_scale": torch.ones(1)}, exact)


def block(name: str, dtype: torch.dtype, rows: int = OUT) -> Case:
    weight = random_e4m3(rows, IN)
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = random_e8m0(2, 2).view(dtype)
    else:
        scale = random_scales(2, 2).to(dtype)
    values = scale.view(torch.float8_e8m0fnu) if dtype == torch.uint8 else scale
    expanded = values.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :IN]
    return Case("fp8_block128", {"weight": weight, name: scale}, weight.double() * expanded)


def channel(shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    weight, scale = random_e4m3(OUT, IN), random_scales(*shape).to(dtype)
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    known = {"weight": weight, "weight_scale": scale.double().reshape(OUT, 1)}
    return Case(
        "fp8_channel", {"weight": weight, "weight_scale": scale}, decompressed("float-quantized", scheme, known)
    )


def mxfp8(name: str, dtype: torch.dtype) -> Case:
    weight, scale = random_e4m3(OUT, IN), random_e8m0(OUT, IN // 32)
    scheme = preset_name_to_scheme("MXFP8A16", ["Linear"])
    library = decompressed("mxfp8-quantized", scheme, {"weight": weight, "weight_scale": scale})
    exact = weight.double() * scale.view(torch.float8_e8m0fnu).double().repeat_interleave(32, 1)
    assert torch.equal(library, exact.bfloat16().double())  # bf16 cuts the bits of subnormals
    return Case("mxfp8", {"weight": weight, name: scale.view(dtype)}, exact)


def gptq(group: int, zero: int = 7, index: bool = True, columns: int = IN) -> Case:
    """qweight word (i, o), bits 4k .. 4k + 3: input 8 i + k of output o; value (q - 8) * scale."""
    q = np.random.default_rng(7).integers(0, 16, (columns, OUT))
    words = sum(q[k::8].astype(np.uint32) << np.uint32(4 * k) for k in range(8))
    scales = random_scales(columns // group, OUT).half()
    tensors = {
        "qweight": torch.from_numpy(words.view(np.int32)),
        "scales": scales,
        "qzeros": torch.from_numpy(np.full((columns // group, OUT // 8), 0x11111111 * zero, np.uint32).view(np.int32)),
    }
    if index:
        tensors["g_idx"] = torch.arange(columns, dtype=torch.int32) // group
    exact = ((q - 8) * np.repeat(scales.double().numpy(), group, 0)).T
    return Case(f"int4_g{group}_f16", tensors, torch.from_numpy(exact))


def int8_groups() -> Case:
    """proa's own AMXINT8."""
    weight = random_bytes(OUT, IN).view(I8)
    scale = random_scales(OUT, 2).bfloat16()
    exact = weight.double() * scale.double().repeat_interleave(128, 1)
    return Case("int8_g128", {"weight": weight, "weight_scale": scale}, exact)


BF16, F16, F32, U8, I8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int8
E8M0, FP4 = torch.float8_e8m0fnu, torch.float4_e2m1fn_x2

CASES: dict[str, Callable[[], Case]] = {
    "int4 g32": lambda: int4(32, BF16),
    "int4 g64": lambda: int4(64, BF16),
    "int4 g128 f16": lambda: int4(128, F16),
    "int4 g32 bytes": lambda: int4(32, BF16, U8),
    "int4 g64 bytes, no shape": lambda: int4(64, F16, U8, shape=False),
    "int4 g128 no shape": lambda: int4(128, BF16, shape=False),
    "mxfp4": lambda: mxfp4(("weight_packed", "weight_scale"), U8, U8),
    "mxfp4 DeepSeek-V4": lambda: mxfp4(("weight", "scale"), I8, E8M0),
    "mxfp4 F4": lambda: mxfp4(("weight", "scale"), FP4, E8M0),
    "nvfp4 ModelOpt": lambda: nvfp4_modelopt(()),
    "nvfp4 ModelOpt [1]": lambda: nvfp4_modelopt((1,)),
    "nvfp4 compressed": nvfp4_compressed,
    "fp8 block": lambda: block("weight_scale_inv", F32),
    "fp8 block bf16": lambda: block("weight_scale_inv", BF16),
    "fp8 block ue8m0": lambda: block("weight_scale_inv", U8),
    "fp8 block DeepSeek-V4": lambda: block("scale", E8M0),
    "fp8 block compressed": lambda: block("weight_scale", F32),
    "fp8 channel": lambda: channel((OUT, 1), BF16),
    "fp8 channel f32": lambda: channel((OUT, 1), F32),
    "fp8 channel vector": lambda: channel((OUT,), F32),
    "mxfp8 MiniMax-M3": lambda: mxfp8("weight_scale_inv", U8),
    "mxfp8 compressed": lambda: mxfp8("weight_scale", U8),
    "mxfp8 e8m0": lambda: mxfp8("weight_scale_inv", E8M0),
    "int8 g128": int8_groups,
    "gptq g32": lambda: gptq(32),
    "gptq g128 v2": lambda: gptq(128, zero=8),
    "gptq g64, no index": lambda: gptq(64, index=False),
}


@pytest.mark.parametrize("name", CASES)
def test_values_equal_the_libraries(tmp_path: Path, name: str) -> None:
    case = CASES[name]()
    checkpoint = open_with(tmp_path, case.tensors)
    linear = read_linear(checkpoint, "p", (OUT, IN))
    assert (linear.format, linear.out_features, linear.in_features) == (case.format, OUT, IN)
    # The product of two numbers of few bits is exact in float64, and in float32 rounded once.
    assert np.array_equal(dequantize(linear), case.exact.float().numpy())
    assert sorted(linear_tensor_names(checkpoint, "p")) == sorted(f"p.{name}" for name in case.tensors)
    assert linear.data.flags.c_contiguous
    assert linear.scales is None or linear.scales.flags.c_contiguous


@pytest.mark.parametrize(
    "case",
    [
        # Rows in whole blocks: transformers divides the shapes to learn the size of a block.
        lambda: block("weight_scale_inv", F32, rows=256),
        lambda: block("weight_scale_inv", U8, rows=256),
        lambda: block("scale", E8M0, rows=256),
        CASES["mxfp4 DeepSeek-V4"],
        CASES["mxfp8 MiniMax-M3"],
    ],
)
def test_values_equal_transformers_dequantizer(tmp_path: Path, case: Callable[[], Case]) -> None:
    tensors = case().tensors
    weight, scale = tensors.values()
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    assert np.array_equal(dequantize(read_linear(open_with(tmp_path, tensors), "p")), theirs.numpy())


@pytest.mark.parametrize("name", [name for name in CASES if "gptq" not in name])
def test_weights_are_views_of_the_file(tmp_path: Path, name: str) -> None:
    linear = read_linear(open_with(tmp_path, CASES[name]().tensors), "p")
    assert not linear.data.flags.owndata
    assert not linear.data.flags.writeable


def test_gptq_with_more_rows_than_are_turned_at_once(tmp_path: Path) -> None:
    case = gptq(32, columns=1056)
    linear = read_linear(open_with(tmp_path, case.tensors), "p", (OUT, 1056))
    assert np.array_equal(dequantize(linear), case.exact.float().numpy())


def test_nvfp4_divisor_is_inverted_once(tmp_path: Path) -> None:
    case = nvfp4_compressed()
    case.tensors["weight_global_scale"] = torch.tensor([300.0])
    linear = read_linear(open_with(tmp_path, case.tensors), "p")
    assert linear.global_scale == np.float32(1) / np.float32(300)
    exact = case.exact.numpy() * 512 / 300
    # Two roundings of float32, of the inverse and of the product.
    assert (np.abs(dequantize(linear) - exact) <= np.abs(exact) * 2.0**-23).all()


def changed(name: str, **tensors: torch.Tensor | None) -> Tensors:
    merged = {**CASES[name]().tensors, **tensors}
    return {suffix: tensor for suffix, tensor in merged.items() if tensor is not None}


def poisoned(name: str, suffix: str, value: float | int) -> Tensors:
    tensors = CASES[name]().tensors
    scale = tensors[suffix].clone()
    flat = scale.view(U8) if isinstance(value, int) else scale
    flat.view(-1)[1] = value
    return {**tensors, suffix: scale}


INF, NAN = float("inf"), float("nan")

# Tensors, what the message names, what it expected and what it found.
FAULTS: dict[str, Callable[[], tuple[Tensors, str, str, str]]] = {
    "int4 scale shape": lambda: (
        changed("int4 g32", weight_scale=torch.ones(OUT, 5).bfloat16()), "p.weight_scale", "[160, 4]", "[160, 5]"),
    "int4 lying shape": lambda: (
        changed("int4 g32", weight_shape=torch.tensor([OUT, 2 * IN])), "p.weight_shape", "[160, 256]", "[160, 512]"),
    "int4 inf scale": lambda: (poisoned("int4 g32", "weight_scale", INF), "p.weight_scale", "finite", "inf or NaN"),
    "int4 nan f16 scale": lambda: (
        poisoned("int4 g128 f16", "weight_scale", NAN), "p.weight_scale", "finite", "inf or NaN"),
    "mxfp4 rows": lambda: (
        changed("mxfp4", weight_packed=random_bytes(OUT - 1, IN // 2)), "p.weight_packed", "[160, 128]", "[159, 128]"),
    "mxfp4 scales of 16": lambda: (
        changed("mxfp4", weight_scale=random_e8m0(OUT, IN // 16)), "p.weight_scale", "[160, 8]", "[160, 16]"),
    "mxfp4 nan scale": lambda: (poisoned("mxfp4", "weight_scale", 255), "p.weight_scale", "finite", "inf or NaN"),
    "V4 nan scale": lambda: (poisoned("mxfp4 DeepSeek-V4", "scale", 255), "p.scale", "finite", "inf or NaN"),
    "nvfp4 scale shape": lambda: (
        changed("nvfp4 ModelOpt", weight_scale=random_e4m3(OUT, IN // 32)), "p.weight_scale", "[160, 16]", "[160, 8]"),
    "nvfp4 nan scale": lambda: (
        poisoned("nvfp4 ModelOpt", "weight_scale", 0xFF), "p.weight_scale", "finite", "inf or NaN"),
    "nvfp4 no global scale": lambda: (
        changed("nvfp4 ModelOpt", weight_scale_2=None), "p.weight_scale_2", "a tensor", "no such tensor"),
    "nvfp4 zero divisor": lambda: (
        changed("nvfp4 compressed", weight_global_scale=torch.zeros(1)), "p.weight_global_scale", "above zero", "0.0"),
    "nvfp4 nan global scale": lambda: (
        changed("nvfp4 ModelOpt", weight_scale_2=torch.tensor(NAN)), "p.weight_scale_2", "finite", "inf or NaN"),
    "nvfp4 global scale per row": lambda: (
        changed("nvfp4 ModelOpt", weight_scale_2=torch.ones(OUT)), "p.weight_scale_2", "[1]", "[160]"),
    "block grid": lambda: (
        changed("fp8 block", weight_scale_inv=torch.ones(2, 1)), "p.weight_scale_inv", "[2, 2]", "[2, 1]"),
    "block inf": lambda: (poisoned("fp8 block", "weight_scale_inv", INF), "p.weight_scale_inv", "finite", "inf or NaN"),
    "block e8m0 nan": lambda: (poisoned("fp8 block ue8m0", "weight_scale_inv", 255), "p.weight_scale_inv", "finite",
                               "inf or NaN"),
    "channel rows": lambda: (
        changed("fp8 channel", weight_scale=torch.ones(OUT - 1)), "p.weight_scale", "[160]", "[159]"),
    "one scale": lambda: (changed("fp8 channel", weight_scale=torch.tensor(1.0)), "p.weight_scale", "[160]", "[]"),
    "channel nan": lambda: (poisoned("fp8 channel", "weight_scale", NAN), "p.weight_scale", "finite", "inf or NaN"),
    "int8 scales": lambda: (
        changed("int8 g128", weight_scale=torch.ones(OUT, 1).bfloat16()), "p.weight_scale", "[160, 2]", "[160, 1]"),
    "mxfp8 columns": lambda: (
        changed("mxfp8 MiniMax-M3", weight_scale_inv=random_e8m0(OUT, 2)),
        "p.weight_scale_inv", "[160, 8]", "[160, 2]"),
    "mxfp8 nan": lambda: (
        poisoned("mxfp8 MiniMax-M3", "weight_scale_inv", 255), "p.weight_scale_inv", "finite", "inf or NaN"),
    "gptq shape": lambda: (
        changed("gptq g32", qweight=torch.zeros(OUT, IN // 8).int()), "p.qweight", "[32, 160]", "[160, 32]"),
    "gptq scale shape": lambda: (
        changed("gptq g32", scales=torch.ones(3, OUT).half()), "p.scales", "[8, 160]", "[3, 160]"),
    "gptq scale type": lambda: (changed("gptq g32", scales=torch.ones(8, OUT)), "p.scales", "F16", "F32"),
    "gptq zeros shape": lambda: (
        changed("gptq g32", qzeros=torch.zeros(8, 3).int()), "p.qzeros", "[8, 20]", "[8, 3]"),
    "gptq inf": lambda: (poisoned("gptq g32", "scales", INF), "p.scales", "finite", "inf or NaN"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_file_tensor_expected_and_found(tmp_path: Path, fault: str) -> None:
    tensors, tensor, expected, got = FAULTS[fault]()
    with pytest.raises(CheckpointError) as caught:
        read_linear(open_with(tmp_path, tensors), "p", (OUT, IN))
    text = str(caught.value)
    assert str(tmp_path) in text
    assert tensor in text
    assert expected in text.split("expected")[1].split("got", maxsplit=1)[0]
    assert got in text.split("got")[1]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (lambda: changed("gptq g32", g_idx=torch.arange(IN).flip(0).int() // 32), "desc_act"),
        (lambda: changed("gptq g32", qzeros=torch.full((8, 20), 0x77777776).int()), "asymmetric"),
        (lambda: changed("fp8 block", weight=random_e4m3(OUT, IN).float().to(torch.float8_e5m2)), "F8_E5M2"),
    ],
)
def test_what_proa_lacks_is_said(tmp_path: Path, tensors: Callable[[], Tensors], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        read_linear(open_with(tmp_path, tensors()), "p", (OUT, IN))


def test_input_features_must_fill_groups(tmp_path: Path) -> None:
    cases: dict[str, Tensors] = {
        "mxfp4": {"weight_packed": random_bytes(2, 20), "weight_scale": random_e8m0(2, 2)},
        "nvfp4": {"weight": random_bytes(2, 20), "weight_scale": random_e4m3(2, 3), "weight_scale_2": torch.ones(1)},
        "mxfp8": {"weight": random_e4m3(2, 40), "weight_scale_inv": random_e8m0(2, 2)},
        "gptq": {"qweight": torch.zeros(5, 8).int(), "scales": torch.ones(1, 8).half()},
    }
    for name, tensors in cases.items():
        (tmp_path / name).mkdir()
        with pytest.raises(CheckpointError, match="in groups of"):
            read_linear(open_with(tmp_path / name, tensors), "p")


QUANTIZATIONS: dict[str, Any] = {
    "int4 g32": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    "fp8 block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp8 MiniMax-M3": {"quant_method": "mxfp8"},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4 ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


@pytest.mark.parametrize("declared", QUANTIZATIONS)
@pytest.mark.parametrize("stored", QUANTIZATIONS)
def test_quantization_config_must_agree_with_the_tensors(tmp_path: Path, stored: str, declared: str) -> None:
    checkpoint = open_with(tmp_path, CASES[stored]().tensors, QUANTIZATIONS[declared])
    if stored == declared:
        read_linear(checkpoint, "p")
        return
    with pytest.raises(CheckpointError, match="as quantization_config says") as caught:
        read_linear(checkpoint, "p")
    assert "p" in str(caught.value)


def test_gptq_zero_point_must_be_the_declared_one(tmp_path: Path) -> None:
    config = {**QUANTIZATIONS["int4 g32"], "checkpoint_format": "gptq_v2"}
    with pytest.raises(UnsupportedError, match="zero points"):
        read_linear(open_with(tmp_path, CASES["gptq g32"]().tensors, config), "p")


def test_subnormal_scales_and_nan_elements_are_taken_as_they_are(tmp_path: Path) -> None:
    weight = random_e4m3(OUT, IN)
    weight.view(U8)[3, 4] = 0x7F
    scale = torch.full((OUT, 1), 1e-40)
    values = dequantize(read_linear(open_with(tmp_path, {"weight": weight, "weight_scale": scale}), "p"))
    assert np.isnan(values[3, 4])
    assert np.isnan(values).sum() == 1
    assert (values[0] != 0).any()
