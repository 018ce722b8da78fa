# Fixtures of other files are arguments here.
# ruff: noqa: F811
"""The demo model, real weights in 29 layers of 16 experts, on a GPU wherever its experts are."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests.gpu.bfloat16_oracle import check_no_further_from_exact, oracle_logits
from tests.gpu.test_engine_answers import (
    PLACES,
    STREAM_FROM,
    answers,
    check_places,
    move_experts,
    on_gpu,
    replays,  # noqa: F401, fixture
    start,
)
from tests.gpu.test_placement import load
from tests.gpu.test_trunk import on_gpu_only, trunk  # noqa: F401, fixtures
from tests.models.conftest import MAX_TOKENS, runtime  # noqa: F401, fixtures
from tests.models.paging import Pager
from tests.models.test_hybrid_models import plan_of
from tokenizers import Tokenizer

from proa.convert.demo_model import ensure_demo_model
from proa.device.gpu import FEW_TOKENS

pytestmark = on_gpu_only

TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of one hundred degrees, and it freezes at a temperature of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5,",
    """Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker. Every morning he opened
his shop, wound the clocks one after the other, and waited for the first customer of the day. One winter morning,""",
)


@pytest.fixture(scope="module")
def prompts():
    tokenizer = Tokenizer.from_file(str(ensure_demo_model() / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture(scope="module")
def exact(prompts):
    """The model with float32 weights, and what an engine on the CPU answers."""
    path = ensure_demo_model(format="f32")
    _, engine = start(path, device="cpu", num_threads=2)
    return path, answers(engine, prompts)


@pytest.mark.parametrize(("share", "stream_from"), PLACES)
@pytest.mark.parametrize("graphs", [True, False])
def test_answers_wherever_experts_are(share, stream_from, graphs, exact, prompts, replays):
    path, expected = exact
    loaded, engine = start(path, num_threads=2, **on_gpu(share, stream_from, graphs=graphs))
    assert answers(engine, prompts) == expected
    check_places(loaded, share, stream_from)
    assert (len(replays) > 0) == graphs


@pytest.mark.parametrize("stream_from", [0, STREAM_FROM])
def test_answers_while_and_after_experts_move(stream_from, exact, prompts, monkeypatch):
    path, expected = exact
    loaded, engine = start(path, num_threads=2, **on_gpu(0.4, stream_from, graphs=True), expert_updates=True)
    assert move_experts(loaded, engine, monkeypatch, expected, prompts) >= 100
    assert answers(engine, prompts) == expected


@pytest.fixture(scope="module")
def oracle(prompts, device):
    return oracle_logits(ensure_demo_model(), prompts, device)


@pytest.mark.parametrize(("share", "stream_from"), PLACES)
@pytest.mark.parametrize("chunk", [FEW_TOKENS, MAX_TOKENS])
def test_bfloat16_is_no_further_from_exact_than_transformers(
    share, stream_from, chunk, oracle, prompts, runtime, trunk, device
):
    """As `make chat` has it."""
    path = ensure_demo_model()
    plan = plan_of(path, share, stream_from=stream_from or None)
    model = load(path, runtime, trunk, plan)
    pages = Pager(model, num_blocks=64, dtype="bfloat16", device=device)
    served = []
    for ids in prompts:
        sequence = pages.sequence(len(ids))
        served += [pages.forward([(sequence, part)]) for part in torch.tensor(ids, dtype=torch.int32).split(chunk)]
    check_no_further_from_exact(torch.cat(served), *oracle)
