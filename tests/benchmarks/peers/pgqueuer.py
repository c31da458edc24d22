"""pgqueuer: asyncio and asyncpg, batches of 500 as ours at both ends. Finished jobs go to its log table."""

import asyncio
import os
from collections.abc import Callable
from datetime import timedelta

import asyncpg
from pgqueuer import AsyncpgDriver, PgQueuer, Queries
from pgqueuer.types import QueueExecutionMode

BATCH = 500
loop = asyncio.new_event_loop()
driver = AsyncpgDriver(loop.run_until_complete(asyncpg.connect(os.environ["DATABASE_URL"])))


def install() -> None:
    loop.run_until_complete(Queries(driver).install())


def single() -> Callable[[], object]:
    return lambda: loop.run_until_complete(Queries(driver).enqueue("other", b'{"number": 1}'))


def fill(tasks: int) -> None:
    payloads = [b'{"number": %d}' % number for number in range(tasks)]
    loop.run_until_complete(Queries(driver).enqueue(["nothing"] * tasks, payloads, [0] * tasks))


def drain(_tasks: int) -> int:
    """Its queue manager, until nothing waits."""
    handled = 0
    queuer = PgQueuer(driver)

    @queuer.entrypoint("nothing")
    async def nothing(job: object) -> None:
        nonlocal handled
        handled += 1

    run = queuer.qm.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=1), mode=QueueExecutionMode.drain)
    loop.run_until_complete(run)
    return handled
