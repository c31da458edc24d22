"""Tasks that kill whoever touches them: they end in ERROR after their budget, and nobody else suffers for long."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.models import Attempt, Task
from tests.chaos.conftest import Start
from tests.chaos.processes import audit, statuses
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines
from tests.support import eventually

KILLERS = {"segfault": "SIGSEGV", "overflow": "SIGSEGV", "exit": "exit code 7", "kill": "SIGKILL"}
RAISERS = {"recursion": "builtins.RecursionError", "leave": "builtins.SystemExit"}
GOOD = 200


@pytest.mark.slow
def test_poison_among_good_tasks(
    process_database: ProcessDatabase, start: Start, queues: Callable[..., None], tmp_path: Path
) -> None:
    # Given six kinds of poison among good tasks
    queues(lease="1s", ledger={"max_attempts": 5}, heartbeat="2s")
    watched, mark = audit(), tmp_path / "mark"
    kinds = [*KILLERS, *RAISERS]
    for kind in kinds:
        enqueue_many("chaos", [{"payload": {"do": "ok"}}] * (GOOD // len(kinds)))
        enqueue("chaos", kind, {"do": kind, "mark": str(mark)})

    # When two children of a supervisor work on them
    poller = start(process_database, "--processes", "2")

    # Then each of the poison ends in ERROR after exactly its attempts
    eventually(done, timeout=90)
    poison = Task.objects.filter(reference__isnull=False)
    assert {task.reference: (task.status, task.attempt) for task in poison} == dict.fromkeys(kinds, ("ERROR", 3))
    started = Counter(line[1] for line in lines(mark))
    assert started.keys() == set(kinds)
    assert max(started.values()) == 3

    # ... and all the others are done, charged at most once for each process that died with them
    good = Task.objects.filter(reference=None)
    print("good tasks by attempt:", Counter(good.values_list("attempt", flat=True)), "poison starts:", started)
    assert set(good.values_list("status", flat=True)) == {"COMPLETED"}
    deaths = len(re.findall(r"Child \d+ ended", poller.log))
    assert max(good.values_list("attempt", flat=True)) <= 1 + deaths

    # ... the last attempt is on record, with what is known of it
    for task in poison:
        last = Attempt.objects.filter(task_id=task.pk).order_by("total_attempt").last()
        assert last is not None
        wanted = RAISERS.get(str(task.reference), "django_dbtaskqueue.core.exceptions.ProcessDied")
        assert (last.attempt, last.error_type) == (3, wanted)
    assert watched.problems() == []

    # ... and the supervisor has replaced every child that died, and goes on
    for death in KILLERS.values():
        assert death in poller.log
    enqueue("chaos", None, {"do": "ok"})
    eventually(done)
    poller.end()


def done() -> None:
    found = statuses()
    assert not found.keys() & {"CREATED", "PROCESSING"}, found
