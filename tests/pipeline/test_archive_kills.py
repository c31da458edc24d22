"""``archive`` killed at any arrow, and random histories in which it is: hot + history + archive + deleted conserve."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from django_dbtaskqueue.models import ArchiveBatch, Attempt, Task
from django_dbtaskqueue.pipeline.database import Database
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.kills import KILLED, killing
from tests.pipeline.lakes import MEANWHILE, Bucket, Census, archive, counted, fill, ids, to_history

STEPS = ("export", "verify", "delete", "publish", "close")


@pytest.mark.parametrize("where", ["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def test_a_run_killed_at_any_step_is_continued_by_the_next(
    postgres_process_database: ProcessDatabase, where: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(where)
    lake = found.lake if isinstance(found, Bucket) else str(found)
    fill()
    before = Census.of(lake)
    again = Task.objects.filter(status="ERROR").earliest("pk")
    with killing("tests.pipeline.killed_archive", postgres_process_database.url, lake) as archive_until:
        for step in STEPS:
            assert archive_until(step) == KILLED, step
            now = Census.of(lake)
            assert set(now.tasks) == set(before.tasks), step
            assert set(now.attempts) == set(before.attempts), step
            if step == "delete":
                assert Task.objects.filter(pk=again.pk).reprocess() == 1
        assert archive_until("end") == 0
    assert Census.of(lake) == before
    assert [task.pk for task in Task.objects.all()] == [again.pk]
    assert set(ArchiveBatch.objects.values_list("state", flat=True)) == {"closed", "abandoned"}


class Killed(BaseException):
    """The end of a process, as far as code can tell that has no handler for it."""


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_histories_conserve(database: Database, folder: Path, seed: int) -> None:
    chance = random.Random(f"{seed} {database.vendor}")
    made: set[int] = set()
    failures = 0

    def enqueue() -> None:
        nonlocal failures
        status = chance.choice(["CREATED", "COMPLETED", "COMPLETED", "ERROR", "POISON"])
        times = MEANWHILE if status != "CREATED" else {}
        task = make_task(status, queue=chance.choice(["parcels", "letters"]), **times)
        made.add(task.pk)
        if status == "ERROR":
            failures += 1
            Attempt.objects.create(task_id=task.pk, queue=task.queue, attempt=1, total_attempt=1)

    def one(statuses: list[str], act: Callable[[Task], object]) -> None:
        if tasks := list(Task.objects.filter(status__in=statuses)):
            act(chance.choice(tasks))

    def operate() -> None:
        chance.choice(
            [
                lambda: one(["ERROR"], lambda task: Task.objects.filter(pk=task.pk).reprocess()),
                lambda: one(["ERROR"], lambda task: Task.objects.filter(pk=task.pk).mark_poison()),
                lambda: one(["POISON"], lambda task: Task.objects.filter(pk=task.pk).unpoison()),
                lambda: one(["COMPLETED", "POISON"], to_history),
                lambda: one(["COMPLETED", "CREATED"], lambda task: Task.objects.filter(pk=task.pk).purge()),
            ]
        )()

    def step(name: str, _done: int, _total: int) -> None:
        for _ in range(chance.randrange(2)):
            if name not in ("publish", "close"):  # others wait for the transaction of these steps, this thread forever
                chance.choice([enqueue, operate])()
        if name in STEPS and chance.random() < 0.15:
            raise Killed

    for _ in range(3):
        for _ in range(6):
            enqueue()
        operate()
        with suppress(Killed):
            archive(database, folder, batch_size=chance.choice([3, 100]), progress=step)
    archive(database, folder)

    found = Census.of(folder)
    assert max(found.tasks.values()) == 1
    assert set(found.tasks) <= made
    assert found.tasks.total() + found.deleted == len(made)
    assert found.attempts.total() == failures
    assert not set(Task.objects.values_list("status", flat=True)) - {"CREATED"}
    archived = sum(ArchiveBatch.objects.values_list("tasks", flat=True))
    assert archived == len(ids(folder, "tasks")) == len(counted(database, folder))
