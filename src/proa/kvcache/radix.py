"""Prefix tree over whole KV blocks: which token prefixes are cached, and in which blocks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

__all__ = ["RadixNode", "RadixTree"]


class RadixNode:
    """One cached block. The tokens on the path from the root are the prefix whose last `block_size` tokens it holds."""

    __slots__ = ("block", "children", "last_used", "parent", "references", "tokens")

    def __init__(self, tokens: tuple[int, ...], block: int, parent: RadixNode | None) -> None:
        self.tokens = tokens
        self.block = block
        self.parent = parent
        self.children: dict[tuple[int, ...], RadixNode] = {}
        # Locks held on this very node, plus one for every child that is protected.
        self.references = 0
        self.last_used = 0


class RadixTree:
    """Every operation is O(blocks walked), besides a logarithm for the eviction order.

    A locked node protects itself and all its ancestors from eviction. Blocks leave from the leaves, least recently
    unlocked path first.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = RadixNode((), -1, None)
        self.num_blocks = 0
        self.num_protected = 0
        self._clock = 0
        self._serial = 0
        # Eviction candidates (last_used, serial, node). Entries go stale when a node is locked, used later, evicted or
        # gets children; `_is_candidate` tells on the way out.
        self._heap: list[tuple[int, int, RadixNode]] = []

    @property
    def num_evictable(self) -> int:
        """Blocks `evict` could free now."""
        return self.num_blocks - self.num_protected

    def match(self, tokens: Sequence[int], max_blocks: int) -> list[RadixNode]:
        """Nodes of the longest cached prefix of `tokens` in whole blocks, at most `max_blocks`, in order."""
        node = self.root
        path: list[RadixNode] = []
        for start in range(0, max_blocks * self.block_size, self.block_size):
            child = node.children.get(tuple(tokens[start : start + self.block_size]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def insert(self, after: RadixNode, tokens: Sequence[int], blocks: Sequence[int]) -> list[RadixNode]:
        """Extend the prefix ending in `after` by `blocks`, which hold `tokens`; return their nodes, in order.

        Where the tree has a block for the same prefix already, its node is returned and the given block stays the
        caller's: `node.block != block`. The caller locks the last node before anything else can evict it.
        """
        assert len(tokens) == len(blocks) * self.block_size
        nodes: list[RadixNode] = []
        node = after
        for index, block in enumerate(blocks):
            key = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
            child = node.children.get(key)
            if child is None:
                child = RadixNode(key, block, node)
                node.children[key] = child
                self.num_blocks += 1
            nodes.append(child)
            node = child
        return nodes

    def lock(self, node: RadixNode) -> None:
        """Protect `node` and its ancestors until `unlock`. Locks nest; locking the root is allowed and does nothing."""
        current: RadixNode | None = node
        while current is not None and current is not self.root:
            current.references += 1
            if current.references > 1:
                return
            self.num_protected += 1
            current = current.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock`; what is no longer protected counts as used just now."""
        self._clock += 1
        current: RadixNode | None = node
        while current is not None and current is not self.root:
            assert current.references > 0, "unlock without lock"
            current.references -= 1
            if current.references > 0:
                return
            self.num_protected -= 1
            current.last_used = self._clock
            if not current.children:
                self._push(current)
            current = current.parent

    def evict(self, count: int) -> list[int]:
        """Remove up to `count` blocks, least recently used leaves first; return them. Fewer when the rest is locked."""
        freed: list[int] = []
        while len(freed) < count and self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if not self._is_candidate(node, last_used):
                continue
            parent = node.parent
            assert parent is not None
            freed.append(self._remove(node))
            if parent is not self.root and not parent.children and parent.references == 0:
                self._push(parent)
        return freed

    def forget(self, node: RadixNode) -> list[int]:
        """Remove `node` and then its ancestors as far as nobody else needs them; return the freed blocks."""
        freed: list[int] = []
        while node is not self.root and not node.children and node.references == 0:
            parent = node.parent
            assert parent is not None
            freed.append(self._remove(node))
            node = parent
        return freed

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the root, in no particular order."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError when counters, links or the eviction order are wrong. O(blocks cached)."""
        total = protected = 0
        candidates = {id(node) for last_used, _, node in self._heap if self._is_candidate(node, last_used)}
        for node in self.nodes():
            total += 1
            protected += node.references > 0
            assert node.parent is not None and node.parent.children[node.tokens] is node
            assert len(node.tokens) == self.block_size
            guarded = sum(child.references > 0 for child in node.children.values())
            assert node.references >= guarded, "a protected child must protect its parent"
            if not node.children and node.references == 0:
                assert id(node) in candidates, f"block {node.block} could never be evicted"
        assert total == self.num_blocks, f"{total} nodes, counted {self.num_blocks}"
        assert protected == self.num_protected, f"{protected} protected, counted {self.num_protected}"

    def _remove(self, node: RadixNode) -> int:
        assert node.parent is not None
        del node.parent.children[node.tokens]
        node.parent = None
        self.num_blocks -= 1
        return node.block

    def _is_candidate(self, node: RadixNode, last_used: int) -> bool:
        return node.parent is not None and not node.children and node.references == 0 and node.last_used == last_used

    def _push(self, node: RadixNode) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (node.last_used, self._serial, node))
        # Without eviction nothing pops; stale entries must not pile up with every request served.
        if len(self._heap) > 2 * self.num_blocks + 64:
            self._heap = [entry for entry in self._heap if self._is_candidate(entry[2], entry[0])]
            heapq.heapify(self._heap)
