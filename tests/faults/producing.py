"""A producer process: ``python -m tests.faults.producing NAME SEED TASKS_PER_SECOND``. It goes on until it is ended.

Each of its transactions writes a Booking and the tasks that belong to it; some are rolled back on purpose. The ledger
has an "invoked" before, and the answer after. One without an answer, or with an error, may have been committed.
"""

import random
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count, cycle
from time import monotonic
from typing import Any

import django
from django.db import connections, transaction
from django.db.utils import Error

from django_dbtaskqueue.core.exceptions import QueueFull
from tests.faults.ledger import Ledger
from tests.faults.sizes import CAPACITY

django.setup()
from django_dbtaskqueue import Unique, batch, enqueue, enqueue_many, signal as send_signal  # noqa: E402 -- Django must be set up first
from django_dbtaskqueue.models import Task  # noqa: E402 -- Django must be set up first
from tests.testapp.models import Booking  # noqa: E402 -- Django must be set up first

THREADS = 2
GROUPS = 5  # of one thread
SIZES = (*(1, 1, 2, 3, 5) * 3, 100)  # tasks of one transaction; half of the greatest go through enqueue_many
BULK = 20  # from how many tasks on
KINDS = ("ok",) * 55 + ("retry", "retry", "again", "delete", "gone", "gone", "gone", "poison", "slow", "late")
# A slow task shows whether the next of its group waits. One that went back into the queue would go behind its group.
KINDS_OF = {
    "grouped": ("ok",) * 12 + ("retry", "slow"),
    **dict.fromkeys(("limited", "wide", "spread", "bridged"), ("ok",) * 5 + ("retry",)),
    "processes": ("ok",) * 6 + ("retry", "slow", "fork", "fork", "dies"),
    "stopped": ("maybe",),
    "steps": ("early", "answered"),
    "flow": ("ok",) * 6 + ("retry", "poison", "slow"),
}
QUEUES = ("plain", "effects") * 4 + ("evented", "evented", "grouped", "batched", "limited", "wide", "processes")
QUEUES += ("flow", "flow", "steps", "steps", "spread", "spread", "stopped", "bridged", "unique")
# Tasks of one transaction where a hundred would take too long, and one would show nothing.
SOME = dict.fromkeys(("flow", "limited", "wide"), 12)
SOME |= dict.fromkeys(("steps", "processes", "stopped", "unique", "batched", "bridged"), 5)
KEYS = 12  # of payloads of which one task lives at a time


class RolledBack(Exception):
    """Raised to roll a transaction back on purpose."""


class Producer(threading.Thread):
    """One thread that enqueues. A group is used by one thread only, so its ids rise in the order of its commits."""

    def __init__(self, name: str, seed: str, pace: float) -> None:
        super().__init__(name=name)
        self._random, self._pace, self._ledger = random.Random(seed), pace, Ledger()
        self._queues = cycle(self._random.sample(QUEUES, len(QUEUES)))
        self.ended = threading.Event()

    def run(self) -> None:
        due = monotonic()
        for number in count():
            due += self._transaction(number) / self._pace
            if self.ended.wait(max(0.0, due - monotonic())):
                return

    def _transaction(self, number: int) -> int:
        name, size = f"{self.name}-{number}", self._random.choice(SIZES)
        full = size < BULK and self._random.random() < 0.1
        if number in (0, 4, 8, 12):
            size, full = CAPACITY + 1, True  # one task more than the queue takes
        queue = "small" if full else next(self._queues)
        size = SOME.get(queue, size)
        if queue == "unique":
            return self._same(size)
        references = [f"{self._random.choice(KINDS_OF.get(queue, KINDS))}-{name}-{index}" for index in range(size)]
        parents = self._graph(references) if queue == "flow" else {}
        self._ledger.write("invoked", transaction=name, queue=queue, references=references, after=parents)
        answer = "ok"
        try:
            self._commit(name, queue, references, parents)
        except (RolledBack, QueueFull):
            answer = "rolled back"
        except Error:
            answer = "unknown"
            connections.close_all()
        self._ledger.write(answer, transaction=name)
        return 1 if answer == "rolled back" else size

    def _same(self, number: int) -> int:
        """Enqueue tasks of which others, with equal payloads, may live."""
        for _ in range(number):
            try:
                task = enqueue("unique", payload={"key": self._random.randrange(KEYS)}, unique=Unique())
                self._ledger.write("asked", task=task.pk)
            except Error:
                connections.close_all()
        return number

    def _graph(self, references: list[str]) -> dict[str, list[str]]:
        """Return what each task of a workflow waits for; the last one waits for all, however they end."""
        parents: dict[str, list[str]] = {}
        for index, reference in enumerate(references[:-1]):
            chosen = self._random.sample(references[:index], min(index, self._random.randrange(3)))
            if any(one.startswith(("poison", "cut")) for one in chosen) and self._random.random() < 0.7:
                references[index] = f"cut-{reference}"
            parents[references[index]] = chosen
        references[-1] = f"ok-{references[-1]}"
        return parents | {references[-1]: references[:-1]}

    def _workflow(self, name: str, parents: dict[str, list[str]]) -> None:
        *members, last = parents
        tasks: dict[str, Task] = {}
        with batch(name, on_complete={"queue": "flow", "reference": last}):
            for one in members:
                after = [tasks[parent] for parent in parents[one]] or None
                policy = "cancel" if one.startswith("cut") else "run"
                tasks[one] = enqueue("flow", one, after=after, on_parent_failure=policy)

    def _commit(self, name: str, queue: str, references: Sequence[str], parents: dict[str, list[str]]) -> None:
        alias = self._random.choice(("default", "second")) if queue == "spread" else "default"
        with transaction.atomic(using=alias):
            Booking.objects.using(alias).create(reference=name)
            if self._random.random() < 0.05:
                with suppress(RolledBack), transaction.atomic(using=alias):
                    enqueue(queue, f"undone-{references[0]}", using=alias)
                    raise RolledBack
            if parents:
                self._workflow(name, parents)
            else:
                self._enqueue(name, queue, references, alias)
            if self._random.random() < 0.03:
                raise RolledBack

    def _enqueue(self, name: str, queue: str, references: Sequence[str], alias: str) -> None:
        if queue == "effects":
            Booking.objects.bulk_create([Booking(reference=reference) for reference in references])
        items: list[Any] = [{"reference": one, "payload": {"of": name}} for one in references]
        if queue in ("grouped", "wide"):
            items = [item | {"group": f"{queue}-{self.name}-{self._random.randrange(GROUPS)}"} for item in items]
        if queue == "spread":  # some wait, so that a move finds tasks
            items = [item | {"delay": timedelta(seconds=self._random.choice((0, 0, 1, 3)))} for item in items]
        if len(items) >= BULK and self._random.random() < 0.5:
            enqueue_many(queue, items, using=alias)
            return
        for item in items:
            task = enqueue(queue, **item, using=alias)
            if item["reference"].startswith("early"):
                send_signal(task, "approved", task.reference)


def main(name: str, seed: str, tasks_per_second: str) -> None:
    pace = float(tasks_per_second) / THREADS
    threads = [Producer(f"{name}.{number}", f"{seed}.{number}", pace) for number in range(THREADS)]
    signal.signal(signal.SIGTERM, lambda *_: [thread.ended.set() for thread in threads])
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
