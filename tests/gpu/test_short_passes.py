# Fixtures of other files are arguments here.
# ruff: noqa: F811
"""A short pass between the layers of another whose experts stream, and steps, replayed and launched, within both."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from tests.gpu.test_gpu_experts import load, plan_of
from tests.gpu.test_trunk import Replayed, on_gpu_only, trunk  # noqa: F401, fixtures
from tests.models.conftest import make_case, one_torch_thread, runtime  # noqa: F401, fixtures
from tests.models.interleaving import Interleaved
from tests.models.paging import Pager
from tests.models.test_oracle import tokens
from tests.models.variants import VARIANTS

from proa.models import DecodeGraphs


@on_gpu_only
@pytest.mark.parametrize("name", ["kimi_int4", "qwen3"])
@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_pass_and_a_shorter_one_between_its_layers(name, share, graphs, make_case, runtime, trunk, device):
    path = make_case(next(v for v in VARIANTS if v.name == name)).path
    model = load(path, runtime, trunk, plan_of(path, share, 20))
    pages = Pager(model, num_blocks=128, dtype="bfloat16", device=device)
    long, texts, answer = tokens(40, seed=9), [tokens(count, seed=count) for count in (11, 24, 33)], tokens(60, seed=3)
    with torch.inference_mode():
        decoding = Replayed(model, DecodeGraphs(model, pages.kv, max_batch=2, max_blocks=8)) if graphs else model

        def forward(ids, runner, sequence=None):
            before, pages.model = pages.model, runner
            found = pages.forward([(sequence or pages.sequence(60), ids)])
            pages.model = before
            return found

        def answers():
            sequence = pages.sequence(60)
            forward(answer[:5], model, sequence)

            def step(_=0):
                at = sequence.length
                return forward(answer[at : at + 1], decoding, sequence) if at < len(answer) else None

            return step

        step = answers()
        expected_steps = [step() for _ in range(len(answer) - 5)]
        expected, expected_texts = forward(long, model), [forward(ids, model) for ids in texts]
        step, found_steps, found_texts = answers(), [], []

        def between(_):
            found_steps.append(step())
            found_texts.extend(
                [forward(ids, Interleaved(model, lambda _: found_steps.append(step()))) for ids in texts]
            )
            forward(texts[1], Interleaved(model, lambda layers: layers == 1))  # given up
            found_steps.append(step())

        found = forward(long, Interleaved(model, between))
    assert found_texts and model.expert_faults == 0
    assert torch.equal(found, expected)
    for index, logits in enumerate(found_texts):
        assert torch.equal(logits, expected_texts[index % len(texts)])
    for one, other in zip(found_steps, expected_steps, strict=False):
        assert one is None or torch.equal(one, other)
