"""The same bits whatever chunking, batch and neighbours a sequence is computed with."""

from __future__ import annotations

import os

import pytest
import torch
from tests.models.conftest import MAX_TOKENS
from tests.models.interleaving import Interleaved
from tests.models.paging import Pager, all_logits
from tests.models.variants import VARIANTS, VOCAB

from proa.models import load_model
from proa.native.runtime import CpuRuntime
from proa.weights.checkpoint import Checkpoint

LENGTH = 40
COVERING = ("deepseek_groups_yarn", "deepseek_fp8", "kimi_int4", "glm_norm_bias", "qwen3_fp8", "mixtral_bf16")
covering = pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name in COVERING], ids=str)


def prompt(seed, length=LENGTH):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def in_one_forward(model, ids, dtype="float32"):
    pager = Pager(model, num_blocks=8, dtype=dtype)
    return pager.forward([(pager.sequence(len(ids)), ids)])


@covering
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prefill_in_chunks_gives_the_same_bits(variant, chunk, make_case):
    model = make_case(variant).model
    ids = prompt(1)
    pager = Pager(model, num_blocks=8)
    sequence = pager.sequence(LENGTH)
    for part in ids.split(chunk):
        pager.forward([(sequence, part)])
    assert torch.equal(all_logits(sequence), in_one_forward(model, ids))


@covering
def test_seven_neighbours_change_no_bit(variant, make_case):
    """Eight sequences at different places: some prefill in chunks of different sizes while others decode."""
    model = make_case(variant).model
    chunks = [list(prompt(seed).split(size)) for seed, size in enumerate([40, 1, 7, 16, 3, 1, 23, 8], start=1)]
    pager = Pager(model, num_blocks=32)
    sequences = [pager.sequence(LENGTH) for _ in chunks]
    step = 0
    while any(chunks):
        batch = []
        for index, pending in enumerate(chunks):
            if pending and step >= index:  # a new one joins at every step
                batch.append((sequences[index], pending.pop(0)))
        pager.forward(batch)
        step += 1
    for seed, sequence in enumerate(sequences, start=1):
        assert torch.equal(all_logits(sequence), in_one_forward(model, prompt(seed)))


@covering
def test_bfloat16_cache_keeps_the_property(variant, make_case):
    model = make_case(variant).model
    ids = prompt(1)
    pager = Pager(model, num_blocks=8, dtype="bfloat16")
    sequence = pager.sequence(LENGTH)
    for part in ids.split(7):
        pager.forward([(sequence, part)])
    whole = in_one_forward(model, ids, "bfloat16")
    assert torch.equal(all_logits(sequence), whole)
    assert not torch.equal(whole, in_one_forward(model, ids))


@covering
def test_sequences_that_leave_between_layers_change_no_bit(variant, make_case, monkeypatch):
    """Four sequences; after the first layer the second leaves, after the next one the last: nothing moves elsewhere."""
    monkeypatch.setattr("proa.models.decoder.NARROW_TOKENS", 4)
    model = make_case(variant).model
    ids = [prompt(seed, length) for seed, length in ((1, 9), (2, 20), (3, 1), (4, 17))]
    pager = Pager(model, num_blocks=8)
    answers = iter([torch.tensor([*range(9), *range(29, 47)]), torch.arange(10), None])
    sequences = [pager.sequence(len(part)) for part in ids]
    logits = pager.forward(list(zip(sequences, ids, strict=True)), still_wanted=lambda: next(answers))
    alone = [in_one_forward(model, ids[index]) for index in (0, 2)]
    assert torch.equal(logits, torch.cat(alone))
    nothing = pager.forward([(pager.sequence(4), ids[0][:4])], still_wanted=lambda: torch.tensor([], dtype=torch.long))
    assert nothing.shape == (0, VOCAB)


@covering
def test_forwards_between_the_layers_of_another_change_no_bit(variant, make_case):
    """While a chunk stands between two layers, answers take steps of one token and two prompts are computed whole, one
    of them in a pass that stops between layers too."""
    model = make_case(variant).model
    long, answers = prompt(1), [prompt(seed, 12) for seed in (2, 3)]
    pager = Pager(model, num_blocks=32)
    sequences = [pager.sequence(12) for _ in answers]
    places = iter(range(1000))

    def step(_=0):
        place = next(places)
        if place >= len(answers[0]):
            return
        before, pager.model = pager.model, model
        pager.forward([(s, ids[place : place + 1]) for s, ids in zip(sequences, answers, strict=True)])
        pager.model = before

    def between(_):
        ids = prompt(100, 17)
        expected = in_one_forward(model, ids)
        assert torch.equal(in_one_forward(Interleaved(model, step), ids), expected)
        step()

    sequence = pager.sequence(LENGTH)
    for part in long.split(20):
        pager.model = Interleaved(model, between)
        pager.forward([(sequence, part)])
    assert next(places) >= 2
    assert torch.equal(all_logits(sequence), in_one_forward(model, long))
    for ids, answer in zip(answers, sequences, strict=True):
        assert torch.equal(all_logits(answer), in_one_forward(model, ids)[: answer.length])


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name == "deepseek_groups_yarn"], ids=str)
def test_attending_some_tokens_at_a_time_changes_no_bit(variant, make_case, runtime, monkeypatch):
    case = make_case(variant)
    expected = in_one_forward(case.model, prompt(1))
    monkeypatch.setattr("proa.layers.mla.ATTEND_TOKENS", 7)
    model = load_model(Checkpoint.open(case.path), runtime, max_tokens=MAX_TOKENS, max_positions=256)
    assert torch.equal(in_one_forward(model, prompt(1)), expected)
    assert model.workspace_bytes < case.model.workspace_bytes


def test_logits_of_chosen_rows_only(make_case):
    model = make_case(VARIANTS[0]).model
    ids = prompt(1)
    pager = Pager(model, num_blocks=8)
    last = pager.forward([(pager.sequence(LENGTH), ids)], last_only=True)
    assert torch.equal(last, in_one_forward(model, ids)[-1:])


@covering
def test_more_threads_change_no_bit(variant, make_case):
    case = make_case(variant)
    with CpuRuntime(len(os.sched_getaffinity(0))) as threads:
        model = load_model(Checkpoint.open(case.path), threads, max_tokens=MAX_TOKENS, max_positions=256)
        assert torch.equal(in_one_forward(model, prompt(1)), in_one_forward(case.model, prompt(1)))
