"""Attention over the paged cache against float64."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.kernels.attention_cases import PagedCase

from proa.attention.shape import MAX_SINGLE, HeadShape, single_token_bytes
from proa.kernels.decode_attention import DecodeScratch, paged_decode
from proa.kernels.prefill_attention import paged_prefill

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter

GPU = torch.cuda.is_available()
# Query and kv heads; columns of keys and values; whether values are columns of the keys.
SHAPES = {
    "mla": ((64 if GPU else 4, 1), (576, 512) if GPU else (48, 32), True),
    "mla_many_heads": ((100 if GPU else 5, 1), (576, 512) if GPU else (48, 32), True),
    "mla_odd": ((3, 1), (40, 24), True),
    "gqa": ((8, 2), (128, 128) if GPU else (32, 32), False),
    "mha": ((4, 4), (192, 128) if GPU else (24, 16), False),
    "odd": ((6, 2), (80, 80) if GPU else (20, 20), False),
}
DTYPES = [torch.float32, torch.bfloat16]


# Steps of the kernels over several blocks, and within one.
@pytest.mark.parametrize("block", [8, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_decode(device, name, dtype, block):
    heads, dims, latent = SHAPES[name]
    contexts = [1, 1000, 77, 64] if GPU else [1, 70]
    case = PagedCase.make(device, heads, dims, contexts, [1] * len(contexts), latent=latent, dtype=dtype, block=block)
    out = torch.full((len(contexts), heads[0], dims[1] + 4), float("nan"), device=device)[..., : dims[1]]
    scratch = DecodeScratch(len(contexts), heads[0], dims[1], device)
    scratch.partial.fill_(float("nan"))
    paged_decode(*case.arguments(), out, scratch)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=case.tolerance())


def test_scratch_takes_no_more_than_is_planned(device):
    for heads, value_dim in ((64, 512), (128, 512), (32, 128), (96, 256)):
        assert DecodeScratch(MAX_SINGLE, heads, value_dim, device).nbytes <= single_token_bytes(
            HeadShape(heads, value_dim)
        )


def test_padding_rows_are_zeros(device):
    case = PagedCase.make(device, (2, 1), (32, 32), [5, 9], [1, 1])
    case.positions[1] = -1
    out = torch.full((2, 2, 32), float("nan"), device=device)
    paged_decode(*case.arguments(), out, DecodeScratch(2, 2, 32, device))
    assert out[0].isfinite().all()
    assert (out[1] == 0).all()


@pytest.mark.parametrize("block", [8, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_prefill(device, name, dtype, block):
    heads, dims, latent = SHAPES[name]
    # Two chunks of one tile, a context before them, and a single token between.
    contexts, lengths = ([5, 300, 900, 33], [5, 1, 200, 33]) if GPU else ([5, 40, 12], [5, 1, 7])
    case = PagedCase.make(device, heads, dims, contexts, lengths, latent=latent, dtype=dtype, block=block)
    out = torch.full((sum(lengths), heads[0], dims[1]), float("nan"), device=device)
    paged_prefill(*case.arguments(), out)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=case.tolerance())


def test_prefill_of_sequences_in_any_order(device):
    case = PagedCase.make(device, (2, 1), (32, 32), [20, 9, 30], [3, 4, 2])
    swapped = torch.tensor([2, 0, 1], device=device)
    table = torch.empty_like(case.block_tables)
    table[swapped] = case.block_tables
    out, expected = (torch.empty(9, 2, 32, device=device) for _ in range(2))
    paged_prefill(*case.arguments(), expected)
    arguments = list(case.arguments())
    arguments[3], arguments[5] = table, swapped[case.sequence_ids.long()].int()
    paged_prefill(*arguments, out)
    assert torch.equal(out, expected)
