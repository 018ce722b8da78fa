# Fixtures of other files are arguments here.
# ruff: noqa: F811
"""Engines on a GPU and on the CPU alone: the same greedy tokens for each family and wherever experts are.

Prompts and answers run beside each other, so that steps are replayed between the layers of prompts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from tests.gpu.test_trunk import on_gpu_only
from tests.models.conftest import make_case, one_torch_thread, runtime  # noqa: F401, fixtures
from tests.models.test_oracle import tokens
from tests.models.variants import VARIANTS

from proa.core.sampling_params import SamplingParams
from proa.engine.build import build_engine
from proa.engine.config import EngineConfig
from proa.engine.load import load_checkpoint
from proa.ipc.messages import Generate
from proa.models import DecodeGraphs
from proa.moe.stats import RoutingCounts

pytestmark = on_gpu_only

NAMES = ("deepseek_groups_yarn", "glm_norm_bias", "qwen3", "mixtral_tied")
FAMILIES = [v for v in VARIANTS if v.name in NAMES]
FAMILIES += [replace(FAMILIES[0], name="kimi_float32", served_type="kimi_k2")]
STREAM_FROM = 20
# The share of experts on the GPU, and from how many tokens on a pass streams the others (0: never).
PLACES = [(0.0, 0), (0.4, 0), (1.0, 0), (0.0, STREAM_FROM), (0.4, STREAM_FROM)]
PROMPTS = [tokens(count, seed).tolist() for seed, count in enumerate((3, 70, 9, 55, 30, 1))]
ANSWER = 16


@pytest.fixture(scope="module")
def model(make_case):
    """Of a family: its directory and what an engine on the CPU answers."""
    known = {}

    def find(family):
        if family.name not in known:
            path = make_case(family).path
            _, engine = start(path, device="cpu")
            known[family.name] = path, answers(engine)
        return known[family.name]

    return find


def start(path, **fields):
    """What was loaded, and an engine of it whose passes take part of the longest prompts only."""
    common = {
        "model_path": str(path),
        "to_engine": "",
        "from_engine": "",
        "kv_cache_dtype": "float32",
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "chunked_prefill_size": 40,
        "max_decode_gap_ms": 1,
        "num_threads": 1,
    }
    config = EngineConfig(**common | fields)
    loaded = load_checkpoint(config, lambda done, total: None)
    return loaded, build_engine(config, loaded)


def answers(engine, prompts=PROMPTS):
    """Of each prompt its greedy tokens; more prompts than run at a time, none of which is known yet."""
    assert engine.flush()
    made = {}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.0)
        engine.submit(Generate(rid=str(index), token_ids=prompt, sampling=params))
        made[str(index)] = []
    while engine.has_work:
        for output in engine.step().outputs:
            assert not output.error, output.error
            made[output.rid] += output.token_ids
    engine.check_integrity()
    return made


@pytest.fixture
def replays(monkeypatch):
    """Grows by the batch of each step that is replayed."""
    found, forward = [], DecodeGraphs.forward
    monkeypatch.setattr(DecodeGraphs, "forward", lambda self, batch: found.append(batch) or forward(self, batch))
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize(("share", "stream_from"), PLACES)
@pytest.mark.parametrize("graphs", [True, False])
def test_answers_wherever_experts_are(family, share, stream_from, graphs, model, replays):
    path, expected = model(family)
    loaded, engine = start(path, **on_gpu(share, stream_from, graphs=graphs))
    assert answers(engine) == expected
    check_places(loaded, share, stream_from)
    assert (len(replays) > 0) == graphs


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("stream_from", [0, STREAM_FROM])
@pytest.mark.parametrize("graphs", [True, False])
def test_answers_while_and_after_experts_move(family, stream_from, graphs, model, replays, monkeypatch):
    path, expected = model(family)
    loaded, engine = start(path, **on_gpu(0.4, stream_from, graphs=graphs), expert_updates=True)
    assert move_experts(loaded, engine, monkeypatch, expected) >= 100
    assert answers(engine) == expected
    assert (len(replays) > 0) == graphs


def on_gpu(share, stream_from, *, graphs):
    """Of an engine's configuration."""
    return {
        "device": "cuda",
        "gpu_experts_ratio": share,
        "gpu_prefill_threshold": stream_from,
        "disable_cuda_graph": not graphs,
    }


def check_places(loaded, share, stream_from):
    """Experts were where they were said to be, and none was late or moved."""
    traffic = loaded.model.hybrid_traffic
    slots, here = np.array(traffic.slots).sum(axis=0)
    assert slots > 0
    assert here == slots if share == 1 else (here > 0) == (share > 0)
    assert (traffic.streamed_bytes > 0) == (stream_from > 0)
    assert loaded.usage.num_moved == loaded.usage.num_deferred == 0


def move_experts(loaded, engine, monkeypatch, expected, prompts=PROMPTS):
    """How many came to the GPU while the prompts were answered, after a use invented anew for each proposal."""
    usage, rng, take = loaded.usage, np.random.default_rng(0), RoutingCounts.take
    with monkeypatch.context() as patch:
        patch.setattr(
            RoutingCounts, "take", lambda self: take(self) + 1000 * rng.random(usage.updates.placement.on_gpu.shape)
        )
        for _ in range(50):
            assert answers(engine, prompts) == expected
            if usage.num_moved >= 100:
                break
    return usage.num_moved
