# Fixtures of other files are arguments here.
# ruff: noqa: F811
"""Whole models on a GPU: the same answers wherever experts are, in CUDA graphs, and while experts change places."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from tests.gpu.bfloat16_oracle import check_no_further_from_exact, oracle_logits
from tests.gpu.test_trunk import Replayed, on_gpu_only, trunk  # noqa: F401, fixtures
from tests.models.conftest import MAX_TOKENS, make_case, one_torch_thread, runtime  # noqa: F401, fixtures
from tests.models.paging import Pager, all_logits
from tests.models.test_hybrid_models import NAMES, PROMPT, case_of, plan_of
from tests.models.test_oracle import NOISE_FACTOR, reference_logits, rounding_noise, tokens

from proa.device.gpu import FEW_TOKENS
from proa.models import DecodeGraphs, load_model
from proa.weights.checkpoint import Checkpoint

ANSWER = 16
FLOAT32 = tuple(name for name in NAMES if name != "deepseek_halves")
PROMPTS = [tokens(PROMPT, seed) for seed in range(8)]
BFLOAT16 = ("deepseek_halves", "mixtral_bf16", "qwen3_bias_bf16", "glm_bias_bf16")
# On the GPU: none, some, all; some with the others streamed in prompts of this many tokens.
PLACES = ((0.0, None), (0.4, None), (1.0, None), (0.0, FEW_TOKENS), (0.4, FEW_TOKENS))

pytestmark = on_gpu_only


def load(path, runtime, trunk, plan):
    options = {"max_tokens": MAX_TOKENS, "max_positions": 256, "expert_activations": "trunk"}
    return load_model(Checkpoint.open(path), runtime, device=trunk, attention="triton", expert_plan=plan, **options)


def answer(model, ids, device, *, graphs=False, after_step=None, dtype="float32"):
    """Greedy tokens, a prompt in chunks of few tokens first."""
    pages = Pager(model, num_blocks=8, dtype=dtype, device=device)
    if graphs:
        with torch.inference_mode():
            pages.model = Replayed(model, DecodeGraphs(model, pages.kv, max_batch=1, max_blocks=8))
    sequence = pages.sequence(len(ids) + ANSWER)
    with torch.inference_mode():
        for chunk in ids[:-1].split(FEW_TOKENS):
            pages.forward([(sequence, chunk)], last_only=True)
        ids, found = ids[-1:], []
        for _ in range(ANSWER):
            ids = pages.forward([(sequence, ids)])[-1:].argmax(-1).int()
            found.append(int(ids))
            if after_step is not None:
                after_step()
    if graphs:
        assert pages.model.replayed >= ANSWER
    return found


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_logits_and_tokens_wherever_experts_are(name, make_case, runtime, trunk, device):
    """Logits of a prompt within the bound of the native kernels; the CPU's greedy tokens, replayed too."""
    case = case_of(make_case, name)
    ids = tokens()[:PROMPT]
    exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
    bound = NOISE_FACTOR * rounding_noise(case, ids, exact)
    expected = answer(case.model, ids, "cpu")
    for share, stream_from in PLACES:
        model = load(case.path, runtime, trunk, plan_of(case.path, share, stream_from=stream_from))
        pages = Pager(model, num_blocks=8, device=device)
        sequence = pages.sequence(PROMPT)
        for chunk in ids.split(FEW_TOKENS):
            pages.forward([(sequence, chunk)])
        assert (all_logits(sequence).double() - exact).abs().max().item() <= bound, (share, stream_from)
        for graphs in (False, True):
            assert answer(model, ids, device, graphs=graphs) == expected, (share, stream_from, graphs)


@pytest.fixture(scope="module")
def oracle(make_case, device):
    """Of a bf16 case: the logits of PROMPTS by transformers, exact and in bf16."""
    known = {}

    def find(name):
        if name not in known:
            known[name] = oracle_logits(case_of(make_case, name).path / "reference", PROMPTS, device)
        return known[name]

    return find


@pytest.mark.parametrize("name", BFLOAT16)
@pytest.mark.parametrize("chunk", [FEW_TOKENS, PROMPT])
def test_bfloat16_is_no_further_from_exact_than_transformers(name, chunk, oracle, make_case, runtime, trunk, device):
    """Of 192 rows, in chunks of few tokens, and of so many that activations are rounded."""
    case, (exact, rounded) = case_of(make_case, name), oracle(name)
    for share, stream_from in PLACES:
        model = load(case.path, runtime, trunk, plan_of(case.path, share, stream_from=stream_from))
        pages = Pager(model, num_blocks=2 * len(PROMPTS), dtype="bfloat16", device=device)
        served = []
        for ids in PROMPTS:
            sequence = pages.sequence(PROMPT)
            served += [pages.forward([(sequence, part)]) for part in ids.split(chunk)]
        check_no_further_from_exact(torch.cat(served), exact, rounded)


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.parametrize(("graphs", "stream_from"), [(False, None), (True, None), (True, FEW_TOKENS)])
def test_tokens_while_experts_change_places(name, graphs, stream_from, make_case, runtime, trunk, device):
    """More than 100 swaps between the steps of answers, over layers, seen by graphs that were captured before.

    Where prompts stream, what crosses the bus are the experts that are in RAM by then.
    """
    case = case_of(make_case, name)
    plan = plan_of(case.path, 0.4, moves=3, ram_slots=2, stream_from=stream_from)
    model = load(case.path, runtime, trunk, plan)
    updates, rng = model.expert_usage.updates, np.random.default_rng(0)
    ids = tokens()[:PROMPT]
    expected = answer(case.model, ids, "cpu")

    def after_step():
        model.expert_usage.after_step(1)
        updates.add(1000 * rng.random(updates.placement.on_gpu.shape))

    rounds = 0
    while updates.num_moved < 100:
        assert answer(model, ids, device, graphs=graphs, after_step=after_step) == expected
        rounds += 1
        assert rounds < 50, updates.num_moved
    torch.cuda.synchronize()
    updates.poll()
    for layer, places in enumerate(updates._layers):
        assert places.gpu.experts == updates.placement.gpu_experts(layer)
        loaded = [e for e in range(places.cpu.num_experts) if places.cpu.is_loaded(e)]
        assert loaded == updates.placement.cpu_experts(layer)
        assert (places.gpu.table[:, 0] >= 0).nonzero().flatten().tolist() == places.gpu.experts


@pytest.mark.parametrize("name", FLOAT32[:2])
def test_deferral_replayed_as_launched(name, make_case, runtime, trunk, device):
    """The same tokens with and without graphs, other ones than in time, and a count."""
    case = case_of(make_case, name)
    ids = tokens()[:PROMPT]
    model = load(case.path, runtime, trunk, plan_of(case.path, 0.2, max_deferred=2))
    launched = answer(model, ids, device)
    assert answer(model, ids, device, graphs=True) == launched
    assert model.expert_usage.num_deferred > 0
