from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proa.kvcache.manager import BlockTable, KVManager
from proa.kvcache.radix import RadixTree

BLOCK = 4


def add(tree: RadixTree, tokens: list[int], first_block: int) -> None:
    """Insert and leave unlocked, as a finished sequence does."""
    nodes = tree.insert(tree.root, tokens, list(range(first_block, first_block + len(tokens) // BLOCK)))
    tree.lock(nodes[-1])
    tree.unlock(nodes[-1])


def blocks(tree: RadixTree, tokens: list[int]) -> list[int]:
    return [node.block for node in tree.match(tokens, len(tokens) // BLOCK)]


def test_match_is_the_longest_prefix_in_whole_blocks() -> None:
    tree = RadixTree(BLOCK)
    add(tree, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    assert blocks(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == [0, 1]
    assert blocks(tree, [1, 2, 3, 4, 5, 6, 7, 9]) == [0]
    assert blocks(tree, [1, 2, 3]) == []
    assert blocks(tree, [2, 2, 3, 4]) == []
    assert [n.block for n in tree.match([1, 2, 3, 4, 5, 6, 7, 8], 1)] == [0]
    tree.check()


def test_insert_keeps_the_block_that_was_there() -> None:
    tree = RadixTree(BLOCK)
    add(tree, [1] * 4 + [2] * 4, 0)
    nodes = tree.insert(tree.root, [1] * 4 + [3] * 4, [10, 11])
    assert [node.block for node in nodes] == [0, 11]
    tree.lock(nodes[-1])
    tree.unlock(nodes[-1])
    assert tree.num_blocks == 3
    tree.check()


def test_eviction_takes_least_recently_used_leaves_and_spares_locked_paths() -> None:
    tree = RadixTree(BLOCK)
    old, middle, new = [1] * 4, [2] * 8, [3] * 4
    add(tree, old, 0)
    add(tree, middle, 1)
    add(tree, new, 3)
    locked = tree.match(old, 1)[-1]
    tree.lock(locked)
    assert tree.num_evictable == 3
    assert tree.evict(2) == [2, 1]  # leaf before its parent, `middle` is older than `new`
    assert tree.evict(9) == [3]
    assert tree.evict(1) == []
    tree.check()
    tree.unlock(locked)
    assert tree.evict(1) == [0]
    assert tree.num_blocks == tree.num_protected == 0


def test_use_renews() -> None:
    tree = RadixTree(BLOCK)
    add(tree, [1] * 4, 0)
    add(tree, [2] * 4, 1)
    node = tree.match([1] * 4, 1)[-1]
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(1) == [1]


def test_heap_does_not_grow_with_requests_served() -> None:
    tree = RadixTree(BLOCK)
    add(tree, [1] * 8, 0)
    for _ in range(10_000):
        node = tree.match([1] * 8, 2)[-1]
        tree.lock(node)
        tree.unlock(node)
    assert len(tree._heap) <= 100
    tree.check()
    assert tree.evict(2) == [1, 0]


def test_last_token_is_never_cached() -> None:
    manager = KVManager(8, BLOCK)
    tokens = list(range(8))
    table = manager.open(tokens)
    assert table is not None
    manager.commit(table, tokens, 8)
    manager.close(table)
    again = manager.open(tokens)
    assert again is not None and again.num_shared == 1
    longer = manager.open([*tokens, 9])
    assert longer is not None and longer.num_shared == 2
    manager.check_integrity()


def test_same_prefix_computed_twice_is_kept_once() -> None:
    manager = KVManager(8, BLOCK)
    tokens = list(range(9))
    first, second = manager.open(tokens), manager.open(tokens)
    assert first is not None and second is not None
    assert manager.num_used == 6
    manager.commit(first, tokens, 9)
    manager.commit(second, tokens, 9)
    assert first.block_ids[:2] == second.block_ids[:2]
    assert first.block_ids[2] != second.block_ids[2]
    assert manager.num_used == 4
    manager.check_integrity()


def test_without_prefix_cache_nothing_is_kept() -> None:
    manager = KVManager(4, BLOCK, prefix_cache=False)
    tokens = list(range(12))
    table = manager.open(tokens)
    assert table is not None
    manager.commit(table, tokens, 12)
    manager.close(table)
    assert manager.num_cached == 0 and manager.num_available == 4
    manager.check_integrity()


def test_open_and_extend_refuse_without_changing_anything() -> None:
    manager = KVManager(3, BLOCK)
    table = manager.open(list(range(8)))
    assert table is not None
    assert manager.open(list(range(100, 105))) is None
    assert manager.open(list(range(100, 104)), headroom=1) is None
    assert not manager.extend(table, 13)
    assert len(table.block_ids) == 2
    assert manager.extend(table, 12) and len(table.block_ids) == 3
    manager.check_integrity()


def test_forgetting_drops_what_no_other_prefix_needs() -> None:
    manager = KVManager(8, BLOCK)
    first, second = [1] * 4 + [2] * 4 + [3], [1] * 4 + [5] * 4 + [3]
    tables = [manager.open(first), manager.open(second)]
    for table, tokens in zip(tables, (first, second), strict=True):
        assert table is not None
        manager.commit(table, tokens, 9)
        manager.close(table, forget=table is tables[1])
    manager.check_integrity()
    assert manager.num_cached == 2
    again = manager.open(first)
    assert again is not None and again.num_shared == 2


def leak(manager: KVManager, table: BlockTable) -> None:
    table.block_ids.pop()


def own_twice(manager: KVManager, table: BlockTable) -> None:
    table.block_ids[-1] = manager._pool.free_blocks()[0]


def lose_a_lock(manager: KVManager, table: BlockTable) -> None:
    manager._tree.unlock(table.node)


def lose_a_holder(manager: KVManager, table: BlockTable) -> None:
    manager._tree.lock(table.node.parent)


def swap_a_shared_block(manager: KVManager, table: BlockTable) -> None:
    table.block_ids[0] = table.block_ids[1]


@pytest.mark.parametrize("damage", [leak, own_twice, lose_a_lock, lose_a_holder, swap_a_shared_block])
def test_integrity_check_finds(damage: Callable[[KVManager, BlockTable], None]) -> None:
    manager = KVManager(8, BLOCK)
    table = manager.open(list(range(10)))
    assert table is not None
    manager.commit(table, list(range(10)), 10)
    manager.check_integrity()
    damage(manager, table)
    with pytest.raises(AssertionError):
        manager.check_integrity()


class ManagerMachine(RuleBasedStateMachine):
    """Random sequences over a small alphabet and a small pool, checked against what each table must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVManager(10, BLOCK)
        self.live: list[tuple[BlockTable, list[int], int]] = []
        # What a forward pass would have written: block -> tokens from the start of the sequence to its end.
        self.contents: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), headroom=st.integers(0, 2))
    def open(self, tokens: list[int], headroom: int) -> None:
        available = self.manager.num_available
        table = self.manager.open(tokens, headroom=headroom)
        if table is None:
            # With nothing cached for it, the request needs a block for each of its own.
            assert -(-len(tokens) // BLOCK) + headroom > available
            return
        assert table.num_shared * BLOCK < len(tokens)
        self.live.append((table, tokens, table.num_shared * BLOCK))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        table, tokens, computed = self.live[index]
        computed = min(len(tokens), computed + count)
        self._write(table, tokens, computed)
        self.manager.commit(table, tokens, computed)
        self.live[index] = (table, tokens, computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        table, tokens, computed = self.live[index]
        if self.manager.extend(table, len(tokens) + len(more)):
            self.live[index] = (table, tokens + more, computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), forget=st.booleans())
    def close(self, data: st.DataObject, forget: bool) -> None:
        table, _, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.manager.close(table, forget=forget)

    @rule()
    def flush(self) -> None:
        self.manager.flush()

    @invariant()
    def every_block_has_one_owner(self) -> None:
        self.manager.check_integrity()

    @invariant()
    def computed_prefix_is_what_the_blocks_hold(self) -> None:
        for table, tokens, computed in self.live:
            assert len(table.block_ids) >= -(-len(tokens) // BLOCK)
            for index in range(computed // BLOCK):
                assert self.contents[table.block_ids[index]] == tuple(tokens[: (index + 1) * BLOCK])

    def _write(self, table: BlockTable, tokens: list[int], computed: int) -> None:
        for index in range(table.num_shared, -(-computed // BLOCK)):
            self.contents[table.block_ids[index]] = tuple(tokens[: (index + 1) * BLOCK])


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
