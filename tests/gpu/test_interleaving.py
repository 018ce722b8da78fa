# Fixtures of other files are arguments here.
# ruff: noqa: F811
"""Decode steps, replayed and launched, between the layers of a pass whose experts stream: the bits of each alone."""

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

STEPS = 12


@on_gpu_only
@pytest.mark.parametrize("name", ["kimi_int4", "deepseek_groups_yarn", "qwen3"])
@pytest.mark.parametrize(("share", "stream_from"), [(0.0, 20), (0.4, 20), (0.4, None)])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_pass_and_the_steps_between_its_layers(name, share, stream_from, graphs, make_case, runtime, trunk, device):
    path = make_case(next(v for v in VARIANTS if v.name == name)).path
    model = load(path, runtime, trunk, plan_of(path, share, stream_from))
    pages = Pager(model, num_blocks=64, dtype="bfloat16", device=device)
    with torch.inference_mode():
        decoding = Replayed(model, DecodeGraphs(model, pages.kv, max_batch=2, max_blocks=8)) if graphs else model

        def answers(seed):
            """Two sequences, and a function that gives each a token and returns their logits."""
            sequences = [pages.sequence(40) for _ in range(2)]
            pages.model = model
            pages.forward(list(zip(sequences, [tokens(7, seed), tokens(11, seed + 1)], strict=True)))
            ids = tokens(2 * STEPS, seed + 2).view(STEPS, 2)
            left = list(range(STEPS))

            def step():
                if not left:
                    return None
                row = ids[left.pop(0)]
                before, pages.model = pages.model, decoding
                found = pages.forward(list(zip(sequences, row.split(1), strict=True)))
                pages.model = before
                return found

            return step

        alone = answers(3)
        expected_steps = [alone() for _ in range(STEPS)]
        prompt = tokens(40, seed=9)
        pages.model = model
        expected = pages.forward([(pages.sequence(40), prompt)])
        step, found_steps = answers(3), []
        pages.model = Interleaved(model, lambda _: found_steps.append(step()))
        found = pages.forward([(pages.sequence(40), prompt)])
    assert len(found_steps) >= 1
    assert torch.equal(found, expected)
    for one, other in zip(found_steps, expected_steps, strict=False):
        assert torch.equal(one, other)
