"""How often tokens go to which expert: counting, recording to a file, moving averages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proa.core.errors import ConfigError

__all__ = ["ExpertCounter", "ExpertStats", "MovingAverage", "Recorder"]

KEY = "logical_count"


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """`counts` float64 `[layers, experts]`: how many tokens were routed to each expert."""

    counts: np.ndarray

    @classmethod
    def load(cls, path: Path) -> ExpertStats:
        """`--init-expert-location`: what SGLang's recorder dumps (`.pt`), or what `save` wrote (`.json`).

        A `.pt` holds a tensor `[..., layers, experts]`, or a dict with one under "logical_count"; it is loaded without
        running code from it, and summed over all but the last two dimensions.

        Raises:
            ConfigError: it cannot be read, or holds something else.
        """
        where = "--init-expert-location"
        try:
            if path.suffix == ".json":
                value: Any = json.loads(path.read_text())
            else:
                value = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(value, dict):
                value = value[KEY]
            counts = np.asarray(value, dtype=np.float64)
        except KeyError as error:
            raise ConfigError(where, f"a file with '{KEY}'", f"'{path}' without") from error
        except Exception as error:  # whatever a damaged file makes of torch, json or numpy
            raise ConfigError(where, "a .pt or .json file of expert counts", f"'{path}' ({error})") from error
        if counts.ndim < 2 or not np.isfinite(counts).all() or (counts < 0).any():
            raise ConfigError(where, "counts [..., layers, experts] of 0 or more", f"'{path}', shape {counts.shape}")
        return cls(counts.reshape(-1, *counts.shape[-2:]).sum(axis=0))

    def save(self, path: Path) -> None:
        """As JSON, which `load` reads."""
        path.write_text(json.dumps({KEY: self.counts.tolist()}))


class ExpertCounter:
    """Counts `[layers, experts]` int64 on a device, without synchronizing with it, in a CUDA graph too."""

    __slots__ = ("_counts", "_ones")

    def __init__(self, num_layers: int, num_experts: int, max_slots: int, device: torch.device) -> None:
        self._counts = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)
        self._ones = torch.ones(max_slots, dtype=torch.int64, device=device)

    def add(self, layer: int, ids: torch.Tensor) -> None:
        """Counts the experts of `ids` `[T, k]`; an id of -1 is none. At most `max_slots` of them."""
        flat = ids.reshape(-1).to(torch.int64)
        # The last column takes the ids of -1.
        self._counts[layer].index_add_(0, flat % self._counts.shape[1], self._ones[: flat.numel()])

    def take(self) -> np.ndarray:
        """The counts since the last call, float64. Waits for the device."""
        counts = self._counts[:, :-1].cpu().numpy().astype(np.float64)
        self._counts.zero_()
        return counts


class Recorder:
    """`/start_expert_distribution_record`, `/stop_...`, `/dump_...`, as SGLang has them.

    `start` forgets what was recorded and begins; `stop` ends; `dump` gives what was recorded and forgets it.
    """

    __slots__ = ("_counts", "_recording")

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts = np.zeros((num_layers, num_experts))
        self._recording = False

    @property
    def recording(self) -> bool:
        return self._recording

    def start(self) -> None:
        self._counts[:] = 0
        self._recording = True

    def stop(self) -> None:
        self._recording = False

    def add(self, counts: np.ndarray) -> None:
        """`counts` `[layers, experts]`; ignored while not recording."""
        if self._recording:
            self._counts += counts

    def dump(self) -> ExpertStats:
        stats = ExpertStats(self._counts.copy())
        self._counts[:] = 0
        return stats


class MovingAverage:
    """Exponential average of the share of tokens that each expert gets: half of it is the last `half_life` tokens.

    `shares` float64 `[layers, experts]`: expected tokens per token of the layer; a row sums to top-k once the layer
    has been seen.
    """

    __slots__ = ("_seen", "_shares", "half_life")

    def __init__(self, num_layers: int, num_experts: int, half_life: float) -> None:
        self.half_life = half_life
        self._shares = np.zeros((num_layers, num_experts))
        self._seen = 0.0

    @property
    def shares(self) -> np.ndarray:
        """Zeros before the first update."""
        weight = 1.0 - 0.5 ** (self._seen / self.half_life)
        return self._shares / weight if weight > 0 else self._shares.copy()

    @property
    def tokens(self) -> float:
        """Tokens seen in all."""
        return self._seen

    def add(self, counts: np.ndarray, tokens: int) -> None:
        """`counts` `[layers, experts]` of the last `tokens` tokens."""
        if tokens <= 0:
            return
        keep = 0.5 ** (tokens / self.half_life)
        self._shares *= keep
        self._shares += (1.0 - keep) * counts / tokens
        self._seen += tokens
