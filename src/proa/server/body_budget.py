"""How much request data the process holds at one time."""

from __future__ import annotations

from proa.core.errors import UnavailableError

__all__ = ["BodyBudget"]


class BodyBudget:
    """Bytes of request bodies held over all connections, from reading until the answer begins."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    def take(self, num_bytes: int) -> None:
        """Account for bytes that were read.

        Raises:
            UnavailableError: too many large requests at one time; the bytes are accounted for all the same.
        """
        self._held += num_bytes
        if self._held > self._limit:
            raise UnavailableError("body", "less data in flight", "too many large requests", "retry later")

    def give_back(self, num_bytes: int) -> None:
        self._held -= num_bytes
