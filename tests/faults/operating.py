"""What operators and clients do while everything breaks, each on a thread of its own."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from django.db import connections
from django.db.utils import Error

from django_dbtaskqueue import SignalRefused, signal
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations import lookup
from tests.faults.tasks import ledger
from tests.kills import KILLED

PAUSE_S = 0.5  # between two turns
CANCELS = 3  # of tasks that would complete, in one turn
PLACES, SHARDS = ("marked", "inserted", "deleted"), ("default", "second")
MOST_MS = 600  # of a move that is killed wherever it is


def answer() -> None:
    for task in Task.objects.filter(queue="steps", parked_by="signal")[:100]:
        with suppress(SignalRefused):
            signal(task, "approved", task.reference)


def cancel(chance: random.Random) -> None:
    """Cancel tasks that end in no other way, and some that would."""
    live = Task.objects.filter(status__in=("CREATED", "PROCESSING")).values_list("queue", "reference")
    some = list(live.filter(queue="stopped", reference__startswith="maybe-"))
    chosen = [*live.filter(status="PROCESSING", reference__startswith="endless-")]
    for queue, reference in chosen + chance.sample(some, min(len(some), CANCELS)):
        ledger.write("cancel", reference=reference)
        ledger.write("cancelled", reference=reference, done=lookup.cancel(queue, reference))


def move(act: Callable[..., int], chance: random.Random, counts: Counter[str]) -> None:
    """Move tasks to the other shard, and kill the move at one of its places, or wherever it is."""
    code = act(chance.choice((*PLACES, chance.randrange(5, MOST_MS))), *chance.sample(SHARDS, 2))
    counts[{KILLED: "moves killed", 0: "moves ended"}.get(code, "moves failed")] += 1


def finish_moves(act: Callable[..., int]) -> bool:
    """Finish what killed moves have left. Whether that was possible."""
    return [act("end", *names) for names in (SHARDS, SHARDS[::-1])] == [0, 0]


@contextmanager
def repeated(turn: Callable[[], object]) -> Iterator[None]:
    """Take a turn again and again beside a ``with`` block, whatever the database answers."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(PAUSE_S):
            try:
                turn()
            except Error:
                connections.close_all()
        connections.close_all()

    thread = threading.Thread(target=repeat, name=str(turn), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
