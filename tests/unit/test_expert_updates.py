"""When experts move and which may: what `ExpertUpdates` asks of the mover (itself: tests/kernels/test_hybrid.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from proa.moe.mover import ExpertMover
from proa.moe.placement import Placement
from proa.moe.rebalance import RebalanceSpec, Swap
from proa.moe.stats import RoutingCounts
from proa.moe.updates import ExpertUpdates, UpdateSpec
from proa.moe.usage import ExpertUsage

TOP_K = 2


@dataclass
class Ram:
    spare_slots: int


@dataclass
class Layer:
    cpu: Ram
    gpu: Any = None


@dataclass
class Moves:
    """Instead of copies: what was started, done when a test says so."""

    started: list[list[Swap]] = field(default_factory=list)
    done: bool = True


@pytest.fixture
def moves(monkeypatch):
    moves, under_way = Moves(), []

    def start(_, swaps):
        moves.started.append(list(swaps))
        under_way.extend(swaps)

    def poll(_):
        switched = list(under_way) if moves.done else []
        under_way[:] = [] if moves.done else under_way
        return switched

    monkeypatch.setattr(ExpertMover, "start", start)
    monkeypatch.setattr(ExpertMover, "poll", poll)
    monkeypatch.setattr(ExpertMover, "busy", property(lambda _: bool(under_way)))
    return moves


def make(spare, *, on_gpu=((1, 1, 0, 0), (1, 1, 0, 0)), max_swaps=4, **options):
    placement = Placement(np.array(on_gpu, np.bool_))
    layers = [Layer(Ram(count)) for count in spare]
    spec = UpdateSpec(rebalance=RebalanceSpec(max_swaps=max_swaps))
    return ExpertUpdates(layers, placement, TOP_K, torch.device("cpu"), spec, **options)


# The experts in RAM get all tokens.
TO_RAM = np.array([[0.0, 0.0, 500.0, 500.0], [0.0, 0.0, 500.0, 500.0]])


@pytest.mark.parametrize("spare", [(0, 0), (1, 0), (2, 1), (8, 8)])
def test_no_more_experts_leave_a_layer_than_ram_has_slots_for(moves, spare):
    updates = make(spare)
    updates.add(TO_RAM)
    started = moves.started[0] if moves.started else []
    left = [sum(swap.out_layer == layer for swap in started) for layer in range(2)]
    assert left == [min(count, 2) for count in spare]


def test_nothing_is_proposed_while_copies_are_on_their_way(moves):
    updates = make((8, 8))
    moves.done = False
    updates.add(TO_RAM)
    assert not updates.wants_counts(10**6) and updates.poll() == []
    updates.add(TO_RAM)
    assert len(moves.started) == 1 and updates.num_moved == 0
    moves.done = True
    assert updates.poll() == moves.started[0] and updates.num_moved == 4
    assert updates.placement.on_gpu.tolist() == [[False, False, True, True]] * 2


def test_full_batches_are_followed_at_once_others_after_the_interval(moves):
    updates = make((8, 8), max_swaps=2)
    assert not updates.wants_counts(15) and updates.wants_counts(16)
    updates.add(TO_RAM)
    updates.poll()
    assert updates.wants_counts(1)  # two of four: there is more
    updates.add(TO_RAM)
    updates.poll()
    updates.add(TO_RAM)
    assert len(moves.started) == 2 and not updates.wants_counts(15)


@pytest.mark.parametrize(("tokens", "moved"), [(4, False), (400, True)])
def test_a_few_tokens_do_not_outweigh_a_use_that_is_known(moves, tokens, moved):
    known = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    updates = make((8, 8), shares=known)
    updates.add(TO_RAM * tokens / 500.0)
    assert bool(moves.started) == moved


def test_a_use_that_wavers_around_even_moves_nothing(moves):
    """Tokens that choose by chance, four an expert and step: no expert stands out for long enough."""
    rng = np.random.default_rng(3)
    updates = make((8, 8))
    for _ in range(200):
        counts = np.stack([np.bincount(rng.integers(0, 4, 32), minlength=4) for _ in range(2)]).astype(float)
        updates.add(counts)
        updates.poll()
    assert updates.num_moved <= 2


def test_what_warmed_up_is_neither_routing_nor_deferred():
    late = 5
    counts = RoutingCounts(1, 2, torch.device("cpu"))
    usage = ExpertUsage(counts, num_late=lambda: late)
    counts.of_layer(0)[1] += 7
    assert usage.num_deferred == 5
    usage.reset()
    usage.start_recording()
    late += 3
    counts.of_layer(0)[0] += 2
    assert usage.num_deferred == 3 and usage.dump().counts.tolist() == [[2.0, 0.0]]
    usage.reset()
    assert usage.num_deferred == 0
