"""The router: which experts a token goes to, and their weights. Float32 throughout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.device.backend import Device
from proa.layers.linear import Linear
from proa.layers.parameters import ParameterReader

__all__ = ["Router", "RouterSpec", "TopK"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How logits become experts and weights.

    `score`: "softmax" over all experts, or "sigmoid". The choice is by score (+ e_score_correction_bias with `bias`)
    among the `top_groups` best of `num_groups` groups (group score: the sum of its two best); the weights are the
    unbiased scores, divided by their sum + `eps` with `renormalize`, times `scale`.
    """

    num_experts: int
    top_k: int
    score: str
    bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class TopK:
    """The routing of T tokens."""

    ids: torch.Tensor  # [T, top_k] int32
    weights: torch.Tensor  # [T, top_k] float32


class Router:
    """Router of one layer: a linear to `num_experts` logits, then the choice."""

    __slots__ = ("_bias", "_counts", "_gate", "_route", "spec")

    def __init__(
        self,
        device: Device,
        spec: RouterSpec,
        gate: Linear,
        bias: torch.Tensor | None,
        counts: torch.Tensor | None = None,
    ) -> None:
        self._route = device.route
        self.spec = spec
        self._gate = gate
        self._bias = bias
        self._counts = counts

    @classmethod
    def load(
        cls,
        reader: ParameterReader,
        prefix: str,
        spec: RouterSpec,
        *,
        hidden: int,
        counts: torch.Tensor | None = None,
    ) -> Router:
        """Reads `{prefix}.weight` and, with a bias, `{prefix}.e_score_correction_bias`.

        `counts`: int64 `[E]` on the device, grows by the tokens that each expert gets.
        """
        gate = Linear.load(reader, [prefix], out_features=[spec.num_experts], in_features=hidden)
        bias = None
        if spec.bias:
            bias = reader.device.place(reader.vector(f"{prefix}.e_score_correction_bias", spec.num_experts))
        return cls(reader.device, spec, gate, bias, counts)

    @property
    def nbytes(self) -> int:
        return self._gate.nbytes

    def forward(self, x: torch.Tensor, logits: torch.Tensor, topk: TopK) -> None:
        """`x` float32 `[T, hidden]`; writes `logits` `[T, num_experts]` and `topk`."""
        self._gate.forward(x, logits)
        spec = self.spec
        self._route(
            logits,
            topk.ids,
            topk.weights,
            bias=self._bias,
            score=spec.score,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            renormalize=spec.renormalize,
            eps=spec.eps,
            scale=spec.scale,
            counts=self._counts,
        )
