# Fixtures of other files are arguments here.
# ruff: noqa: F811
"""Experts that come a layer late on a GPU, launched and replayed, against a reference of the schedule."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from tests.gpu.test_placement import load
from tests.gpu.test_trunk import Replayed, on_gpu_only, trunk  # noqa: F401, fixtures
from tests.models.conftest import make_case, one_torch_thread, runtime  # noqa: F401, fixtures
from tests.models.paging import Pager
from tests.models.test_hybrid_models import LateReference, case_of, plan_of
from tests.models.test_oracle import NOISE_FACTOR, reference_logits, rounding_noise, tokens

from proa.models import DecodeGraphs

pytestmark = on_gpu_only
STEPS = 8


class LateReferenceOnGpu(LateReference):
    """All experts, the GPU's too, are computed by the CPU's kernels."""

    def submit(self, x, topk, ctx):
        super().submit(x.cpu(), type(topk)(topk.ids.cpu(), topk.weights.cpu()), ctx)
        self.parts = [part.to(x.device) for part in self.parts]


def rows(model, device, *, graphs=False):
    """Logits of two prompts, and of steps after them whose tokens are given."""
    pages = Pager(model, num_blocks=16, device=device)
    with torch.inference_mode():
        if graphs:
            pages.model = Replayed(model, DecodeGraphs(model, pages.kv, max_batch=2, max_blocks=8))
        sequences = [pages.sequence(32) for _ in range(2)]
        found = [pages.forward(list(zip(sequences, [tokens(7, 1), tokens(9, 2)], strict=True)))]
        for step in range(STEPS):
            ids = [tokens(1, 10 * step + i) for i in range(2)]
            found.append(pages.forward(list(zip(sequences, ids, strict=True))))
    assert not graphs or pages.model.replayed == STEPS
    return found


@pytest.mark.parametrize(
    ("name", "count"), [("deepseek_groups_yarn", 2), ("glm_norm_bias", 1), ("qwen3", 1), ("mixtral_tied", 1)]
)
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_deferral_is_the_reference_schedule(name, count, share, make_case, runtime, trunk, device, monkeypatch):
    """Within the noise of float32, which is far less than what coming late changes; in time where nobody asks."""
    case = case_of(make_case, name)
    ids = tokens()[:24]
    exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
    bound = NOISE_FACTOR * rounding_noise(case, ids, exact)
    plan = plan_of(case.path, share, max_deferred=count)
    late = load(case.path, runtime, trunk, plan)
    in_time = load(case.path, runtime, trunk, plan_of(case.path, share))
    made = []

    def create(experts, workspace, max_top_k):
        made.append(LateReferenceOnGpu(experts, len(made), count, plan.on_gpu[len(made)]))
        return made[-1]

    monkeypatch.setattr("proa.moe.layer.create_strategy", create)
    in_ram = plan_of(case.path, 0.0, max_deferred=count)
    expected = rows(load(case.path, runtime, trunk, in_ram), device)
    launched, without = rows(late, device), rows(in_time, device)
    num_late = late.expert_usage.num_deferred
    replayed = rows(late, device, graphs=True)
    assert torch.equal(launched[0], without[0])
    for step, (got, again, want, other) in enumerate(zip(launched, replayed, expected, without, strict=True)):
        assert torch.equal(got, again)
        assert (got - want).abs().max() <= bound
        assert step == 0 or (want - other).abs().max() > 2 * bound
    assert num_late == sum(strategy.num_late for strategy in made)
    assert in_time.expert_usage.num_deferred == 0
