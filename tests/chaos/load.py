"""Producers that go on whatever happens, and keep a record outside the database of what it acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from django.db import connections, transaction
from django.db.utils import Error

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Task
from tests.chaos.processes import until_all
from tests.patience import PATIENCE
from tests.testapp.models import Booking

PACE = 0.02  # seconds between two filings of one producer


class Producer(threading.Thread):
    """Files a booking and its task in one transaction, again and again, to each queue in turn.

    ``acknowledged`` holds the references whose commit was answered. Those whose commit failed are ``unknown``: they
    may stand in the database or not.
    """

    def __init__(self, name: str, ledger: Path) -> None:
        super().__init__(name=name, daemon=True)
        self._ledger = ledger
        ledger.touch()
        self._ended = threading.Event()
        self.unknown: set[str] = set()

    @property
    def acknowledged(self) -> set[str]:
        return set(self._ledger.read_text().split())

    def run(self) -> None:
        with self._ledger.open("a") as ledger:
            for number in count():
                reference = f"{self.name}-{number}"
                try:
                    self._file(reference, ("chaos", "ledger")[number % 2])
                except Error:
                    self.unknown.add(reference)
                    connections["default"].close()
                else:
                    ledger.write(f"{reference}\n")
                    ledger.flush()
                if self._ended.wait(PACE):
                    break
        connections.close_all()

    def _file(self, reference: str, queue: str) -> None:
        with transaction.atomic():
            Booking.objects.create(reference=reference)
            enqueue(queue, reference, {"do": "bump"})

    def end(self) -> None:
        """File nothing more."""
        self._ended.set()
        self.join(PATIENCE)


@contextmanager
def producers(number: int, folder: Path) -> Iterator[list[Producer]]:
    """Producers for the time of a ``with`` block."""
    cast = [Producer(f"producer{index}", folder / f"ledger-{index}") for index in range(number)]
    for producer in cast:
        producer.start()
    try:
        yield cast
    finally:
        for producer in cast:
            producer.end()


def conserved(cast: list[Producer]) -> int:
    """Wait for the end of all tasks and check that nothing was lost, made up or done twice; return their number."""
    connections["default"].close()
    until_all("COMPLETED")
    acknowledged = set().union(*[producer.acknowledged for producer in cast])
    unknown = set().union(*[producer.unknown for producer in cast])
    present = set(Task.objects.values_list("reference", flat=True))
    assert acknowledged <= present, f"acknowledged and lost: {sorted(acknowledged - present)[:10]}"
    assert present <= acknowledged | unknown, "a task nobody filed"
    assert present == set(Booking.objects.values_list("reference", flat=True)), "a filing was committed in part"
    in_ledger = Task.objects.filter(queue="ledger").values("reference")
    amounts = set(Booking.objects.filter(reference__in=in_ledger).values_list("amount", flat=True))
    assert amounts == {1}, f"effects in atomic mode must be exactly once: {amounts}"
    return len(present)
