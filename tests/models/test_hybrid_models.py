"""Models of every family give the same answers wherever their experts are, and while these change places."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.models.conftest import MAX_TOKENS
from tests.models.hybrid_models import load_hybrid
from tests.models.interleaving import Interleaved
from tests.models.paging import Pager
from tests.models.test_gpu_trunk import greedy
from tests.models.test_oracle import NOISE_FACTOR, reference_logits, rounding_noise, tokens
from tests.models.variants import VARIANTS
from tokenizers import Tokenizer

from proa.convert.demo_model import ensure_demo_model
from proa.core.sampling_params import SamplingParams
from proa.engine.build import LoadedModel, build_engine
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import KVPlan
from proa.ipc.messages import Generate
from proa.models import ExpertPlan, inspect, load_model
from proa.moe.hybrid import HybridDecode
from proa.moe.hybrid_layers import Hybrid
from proa.moe.placement import ExpertBudget, place
from proa.moe.prefill_plan import PrefillRates
from proa.moe.stats import ExpertStats, RoutingCounts
from proa.moe.stream import WeightStream
from proa.weights.checkpoint import Checkpoint

# A family each, float32 or exact weights: greedy tokens are the same up to sums in another order.
NAMES = ("deepseek_groups_yarn", "glm_norm_bias", "qwen3", "mixtral_tied", "deepseek_halves")
PROMPT, ANSWER = 24, 16
DEMO_ANSWER = 6


def case_of(make_case, name):
    return make_case(next(v for v in VARIANTS if v.name == name), "trunk")


def plan_of(path, share, **fields):
    """That part of the experts on the GPU, at random; with `stream_from` all others stream, whatever is fastest."""
    if fields.get("stream_from") is not None:
        fields = {"stream_all": True, "ring_bytes": 1 << 20, **fields}
    info = inspect(Checkpoint.open(path)).experts
    budget = ExpertBudget.ratio(info.layers, info.experts, share)
    return ExpertPlan(place("random", budget).on_gpu, **fields)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("share", "stream_from"), [(0.0, None), (0.4, None), (1.0, None), (0.0, 20), (0.4, 20)])
def test_logits_and_greedy_tokens_wherever_experts_are(
    name, share, stream_from, make_case, device, driver, monkeypatch
):
    """Logits within the bound that the native kernels are held to, and the native kernels' tokens."""
    case = case_of(make_case, name)
    plan = plan_of(case.path, share, stream_from=stream_from)
    model = load_hybrid(monkeypatch, case.path, device, driver, plan, expert_activations="trunk")
    ids = tokens()[:PROMPT]
    exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
    pager = Pager(model, num_blocks=8)
    served = pager.forward([(pager.sequence(PROMPT), ids)])
    assert (served.double() - exact).abs().max().item() <= NOISE_FACTOR * rounding_noise(case, ids, exact)
    assert greedy(model, ids, ANSWER) == greedy(case.model, ids, ANSWER)


@pytest.mark.parametrize("name", NAMES[:2])
def test_logits_of_prompts_whose_experts_are_where_they_are_done_first(name, make_case, device, driver, monkeypatch):
    """Planned from measured rates, several prompts one after another: plans change with what they have shown."""
    case = case_of(make_case, name)
    plan = plan_of(case.path, 0.2, stream_from=20, stream_all=False)
    model = load_hybrid(monkeypatch, case.path, device, driver, plan, expert_activations="trunk")
    pager = Pager(model, num_blocks=16)
    for seed in range(4):
        ids = tokens(PROMPT, seed)
        exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
        served = pager.forward([(pager.sequence(PROMPT), ids)])
        assert (served.double() - exact).abs().max().item() <= NOISE_FACTOR * rounding_noise(case, ids, exact)


def test_nothing_crosses_the_bus_that_no_layer_waits_for(make_case, device, driver, monkeypatch):
    """Of a prompt only the last token goes through the last layer's experts."""
    path = case_of(make_case, NAMES[0]).path
    model = load_hybrid(monkeypatch, path, device, driver, plan_of(path, 0.2, stream_from=12))
    started = []
    start = WeightStream.start
    monkeypatch.setattr(WeightStream, "start", lambda *args: (started.append(args[1]), start(*args)))
    pager = Pager(model, num_blocks=8)
    pager.forward([(pager.sequence(PROMPT), tokens()[:PROMPT])], last_only=True)
    layers = {group.layer for groups in started for group in groups}
    assert layers == set(range(len(model.hybrid_traffic.slots) - 1))
    assert model._hybrid._pass.stream.finished


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize("stream_all", [True, False])
def test_a_pass_between_the_layers_of_another_changes_no_bit(name, stream_all, make_case, device, driver, monkeypatch):
    """Both stream, or the short one has too few tokens for it, or it is given up; answers take steps within both."""
    plan = plan_of(case_of(make_case, name).path, 0.3, stream_from=12, stream_all=stream_all)
    model = load_hybrid(monkeypatch, case_of(make_case, name).path, device, driver, plan, expert_activations="trunk")
    long, texts = tokens(50, seed=5), [tokens(count, seed=count) for count in (9, 20, 30)]
    answer = tokens(40, seed=7)

    def alone(ids):
        pager = Pager(model, num_blocks=8)
        return pager.forward([(pager.sequence(len(ids)), ids)])

    if stream_all:  # else a plan follows what was measured, and sums are in the order of the plan
        expected, expected_texts = alone(long), [alone(ids) for ids in texts]
    pager = Pager(model, num_blocks=40)
    answering = pager.sequence(len(answer))

    def forward(ids, between):
        pager.model = Interleaved(model, between)
        sequence = pager.sequence(len(ids))
        return pager.forward([(sequence, ids)])

    def step(_=0):
        before, pager.model = pager.model, model
        pager.forward([(answering, answer[answering.length : answering.length + 1])])
        pager.model = before

    found = []

    def between(done):
        before = pager.model
        found.extend([forward(ids, step) for ids in texts])
        forward(texts[1], lambda layers: layers == 1)  # given up
        pager.model = before
        step()

    last = forward(long, between)
    assert model.expert_faults == 0 and answering.length > 4
    pager.model = model
    if stream_all:
        assert torch.equal(last, expected)
        for index, logits in enumerate(found):
            assert torch.equal(logits, expected_texts[index % len(texts)])
    else:
        case = case_of(make_case, name)
        for ids, logits in [(long, last), *zip(texts * 2, found, strict=False)]:
            exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
            assert (logits.double() - exact).abs().max().item() <= NOISE_FACTOR * rounding_noise(case, ids, exact)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_while_experts_change_places(name, make_case, device, driver, monkeypatch):
    """More than 100 swaps, across layers, between the steps of an answer: its tokens, and every expert in one place."""
    case = case_of(make_case, name)
    plan = plan_of(case.path, 0.4, moves=3, ram_slots=2)
    model = load_hybrid(monkeypatch, case.path, device, driver, plan, expert_activations="trunk")
    usage = model.expert_usage
    updates = usage.updates
    rng = np.random.default_rng(0)
    ids = tokens()[:PROMPT]
    expected = greedy(case.model, ids, ANSWER)
    while updates.num_moved < 100:
        pager = Pager(model, num_blocks=8)
        sequence, found, chunk = pager.sequence(PROMPT + ANSWER), [], ids
        for _ in range(ANSWER):
            chunk = pager.forward([(sequence, chunk)], last_only=True)[-1:].argmax(-1).int()
            found.append(int(chunk))
            usage.after_step(1)
            updates.add(1000 * rng.random(updates.placement.on_gpu.shape))
        assert found == expected
    updates.poll()
    for layer, places in enumerate(updates._layers):
        assert places.gpu.experts == updates.placement.gpu_experts(layer)
        loaded = [e for e in range(places.cpu.num_experts) if places.cpu.is_loaded(e)]
        assert loaded == updates.placement.cpu_experts(layer)


def test_a_use_that_is_known_is_not_forgotten_at_the_first_tokens(make_case, device, driver, monkeypatch):
    """Placed by counts: eight tokens of another kind move nothing, and without counts they do."""
    case = case_of(make_case, "deepseek_groups_yarn")
    counts = ExpertStats(np.tile(np.arange(16.0) ** 2, (2, 1)))
    moved = []
    for shares in (counts.shares(3), None):
        on_gpu = place("frequency", ExpertBudget(2, 16, 16), counts).on_gpu
        plan = ExpertPlan(on_gpu, moves=4, ram_slots=2, shares=shares)
        usage = load_hybrid(monkeypatch, case.path, device, driver, plan).expert_usage
        usage.updates.add(np.tile(np.r_[np.full(6, 4.0), np.zeros(10)], (2, 1)))
        usage.updates.poll()
        moved.append(usage.num_moved)
    assert moved[0] == 0 < moved[1]


def test_what_routing_prefers_comes_to_the_gpu(make_case, device, driver, monkeypatch):
    """Nothing but steps: counts of the routers alone bring the most used experts to the GPU."""
    case = case_of(make_case, "deepseek_groups_yarn")
    model = load_hybrid(monkeypatch, case.path, device, driver, plan_of(case.path, 0.25, moves=4, ram_slots=2))
    usage, pager, counts = model.expert_usage, Pager(model, num_blocks=64), 0
    usage.reset()
    usage.start_recording()
    before = usage.updates.placement
    for seed in range(12):
        ids = tokens(PROMPT, seed)
        pager.forward([(pager.sequence(PROMPT), ids)])
        usage.after_step(PROMPT)
    counts = usage.dump().counts
    assert counts.sum(axis=1).tolist() == [12 * PROMPT * 3] * 2
    after = usage.updates.placement
    best = place("frequency", ExpertBudget(*counts.shape, before.num_gpu_experts), ExpertStats(counts))
    assert before.hit_ratio(counts) + 0.8 * (best.hit_ratio(counts) - before.hit_ratio(counts)) < after.hit_ratio(
        counts
    )


@pytest.mark.parametrize("stream_from", [None, 12])
def test_an_engine_whose_experts_move_between_and_not_within_passes(
    stream_from, make_case, runtime, device, driver, monkeypatch
):
    """Long prompts stop between layers for decode steps of others, while swaps are proposed all the time."""
    case = case_of(make_case, "glm_norm_bias")
    plan = plan_of(case.path, 0.4, moves=4, ram_slots=3, stream_from=stream_from)
    model = load_hybrid(monkeypatch, case.path, device, driver, plan, expert_activations="trunk")
    updates, rng, switched_in_pass = model.expert_usage.updates, np.random.default_rng(0), []
    take = model.expert_usage._counts.take
    monkeypatch.setattr(RoutingCounts, "take", lambda _: take() + 100 * rng.random(updates.placement.on_gpu.shape))
    config = EngineConfig(
        model_path="", to_engine="", from_engine="", max_running_requests=4, chunked_prefill_size=40, block_size=16,
        max_decode_gap_ms=1,
    )  # fmt: skip
    kv = KVPlan(num_blocks=64, block_size=16, dtype="float32", max_model_len=128, notes={})
    answers = []
    for served, usage in ((model, model.expert_usage), (case.model, None)):
        engine = build_engine(config, LoadedModel(served, served.layout, kv, (), usage=usage))
        made = {}
        for index, length in enumerate((3, 70, 9, 55, 30)):
            params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
            engine.submit(Generate(rid=str(index), token_ids=tokens(length, index).tolist(), sampling=params))
            made[str(index)] = []
        while engine.has_work:
            inside, before = engine.running_pass, model.expert_usage.num_moved
            for output in engine.step().outputs:
                assert not output.error, output.error
                made[output.rid] += output.token_ids
            if inside is not None and engine.running_pass is inside:
                switched_in_pass.append(model.expert_usage.num_moved - before)
        engine.check_integrity()
        answers.append(made)
    assert answers[0] == answers[1]
    assert model.expert_usage.num_moved > 8
    assert switched_in_pass and not any(switched_in_pass)


@pytest.mark.parametrize("stream_all", [True, False])
def test_a_threshold_streams_from_its_tokens_on_whatever_is_fastest(stream_all, make_case, device, driver, monkeypatch):
    """On a machine whose bus takes days; without a threshold everything stays on its CPU."""
    slow = PrefillRates(1.0, 1.0, 1.0, 1.0, (1.0,), (1e-9,), (1e-9,))
    monkeypatch.setattr("proa.moe.hybrid_layers.measure_rates", lambda *_, **__: slow)
    copied = []
    start = WeightStream.start

    def spy(self, groups, *args):
        copied.append(sum(len(group.experts) for group in groups))
        return start(self, groups, *args)

    monkeypatch.setattr(WeightStream, "start", spy)
    case = case_of(make_case, "qwen3")
    plan = plan_of(case.path, 0.0, stream_from=20, stream_all=stream_all)
    model = load_hybrid(monkeypatch, case.path, device, driver, plan, expert_activations="trunk")
    copied.clear()
    for count in (19, 20):
        pager = Pager(model, num_blocks=8)
        pager.forward([(pager.sequence(count), tokens(count, 1))])
        assert copied == ([plan.on_gpu[:-1].size if stream_all else 0] if count == 20 else [])


@pytest.mark.parametrize(
    ("fields", "is_pinned"), [({}, False), ({"stream_from": 20}, True), ({"moves": 2, "ram_slots": 1}, True)]
)
def test_what_may_be_copied_is_pinned(fields, is_pinned, make_case, device, driver, monkeypatch):
    pinned = []
    monkeypatch.setattr(Hybrid, "_pin", lambda _, layer: bool(pinned.append(layer.used_memory)) or True)
    case = case_of(make_case, "qwen3")
    plan = plan_of(case.path, 0.3, **fields)
    load_hybrid(monkeypatch, case.path, device, driver, plan)
    assert len(pinned) == (len(plan.on_gpu) if is_pinned else 0)
    assert all(sum(nbytes for _, nbytes in ranges) > 0 for ranges in pinned)


def test_what_a_failed_forward_left_to_the_cpu_is_ended(make_case, device, driver, monkeypatch):
    """Late experts of a layer were handed over, and the layer that waits for them never came."""
    case = case_of(make_case, "deepseek_groups_yarn")
    plan = plan_of(case.path, 0.3, max_deferred=2)
    model = load_hybrid(monkeypatch, case.path, device, driver, plan, expert_activations="trunk")
    answers = []
    for fails in (False, True):
        pager = Pager(model, num_blocks=8)
        sequence = pager.sequence(40)
        pager.forward([(sequence, tokens(9, 1))])
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(HybridDecode, "finish", out_of_memory)
                with pytest.raises(MemoryError):
                    pager.forward([(pager.sequence(8), tokens(1, 2))])
            model.recover()
        answers.append(pager.forward([(sequence, tokens(1, 3))]))
    assert torch.equal(answers[0], answers[1])


def out_of_memory(*_):
    raise MemoryError


@pytest.fixture(scope="module")
def demo(runtime):
    """The demo model, a prompt, and the greedy tokens of the CPU."""
    path = ensure_demo_model()
    options = {"max_tokens": MAX_TOKENS, "max_positions": 256, "expert_activations": "trunk"}
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode("The capital of France is the city of").ids
    ids = torch.tensor(ids * 3, dtype=torch.int32)
    return path, ids, greedy(load_model(Checkpoint.open(path), runtime, **options), ids, DEMO_ANSWER)


@pytest.mark.parametrize(
    ("share", "fields"),
    [(0.4, {"stream_from": 20, "ring_bytes": 4 << 20}), (1.0, {}), (0.3, {"moves": 8, "ram_slots": 4})],
)
def test_the_demo_model_answers_alike_wherever_its_experts_are(share, fields, demo, device, driver, monkeypatch):
    path, ids, expected = demo
    plan = plan_of(path, share, **fields)
    model = load_hybrid(monkeypatch, path, device, driver, plan, expert_activations="trunk")
    pager, found, chunk = Pager(model, num_blocks=8), [], ids
    sequence = pager.sequence(len(ids) + DEMO_ANSWER)
    for _ in range(DEMO_ANSWER):
        chunk = pager.forward([(sequence, chunk)], last_only=True)[-1:].argmax(-1).int()
        found.append(int(chunk))
        model.expert_usage.after_step(16)
    assert found == expected
    assert (model.expert_usage.num_moved > 0) == ("moves" in fields)


class LateReference:
    """The schedule of deferral, slot by slot: of a token's CPU experts among the `count` slots of least weight, each
    comes one MoE layer late, the last layer has none, and only forwards that defer have any."""

    is_capturable = False
    carried = None
    last = 0

    def __init__(self, experts, layer, count, on_gpu):
        self.experts, self.layer, self.count, self.on_gpu = experts, layer, count, on_gpu
        self.num_late = 0
        type(self).last = layer

    def submit(self, x, topk, ctx):
        count = self.count if ctx.defers and self.layer < type(self).last else 0
        late = torch.zeros_like(topk.ids, dtype=torch.bool)
        for t, row in enumerate(topk.weights.tolist()):
            order = sorted(range(len(row)), key=lambda slot: (-row[slot], slot))
            for slot in order[len(order) - count :]:
                late[t, slot] = not self.on_gpu[topk.ids[t, slot]]
        gpu = torch.tensor(self.on_gpu)[topk.ids.long()]
        self.parts = [self._run(x, topk, mask) for mask in (gpu, ~gpu & ~late, late)]
        self.num_late += int(late.sum())
        ctx.out.copy_(self.parts[0])

    def _run(self, x, topk, mask):
        out = torch.zeros_like(x)
        self.experts.forward(x, type(topk)(topk.ids.masked_fill(~mask, -1), topk.weights), out)
        return out

    def finish(self, x, topk, ctx):
        ctx.out.add_(self.parts[1])
        if ctx.defers and self.layer > 0:
            ctx.out.add_(type(self).carried)
        type(self).carried = self.parts[2]


@pytest.mark.parametrize("name", ["deepseek_groups_yarn", "mixtral_tied"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_deferral_is_the_reference_schedule(name, share, make_case, device, driver, monkeypatch):
    """A whole model: prompts as without, decode steps of two sequences to the bit those of the reference."""
    case, count = case_of(make_case, name), 1 if name == "mixtral_tied" else 2
    plan = plan_of(case.path, share, max_deferred=count)
    model = load_hybrid(monkeypatch, case.path, device, driver, plan, expert_activations="trunk")
    in_time = load_hybrid(monkeypatch, case.path, device, driver, plan_of(case.path, share), expert_activations="trunk")
    made = []

    def create(experts, workspace, max_top_k):
        made.append(LateReference(experts, len(made), count, plan.on_gpu[len(made)]))
        return made[-1]

    monkeypatch.setattr("proa.moe.layer.create_strategy", create)
    in_ram = plan_of(case.path, 0.0, max_deferred=count)  # the reference computes all experts there
    expected = load_hybrid(monkeypatch, case.path, device, driver, in_ram, expert_activations="trunk")
    runs = []
    for served in (model, expected, in_time):
        pager = Pager(served, num_blocks=16)
        sequences = [pager.sequence(32) for _ in range(2)]
        rows = [pager.forward(list(zip(sequences, [tokens(9, 1), tokens(14, 2)], strict=True)))]
        for step in range(6):
            ids = [tokens(1, 10 * step + i) for i in range(2)]
            rows.append(pager.forward(list(zip(sequences, ids, strict=True))))
        runs.append(rows)
    late, reference, without = runs
    assert torch.equal(late[0], without[0])
    for got, want, other in zip(late[1:], reference[1:], without[1:], strict=True):
        assert torch.equal(got, want)
        assert (got - other).abs().max() > 2.0**-12 * want.abs().max()
    assert model.expert_usage.num_deferred == sum(strategy.num_late for strategy in made)
    assert in_time.expert_usage.num_deferred == 0
