"""pgqueuer: asyncio and asyncpg, batches at both ends. Finished jobs go to its log table."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import timedelta

import asyncpg
from pgqueuer import AsyncpgDriver, PgQueuer, Queries
from pgqueuer.types import QueueExecutionMode

BATCH = 500


class Pgqueuer:
    """Batches of 500, as ours."""

    def install(self) -> None:
        """Make its tables."""
        asyncio.run(self._with(lambda queries: queries.install()))

    def single(self) -> Callable[[], object]:
        """One enqueue, on a loop that goes on for all of them."""
        loop = asyncio.new_event_loop()
        queries = loop.run_until_complete(self._queries())
        return lambda: loop.run_until_complete(queries.enqueue("other", b'{"number": 1}'))

    def fill(self, tasks: int) -> None:
        """One enqueue of a list."""
        payloads = [b'{"number": %d}' % number for number in range(tasks)]
        asyncio.run(self._with(lambda queries: queries.enqueue(["nothing"] * tasks, payloads, [0] * tasks)))

    def drain(self, tasks: int) -> int:
        """Its queue manager, until nothing waits."""
        return asyncio.run(self._drain())

    async def _drain(self) -> int:
        handled = 0
        queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(os.environ["DATABASE_URL"])))

        @queuer.entrypoint("nothing")
        async def nothing(job: object) -> None:
            nonlocal handled
            handled += 1

        await queuer.qm.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=1), mode=QueueExecutionMode.drain)
        return handled

    async def _with(self, act: Callable[[Queries], object]) -> None:
        await act(await self._queries())  # type: ignore[misc]

    async def _queries(self) -> Queries:
        return Queries(AsyncpgDriver(await asyncpg.connect(os.environ["DATABASE_URL"])))


PEER = Pgqueuer()
