"""A step that finds no memory ends the request that cannot do without, and no other."""

from __future__ import annotations

import errno
import gc
import random
from collections.abc import Generator

import psutil
import pytest
import torch
from fake_model import HELD_BYTES, NO_GPU_MEMORY, NO_RAM, greedy
from harness import fake_engine

from proa.attention.batch import ForwardBatch
from proa.engine.step_failure import StepFailure


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=length)


@pytest.mark.parametrize(("bad", "where"), [(NO_GPU_MEMORY, "GPU memory"), (NO_RAM, "RAM")])
def test_the_request_that_finds_none_ends_and_the_others_live(bad: int, where: str) -> None:
    harness = fake_engine(chunked_prefill_size=200)
    for i in range(5):
        harness.submit(f"r{i}", prompt(i, 12), max_tokens=10)
    harness.step()
    resident = psutil.Process().memory_info().rss
    harness.submit("bad", [*prompt(50, 9), bad], max_tokens=10)
    harness.submit("late", prompt(60, 12), max_tokens=10)
    harness.run()
    failed = harness.results["bad"]
    assert failed.finish_reason == "error" and failed.tokens == []
    assert failed.error.startswith(f"[{where}] expected room for a step of this request, got none. Fix: ")
    for name, seed in {**{f"r{i}": i for i in range(5)}, "late": 60}.items():
        assert harness.results[name].tokens == greedy(prompt(seed, 12), 10)
    # Nothing of the step is kept alive by what was logged or answered.
    gc.collect()
    assert psutil.Process().memory_info().rss - resident < HELD_BYTES // 2
    stats = harness.engine.stats()
    assert stats.out_of_memory == harness.model.recoveries > 0
    assert stats.kv_tokens_used == 0
    # Seven sequences are halved until the one is alone: 7, 4, 2, 1 or one less.
    assert len(harness.model.refused) <= 4


def test_a_batch_too_large_is_computed_in_parts_and_nobody_ends() -> None:
    harness = fake_engine(chunked_prefill_size=500)
    harness.model.max_sequences = 3
    for i in range(8):
        harness.submit(f"r{i}", prompt(i, 12), max_tokens=6)
    harness.run()
    for i in range(8):
        assert harness.results[f"r{i}"].tokens == greedy(prompt(i, 12), 6)


def test_every_part_of_a_step_counts() -> None:
    """What was computed in parts is not computed once more."""
    harness = fake_engine(chunked_prefill_size=200)
    for i in range(6):
        harness.submit(f"r{i}", prompt(i, 12), max_tokens=10)
    harness.step()
    harness.model.max_sequences = 2
    made = [len(harness.results[f"r{i}"].tokens) for i in range(6)]
    harness.step()
    assert [len(harness.results[f"r{i}"].tokens) for i in range(6)] == [count + 1 for count in made]


def test_the_longest_is_left_for_last() -> None:
    """Of two halves the first has the short steps: what is common to all finds memory before a long prompt asks."""
    harness = fake_engine(chunked_prefill_size=200)
    harness.model.max_sequences = 1
    for i, length in enumerate((9, 40, 5, 21)):
        harness.submit(f"r{i}", prompt(i, length), max_tokens=1)
    harness.run()
    assert harness.model.forwards == [5, 9, 21, 40]


def test_a_request_alone_has_a_second_try_with_what_was_given_back() -> None:
    harness = fake_engine()
    forward = harness.model.forward
    failures = [torch.OutOfMemoryError("fragments")]

    def fail_once(*arguments: object) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return forward(*arguments)

    harness.model.forward = fail_once
    assert harness.generate(prompt(1, 6), max_tokens=3).tokens == greedy(prompt(1, 6), 3)
    assert harness.model.recoveries == 1


def test_an_abort_while_a_batch_is_computed_again() -> None:
    harness = fake_engine(chunked_prefill_size=200)
    for i in range(4):
        harness.submit(f"r{i}", prompt(i, 5 + i), max_tokens=3)
    harness.step()
    harness.model.max_sequences = 2
    before = len(harness.model.forwards)

    def abort_of_the_computed() -> None:
        if len(harness.model.forwards) == before + 1:
            harness.engine.abort("r0")

    harness.step(abort_of_the_computed)
    assert harness.model.forwards[before:] == [2, 2]
    assert harness.results["r0"].finish_reason == "abort" and len(harness.results["r0"].tokens) == 1
    harness.run()
    for i in range(1, 4):
        assert harness.results[f"r{i}"].tokens == greedy(prompt(i, 5 + i), 3)


@pytest.mark.parametrize(
    ("error", "is_out_of_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_kinds_of_failures(error: Exception, is_out_of_memory: bool) -> None:
    assert StepFailure.of(error).is_out_of_memory == is_out_of_memory


def test_a_device_that_is_lost_ends_the_engine() -> None:
    harness = fake_engine()

    def lost() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    harness.model.recover = lost
    harness.submit("r", [*prompt(1, 5), NO_GPU_MEMORY], max_tokens=3)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        harness.step()


def test_an_expert_that_was_looked_for_in_vain_fails_its_request() -> None:
    """Its slots are missing from a sum: no token of that step can be trusted."""
    harness = fake_engine(chunked_prefill_size=200)
    layers = harness.model.layers

    def faulty_layers(batch: ForwardBatch, *arguments: object) -> Generator[float, None, torch.Tensor]:
        harness.model.expert_faults += bool((batch.token_ids == 77).any())
        return (yield from layers(batch, *arguments))

    harness.model.layers = faulty_layers
    harness.submit("good", [30, 31, 32], max_tokens=5)
    harness.submit("bad", [30, 77, 32], max_tokens=5)
    harness.run()
    assert harness.results["good"].tokens == greedy([30, 31, 32], 5)
    assert "expected ids of experts that are in RAM, got 1 others" in harness.results["bad"].error
    assert harness.engine.stats().out_of_memory == 0
