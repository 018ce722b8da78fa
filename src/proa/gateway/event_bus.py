"""Hands events to any number of observers, none of which can hold up the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from proa.gateway.status import GatewayEvent

__all__ = ["EventBus"]

_MAX_PENDING = 256


class EventBus:
    """Events in order; an observer that reads too slowly misses the oldest (their numbers show the gap)."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._number = 0
        self._queues: set[asyncio.Queue[GatewayEvent]] = set()

    def publish(self, kind: Literal["state", "progress", "config"], model: str = "", /, **data: Any) -> None:
        """Tell every observer."""
        self._number += 1
        event = GatewayEvent(self._number, self._clock(), kind, model, _frozen(data))
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    @contextmanager
    def subscribe(self) -> Iterator[AsyncIterator[GatewayEvent]]:
        """What happens from here on, without end."""
        queue: asyncio.Queue[GatewayEvent] = asyncio.Queue(_MAX_PENDING)
        self._queues.add(queue)
        try:
            yield _drain(queue)
        finally:
            self._queues.discard(queue)


async def _drain(queue: asyncio.Queue[GatewayEvent]) -> AsyncIterator[GatewayEvent]:
    while True:
        yield await queue.get()


def _frozen(data: dict[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in data.items() if value is not None}
