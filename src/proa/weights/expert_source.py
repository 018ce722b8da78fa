"""Where routed experts come from: a model's own checkpoint, GGUF files, or what `proa convert` made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from proa.weights.checkpoint import Checkpoint
from proa.weights.experts import expert_linear_tensors, read_expert_linear
from proa.weights.linear import RawLinear, read_linear
from proa.weights.packed_size import packed_size
from proa.weights.read_ahead import WINDOW_BYTES

__all__ = ["CheckpointExperts", "ExpertLayout", "ExpertShape", "ExpertSource"]

_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What the model's config.json says of the experts of every layer."""

    num_experts: int
    hidden: int
    intermediate: int

    def of(self, projection: str) -> tuple[int, int]:
        """`(out, in)` of a projection: "gate", "up" or "down"."""
        return (self.hidden, self.intermediate) if projection == "down" else (self.intermediate, self.hidden)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The routed experts of a model, and what it calls them.

    `prefixes`: of the experts by layer, e.g. `model.layers.3.mlp.experts`; `names`: of "gate", "up", "down".
    `routers`: the linear of each layer's router.
    """

    shape: ExpertShape
    prefixes: dict[int, str]
    names: dict[str, str]
    routers: dict[int, str]

    def expert(self, layer: int, expert: int) -> list[tuple[str, tuple[int, int]]]:
        """Name and `(out, in)` of the linears of one expert: gate, up, down."""
        prefix = f"{self.prefixes[layer]}.{expert}"
        return [(f"{prefix}.{self.names[part]}", self.shape.of(part)) for part in _PROJECTIONS]

    def linears(self, layer: int) -> list[tuple[str, tuple[int, int]]]:
        """Those of all experts of a layer."""
        return [linear for expert in range(self.shape.num_experts) for linear in self.expert(layer, expert)]


class ExpertSource(Protocol):
    """Routed experts under the names of the model's own linears; `name in source` says which it holds.

    What headers tell is checked when it is made, weights as they are read. Several threads may call `linear` at once,
    one at a time `packed`.
    """

    def __contains__(self, name: object) -> bool: ...

    def replaces(self, tensor: str) -> bool:
        """Whether `tensor` of the model's own checkpoint belongs to the experts read from here."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts in the files."""

    @property
    def max_packed_bytes(self) -> int:
        """The most that all experts can take once loaded."""

    def has_bias(self, name: str) -> bool:
        """Whether the linear `name` comes with a bias."""

    def linear(self, name: str, shape: tuple[int, int]) -> RawLinear:
        """The linear `name`, `(out, in)` = `shape`, good until `packed(name)`. CheckpointError for a fault."""

    def packed(self, name: str) -> int:
        """The linear `name` is copied, its pages may leave this process: returns the stored bytes it had."""

    def read_ahead(self, window_bytes: int = WINDOW_BYTES) -> AbstractContextManager[None]:
        """While a loader reads expert after expert, read up to `window_bytes` of what comes next."""


class CheckpointExperts:
    """The experts that a checkpoint stores itself, in any format and under any naming `read_expert_linear` knows."""

    def __init__(self, checkpoint: Checkpoint, layout: ExpertLayout) -> None:
        self._checkpoint = checkpoint
        self._prefixes = tuple(f"{prefix}." for prefix in layout.prefixes.values())
        self._names = {name for layer in layout.prefixes for name, _ in layout.linears(layer)}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def replaces(self, tensor: str) -> bool:
        return tensor.startswith(self._prefixes)

    @property
    def stored_bytes(self) -> int:
        return sum(self._checkpoint.nbytes(name) for name in self._checkpoint.names if self.replaces(name))

    @property
    def max_packed_bytes(self) -> int:
        return sum(packed_size(self._checkpoint, name) for name in self._checkpoint.names if self.replaces(name))

    def has_bias(self, name: str) -> bool:
        return any(tensor.endswith("bias") for tensor in expert_linear_tensors(self._checkpoint, name))

    def linear(self, name: str, shape: tuple[int, int]) -> RawLinear:
        found = read_expert_linear(self._checkpoint, name, shape)
        return found or read_linear(self._checkpoint, name, shape)  # which says what is missing

    def packed(self, name: str) -> int:
        names = expert_linear_tensors(self._checkpoint, name)
        for tensor in names:
            self._checkpoint.release(tensor)
        return sum(self._checkpoint.nbytes(tensor) for tensor in names)

    @contextmanager
    def read_ahead(self, window_bytes: int = WINDOW_BYTES) -> Iterator[None]:
        with self._checkpoint.read_ahead(window_bytes, skip=lambda name: not self.replaces(name)):
            yield
