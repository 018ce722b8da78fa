"""A whole model in plain torch that rounds where a model on a GPU does, and how far the two may be apart.

A router of a tiny model is close to a tie for some row of nearly every prompt, and a row that goes to other experts is
another row. So the reference goes where the served model went, and says how far that was from its own choice.
docs/decisions/0020-models-that-round-alike.md has the bounds' reasons.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from tests.models.test_oracle import NOISE_FACTOR, reference_logits, two_bf16_terms

from proa.device.gpu import FEW_TOKENS, GpuDevice, LinearKernels
from proa.device.weight import PlacedWeight, dequantize
from proa.kernels import reference
from proa.kernels.gemv import is_fast
from proa.kernels.skinny_gemm import takes_rows
from proa.kernels.weight_tiles import KINDS, kind_of
from proa.models import load_model
from proa.models.decoder import Decoder
from proa.moe import layer
from proa.moe.hybrid_layers import Hybrid
from proa.moe.router import TopK
from proa.weights.checkpoint import Checkpoint

# Up to so many tokens weights of few bits are exact (docs/decisions/0005-numerics-of-the-gpu-trunk.md).
EXACT_TOKENS = 4


@dataclass
class Recording:
    """Of a served model's forward: for each MoE layer its input, its routing and the sum of its routed experts, and the
    plan of a streamed pass."""

    layers: list[tuple[torch.Tensor, TopK, torch.Tensor]] = field(default_factory=list)
    plans: list = field(default_factory=list)

    def watch(self, patch):
        """Models that are loaded from here on."""
        create, plans = layer.create_strategy, Hybrid._plans

        def recorded_plans(hybrid, tokens):
            self.plans.append(plans(hybrid, tokens))
            return self.plans[-1]

        patch.setattr(layer, "create_strategy", lambda *how: _Watched(create(*how), self.layers))
        patch.setattr(Hybrid, "_plans", recorded_plans)

    def clear(self):
        self.layers.clear()
        self.plans.clear()


class _Watched:
    """An `ExpertStrategy`. Shared experts add to the same rows between its two parts."""

    def __init__(self, strategy, layers):
        self._strategy, self._layers = strategy, layers

    def __getattr__(self, name):
        return getattr(self._strategy, name)

    def submit(self, x, topk, ctx):
        self._strategy.submit(x, topk, ctx)
        self._sum = ctx.out.clone()

    def finish(self, x, topk, ctx):
        before = ctx.out.clone()
        self._strategy.finish(x, topk, ctx)
        self._layers.append((x.clone(), TopK(topk.ids.clone(), topk.weights.clone()), self._sum + (ctx.out - before)))


@dataclass
class Follower:
    """A router that takes the experts it is told, one MoE layer after another, with the weights of its own logits.

    `gaps`: how much lower than what it would have chosen, at most, it ranks what it took. `logits`: its own.
    """

    ids: list[torch.Tensor] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def follow(self, recording):
        """In the next forward."""
        self.ids = [topk.ids for _, topk, _ in recording.layers]
        self.gaps, self.logits = [], []

    def route(self, logits, ids, weights, *, bias=None, counts=None, **how):
        if not self.ids:  # the self-test at load
            reference.route(logits, ids, weights, bias=bias, **how)
            return
        taken = self.ids.pop(0).long()
        scores = logits.sigmoid() if how["score"] == "sigmoid" else logits.softmax(-1)
        self.gaps.append(_gap(scores if bias is None else scores + bias, taken, how["num_groups"], how["top_groups"]))
        self.logits.append(logits.clone())
        reference.route(logits, ids, weights, bias=torch.zeros_like(logits).scatter_(1, taken, 8.0), **how)


def _gap(ranks, taken, num_groups, top_groups):
    """Of experts within the groups that were taken, and of these groups, whose ranks are sums of two."""
    gap = 0.0
    if top_groups < num_groups:
        size = ranks.shape[1] // num_groups
        of_groups = ranks.unflatten(1, (num_groups, size)).topk(min(2, size), -1).values.sum(-1)
        least = of_groups.gather(1, taken // size).amin(-1)
        gap = (of_groups.topk(top_groups, -1).values[:, -1] - least).max().item() / 2
        used = torch.zeros_like(of_groups).scatter_(1, taken // size, 1.0)
        ranks = ranks.masked_fill(used.repeat_interleave(size, 1) == 0, -torch.inf)
    best = ranks.topk(taken.shape[1], -1).values[:, -1]
    return max(gap, (best - ranks.gather(1, taken).amin(-1)).max().item())


class PlainExperts:
    """Experts of one MoE layer, an `ExpertStrategy`: those in RAM by the CPU's kernels, those on the GPU in torch.

    `weights`: float32 gate and up `[E, 2 I, H]`, and down `[E, H, I]`. `on_gpu(tokens)`: which ones are there, bool
    `[E]`. Without `rounds` all are computed in float32.
    """

    is_capturable = False

    def __init__(self, in_ram, weights, on_gpu, *, rounds):
        self._in_ram, self._weights, self._on_gpu, self._rounds = in_ram, weights, on_gpu, rounds

    def submit(self, x, topk, ctx):
        ctx.out.copy_(self.sum(x, topk))

    def finish(self, x, topk, ctx):
        """All was done by `submit`."""

    def sum(self, x, topk):
        """float32 `[T, H]`."""
        here = self._on_gpu(x.shape[0]) if self._rounds else np.ones(len(self._weights[0]), np.bool_)
        here = torch.tensor(here, device=x.device)[topk.ids.long()]
        in_ram = torch.zeros_like(x, device="cpu")
        ids = topk.ids.masked_fill(here, -1).cpu()
        self._in_ram.forward(x.cpu(), TopK(ids, topk.weights.cpu()), in_ram)
        is_exact = not self._rounds or x.shape[0] <= FEW_TOKENS or self._in_ram.layer.formats[0] == "f32"
        rounded = _as_is if is_exact else _bf16
        slots = torch.zeros(*topk.ids.shape, x.shape[1], device=x.device)
        for expert in topk.ids[here].unique().tolist():
            t, s = ((topk.ids == expert) & here).nonzero(as_tuple=True)
            gate_up, down = (rounded(weight[expert]) for weight in self._weights)
            gate, up = (rounded(x[t]) @ gate_up.T).chunk(2, -1)
            hidden = rounded(torch.nn.functional.silu(gate) * up)
            slots[t, s] = rounded((hidden @ down.T) * topk.weights[t, s, None])
        return slots.sum(1) + in_ram.to(x.device)


@dataclass(frozen=True)
class Plain:
    """`experts`: of each MoE layer."""

    model: Decoder
    router: Follower
    experts: list[PlainExperts]


def load_plain(case, runtime, device, on_gpu=None, *, rounds, **options):
    """The model of `case` in plain torch. `on_gpu(layer, tokens)`: see `PlainExperts`; None: no expert is.

    Without `rounds` it is exact but for float32.
    """
    experts = [block.mlp.experts for block in case.reference.model.layers if hasattr(block.mlp, "experts")]
    made, router = [], Follower()

    def create(in_ram, workspace, max_top_k):
        index = len(made)
        weights = [w.detach().to(device) for w in (experts[index].gate_up_proj, experts[index].down_proj)]
        none = np.zeros(len(weights[0]), np.bool_)
        here = (lambda tokens: none) if on_gpu is None else partial(on_gpu, index)
        made.append(PlainExperts(in_ram, weights, here, rounds=rounds))
        return made[-1]

    few = FEW_TOKENS if rounds else options["max_tokens"]
    plain = GpuDevice(runtime, device, reference, linears=LINEARS if rounds else None, few_tokens=few)
    plain.route = router.route
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "create_strategy", create)
        model = load_model(Checkpoint.open(case.path), runtime, device=plain, attention="torch", **options)
    return Plain(model, router, made)


class Comparison:
    """A served model beside two in plain torch, `rounded` and `exact`: `pages` of the three in this order."""

    def __init__(self, case, ids, recording, pages, rounded, exact):
        values = reference_logits(copy.deepcopy(case.reference).double(), ids)
        noise = (reference_logits(case.reference, ids) - values).abs().max() / values.abs().max()
        self._noise = NOISE_FACTOR * noise.item()
        self._recording, self._pages, self._plain = recording, pages, (rounded, exact)
        self._sequences = [[page.sequence(64) for _ in range(2)] for page in pages]

    def check(self, chunks):
        """Appends them to the sequences: every row of each layer's experts, of the logits, and where rows went."""
        recording, (rounded, exact) = self._recording, self._plain
        recording.clear()
        served = self._forward(0, chunks)
        for index, (x, topk, experts) in enumerate(recording.layers):
            alike, exactly = (plain.experts[index].sum(x, topk) for plain in self._plain)
            _check(f"experts of MoE layer {index}", experts, alike, self._layer_bound(alike, exactly))
        logits = []
        for number, plain in enumerate(self._plain, start=1):
            plain.router.follow(recording)
            logits.append(self._forward(number, chunks))
        _check("logits", served, logits[0], self._model_bound(*logits))
        assert len(rounded.router.gaps) == len(recording.layers) == len(rounded.experts)
        for gap, *scores in zip(rounded.router.gaps, rounded.router.logits, exact.router.logits, strict=True):
            # No score grows faster than its logit; that of one expert may be too high and of another too low.
            bound = 2 * self._model_bound(*scores)
            assert gap <= bound, f"experts ranked {gap} lower than others were taken, {bound} would be a tie"

    def _forward(self, number, chunks):
        return self._pages[number].forward(list(zip(self._sequences[number], chunks, strict=False)))

    def _layer_bound(self, rounded, exact):
        """Sums in another order leave a relative noise, and carry few values over a boundary of the rounding behind.

        A value x whose bf16 neighbours are s >= |x| / 256 apart changes, by s, with a probability of noise |x| / s,
        at most 256 noise. Rounding has a variance of s^2 / 12: changes amount to sqrt(12 * 256 noise) of it all.
        """
        return self._noise * exact.abs().max().item() + math.sqrt(12 * 256 * self._noise) * _distance(rounded, exact)

    def _model_bound(self, rounded, exact):
        """Behind a value that changed all is rounded anew: sqrt(2) of what rounding does, and the maxima are of
        different samples."""
        return self._noise * exact.abs().max().item() + 2 * _distance(rounded, exact)


def _check(name, served, rounded, bound):
    distance = _distance(served, rounded)
    assert distance <= bound, f"{name}: {distance} apart, bound {bound}"


def _distance(one, other):
    return (one - other).abs().max().item()


def _bf16(x):
    return x.bfloat16().float()


def _as_is(x):
    return x


def _linear(x, data, scales, out, *, weight_format, bias=None, accumulate=False):
    weight = dequantize(PlacedWeight(weight_format, out.shape[1], x.shape[1], data, scales, 1.0))
    few = takes_rows(x, data, scales, kind_of(weight_format), exact=False)
    exact = x.shape[0] <= EXACT_TOKENS if few or scales is not None else is_fast(x.shape[0], out.shape[1])
    if not exact:
        weight = weight if few else _bf16(weight)
        x = two_bf16_terms(x) if x.shape[0] <= FEW_TOKENS else _bf16(x)
    product = x @ weight.T
    product = product if bias is None else product + bias
    out.copy_(out + product if accumulate else product)


def _heads_linear(x, weight, out):
    x = x if weight.dtype == torch.float32 else two_bf16_terms(x)
    out.copy_((x.transpose(0, 1) @ weight.float().mT).transpose(0, 1))


LINEARS = LinearKernels(_linear, _heads_linear, formats=frozenset(KINDS), is_fast=is_fast)
