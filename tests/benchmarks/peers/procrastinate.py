"""procrastinate: asyncio, one statement per job."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import procrastinate

URL = os.environ["DATABASE_URL"]
handled = 0
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL))


@app.task(queue="benchmark", name="nothing")
async def nothing(number: int) -> None:
    """Do nothing."""
    global handled
    handled += 1


class Procrastinate:
    """Ten jobs at a time; finished ones are kept."""

    def install(self) -> None:
        """Make its tables."""
        with self._sync().open() as sync:
            sync.schema_manager.apply_schema()

    def single(self) -> Callable[[], object]:
        """The synchronous connector, as a view has it."""
        sync = self._sync()
        sync.open()
        task = sync.configure_task("nothing", queue="other")
        return lambda: task.defer(number=1)

    def fill(self, tasks: int) -> None:
        """Its batch call."""
        with self._sync().open() as sync:
            sync.configure_task("nothing", queue="benchmark").batch_defer(*[{"number": n} for n in range(tasks)])

    def drain(self, tasks: int) -> int:
        """Its worker, until nothing waits."""
        asyncio.run(self._drain())
        return handled

    async def _drain(self) -> None:
        async with app.open_async():
            await app.run_worker_async(queues=["benchmark"], concurrency=10, wait=False, install_signal_handlers=False)

    def _sync(self) -> procrastinate.App:
        return procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=URL))


PEER = Procrastinate()
