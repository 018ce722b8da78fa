"""The self-test of kernels: small fixed products whose results are known, before anything is served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from proa.core.errors import KernelFaultError
from proa.native import _C
from proa.native._C import ExpertLayer, ExpertWorkspace, PackedWeight, ThreadPool
from proa.weights.quantize import dequantize, quantize
from proa.weights.raw_linear import RawLinear

__all__ = ["Activations", "KernelCheck", "KernelUse", "block_weight", "check_kernels", "run_checks"]

# What a kernel may round its inputs to where others run (`kernel_report`).
Activations: TypeAlias = Literal["trunk", "int8", "bf16"]

OUT_FEATURES, IN_FEATURES = 48, 512
HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 256, 256, 2, 2
# One token, several, and enough for the kernels of many tokens.
TOKENS = (1, 6, 40)
# Of the sum of the magnitudes of all products. Activations are integers whose largest in every 32 is 127: int8 holds
# them exactly, bf16 too, and int16 with at most half of 127 / 32767 beside a mean magnitude of 7: 2.6e-4. Float sums
# of 512 terms add 512 / 2^24.
TOLERANCE = 2.0**-11
# Relative L2 error of an expert layer: twice what int8 activations may cost.
LAYER_TOLERANCE = 2.4e-2

# GGUF blocks: type in file -> elements, bytes, offsets of its fp16 fields (gguf's constants.py and quants.py).
_BLOCKS = {
    "q4_1": (32, 20, (0, 2)),
    "iq4_nl": (32, 18, (0,)),
    "q5_0": (32, 22, (0,)),
    "q5_1": (32, 24, (0, 2)),
    "q2_k": (256, 84, (80, 82)),
    "q3_k": (256, 110, (108,)),
    "q4_k": (256, 144, (0, 2)),
    "q5_k": (256, 176, (0, 2)),
    "q6_k": (256, 210, (208,)),
}
_LOWER_TIER = {"amx": "avx512", "avx512": "avx2", "avx2": "ref"}


@dataclass(frozen=True, slots=True)
class KernelUse:
    """Weights of one format and shape that a model multiplies with."""

    format: str
    out_features: int
    in_features: int
    activations: Activations = "trunk"

    @property
    def kernel(self) -> str:
        """The name of the kernel chosen for it; empty when there is none."""
        report = _C.kernel_report(self.format, self.out_features, self.in_features, self.activations)
        return next((row["name"] for row in report if row["chosen"]), "")


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """The outcome for one kernel; `fault` is empty when it passed."""

    format: str
    kernel: str
    fault: str


def check_kernels(pool: ThreadPool, uses: Iterable[KernelUse]) -> list[KernelCheck]:
    """Runs every kernel that `uses` need, on all threads of `pool`.

    Raises:
        KernelFaultError: one computes something else than it should. Nothing may be served then.
    """
    checks = run_checks(pool, uses)
    for check in checks:
        if check.fault:
            lower = _LOWER_TIER.get(_C.cpu_info()["isa_in_use"], "ref")
            fix = f"run with PROA_FORCE_ISA={lower}, and report this with the output of `proa doctor`"
            raise KernelFaultError(check.kernel, "the known result of its self-test", check.fault, fix)
    return checks


def run_checks(pool: ThreadPool, uses: Iterable[KernelUse]) -> list[KernelCheck]:
    """One check per kernel, and one of the expert layer around it."""
    checks: dict[tuple[str, str], KernelCheck] = {}
    for use in sorted(uses, key=lambda use: (use.format, use.activations, use.in_features, use.out_features)):
        kernel = use.kernel
        if kernel and (kernel, use.activations) not in checks:
            fault = _linear_fault(pool, use) or _layer_fault(pool, use)
            checks[kernel, use.activations] = KernelCheck(use.format, kernel, fault)
    return list(checks.values())


def _small_use(use: KernelUse) -> KernelUse:
    """The smallest weight that the kernel of `use` is chosen for."""
    candidates = (
        replace(use, out_features=OUT_FEATURES, in_features=IN_FEATURES),
        replace(use, out_features=OUT_FEATURES),
    )
    return next((small for small in candidates if small.kernel == use.kernel), use)


def _linear_fault(pool: ThreadPool, use: KernelUse) -> str:
    use = _small_use(use)
    raw = _raw_linear(use.format, use.out_features, use.in_features, 0)
    packed = PackedWeight.pack(pool, raw, use.activations)
    weight = _values(raw, packed)
    for tokens in TOKENS:
        x = _activations(tokens, use.in_features)
        found = np.empty((tokens, use.out_features), np.float32)
        _C.linear(pool, x, packed, found)
        expected = _product(x, weight)
        difference = np.abs(found - expected)
        allowed = TOLERANCE * _product(np.abs(x), np.abs(weight))
        if not (difference <= allowed).all():
            token, row = (int(index) for index in np.unravel_index(np.argmax(difference - allowed), difference.shape))
            return f"{tokens} tokens: {found[token, row]} in row {row}, not {expected[token, row]:.9g}"
    return ""


def _layer_fault(pool: ThreadPool, use: KernelUse) -> str:
    kernels = [KernelUse(use.format, *shape, use.activations).kernel for shape in _LAYER_SHAPES]
    if not all(kernels):
        return ""
    layer = ExpertLayer(
        ExpertWorkspace(pool, max(TOKENS)),
        NUM_EXPERTS,
        HIDDEN,
        INTERMEDIATE,
        use.format,
        max_top_k=TOP_K,
        activations=use.activations,
    )
    experts = []
    for expert in range(NUM_EXPERTS):
        raws = [_raw_linear(use.format, *shape, 3 * expert + i) for i, shape in enumerate(_LAYER_SHAPES)]
        layer.load(expert, *raws)
        experts.append([_values(raw, PackedWeight.pack(pool, raw)) for raw in raws])
    for tokens in TOKENS:
        x = _activations(tokens, HIDDEN) / np.float32(64)
        ids = np.array([[(t + slot) % NUM_EXPERTS for slot in range(TOP_K)] for t in range(tokens)], np.int32)
        weights = np.array([[0.75, 0.25]] * tokens, np.float32)
        found = np.empty_like(x)
        layer.forward(x, ids, weights, found)
        expected = _layer_output(x, ids, weights, experts)
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        if not error <= LAYER_TOLERANCE:
            return f"{tokens} tokens through an expert layer: a relative error of {error:.3g}"
    return ""


_LAYER_SHAPES = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))


def _layer_output(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, experts: list[list[np.ndarray]]) -> np.ndarray:
    out = np.zeros(x.shape)
    for expert, (gate, up, down) in enumerate(experts):
        token, slot = np.nonzero(ids == expert)
        products = _product(x[token], gate)
        hidden = products / (1 + np.exp(-products)) * _product(x[token], up)
        np.add.at(out, token, weights[token, slot, None] * _product(hidden, down))
    return out


def _product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`x @ weight.T` without the threads of a BLAS."""
    return np.asarray(np.einsum("ti,oi->to", x, weight))


def _values(raw: RawLinear, packed: PackedWeight) -> np.ndarray:
    """float64 `[out, in]`, not from the packed bytes where numpy can read the raw ones."""
    return (dequantize(raw) if raw.layout == "rows" else packed.dequantize()).astype(np.float64)


def _raw_linear(weight_format: str, out_features: int, in_features: int, seed: int) -> RawLinear:
    """A weight made by integer arithmetic alone, of magnitudes around 1 / sqrt(in)."""
    if weight_format in _BLOCKS:
        return block_weight(weight_format, out_features, in_features, seed)
    rows, columns = np.ogrid[:out_features, :in_features]
    integers = _mixed(rows * np.uint32(in_features) + columns + seed * 1_000_003) % 255
    return quantize((integers.astype(np.float32) - 127) / np.float32(64 * in_features**0.5), weight_format)


def block_weight(weight_format: str, out_features: int, in_features: int, seed: int) -> RawLinear:
    """A weight in the blocks of a GGUF type, of random codes and equal fp16 scales; values up to about 1/4."""
    elements, nbytes, halves = _BLOCKS[weight_format]
    count = in_features // elements
    data = (_mixed(np.arange(out_features * count * nbytes, dtype=np.uint32) + seed * 1_000_003) & 255).astype(np.uint8)
    blocks = data.reshape(out_features, count, nbytes)
    scale = np.array([2.0**-12 if elements == 256 else 2.0**-8], np.float16).view(np.uint8)
    for offset in halves:
        blocks[..., offset : offset + 2] = scale
    return RawLinear(weight_format, out_features, in_features, data.reshape(out_features, -1), None, layout="ggml")


def _mixed(index: np.ndarray) -> np.ndarray:
    """A hash of uint32 (Wang, 2007)."""
    mixed = index.astype(np.uint32)
    mixed = (mixed ^ np.uint32(61)) ^ (mixed >> np.uint32(16))
    mixed = mixed * np.uint32(9)
    mixed = mixed ^ (mixed >> np.uint32(4))
    mixed = mixed * np.uint32(0x27D4EB2D)
    return mixed ^ (mixed >> np.uint32(15))


def _activations(tokens: int, columns: int) -> np.ndarray:
    """Integers -7 .. 7, and one of 127 or -127 in every 32 columns, float32 `[tokens, columns]`."""
    token, column = np.ogrid[:tokens, :columns]
    x = (_mixed(token * np.uint32(7919) + column) % 15).astype(np.float32) - 7
    peaks = column % 32 == (token + column // 32) % 32
    return np.where(peaks, np.where((token + column) % 3 == 0, np.float32(-127), np.float32(127)), x)
