"""Drains: tasks that wait are processed by one or more processes; ours, and the bare loop's."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import transaction
from django.test import override_settings

from tests.benchmarks.children import Worker, drained, family, manage, memory, python, tree_cpu
from tests.benchmarks.measure import Reading
from tests.benchmarks.raw import LOOPS, Loop
from tests.benchmarks.server import Server, Span
from tests.forks import Program, program
from tests.patience import until

TABLE = "dbtaskqueue_task"
# From the line's end, where whatever is left stands: its head is full of entries of rows that are done.
LEFT = f"""
SELECT 1 FROM unnest(%s::text[]) AS q(name), generate_series(0, %s - 1) AS p(number), LATERAL (
    SELECT id FROM {TABLE} WHERE queue_name = q.name AND priority = p.number AND ready_time <= now()
    ORDER BY ready_time DESC, id DESC LIMIT 1) AS x LIMIT 1
"""
# When batches were checked out or settled, and how many tasks.
BATCHES = f"""
SELECT extract(epoch FROM {{0}} - %(clock)s)::float8, count(*) FROM {TABLE}
WHERE queue_name = ANY(%(queues)s) AND status = 'COMPLETED' AND start_time >= %(clock)s GROUP BY {{0}} ORDER BY {{0}}
"""
Around = Callable[[Server], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Drain:
    """Fill a queue, drain it by a real ``runtaskpoller``, and say what it took."""

    server: Server
    tasks: int
    queues: Sequence[str] = ("nothing",)  # the tasks are spread over them
    polled: Sequence[str] = ()  # when it is more than those
    processes: int = 1
    priorities: int = 1
    keys: int = 0  # of the tasks, in turn; 0: they have none
    keyed: bool = True  # False: the key is only in the payload
    first: int = 0  # number of the first task, where others were there before
    env: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    prepare: Callable[[Server], None] = lambda server: None  # what else lies in the table
    around: Around = nullcontext  # what goes on meanwhile

    def __call__(self) -> Reading:
        empty(self.server)
        with self.around(self.server):
            self.prepare(self.server)
            self.fill()
            self.server.calm(TABLE)
            with self.poller() as process:
                return self._measure(process)

    def fill(self) -> None:
        from django_dbtaskqueue import enqueue_many
        from django_dbtaskqueue.operations import queue_control

        for queue in self.queues:
            queue_control.pause(queue, "default", by="benchmarks")
        numbers = range(self.first, self.first + self.tasks // len(self.queues))
        with override_settings(DBTASKQUEUE={**settings.DBTASKQUEUE, **self.settings}):
            for queue in self.queues:
                enqueue_many(queue, map(self._item, numbers))

    def _item(self, number: int) -> dict[str, Any]:
        payload: dict[str, Any] = {"number": number}
        item = {"reference": f"r-{number}", "payload": payload, "priority": number % self.priorities}
        if self.keys:
            part, name = (item, "group") if self.keyed else (payload, "key")
            part[name] = f"key {number % self.keys}"
        return item

    def poller(self) -> AbstractContextManager[Program]:
        processes = ["--processes", str(self.processes)] if self.processes > 1 else []
        names = ",".join(self.polled or self.queues)
        settings = {"BENCHMARK_TASKQUEUE": json.dumps(self.settings)}
        return running(self.processes, "--queue", names, *processes, *self.options, env={**self.env, **settings})

    def resume(self) -> None:
        from django_dbtaskqueue.operations import queue_control

        with transaction.atomic():  # all at one moment
            for queue in self.queues:
                queue_control.resume(queue, "default")
        with self.server.connect() as connection:
            left = [list(self.queues), self.priorities]
            until(lambda: not connection.execute(LEFT, left).fetchall(), timeout=120 + self.tasks / 2000)

    def _measure(self, process: Program) -> Reading:
        server, before = self.server, self.server.counted(TABLE)
        found = {"queues": list(self.queues), "clock": server.run("SELECT now()")[0][0]}
        with server.span() as span:
            cpu = tree_cpu(process)
            self.resume()
            cpu = tree_cpu(process) - cpu
        checkouts, settles = (server.run(BATCHES.format(column), found) for column in ("start_time", "finish_time"))
        most = max(memory(one.pid, "VmHWM") for one in family(process.pid))
        process.stop()  # what its connections counted is shown by the server when they end
        done = sum(count for _, count in settles) or self.tasks  # or they left the table
        if done < self.tasks - self.tasks % len(self.queues):
            raise RuntimeError(f"only {done} of {self.tasks} tasks were completed")
        seconds = settles[-1][0] - checkouts[0][0] if settles else span.seconds
        rate = {"tasks/s": done / seconds, "µs CPU worker": cpu / done * 1e6}
        reading = rate | _of_server(server, span, before, TABLE, done) | {"MiB worker": most}
        if settles:
            reading["ms lost at the start"] = lost_at_the_start(checkouts[0][0], settles)
            reading |= {"tasks/checkout": done / len(checkouts), "tasks/settle": done / len(settles)}
        return reading


def lost_at_the_start(began: float, settles: Sequence[tuple[float, int]]) -> float:
    """Return how many milliseconds later the first tenth was settled than at the rate of the rest.

    A tenth, because the rate differs by a tenth within one drain: after half of it, that would be all that is seen.
    """
    total, done = sum(count for _, count in settles), 0
    for at, count in settles:
        done += count
        if done >= total / 10:
            return 1000 * (at - began - (settles[-1][0] - at) / max(1, total - done) * done)


def _of_server(server: Server, span: Span, before: dict[str, float], table: str, done: float) -> dict[str, float]:
    """Return what so many tasks cost PostgreSQL, and how noisy the machine was."""
    spent = {name: None if value is None else value - before[name] for name, value in server.counted(table).items()}
    size = server.run("SELECT pg_total_relation_size(%s::regclass)", [table])[0][0] / 2**20
    figures = {"bytes WAL/task": spent["wal"] / done, "HOT share": spent["hot"] / max(1, spent["updates"])}
    figures |= {} if spent["walked"] is None else {"rows walked/task": spent["walked"] / done}
    return {**span.cost(done), **figures, "buffers/task": spent["buffers"] / done, "MiB table": size}


def empty(server: Server) -> None:
    server.run(f"TRUNCATE {TABLE}, dbtaskqueue_attempt, dbtaskqueue_step, dbtaskqueue_taskhistory")


@contextmanager
def running(processes: int, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Program]:
    from django_dbtaskqueue.models import Poller

    Poller.objects.all().delete()
    with program(manage("runtaskpoller", *options), os.environ | (env or {})) as process:
        ready = Poller.objects.filter(state="RUNNING")
        until(lambda: ready.count() >= processes or process.code is not None, timeout=120)
        if process.code is not None:
            raise RuntimeError(f"runtaskpoller {' '.join(options)} ended by itself:\n{process.log[-2000:]}")
        yield process


def raw_table(server: Server, loop: Loop, tasks: int = 0) -> None:
    server.run(f"DROP TABLE IF EXISTS {loop.table}; {loop.create}")
    server.run(loop.fill, {"tasks": tasks})
    server.calm(loop.table)


def raw_drain(server: Server, tasks: int, name: str = "simple", *, way: str = "drain") -> Reading:
    loop = LOOPS[name]
    raw_table(server, loop, tasks)
    worker = Worker(*python("raw", way, *((name, "500") if way == "drain" else ())))
    before = server.counted(loop.table)
    with server.span() as span:
        found = drained(worker)
    if (done := found["tasks"]) < tasks:
        raise RuntimeError(f"the loop did {done} of {tasks} tasks")
    rate = {"tasks/s": done / found["seconds"], "µs CPU worker": found["cpu"] / done * 1e6}
    return rate | _of_server(server, span, before, loop.table, done)
