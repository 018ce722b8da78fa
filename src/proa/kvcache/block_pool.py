"""Which KV blocks are free."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """A stack of free block ids; the block released last is handed out first, while its memory is warm.

    A block has exactly one owner: the free stack, a sequence, or the prefix tree. Sharing is by locks in the tree,
    so blocks need no reference counts of their own.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; there must be as many."""
        assert 0 <= count <= len(self._free), f"allocate {count} of {len(self._free)} free blocks"
        if count == 0:
            return []
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        for block in blocks:
            self._is_free[block] = 0
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back, each once."""
        for block in blocks:
            assert not self._is_free[block], f"block {block} released twice"
            self._is_free[block] = 1
            self._free.append(block)

    def free_blocks(self) -> list[int]:
        """The free ids, for integrity checks."""
        return list(self._free)
