"""procrastinate: asyncio, one statement per job, ten jobs at a time; finished ones are kept."""

import asyncio
import os
from collections.abc import Callable

import procrastinate

URL = os.environ["DATABASE_URL"]
handled = 0
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL))
sync = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=URL))  # as a view has it


@app.task(queue="benchmark", name="nothing")
async def nothing(number: int) -> None:
    global handled
    handled += 1


def install() -> None:
    with sync.open():
        sync.schema_manager.apply_schema()


def single() -> Callable[[], object]:
    sync.open()
    task = sync.configure_task("nothing", queue="other")
    return lambda: task.defer(number=1)


def fill(tasks: int) -> None:
    with sync.open():
        sync.configure_task("nothing", queue="benchmark").batch_defer(*[{"number": n} for n in range(tasks)])


def drain(_tasks: int) -> int:
    async def run() -> None:
        async with app.open_async():
            await app.run_worker_async(queues=["benchmark"], concurrency=10, wait=False, install_signal_handlers=False)

    asyncio.run(run())
    return handled
