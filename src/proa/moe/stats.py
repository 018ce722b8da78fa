"""How often tokens go to which expert: counting, recording to a file, moving averages."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proa.core.errors import ConfigError

__all__ = ["ExpertStats", "MovingAverage", "Recorder", "RoutingCounts"]

KEY = "logical_count"
_WHERE = "--init-expert-location"
# Of a file, and of its counts in float64. SGLang records up to 1000 passes: of Kimi K2 that is 187 MB.
_MOST_BYTES = 2**29


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
            ConfigError: it cannot be read, is of more than half a GiB, or holds something else.
        """
        try:
            counts = _counts_in(path)
        except KeyError as error:
            raise ConfigError(_WHERE, f"a file with '{KEY}'", f"'{path}' without") from error
        except ConfigError:
            raise
        except Exception as error:  # whatever a damaged file makes of torch, json or numpy
            reason = str(error).partition("\n")[0]
            raise ConfigError(_WHERE, "a .pt or .json file of expert counts", f"'{path}' ({reason})") from error
        with np.errstate(over="ignore"):
            total = counts.reshape(-1, *counts.shape[-2:]).sum(axis=0) if counts.ndim >= 2 else counts
        if total.ndim != 2 or not np.isfinite(total).all() or (counts < 0).any():
            raise ConfigError(_WHERE, "counts [..., layers, experts] of 0 or more", f"'{path}', shape {counts.shape}")
        return cls(total)

    def of_moe_layers(self, num_layers: int, num_experts: int, dense_layers: Sequence[int] = ()) -> ExpertStats:
        """The counts of a model with that many MoE layers, beside them `dense_layers` (by index among all layers).

        SGLang's recorder has a row for every layer; those of dense ones are zeros and are left out.

        Raises:
            ConfigError: these are counts of another model.
        """
        rows = self.counts
        dense = list(dense_layers)
        if dense and len(rows) == num_layers + len(dense) and not rows[dense].any():
            rows = np.delete(rows, dense, axis=0)
        if rows.shape != (num_layers, num_experts):
            expected = f"counts of {num_layers} x {num_experts} experts"
            raise ConfigError(_WHERE, expected, self.counts.shape)
        return ExpertStats(rows)

    def shares(self, top_k: int) -> np.ndarray:
        """Tokens per token of the layer, `[layers, experts]`; even where a layer has no counts."""
        sums = self.counts.sum(axis=1, keepdims=True)
        even = np.full_like(self.counts, 1.0 / self.counts.shape[1])
        return top_k * np.where(sums > 0, self.counts / np.where(sums > 0, sums, 1.0), even)

    def save(self, path: Path) -> None:
        """As JSON, which `load` reads."""
        path.write_text(json.dumps({KEY: self.counts.tolist()}))


def _counts_in(path: Path) -> np.ndarray:
    """The array in a file of `ExpertStats.load`, whatever its shape and values.

    Memory is bounded: a file may unpack to more than it has, and a tensor may repeat a small storage.

    Raises:
        ConfigError: more than `_MOST_BYTES`. KeyError: a dict without counts. Others: it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError("no such file")
    nbytes = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            nbytes = max(nbytes, sum(entry.file_size for entry in archive.infolist()))
    if nbytes > _MOST_BYTES:
        raise ConfigError(_WHERE, f"a file of at most {_MOST_BYTES} bytes", f"'{path}' of {nbytes}")
    if path.suffix == ".json":
        value: Any = json.loads(path.read_text())
    else:
        value = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(value, dict):
        value = value[KEY]
    if isinstance(value, torch.Tensor):
        if value.numel() * 8 > _MOST_BYTES:
            raise ConfigError(_WHERE, f"at most {_MOST_BYTES // 8} counts", f"'{path}', shape {tuple(value.shape)}")
        value = value.numpy()
    return np.asarray(value, dtype=np.float64)


class RoutingCounts:
    """How many tokens the router of each MoE layer sent to each expert, on the device of the trunk.

    The routing kernels add to it, so that a step counts without Python and inside a CUDA graph. A forward counts the
    rows it routes: in the last layer those whose logits are wanted.
    """

    __slots__ = ("_counts",)

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)

    @property
    def shape(self) -> tuple[int, int]:
        """(layers, experts)."""
        layers, experts = self._counts.shape
        return layers, experts

    def of_layer(self, layer: int) -> torch.Tensor:
        """int64 `[E]` of MoE layer `layer`, counted from 0, to be added to."""
        return self._counts[layer]

    def take(self) -> np.ndarray:
        """The counts since the last call, float64 `[layers, experts]`. Waits for the device."""
        counts = self._counts.cpu().numpy().astype(np.float64)
        self._counts.zero_()
        return counts


class Recorder:
    """`/start_expert_distribution_record`, `/stop_...`, `/dump_...`, as SGLang has them.

    `start` forgets what was recorded and begins; `stop` ends; `dump` gives what was recorded and forgets it.
    """

    __slots__ = ("_counts", "_recording", "_started")

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts = np.zeros((num_layers, num_experts))
        self._recording = self._started = False

    @property
    def recording(self) -> bool:
        return self._recording

    def start(self) -> None:
        self._counts[:] = 0
        self._recording = self._started = True

    def stop(self) -> None:
        self._recording = False

    def add(self, counts: np.ndarray) -> None:
        """`counts` `[layers, experts]`; ignored while not recording."""
        if self._recording:
            self._counts += counts

    def dump(self) -> ExpertStats | None:
        """None when recording has not been on since the last dump."""
        if not self._started:
            return None
        stats = ExpertStats(self._counts.copy())
        self._counts[:] = 0
        self._started = self._recording
        return stats


class MovingAverage:
    """Exponential average of the share of tokens that each expert gets: half of it is the last `half_life` tokens.

    `shares` float64 `[layers, experts]`: expected tokens per token of the layer; a row sums to top-k once the layer
    has been seen. Layers may see different numbers of tokens.
    """

    __slots__ = ("_seen", "_shares", "half_life", "top_k")

    def __init__(self, num_layers: int, num_experts: int, top_k: int, half_life: float) -> None:
        self.half_life = half_life
        self.top_k = top_k
        self._shares = np.zeros((num_layers, num_experts))
        self._seen = np.zeros(num_layers)

    def expect(self, shares: np.ndarray, tokens: float) -> None:
        """Begins as if `tokens` tokens had gone as `shares` `[layers, experts]` says."""
        self._shares = shares * (1.0 - 0.5 ** (tokens / self.half_life))
        self._seen[:] = tokens

    @property
    def shares(self) -> np.ndarray:
        """Zeros of a layer before its first update."""
        weight = 1.0 - 0.5 ** (self._seen / self.half_life)
        return self._shares / np.where(weight > 0, weight, 1.0)[:, None]

    @property
    def tokens(self) -> float:
        """Tokens that the layer which saw most has seen."""
        return float(self._seen.max(initial=0.0))

    def add(self, counts: np.ndarray) -> None:
        """`counts` `[layers, experts]` of the tokens since the last call."""
        tokens = counts.sum(axis=1) / self.top_k
        keep = 0.5 ** (tokens / self.half_life)
        self._shares *= keep[:, None]
        self._shares += ((1.0 - keep) / np.where(tokens > 0, tokens, 1.0))[:, None] * counts
        self._seen += tokens
