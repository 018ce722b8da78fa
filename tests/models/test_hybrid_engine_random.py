"""Whole engines at random: each answer is that of the CPU alone, or ended as asked.

Experts on both sides move and stream, prompts are computed between the layers of others, requests are aborted and
preempted, steps find no memory half way.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.models.hybrid_models import load_hybrid
from tests.models.test_hybrid_models import NAMES, case_of, plan_of
from tests.models.test_oracle import tokens

from proa.core.sampling_params import SamplingParams
from proa.engine.build import LoadedModel, build_engine
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import KVPlan
from proa.ipc.messages import Generate
from proa.moe.hybrid import HybridDecode
from proa.moe.stats import RoutingCounts
from proa.moe.streamed_prefill import StreamedPrefill

PROMPTS = 10


def random_plan(path, rng):
    share = float(rng.choice([0.0, 0.3, 0.6, 1.0]))
    fields = {} if share == 1.0 else {"stream_from": rng.choice([None, 12, 30])}
    if 0.0 < share < 1.0:
        fields |= {"moves": 4, "ram_slots": int(rng.integers(1, 4))}
    return plan_of(path, share, **fields)


def random_faults(rng, monkeypatch):
    """A function; once it was called one of the next layers finds no memory."""
    waiting = [False]

    def sometimes(finish):
        def faulty(self, *arguments):
            if waiting[0] and rng.random() < 0.2:
                waiting[0] = False
                raise MemoryError
            return finish(self, *arguments)

        return faulty

    for strategy in (HybridDecode, StreamedPrefill):
        monkeypatch.setattr(strategy, "finish", sometimes(strategy.finish))
    return lambda: waiting.__setitem__(0, True)


class Driven:
    """An engine and what came of its requests."""

    def __init__(self, config, model, kv, usage):
        self.engine = build_engine(config, LoadedModel(model, model.layout, kv, (), usage=usage))
        self.made, self.ends = {}, {}

    def submit(self, rid, length, count):
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
        # Some prompts begin alike.
        prompt = tokens(length, int(rid) % 4).tolist()
        self.made[rid] = []
        self.engine.submit(Generate(rid=rid, token_ids=prompt, sampling=params))

    def step(self, poll=None):
        for output in self.engine.step(poll).outputs:
            self.made[output.rid] += output.token_ids
            if output.finish_reason:
                assert output.rid not in self.ends
                self.ends[output.rid] = (output.finish_reason, output.error)


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_those_of_the_cpu(seed, make_case, device, driver, monkeypatch):
    rng = np.random.default_rng(seed)
    case = case_of(make_case, NAMES[seed % len(NAMES)])
    model = load_hybrid(monkeypatch, case.path, device, driver, random_plan(case.path, rng), expert_activations="trunk")
    usage = model.expert_usage
    if usage.updates is not None:  # swaps are proposed all the time
        take, shape = usage._counts.take, usage.updates.placement.on_gpu.shape
        monkeypatch.setattr(RoutingCounts, "take", lambda _: take() + 100 * rng.random(shape))
    config = EngineConfig(
        model_path="", to_engine="", from_engine="", max_running_requests=4, block_size=16,
        chunked_prefill_size=int(rng.choice([16, 40, 64])), max_decode_gap_ms=float(rng.choice([0.01, 1, 50])),
    )  # fmt: skip
    kv = KVPlan(int(rng.choice([12, 24, 64])), 16, "float32", max_model_len=128, notes={})
    wanted = [(str(i), int(rng.integers(1, 90)), int(rng.integers(1, 20))) for i in range(PROMPTS)]
    alone = Driven(config, case.model, kv, None)
    for request in wanted:
        alone.submit(*request)
    while alone.engine.has_work:
        alone.step()
    both, fault = Driven(config, model, kv, usage), random_faults(rng, monkeypatch)

    def poll():
        if wanted and rng.random() < 0.3:
            both.submit(*wanted.pop(0))
        if both.made and rng.random() < 0.02:
            both.engine.abort(str(rng.choice(sorted(both.made))))
        if rng.random() < 0.03:
            fault()

    while wanted or both.engine.has_work:
        poll()
        if both.engine.has_work:
            both.step(poll)
    both.engine.check_integrity()
    assert model.expert_faults == 0 and both.ends.keys() == alone.ends.keys()
    for rid, (reason, error) in both.ends.items():
        made, expected = both.made[rid], alone.made[rid]
        assert made == expected if reason == "length" else made == expected[: len(made)]
        assert reason in {"length", "abort"} or error.startswith("[RAM] expected room for a step")
