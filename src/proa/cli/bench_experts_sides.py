"""One side of a comparison, and ours: the native expert layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from proa.cli.bench_experts_data import Inputs, RawExpert
from proa.cli.bench_experts_spec import ExpertSpec
from proa.native import _C
from proa.native.runtime import CpuRuntime

__all__ = ["ProaSide", "Setup", "Side"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What every side builds: `layers` equal layers, so that their weights together exceed the caches."""

    spec: ExpertSpec
    layers: int
    threads: int
    variants: Sequence[RawExpert]

    def expert(self, index: int) -> RawExpert:
        return self.variants[index % len(self.variants)]


class Side(Protocol):
    """An implementation of the expert layer, timed by calling it."""

    name: str
    kernel: str
    bytes_per_expert: int

    def prepare(self, inputs: Inputs) -> None:
        """Takes over the inputs of the next calls, converted to what this side computes with."""

    def call(self, index: int) -> None:
        """Runs routing `index` on layer `index`, each modulo how many there are."""

    def output(self) -> np.ndarray:
        """float32 [T, hidden]: the result of the last call."""


class ProaSide:
    """`proa.native`'s expert layer. Bytes per expert are the checkpoint's: a padded layout earns nothing."""

    name = "proa"

    def __init__(self, setup: Setup, runtime: CpuRuntime) -> None:
        spec, dims = setup.spec, setup.spec.dims
        workspace = _C.ExpertWorkspace(runtime.pool, max(spec.tokens))
        self._layers = []
        for _ in range(setup.layers):
            layer = _C.ExpertLayer(
                workspace,
                dims.experts,
                dims.hidden,
                dims.intermediate,
                spec.method.format,
                max_top_k=dims.top_k,
                activations=spec.activations,
            )
            for index in range(dims.experts):
                raw = setup.expert(index)
                layer.load(index, raw.gate, raw.up, raw.down)
            self._layers.append(layer)
        self.kernel = self._layers[0].kernel
        self.bytes_per_expert = spec.bytes_per_expert

    def prepare(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._out = np.empty_like(inputs.x)

    def call(self, index: int) -> None:
        routing = index % len(self._inputs.ids)
        layer = self._layers[index % len(self._layers)]
        layer.forward(self._inputs.x, self._inputs.ids[routing], self._inputs.weights[routing], self._out)

    def output(self) -> np.ndarray:
        return self._out
