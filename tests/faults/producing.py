"""A producer process: ``python -m tests.faults.producing NAME SEED TASKS_PER_SECOND``. It goes on until it is ended.

Each of its transactions writes a Booking and the tasks that belong to it; some are rolled back on purpose. The ledger
has an "invoked" before, and the answer after. A transaction without an answer, or whose answer was an error of the
database, may have been committed or not.
"""

import random
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from time import monotonic

import django
from django.db import connection, transaction
from django.db.utils import Error

from django_dbtaskqueue.core.exceptions import QueueFull
from tests.faults.ledger import Ledger
from tests.faults.sizes import CAPACITY

django.setup()
from django_dbtaskqueue import enqueue, enqueue_many  # noqa: E402 -- Django must be set up first
from tests.testapp.models import Booking  # noqa: E402 -- Django must be set up first

THREADS = 2
GROUPS = 5  # of one thread
SIZES = (1, 1, 1, 2, 3, 5, 100)  # tasks of one transaction; half of the greatest go through enqueue_many
BULK = 20  # from how many tasks on
KINDS = ("ok",) * 55 + ("retry", "retry", "again", "delete", "gone", "gone", "gone", "poison", "slow", "late")
# A slow task shows whether the next of its group waits. One that went back into the queue would go behind its group.
GROUPED_KINDS = ("ok",) * 12 + ("retry", "slow")
QUEUES = ("plain",) * 6 + ("effects", "effects", "evented", "evented", "grouped")


class RolledBack(Exception):
    """Raised to roll a transaction back on purpose."""


class Producer(threading.Thread):
    """One thread that enqueues. A group is used by one thread only, so its ids rise in the order of its commits."""

    def __init__(self, name: str, seed: str, pace: float) -> None:
        super().__init__(name=name)
        self._random, self._pace, self._ledger = random.Random(seed), pace, Ledger()
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
        queue = "small" if full else self._random.choice(QUEUES)
        kinds = GROUPED_KINDS if queue == "grouped" else KINDS
        references = [f"{self._random.choice(kinds)}-{name}-{index}" for index in range(size)]
        self._ledger.write("invoked", transaction=name, queue=queue, references=references)
        answer = "ok"
        try:
            self._commit(name, queue, references)
        except (RolledBack, QueueFull):
            answer = "rolled back"
        except Error:
            answer = "unknown"
            connection.close()
        self._ledger.write(answer, transaction=name)
        return size

    def _commit(self, name: str, queue: str, references: Sequence[str]) -> None:
        with transaction.atomic():
            Booking.objects.create(reference=name)
            if queue == "effects":
                Booking.objects.bulk_create([Booking(reference=reference) for reference in references])
            if self._random.random() < 0.05:
                with suppress(RolledBack), transaction.atomic():
                    enqueue(queue, f"undone-{references[0]}")
                    raise RolledBack
            payload = {"of": name}
            items = [{"reference": one, "payload": payload, "group": self._group(queue)} for one in references]
            if len(items) >= BULK and self._random.random() < 0.5:
                enqueue_many(queue, items)
            else:
                for item in items:
                    enqueue(queue, **item)
            if self._random.random() < 0.03:
                raise RolledBack

    def _group(self, queue: str) -> str | None:
        return f"{self.name}-{self._random.randrange(GROUPS)}" if queue == "grouped" else None


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
