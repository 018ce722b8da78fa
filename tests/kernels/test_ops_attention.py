from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.kernels.ops_cases import EPS32, AttentionCase, same_bits, slots_of

from proa.native import ops
from proa.native.ops import ThreadPool

MHA = {"heads": 4, "kv_heads": 4, "key_dim": 64}
GQA = {"heads": 9, "kv_heads": 3, "key_dim": 64}
SHAPES = {
    "mha-64": MHA,
    "gqa-3": GQA,
    "gqa-8-80": {"heads": 16, "kv_heads": 2, "key_dim": 80},
    "gqa-4-128": {"heads": 8, "kv_heads": 2, "key_dim": 128},
    "unequal-192-128": {"heads": 6, "kv_heads": 6, "key_dim": 192, "value_dim": 128},
    "odd-33-19": {"heads": 5, "kv_heads": 1, "key_dim": 33, "value_dim": 19},
    "mla-576-512": {"heads": 16, "kv_heads": 1, "key_dim": 576, "value_dim": 512, "latent": True},
    "mla-many-heads": {"heads": 70, "kv_heads": 1, "key_dim": 96, "value_dim": 64, "latent": True},
}
BATCHES = {
    "one-token": [(0, 1)],
    "decode": [(63, 1), (64, 1), (5, 1), (200, 1)],
    "prefill": [(0, 77)],
    "mixed": [(100, 1), (0, 40), (17, 5), (64, 1)],
    "chunk-borders": [(1020, 8), (1024, 1), (2100, 1)],
}


def attend(pool: ThreadPool, case: AttentionCase, *cuts: int) -> torch.Tensor:
    """The result of one call, or of one call per piece of the batch between `cuts`."""
    out = case.new_out()
    edges = [0, *cuts, len(out)]
    for first, last in itertools.pairwise(edges):
        ops.paged_attention(pool, *case.args(slice(first, last)), out[first:last])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_float64(
    pool: ThreadPool, shape: dict[str, int], batch: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    case = AttentionCase.make(batch, dtype=dtype, **shape)
    expected, bound = case.reference()
    error = (attend(pool, case).double() - expected).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_do_not_depend_on_batch_chunks_or_threads(
    pool: ThreadPool, single: ThreadPool, crowd: ThreadPool, shape: dict[str, int]
) -> None:
    case = AttentionCase.make([(30, 5), (0, 70), (1100, 1), (1022, 4)], **shape)
    together = attend(single, case)
    every_token = range(1, len(together))
    for result in (
        attend(pool, case),
        attend(crowd, case),
        attend(single, case, *every_token),
        attend(crowd, case, *every_token),
        attend(pool, case, 3, 20, 21, 60, 77),
    ):
        assert same_bits(result, together)


@given(
    batch=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    key_dim=st.integers(1, 70),
    value_dim=st.integers(1, 70),
    block_size=st.integers(1, 40),
    bf16=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_shape(
    pool: ThreadPool,
    batch: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    bf16: bool,
) -> None:
    case = AttentionCase.make(
        batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    expected, bound = case.reference()
    result = attend(pool, case)
    assert ((result.double() - expected).abs() <= bound).all()
    assert same_bits(attend(pool, case, *range(1, len(result))), result)


def test_tokens_in_any_order(pool: ThreadPool) -> None:
    case = AttentionCase.make([(30, 5), (0, 20), (63, 4)], **GQA)
    expected = attend(pool, case)
    order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(1))
    out = case.new_out()
    ops.paged_attention(
        pool,
        case.query[order],
        case.key,
        case.value,
        case.block_tables,
        case.block_size,
        case.sequence_ids[order],
        case.positions[order],
        case.scale,
        out,
    )
    assert same_bits(out, expected[order])


def test_strided_arguments(pool: ThreadPool) -> None:
    case = AttentionCase.make([(30, 5), (0, 20)], **GQA)
    expected = attend(pool, case)
    query = torch.zeros(25, 2, 9, 70)[:, 1, :, 3:67]
    query.copy_(case.query)
    fused = torch.cat([case.key, case.value], dim=-1)  # keys and values of a slot side by side
    out = torch.zeros(9, 25, 64).transpose(0, 1)
    _, _, _, *rest = case.args()
    ops.paged_attention(pool, query, fused[..., :64], fused[..., 64:], *rest, out)
    assert same_bits(out, expected)


def test_large_scores_do_not_overflow(pool: ThreadPool) -> None:
    case = AttentionCase.make([(0, 90)], **MHA)
    args = list(case.args())
    args[-1] = 1e6  # differences of scores are large, so the softmax is one-hot
    out = case.new_out()
    ops.paged_attention(pool, *args, out)
    slots = slots_of(case.block_tables[0], case.block_size, 90)
    best = torch.einsum("hd,nhd->hn", case.query[-1].double(), case.key[slots].double()).argmax(-1)
    expected = torch.stack([case.value[slots[n], h] for h, n in enumerate(best.tolist())])
    assert torch.allclose(out[-1], expected, rtol=4 * EPS32, atol=0)


def test_nothing_to_do(pool: ThreadPool) -> None:
    case = AttentionCase.make([(0, 4)], **MHA)
    ops.paged_attention(pool, *case.args(slice(0, 0)), case.new_out()[:0])


REFUSED = {
    "query dtype": (0, lambda a: a.double(), TypeError, "q as float32"),
    "query rank": (0, lambda a: a[0], ValueError, r"q with shape \[\*, \*, \*\]"),
    "query strided": (0, lambda a: a.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "contiguous last"),
    "key dim": (1, lambda a: a[:, :, :32], ValueError, "k_cache with shape"),
    "key dtype": (1, lambda a: a.int(), TypeError, "k_cache as float32"),
    "kv heads": (1, lambda a: a[:, :2], ValueError, "v_cache with shape|divides"),
    "value dtype": (2, lambda a: a.bfloat16(), TypeError, "v_cache as float32"),
    "value slots": (2, lambda a: a[:-1], ValueError, "v_cache with shape"),
    "table dtype": (3, lambda a: a.long(), TypeError, "block_tables as int32"),
    "table rank": (3, lambda a: a[0], ValueError, "block_tables with shape"),
    "table short": (3, lambda a: a[:, :2].contiguous(), ValueError, "positions with entries in 0 .. 31, got 32"),
    "block size 0": (4, lambda a: 0, ValueError, "block_size"),
    "block size huge": (4, lambda a: 2**40, ValueError, "block_size"),
    "ids shape": (5, lambda a: a[:-1], ValueError, "sequence_ids with shape"),
    "ids negative": (5, lambda a: a - 1, ValueError, "sequence_ids with entries"),
    "ids too large": (5, lambda a: a + 1, ValueError, "sequence_ids with entries"),
    "positions negative": (6, lambda a: -a - 1, ValueError, "positions with entries"),
    "positions too large": (6, lambda a: a + 1000, ValueError, "positions with entries"),
    "positions huge": (6, lambda a: a * 0 + 2**31 - 1, ValueError, "positions with entries"),
    "scale": (7, lambda a: float("nan"), ValueError, "finite scale"),
    "out shape": (8, lambda a: a[:, :, :32], ValueError, "out with shape"),
    "out dtype": (8, lambda a: a.half(), TypeError, "out as float32"),
    "out overlapping": (8, lambda a: a[:1].expand_as(a), ValueError, "do not overlap"),
    "no array": (0, lambda a: [[1.0]], TypeError, "numpy array or a torch CPU tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_wrong_arguments(pool: ThreadPool, name: str) -> None:
    case = AttentionCase.make([(30, 5), (0, 36)], **GQA)
    index, change, error, message = REFUSED[name]
    args = [*case.args(), case.new_out()]
    args[index] = change(args[index])
    with pytest.raises(error, match=message):
        ops.paged_attention(pool, *args)


@pytest.mark.parametrize("block", [-1, 10**6, 2**31 - 1])
def test_refuses_blocks_outside_the_cache(pool: ThreadPool, block: int) -> None:
    case = AttentionCase.make([(30, 5), (0, 36)], **GQA)
    case.block_tables[1, 2] = block
    out = case.new_out()
    with pytest.raises(ValueError, match=r"block_tables with entries in 0 .. \d+ .* at \[1, 2\]"):
        ops.paged_attention(pool, *case.args(), out)
    assert out.isnan().all()
    # Blocks past the last position are not looked at.
    ops.paged_attention(pool, *case.args(slice(0, 5)), out[:5])


def test_refuses_a_partial_last_block(pool: ThreadPool) -> None:
    case = AttentionCase.make([(0, 30)], **GQA)
    last = int(case.block_tables.max())
    args = list(case.args())
    args[1], args[2] = (a[: (last + 1) * 16 - 1] for a in args[1:3])
    with pytest.raises(ValueError, match="block_tables"):
        ops.paged_attention(pool, *args, case.new_out())
