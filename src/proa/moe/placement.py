"""Which experts the GPU holds: pure policies from a budget and, for some, routing counts. Knows no device.

Every expert is in exactly one place: `Placement.on_gpu` says in which. A new policy is one function and one entry of
`POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from proa.core.errors import ConfigError
from proa.moe.stats import ExpertStats

__all__ = ["POLICIES", "ExpertBudget", "Placement", "place"]

# SGLang's seed for the policy of this name, so that two runs place alike.
RANDOM_SEED = 42


@dataclass(frozen=True, slots=True)
class ExpertBudget:
    """`gpu_experts` of the `num_layers * num_experts` routed experts may be on the GPU."""

    num_layers: int
    num_experts: int
    gpu_experts: int

    def __post_init__(self) -> None:
        if not 0 <= self.gpu_experts <= self.total:
            raise ConfigError("GPU experts", f"0 to {self.total} experts", self.gpu_experts)

    @property
    def total(self) -> int:
        return self.num_layers * self.num_experts

    @classmethod
    def per_layer(cls, num_layers: int, num_experts: int, count: int) -> ExpertBudget:
        """`--kt-num-gpu-experts`: `count` times the number of layers, however a policy spreads them.

        Raises:
            ConfigError: a layer has fewer experts.
        """
        if not 0 <= count <= num_experts:
            raise ConfigError("--kt-num-gpu-experts", f"0 to {num_experts} experts per layer", count)
        return cls(num_layers, num_experts, num_layers * count)

    @classmethod
    def ratio(cls, num_layers: int, num_experts: int, ratio: float) -> ExpertBudget:
        """`--kt-gpu-experts-ratio`: that part of all experts, rounded down.

        Raises:
            ConfigError: not a number from 0 to 1.
        """
        if not 0.0 <= ratio <= 1.0:
            raise ConfigError("--kt-gpu-experts-ratio", "0 to 1", ratio)
        return cls(num_layers, num_experts, int(ratio * num_layers * num_experts))


@dataclass(frozen=True, slots=True)
class Placement:
    """`on_gpu` bool `[layers, experts]`, read-only: true on the GPU, false in RAM."""

    on_gpu: np.ndarray

    def __post_init__(self) -> None:
        if self.on_gpu.dtype != np.bool_ or self.on_gpu.ndim != 2:
            raise ConfigError("Placement", "bool [layers, experts]", f"{self.on_gpu.dtype} {self.on_gpu.shape}")
        self.on_gpu.setflags(write=False)

    @property
    def num_gpu_experts(self) -> int:
        return int(self.on_gpu.sum())

    def gpu_experts(self, layer: int) -> list[int]:
        """In ascending order."""
        return [int(expert) for expert in np.flatnonzero(self.on_gpu[layer])]

    def cpu_experts(self, layer: int) -> list[int]:
        """In ascending order."""
        return [int(expert) for expert in np.flatnonzero(~self.on_gpu[layer])]

    def hit_ratio(self, counts: np.ndarray) -> float:
        """The part of the routed tokens `counts` `[layers, experts]` that meets an expert on the GPU."""
        total = float(counts.sum())
        return float(counts[self.on_gpu].sum()) / total if total > 0 else 0.0


Policy = Callable[[ExpertBudget, ExpertStats | None], np.ndarray]


def _from_positions(budget: ExpertBudget, positions: np.ndarray) -> np.ndarray:
    """Marks flat positions `layer * num_experts + expert`."""
    flat = np.zeros(budget.total, np.bool_)
    flat[positions] = True
    return flat.reshape(budget.num_layers, budget.num_experts)


def _uniform(budget: ExpertBudget, _: ExpertStats | None) -> np.ndarray:
    """The first experts of each layer, as many in each; what is left over goes to the first layers."""
    each, extra = divmod(budget.gpu_experts, budget.num_layers) if budget.num_layers else (0, 0)
    counts = each + (np.arange(budget.num_layers) < extra)
    return np.arange(budget.num_experts)[None, :] < counts[:, None]


def _front_loading(budget: ExpertBudget, _: ExpertStats | None) -> np.ndarray:
    """All experts of the first layers."""
    return _from_positions(budget, np.arange(budget.gpu_experts))


def _random(budget: ExpertBudget, _: ExpertStats | None) -> np.ndarray:
    chosen = np.random.default_rng(RANDOM_SEED).permutation(budget.total)[: budget.gpu_experts]
    return _from_positions(budget, chosen)


def _frequency(budget: ExpertBudget, stats: ExpertStats | None) -> np.ndarray:
    """The experts that most tokens went to, of all layers together; of equal ones the earlier layer and expert."""
    if stats is None:
        raise ConfigError(
            "--kt-expert-placement-strategy",
            "routing counts for 'frequency'",
            "none",
            "give --init-expert-location FILE, or take 'auto'",
        )
    counts = stats.of_moe_layers(budget.num_layers, budget.num_experts).counts
    order = np.argsort(-counts.reshape(-1), kind="stable")
    return _from_positions(budget, order[: budget.gpu_experts])


def _auto(budget: ExpertBudget, stats: ExpertStats | None) -> np.ndarray:
    return _uniform(budget, None) if stats is None else _frequency(budget, stats)


POLICIES: dict[str, Policy] = {
    "auto": _auto,
    "frequency": _frequency,
    "front-loading": _front_loading,
    "random": _random,
    "uniform": _uniform,
}


def place(policy: str, budget: ExpertBudget, stats: ExpertStats | None = None) -> Placement:
    """A placement of exactly `budget.gpu_experts` experts on the GPU, the same for the same arguments.

    Raises:
        ConfigError: there is no such policy, or it needs counts that are missing or of another model.
    """
    chosen = POLICIES.get(policy)
    if chosen is None:
        raise ConfigError("--kt-expert-placement-strategy", f"one of {', '.join(POLICIES)}", f"'{policy}'")
    return Placement(chosen(budget, stats))
