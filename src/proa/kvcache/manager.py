"""Who owns which KV block: free, cached in the prefix tree, or owned by one sequence."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from proa.kvcache.block_pool import BlockPool
from proa.kvcache.radix import RadixNode, RadixTree

__all__ = ["BlockTable", "KVManager"]


class BlockTable:
    """Blocks of one sequence in position order.

    block_ids:  [ s0 s1 .. s(k-1) | o0 o1 .. ]        k = num_shared
                  in the tree,      owned by this
                  locked by `node`  sequence alone
    """

    __slots__ = ("block_ids", "node", "num_shared")

    def __init__(self, node: RadixNode) -> None:
        self.block_ids = array("i")
        self.num_shared = 0
        self.node = node


class KVManager:
    """Block tables of live sequences over one pool, with a prefix cache. Tokens, not tensors: it knows no torch."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._pool = BlockPool(num_blocks)
        self._tree = RadixTree(block_size)
        self._tables: set[BlockTable] = set()

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones and cached ones nobody uses."""
        return self._pool.num_free + self._tree.num_evictable

    @property
    def num_used(self) -> int:
        """Blocks live sequences hold, shared ones counted once."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache, in use or not."""
        return self._tree.num_blocks

    def open(self, tokens: Sequence[int], *, headroom: int = 0) -> BlockTable | None:
        """A table with room for all `tokens`, its first `num_shared` blocks cached; None when blocks are short.

        The last token is never served from the cache: its logits are needed, so it is computed again.
        `headroom` blocks are left available for others.
        """
        matched = self._tree.match(tokens, (len(tokens) - 1) // self.block_size) if self.prefix_cache else []
        table = BlockTable(matched[-1] if matched else self._tree.root)
        self._tree.lock(table.node)
        missing = self._blocks_for(len(tokens)) - len(matched)
        if missing + headroom > self.num_available:
            self._tree.unlock(table.node)
            return None
        table.block_ids.extend(node.block for node in matched)
        table.num_shared = len(matched)
        self._tables.add(table)
        table.block_ids.extend(self._take(missing))
        return table

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for `num_tokens` in all; False, and nothing changed, when blocks are short."""
        missing = self._blocks_for(num_tokens) - len(table.block_ids)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        table.block_ids.extend(self._take(missing))
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Share the full blocks among the first `num_computed` of `tokens`, whose keys and values are written.

        A block the tree has already is swapped for the tree's: same tokens, same contents.
        """
        first, last = table.num_shared, num_computed // self.block_size
        if not self.prefix_cache or last <= first:
            return
        own = table.block_ids[first:last]
        nodes = self._tree.insert(table.node, tokens[first * self.block_size : last * self.block_size], own)
        for index, node in enumerate(nodes):
            if node.block != own[index]:
                table.block_ids[first + index] = node.block
                self._pool.release((own[index],))
        self._tree.lock(nodes[-1])
        self._tree.unlock(table.node)
        table.node = nodes[-1]
        table.num_shared = last

    def close(self, table: BlockTable, *, forget: bool = False) -> None:
        """The sequence ends: owned blocks become free, shared ones stay cached until evicted.

        `forget` also drops the shared ones no other prefix needs: their contents are not trusted.
        """
        self._tables.remove(table)
        self._pool.release(table.block_ids[table.num_shared :])
        self._tree.unlock(table.node)
        if forget:
            self._pool.release(self._tree.forget(table.node))
        table.block_ids = array("i")
        table.num_shared = 0
        table.node = self._tree.root

    def flush(self) -> int:
        """Forget every cached prefix no live sequence uses; return how many blocks became free."""
        freed = self._tree.evict(self._tree.num_evictable)
        self._pool.release(freed)
        return len(freed)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block has exactly one owner and every lock a holder. O(blocks)."""
        self._tree.check()
        free = self._pool.free_blocks()
        cached = [node.block for node in self._tree.nodes()]
        owned = [block for table in self._tables for block in table.block_ids[table.num_shared :]]
        every = sorted(free + cached + owned)
        assert every == list(range(self.num_blocks)), (
            f"free {len(free)} + cached {len(cached)} + owned {len(owned)} = {len(every)}, "
            f"{len(set(every))} distinct, of {self.num_blocks} blocks"
        )
        holders = Counter(table.node for table in self._tables)
        for node in self._tree.nodes():
            locks = node.references - sum(child.references > 0 for child in node.children.values())
            assert locks == holders[node], f"block {node.block} has {locks} locks, {holders[node]} tables end in it"
        for table in self._tables:
            ancestor: RadixNode | None = table.node
            for block in reversed(table.block_ids[: table.num_shared]):
                assert ancestor is not None and ancestor.block == block
                ancestor = ancestor.parent
            assert ancestor is self._tree.root

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self, count: int) -> list[int]:
        if count > self._pool.num_free:
            self._pool.release(self._tree.evict(count - self._pool.num_free))
        return self._pool.allocate(count)
