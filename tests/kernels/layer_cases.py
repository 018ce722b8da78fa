"""Small expert layers in every weight format, with what is odd about real ones, for comparing ISAs."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from tests.kernels.ggml_blocks import BLOCK_TYPES, TYPES, plain_blocks

from proa.native import _C
from proa.weights.formats import ROW_FORMATS
from proa.weights.gguf_blocks import NATIVE, to_linear
from proa.weights.linear import RawLinear
from proa.weights.quantize import quantize

__all__ = ["FORMATS", "ODD_SCALES", "digest", "make_layer", "odd_rows", "run"]

FORMATS = tuple(_C.weight_formats())
# Hidden and intermediate size: rows that do not fill a panel, groups that do not fill a block where the format allows.
_SIZES = {"32": (160, 96), "64": (192, 64), "128": (256, 128), "256": (512, 256)}
_EXPERTS, _TOP_K = 5, 3
# Bits of a scale that is odd, per dtype of the scales.
ODD_SCALES = {
    "denormal": {"bf16": 0x0001, "f16": 0x0001, "e8m0": 0, "e4m3": 1, "f32": 1},
    "infinite": {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F800000},
    "nan": {"bf16": 0x7FC0, "f16": 0x7E00, "e8m0": 255, "e4m3": 0x7F, "f32": 0x7FC00000},
}
_SCALE_TYPES = {"mxfp8": "e8m0", "mxfp4": "e8m0", "nvfp4": "e4m3", "fp8_block128": "f32", "fp8_channel": "f32"}
_GGML = {NATIVE[name].format: name for name in BLOCK_TYPES}
_ODD_ROW = 5


def _step(fmt: str) -> str:
    if fmt.endswith("_k"):
        return "256"
    return next((step for step in ("128", "64") if f"_g{step}" in fmt), "32")


def _linear(fmt: str, rows: int, columns: int, rng: np.random.Generator) -> RawLinear:
    if fmt in ROW_FORMATS:
        return quantize(rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5), fmt)
    name = _GGML[fmt]
    return to_linear(TYPES[name], plain_blocks(name, rows, columns, rng), fmt)


def odd_rows(fmt: str, kind: str) -> list[int] | None:
    """The outputs that a scale of that kind reaches; None: the format has no array of scales that could hold one."""
    if _scale_type(fmt) not in ODD_SCALES[kind]:
        return None
    return list(range(128)) if fmt == "fp8_block128" else [_ODD_ROW]


def _scale_type(fmt: str) -> str:
    if fmt in _SCALE_TYPES:
        return _SCALE_TYPES[fmt]
    if fmt.startswith("int"):
        return "f16" if fmt.endswith("_f16") else "bf16"
    return ""


def _with_odd_scale(linear: RawLinear, kind: str) -> RawLinear:
    assert linear.scales is not None
    scales = np.array(linear.scales)
    flat = scales.view(np.uint32) if scales.dtype == np.float32 else scales
    row = 0 if linear.format == "fp8_block128" else _ODD_ROW
    flat[(row, *([0] * (flat.ndim - 1)))] = ODD_SCALES[kind][_scale_type(linear.format)]
    return replace(linear, scales=scales)


def make_layer(pool: _C.ThreadPool, fmt: str, seed: int, odd: str | None = None) -> _C.ExpertLayer:
    """The layer; `odd`: expert 1 has one such scale in its down projection."""
    rng = np.random.default_rng(seed)
    hidden, intermediate = _SIZES[_step(fmt)]
    layer = _C.ExpertLayer(_C.ExpertWorkspace(pool, 64), _EXPERTS, hidden, intermediate, fmt, max_top_k=_TOP_K)
    for expert in range(_EXPERTS):
        gate, up = _linear(fmt, intermediate, hidden, rng), _linear(fmt, intermediate, hidden, rng)
        down = _linear(fmt, hidden, intermediate, rng)
        layer.load(expert, gate, up, _with_odd_scale(down, odd) if odd and expert == 1 else down)
    return layer


def run(layer: _C.ExpertLayer, fmt: str, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, outputs). Some slots are skipped, expert 4 has no token, and a token may name one expert twice."""
    rng = np.random.default_rng([seed, tokens])
    hidden = _SIZES[_step(fmt)][0]
    ids = rng.integers(-1, _EXPERTS - 1, (tokens, _TOP_K)).astype(np.int32)
    ids[0] = [1, 1, -1]
    out = np.full((tokens, hidden), 123.0, np.float32)
    weights = rng.standard_normal((tokens, _TOP_K), np.float32)
    layer.forward(rng.standard_normal((tokens, hidden), np.float32), ids, weights, out)
    return ids, out


def digest(pool: _C.ThreadPool, format: str, seed: int, odd: str | None) -> str:
    """Of the outputs for one token, a few and many; which NaN it is does not count."""
    layer = make_layer(pool, format, seed, odd)
    state = hashlib.sha256()
    for tokens in (1, 3, 50):
        out = run(layer, format, tokens, seed)[1]
        out[np.isnan(out)] = np.nan
        state.update(out.tobytes())
    return state.hexdigest()
