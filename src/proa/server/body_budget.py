"""How much request data the process holds at one time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from proa.core.errors import UnavailableError

__all__ = ["BodyAccount", "BodyBudget"]


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

    @contextmanager
    def account(self) -> Iterator[BodyAccount]:
        """For the body of one request: what it takes is given back in the end."""
        account = BodyAccount(self)
        try:
            yield account
        finally:
            account.release()


class BodyAccount:
    """What one request holds."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held = 0

    def take(self, num_bytes: int) -> None:
        """As BodyBudget.take."""
        self.held += num_bytes
        self._budget.take(num_bytes)

    def release(self) -> None:
        """The body is no longer held."""
        self._budget.give_back(self.held)
        self.held = 0
