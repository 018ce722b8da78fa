from __future__ import annotations

import pytest

from proa.kvcache.block_pool import BlockPool


def test_hands_out_every_block_once_and_takes_them_back() -> None:
    pool = BlockPool(5)
    first = pool.allocate(3)
    second = pool.allocate(2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.allocate(0) == []
    pool.release(first)
    assert pool.num_free == 3
    assert sorted(pool.free_blocks()) == sorted(first)
    assert set(pool.allocate(3)) == set(first)


def test_asking_for_too_many_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="allocate 3 of 2"):
        BlockPool(2).allocate(3)


def test_double_release_is_a_bug() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])
