"""A request's place in the queue of a model (`Ticket`) and its right to use the engine (`Lease`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from proa.gateway.routing import Route
from proa.gateway.status import LoadProgress

__all__ = ["Engine", "Lease", "Ticket"]


class Engine:
    """A running engine as requests see it.

    Attributes:
        base_url: such as http://127.0.0.1:40123, without a slash at its end.
        headers: to be sent with every request (the secret of this run), in place of the client's of the same name.
        pid: of its first process.
        end_reason: why it ended, None while it runs.
    """

    def __init__(self, base_url: str, headers: dict[str, str], pid: int) -> None:
        self.base_url = base_url
        self.headers = headers
        self.pid = pid
        self.end_reason: str | None = None


class Lease:
    """The right to send one request to an engine. The engine is not stopped for idleness or others meanwhile."""

    def __init__(self, route: Route, engine: Engine, release: Callable[[], None]) -> None:
        self.route = route
        self.engine = engine
        self._release = release

    def release(self) -> None:
        """The request is over, however it ended. Calling it again does nothing."""
        self._release()


class Ticket:
    """A request that waits for an engine. Use it as a context manager: leaving it gives up the place or the lease.

        with supervisor.ticket("kimi-k2") as ticket:
            while not await ticket.wait(5.0):
                ...  # say how far it is: ticket.progress
            lease = await ticket.lease()
            ...      # the request

    All use is on the supervisor's event loop.
    """

    def __init__(self, route: Route, progress: Callable[[], LoadProgress], give_up: Callable[[], None]) -> None:
        self.route = route
        self._progress = progress
        self._give_up = give_up
        self._outcome: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    @property
    def progress(self) -> LoadProgress:
        """How far the engine is."""
        return self._progress()

    @property
    def is_settled(self) -> bool:
        """Whether `lease` returns or raises at once."""
        return self._outcome.done()

    async def wait(self, seconds: float) -> bool:
        """Wait for at most so long; whether the ticket is settled. Raises nothing of the outcome."""
        await asyncio.wait([self._outcome], timeout=seconds)
        return self._outcome.done()

    async def lease(self) -> Lease:
        """The lease, as soon as there is one. Cancelling this keeps the place; `close` gives it up.

        Raises:
            EngineUnavailableError: there will be none; its class says why, `retry_after_s` when to ask again.
        """
        return await asyncio.shield(self._outcome)

    def grant(self, lease: Lease) -> None:
        """For the supervisor: the request may go."""
        self._outcome.set_result(lease)

    def refuse(self, error: Exception) -> None:
        """For the supervisor: it may not."""
        self._outcome.set_exception(error)
        self._outcome.exception()  # whoever left before reading it is not warned about

    def close(self) -> None:
        """Give up the place, or release the lease. Calling it again does nothing."""
        self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
