"""The self-test of kernels: small fixed products whose results are known, before anything is served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from proa.core.errors import KernelFaultError
from proa.layers.known_data import known_activations, known_product, known_values, known_weight
from proa.native import _C
from proa.native._C import ExpertLayer, ExpertWorkspace, PackedWeight, ThreadPool

__all__ = ["Activations", "KernelCheck", "KernelUse", "check_kernels", "run_checks"]

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
    raw = known_weight(use.format, use.out_features, use.in_features, 0)
    packed = PackedWeight.pack(pool, raw, use.activations)
    weight = known_values(raw, packed)
    for tokens in TOKENS:
        x = known_activations(tokens, use.in_features)
        found = np.empty((tokens, use.out_features), np.float32)
        _C.linear(pool, x, packed, found)
        expected = known_product(x, weight)
        difference = np.abs(found - expected)
        allowed = TOLERANCE * known_product(np.abs(x), np.abs(weight))
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
        raws = [known_weight(use.format, *shape, 3 * expert + i) for i, shape in enumerate(_LAYER_SHAPES)]
        layer.load(expert, *raws)
        experts.append([known_values(raw, PackedWeight.pack(pool, raw)) for raw in raws])
    for tokens in TOKENS:
        x = known_activations(tokens, HIDDEN) / np.float32(64)
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
        products = known_product(x[token], gate)
        hidden = products / (1 + np.exp(-products)) * known_product(x[token], up)
        np.add.at(out, token, weights[token, slot, None] * known_product(hidden, down))
    return out
