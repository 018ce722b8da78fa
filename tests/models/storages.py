"""How the checkpoints of the model tests store their weights, and the values that stands for, decoded by others.

Values come from compressed-tensors' decompressors, torch's types, or a formula written out here: never from proa.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from proa.convert import encoding
from proa.weights.quantize import quantize

Tensors = dict[str, torch.Tensor]  # by suffix of the linear's name

# Kimi's: all but the routed experts.
IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


@dataclass(frozen=True)
class Storage:
    """`store`: float32 [out, in] -> tensors; `value`: tensors -> float32 [out, in], exact or rounded once.

    `quantizes(name)` picks the weights it stores; the rest has the type `trunk`. `int8_activations`,
    `int16_activations`: what proa's kernels of the format round the activations of a group to. `float_formats`:
    those of the checkpoint whose activations are floats of 24 bits or, in AMX tiles, two terms of 8.
    """

    quantization: dict[str, Any] | None = None
    store: Callable[[torch.Tensor], Tensors] | None = None
    value: Callable[[Tensors], torch.Tensor] | None = None
    trunk: torch.dtype = torch.bfloat16
    experts_only: bool = True
    int8_activations: bool = False
    int16_activations: bool = False
    float_formats: tuple[str, ...] = ("bf16",)

    def quantizes(self, name: str) -> bool:
        if self.store is None:
            return False
        return ".experts." in name if self.experts_only else name.endswith("_proj.weight")


def stored_by_proa(to: str) -> Callable[[torch.Tensor], Tensors]:
    """proa's quantizer; tests/unit/test_stored_linears.py checks how the result is stored."""
    dtypes = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16}

    def store(weight: torch.Tensor) -> Tensors:
        parts = encoding.stored_tensors(quantize(weight.numpy(), to))
        tensors = {suffix: (dtype, torch.from_numpy(np.array(values))) for suffix, (dtype, values) in parts.items()}
        return {suffix: t.view(dtypes[dtype]) if dtype in dtypes else t for suffix, (dtype, t) in tensors.items()}

    return store


def decompressed(name: str, weights: QuantizationArgs) -> Callable[[Tensors], torch.Tensor]:
    """compressed-tensors' value, its scales given in float64 so that it rounds nothing."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)

    def value(tensors: Tensors) -> torch.Tensor:
        scale = tensors["weight_scale"]
        known = {**tensors, "weight_scale": scale.double() if scale.dtype != torch.uint8 else scale}
        compressor = BaseCompressor.get_value_from_registry(name)
        return compressor.decompress(known, scheme)["weight"].float()

    return value


def int4(group: int) -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)


def channel_args() -> QuantizationArgs:
    return QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")


def mxfp4_args() -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32)


def store_fp8_block(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // 128), -(-columns // 128))
    quantized = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scale[i, j] = block.abs().max() / 448
            quantized[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = (block / scale[i, j]).to(torch.float8_e4m3fn)
    return {"weight": quantized, "weight_scale_inv": scale}


def store_fp8_powers(weight: torch.Tensor) -> Tensors:
    """DeepSeek-V4: `.scale` of E8M0."""
    tensors = store_fp8_block(weight)
    scale = torch.exp2(tensors["weight_scale_inv"].log2().ceil()).to(torch.float8_e8m0fnu)
    expanded = expand_blocks(scale.float(), weight.shape)
    return {"weight": (weight / expanded).to(torch.float8_e4m3fn), "scale": scale}


def fp8_block_value(tensors: Tensors) -> torch.Tensor:
    """value = e4m3 * scale[i // 128][j // 128]."""
    scale = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "scale"]
    return tensors["weight"].float() * expand_blocks(scale.float(), tensors["weight"].shape)


def expand_blocks(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def mxfp8_value(tensors: Tensors) -> torch.Tensor:
    scale = tensors["weight_scale_inv"].view(torch.float8_e8m0fnu).float()
    return tensors["weight"].float() * scale.repeat_interleave(32, 1)


def int8_value(tensors: Tensors) -> torch.Tensor:
    """The last group of a row may be cut short."""
    weight = tensors["weight"].float()
    return weight * tensors["weight_scale"].float().repeat_interleave(128, 1)[:, : weight.shape[1]]


def nvfp4_value(tensors: Tensors) -> torch.Tensor:
    """e2m1 * e4m3 * weight_scale_2; the elements by table (OCP microscaling formats, 2023)."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    codes = torch.stack([tensors["weight"] & 15, tensors["weight"] >> 4], -1).flatten(-2).long()
    scale = tensors["weight_scale"].double().repeat_interleave(16, 1) * tensors["weight_scale_2"].double()
    return (table[codes] * scale).float()


def store_gptq(weight: torch.Tensor) -> Tensors:
    """Groups of 32: qweight word (i, o), bits 4k .. 4k + 3, is input 8 i + k of output o, plus 8."""
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7).half()
    q = (groups / scale[..., None].float()).round().clamp(-8, 7).flatten(1).T.numpy().astype(np.int64) + 8
    words = sum(q[k::8] << (4 * k) for k in range(8)).astype(np.uint32)
    zeros = np.full((scale.shape[1], weight.shape[0] // 8), 0x77777777, np.uint32)
    return {
        "qweight": torch.from_numpy(words.view(np.int32)).contiguous(),
        "scales": scale.T.contiguous(),
        "qzeros": torch.from_numpy(zeros.view(np.int32)),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 32,
    }


def gptq_value(tensors: Tensors) -> torch.Tensor:
    words = tensors["qweight"].numpy().view(np.uint32)
    q = np.stack([words >> (4 * k) & 15 for k in range(8)], 1).reshape(-1, words.shape[1]).astype(np.float32) - 8
    return torch.from_numpy(q).mul(tensors["scales"].float().repeat_interleave(32, 0)).T.contiguous()


def store_int4(weight: torch.Tensor) -> Tensors:
    """compressed-tensors int4 g32. Scales of 4 significant bits: values are exact in bf16, what transformers keeps."""
    groups = weight.unflatten(1, (-1, 32))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / 7)
    scale = torch.ldexp((mantissa * 16).ceil() / 16, exponent)
    nibbles = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int64) + 8
    words = (nibbles.reshape(weight.shape[0], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return {
        "weight_packed": words.to(torch.uint32).view(torch.int32),
        "weight_scale": scale.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }


def int4_value(tensors: Tensors) -> torch.Tensor:
    """Element 8w + k of a row is bits 4k .. 4k + 3 of word w, minus 8, times the scale of its 32 columns."""
    words = tensors["weight_packed"].numpy().view(np.uint32)
    q = np.stack([(words >> (4 * k)) & 15 for k in range(8)], axis=-1).reshape(words.shape[0], -1).astype(np.int32) - 8
    return torch.from_numpy(q.astype(np.float32)) * tensors["weight_scale"].float().repeat_interleave(32, 1)


def compressed_tensors(to: str) -> dict[str, Any]:
    config = encoding.quantization_config(to, IGNORE)
    assert config is not None
    return config


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}
F32 = {"trunk": torch.float32, "float_formats": ()}

STORAGES: dict[str, Storage] = {
    "f32": Storage(**F32),
    "bf16": Storage(),
    "int4": Storage(compressed_tensors("int4_g32"), store_int4, int4_value, int8_activations=True),
    "fp8": Storage(FP8, store_fp8_block, fp8_block_value, experts_only=False, float_formats=("bf16", "fp8_block128")),
    "fp8_powers": Storage(
        FP8 | {"scale_fmt": "ue8m0"}, store_fp8_powers, fp8_block_value, torch.float32, float_formats=("fp8_block128",)
    ),
    "int4_g64": Storage(
        compressed_tensors("int4_g64"),
        stored_by_proa("int4_g64"),
        decompressed("pack-quantized", int4(64)),
        int8_activations=True,
        **F32,
    ),
    "int4_g128": Storage(
        compressed_tensors("int4_g128_f16"),
        stored_by_proa("int4_g128_f16"),
        decompressed("pack-quantized", int4(128)),
        int8_activations=True,
        **F32,
    ),
    "gptq": Storage(GPTQ, store_gptq, gptq_value, int8_activations=True, **F32),
    "mxfp4": Storage(
        compressed_tensors("mxfp4"),
        stored_by_proa("mxfp4"),
        decompressed("mxfp4-pack-quantized", mxfp4_args()),
        int8_activations=True,
        **F32,
    ),
    "nvfp4": Storage(
        encoding.quantization_config("nvfp4", IGNORE),
        stored_by_proa("nvfp4"),
        nvfp4_value,
        int8_activations=True,
        **F32,
    ),
    "fp8_channel": Storage(
        compressed_tensors("fp8_channel"),
        stored_by_proa("fp8_channel"),
        decompressed("float-quantized", channel_args()),
        trunk=torch.float32,
        float_formats=("fp8_channel",),
    ),
    "int8": Storage(None, stored_by_proa("int8_g128"), int8_value, int16_activations=True, **F32),
    "mxfp8": Storage(
        encoding.quantization_config("mxfp8", IGNORE),
        stored_by_proa("mxfp8"),
        mxfp8_value,
        torch.float32,
        float_formats=("mxfp8",),
    ),
}
