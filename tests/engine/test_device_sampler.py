"""The sampler of whole batches where the logits are, against the one that takes a row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proa.core.sampling_params import SamplingParams
from proa.engine.device_sampler import draw_on_device
from proa.engine.request import Request
from proa.engine.sampler import Draw, draw
from proa.ipc.messages import Generate

VOCAB = 1000


def request(seed: int, **sampling) -> Request:
    message = Generate(rid=str(seed), token_ids=[1, 2, 3], sampling=SamplingParams(**sampling))
    return Request(message, arrival=0, seed=seed, eos_token_ids=[2], vocab_size=VOCAB)


def drawn_alone(row: np.ndarray, one: Request) -> Draw:
    return draw(row, one.params, one.adjuster, seed=one.seed, position=len(one.tokens), index=one.num_generated)


def random_logits(rows: int, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


LIMITS = [
    {},
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.6},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.3, "top_p": 0.95},
    {"temperature": 0.0},
    {"temperature": 5.0, "top_k": VOCAB + 7},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_one_kind_of_request_gets_the_same_tokens(limits):
    """exp in float32 may differ by an ulp between the two: one draw in 1e6 could fall between."""
    logits = random_logits(200)
    requests = [request(seed, **limits) for seed in range(200)]
    expected = [drawn_alone(row, one) for row, one in zip(logits.numpy(), requests, strict=True)]
    assert draw_on_device(logits, requests) == expected
    if limits.get("temperature") != 0.0 and limits.get("top_k") != 1:
        assert len({draw.token for draw in expected}) > 3


def test_a_mixed_batch_gets_the_same_tokens():
    logits = random_logits(6 * len(LIMITS))
    requests = [request(seed, **LIMITS[seed % len(LIMITS)]) for seed in range(len(logits))]
    expected = [drawn_alone(row, one) for row, one in zip(logits.numpy(), requests, strict=True)]
    assert draw_on_device(logits, requests) == expected


def test_equal_logits_are_told_apart_by_their_ids():
    """Coarse logits: dozens of equal ones, some of them cut off by top_k."""
    logits = random_logits(300).round()
    requests = [request(seed, top_k=7, temperature=2.0) for seed in range(300)]
    expected = [drawn_alone(row, one) for row, one in zip(logits.numpy(), requests, strict=True)]
    assert draw_on_device(logits, requests) == expected
    greedy = [request(seed, temperature=0.0) for seed in range(300)]
    tokens = [result.token for result in draw_on_device(logits, greedy)]
    assert tokens == logits.numpy().argmax(1).tolist()


def test_rows_that_need_more_come_back_as_they_are():
    logits = random_logits(5)
    logits[4, 7] = torch.nan
    requests = [
        request(0),
        request(1, logprobs=2),
        request(2, logit_bias={5: 3.0}),
        request(3, presence_penalty=0.5),
        request(4),
    ]
    results = draw_on_device(logits, requests)
    assert isinstance(results[0], Draw)
    for row in (1, 2, 3, 4):
        assert np.array_equal(results[row], logits[row].numpy(), equal_nan=True)


def test_weights_of_zero_are_never_drawn():
    logits = torch.full((64, VOCAB), -torch.inf)
    logits[:, 3], logits[:, 900] = 0.0, -1.0
    results = draw_on_device(logits, [request(seed) for seed in range(64)])
    assert {result.token for result in results} == {3, 900}


def test_nothing_to_draw():
    assert draw_on_device(torch.empty(0, VOCAB), []) == []
