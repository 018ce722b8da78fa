"""Gated MLPs: the experts of a layer, dense layers and shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from proa.core.errors import UnsupportedError
from proa.device.backend import GatedProduct
from proa.layers.linear import Linear
from proa.layers.parameters import ParameterReader
from proa.layers.workspace import Workspace
from proa.native.ops import ExpertLayer

__all__ = ["SILU", "Activation", "GatedMLP", "MlpNames", "load_experts", "load_mlp", "mlp_rows"]

# So many tokens of a pass go through at a time: gate, up and what they are joined to are wide.
MLP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Activation:
    """What joins the outputs of gate and up, after g = min(gate, limit) and u = clamp(up, -limit, limit).

    `gating`: "silu" is g * sigmoid(g) * u (with a limit: DeepSeek-V4's `swiglu_limit`), "swigluoai" is
    g * sigmoid(alpha * g) * (u + 1) (gpt-oss and MiniMax-M3: alpha 1.702, limit 7).
    """

    gating: str = "silu"
    limit: float = math.inf
    alpha: float = 1.0


SILU = Activation()


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Names of the three projections inside an expert or MLP: `down(activation(gate(x)) * up(x))`."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def load_experts(
    reader: ParameterReader,
    prefixes: list[str],
    names: MlpNames,
    *,
    hidden: int,
    intermediate: int,
    activation: Activation,
    workspace: Workspace,
    max_top_k: int,
    packed: Callable[[ExpertLayer, int], None] = lambda *_: None,
    most_in_ram: int | None = None,
) -> ExpertLayer:
    """Packs one gated MLP per prefix, e.g. `model.layers.3.mlp.experts.0`, into one native layer.

    `max_top_k`: the most experts a token goes to. Gate and up must share one format in all experts, down too, which may
    be another one. Raises UnsupportedError naming the first that does not. Biases are part of every
    expert or of none. `packed` hears of each, and may drop it; `most_in_ram`: that are there at a time, None: all.
    """
    layer: ExpertLayer | None = None
    activations = reader.expert_activations
    for expert in reader.storage_order(prefixes):
        prefix = prefixes[expert]
        gate = reader.raw_linear(f"{prefix}.{names.gate}", intermediate, hidden, activations)
        up = reader.raw_linear(f"{prefix}.{names.up}", intermediate, hidden, activations)
        down = reader.raw_linear(f"{prefix}.{names.down}", hidden, intermediate, activations)
        if layer is None:
            gate_up_format, down_format = gate.format, down.format
            layer = ExpertLayer(
                workspace.experts,
                num_experts=len(prefixes),
                hidden=hidden,
                intermediate=intermediate,
                format=gate_up_format,
                activation=activation.gating,
                max_top_k=max_top_k,
                limit=activation.limit,
                alpha=activation.alpha,
                bias=any(linear.bias is not None for linear in (gate, up, down)),
                down_format=down_format,
                activations=activations,
            )
            # Until the end of this function, or what is left of it when it fails.
            memory = layer.prefault(len(prefixes) if most_in_ram is None else most_in_ram)
        sides = (
            ("gate and up", names.gate, gate, gate_up_format),
            ("gate and up", names.up, up, gate_up_format),
            ("down", names.down, down, down_format),
        )
        for side, name, raw, weight_format in sides:
            if raw.format != weight_format:
                expected = f"{side} of a layer in one format (elsewhere {weight_format})"
                raise UnsupportedError(f"{reader.checkpoint.path}: {prefix}.{name}", expected, raw.format)
        layer.load(expert, gate, up, down)
        for name in (names.gate, names.up, names.down):
            reader.packed(f"{prefix}.{name}")
        packed(layer, expert)
    assert layer is not None, "a layer has at least one expert"
    memory.wait()
    return layer


class GatedMLP(Protocol):
    """A single gated MLP that sees every token: a dense layer or the shared experts."""

    @property
    def nbytes(self) -> int: ...

    def forward(self, x: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        """`x`, `out` float32 `[T, hidden]`; with `accumulate` the result is added to `out`."""


def load_mlp(
    reader: ParameterReader,
    prefix: str,
    workspace: Workspace,
    *,
    hidden: int,
    intermediate: int,
    activation: Activation,
    names: MlpNames,
) -> GatedMLP:
    """Reads `{prefix}.{gate,up,down}` into the form the device of the trunk computes fastest."""
    gated_product = reader.device.gated_product
    if gated_product is not None:
        widths = [intermediate, intermediate]
        sides = [f"{prefix}.{names.gate}", f"{prefix}.{names.up}"]
        gate_up = Linear.load(reader, sides, out_features=widths, in_features=hidden)
        down = Linear.load(reader, [f"{prefix}.{names.down}"], out_features=[hidden], in_features=intermediate)
        return _LinearMlp(gate_up, down, activation, gated_product, workspace)
    experts = load_experts(
        reader,
        [prefix],
        names,
        hidden=hidden,
        intermediate=intermediate,
        activation=activation,
        workspace=workspace,
        max_top_k=1,
    )
    return _ExpertMlp(experts, workspace)


def mlp_rows(workspace: Workspace, intermediate: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch of MLPs that are two linears: gate and up `[T, 2 * intermediate]`, and what they are joined to.

    T: `tokens`, MLP_TOKENS at most.
    """
    few, capacity = (min(count, MLP_TOKENS) for count in (tokens, workspace.max_tokens))
    gate_up = workspace.rows(f"mlp.{intermediate}.gate_up", few, 2 * intermediate, capacity=capacity)
    return gate_up, workspace.rows(f"mlp.{intermediate}.hidden", few, intermediate, capacity=capacity)


class _ExpertMlp:
    """An expert layer of one expert on the CPU."""

    __slots__ = ("_experts", "_ids", "_weights", "nbytes")

    def __init__(self, experts: ExpertLayer, workspace: Workspace) -> None:
        self._experts = experts
        self._ids = workspace.rows("mlp.ids", workspace.max_tokens, 1, dtype=torch.int32)
        self._weights = workspace.rows("mlp.weights", workspace.max_tokens, 1)
        self._weights.fill_(1.0)
        self.nbytes = int(experts.nbytes)

    def forward(self, x: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        tokens = x.shape[0]
        self._experts.forward(x, self._ids[:tokens], self._weights[:tokens], out, accumulate=accumulate)


class _LinearMlp:
    """Two linears and what joins gate and up between them."""

    __slots__ = ("_activation", "_down", "_gate_up", "_gated_product", "_workspace", "nbytes")

    def __init__(
        self, gate_up: Linear, down: Linear, activation: Activation, gated_product: GatedProduct, workspace: Workspace
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._gated_product = gated_product
        self._workspace = workspace
        self.nbytes = gate_up.nbytes + down.nbytes
        mlp_rows(workspace, down.in_features, workspace.max_tokens)  # takes the memory now

    def forward(self, x: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        how = self._activation
        for first in range(0, x.shape[0], MLP_TOKENS):
            part = slice(first, first + MLP_TOKENS)
            gate_up, hidden = mlp_rows(self._workspace, self._down.in_features, len(x[part]))
            self._gate_up.forward(x[part], gate_up)
            self._gated_product(gate_up, hidden, gating=how.gating, limit=how.limit, alpha=how.alpha)
            self._down.forward(hidden, out[part], accumulate=accumulate)
