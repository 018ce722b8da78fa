"""The last lines an engine wrote, and a view that follows them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

__all__ = ["LogRing"]

_MAX_LINE = 8192


class LogRing:
    """Keeps `max_lines` lines of at most 8192 characters. All use is on one event loop.

    Followers that read too slowly miss lines; they never hold up the engine.
    """

    def __init__(self, max_lines: int) -> None:
        self._lines: deque[str] = deque(maxlen=max_lines)
        self._written = 0
        self._news = asyncio.Event()

    @property
    def written(self) -> int:
        """Lines written in all, those that fell out included."""
        return self._written

    def write(self, line: str) -> None:
        """Add a line without its line end."""
        self._lines.append(line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + " ...")
        self._written += 1
        self._news.set()
        self._news = asyncio.Event()

    def tail(self, count: int | None = None) -> list[str]:
        """The last `count` lines, all that are kept when None."""
        lines = list(self._lines)
        return lines if count is None else lines[max(0, len(lines) - count) :]

    async def follow(self, count: int | None = None) -> AsyncIterator[str]:
        """The last `count` lines, then each new one, without end."""
        position = self._written - len(self.tail(count))
        while True:
            while position < self._written:
                position = max(position, self._written - len(self._lines))
                line = self._lines[len(self._lines) - (self._written - position)]
                position += 1
                yield line
            news = self._news
            await news.wait()
