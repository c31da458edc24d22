"""``archive``: finished tasks move to the lake, and nothing is lost or doubled, whatever happens on the way."""

import random
import re
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pytest
from deltalake import DeltaTable
from django.db import transaction
from django.db.models.functions import Now

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.core.exceptions import CheckFailed, LakeError, PipelineError
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import dependencies
from django_dbtaskqueue.flow.batches import BatchHandle
from django_dbtaskqueue.models import ArchiveBatch, Attempt, Batch, Hold, Task
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake import Lake
from django_dbtaskqueue.pipeline.lake.export import Batches
from tests.factories import make_task
from tests.kills import KILLED, killing
from tests.pipeline.lakes import DAY, MEANWHILE, ON_AZURE, Census, archive, counted, fill, flip, ids, place_of
from tests.support import PATIENCE, actors, blocked, until
from tests.testapp.models import Parcel


def test_a_failed_task_stays_while_another_waits_for_it(database: Database, folder: Path) -> None:
    """If it left, its child would start as though it had completed."""
    child = enqueue("work", after=make_task("ERROR", queue="work", finish_time=-2 * DAY, **MEANWHILE))
    assert archive(database, folder)["tasks"] == 0
    assert Hold.objects.filter(task_id=child.pk).exists()
    Task.objects.filter(pk=child.pk).delete()
    dependencies.sweep_missing(Session.on("default"), 0)
    assert archive(database, folder)["tasks"] == 1


def test_an_archive_lets_go_before_its_connection_has_ended(pg: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server notices the end of a connection a moment after the next archive may have begun."""
    with pg.open() as link:
        monkeypatch.setattr(Database, "open", lambda _: nullcontext(link))
        with Batches.locked(pg):
            pass
        monkeypatch.undo()
        with Batches.locked(pg):
            pass


def test_delta_readers_read_the_same(pg: Database, folder: Path) -> None:
    fill()
    expected = {(task.pk, task.queue, task.status, task.finish_time, task.total_attempt) for task in Task.objects.all()}
    archive(pg, folder, source="task")
    with duckdb.connect() as reader:
        reader.register("tasks", DeltaTable(str(folder / "tasks")).to_pyarrow_dataset())
        reader.execute("SET TimeZone = 'UTC'")
        found = reader.execute("SELECT id, queue_name, status, finish_time, total_attempt FROM tasks").fetchall()
        days = reader.execute("SELECT bool_and(finished_date = finish_time::date) FROM tasks").fetchone()
    assert (set(found), days) == (expected, (True,))
    frame = DeltaTable(str(folder / "attempts")).to_pandas()
    assert set(frame["task_id"]) == {one for one, _queue, status, *_ in expected if status == "ERROR"}


def test_a_task_changed_meanwhile_stays_and_does_not_count_in_the_lake(pg: Database, folder: Path) -> None:
    """One waits again, one came back to the same status, one is locked; the delete waits for a fourth one's change."""
    fill()
    for _ in range(2):
        make_task("POISON", finish_time=-2 * DAY, **MEANWHILE)
    again, flipped, held = Task.objects.filter(status="ERROR").order_by("pk")
    last = Task.objects.filter(status="POISON").latest("pk")
    before = Census.of(folder)
    locked, free, changed, ended = (threading.Event() for _ in range(4))

    def hold() -> None:
        with transaction.atomic():
            Task.objects.select_for_update().get(pk=held.pk)
            locked.set()
            assert free.wait(PATIENCE)

    def change() -> None:
        with transaction.atomic():
            assert Task.objects.filter(pk=last.pk).unpoison() == 1
            changed.set()
            until(lambda: blocked() or ended.is_set())

    def meddle(step: str, _done: int, _total: int) -> None:
        if step == "delete" and not locked.is_set():
            assert Task.objects.filter(pk=again.pk).reprocess() == 1
            assert Task.objects.filter(pk=flipped.pk).mark_poison() == 1
            assert Task.objects.filter(pk=flipped.pk).unpoison() == 1
            started.extend((operator.do(hold), other.do(change)))
            assert locked.wait(PATIENCE) and changed.wait(PATIENCE)

    started: list[Any] = []
    with actors(2) as (operator, other):
        done = archive(pg, folder, source="task", progress=meddle)
        free.set()
        ended.set()
        for one in started:
            one.result(PATIENCE)
    stayed = {again.pk, flipped.pk, held.pk, last.pk}
    assert (set(Task.objects.values_list("pk", flat=True)), done["withdrawn"]) == (stayed, 4)
    assert Census.of(folder) == before
    assert set(Attempt.objects.values_list("task_id", flat=True)) == stayed - {last.pk}
    assert not stayed & {*ids(folder, "tasks")} and not ids(folder, "attempts")


def test_with_its_database_the_lake_has_each_task_once_at_every_step(pg: Database, folder: Path) -> None:
    fill()
    error = Task.objects.filter(status="ERROR").earliest("pk")
    everything = Counter(Task.objects.values_list("pk", flat=True))
    seen: dict[str, Counter[int]] = {}

    def look(step: str, _done: int, _total: int) -> None:
        if step == "delete":
            Task.objects.filter(pk=error.pk).reprocess()
        if step in ("delete", "publish", "close", "compact"):
            seen[step] = Counter([*counted(pg, folder), *Task.objects.values_list("pk", flat=True)])

    archive(pg, folder, source="task", progress=look, compact=1)
    assert seen == dict.fromkeys(("delete", "publish", "close", "compact"), everything)


def test_a_task_that_breaks_a_rule_is_quarantined_and_the_others_are_archived(database: Database, folder: Path) -> None:
    good = make_task("ERROR")
    bad = make_task("ERROR", start_time=timedelta(hours=2))
    for task in (good, bad):
        Attempt.objects.create(task_id=task.pk, queue=task.queue, attempt=1, total_attempt=1)
    before = Census.of(folder)
    for number in (1, 0):
        said = rf"finished before it started: 1 rows \(task {bad.pk}\).*--no-check"
        with pytest.raises(CheckFailed, match=said) as caught:
            archive(database, folder)
        assert caught.value.result["broken"] == {"finished before it started": 1}
        assert (caught.value.result["tasks"], caught.value.result["quarantined"]) == (number, 1)
        assert [task.pk for task in Task.objects.all()] == [bad.pk] and Census.of(folder) == before
    assert archive(database, folder, no_check=True)["tasks"] == 1
    assert not Task.objects.exists() and Census.of(folder) == before


@pytest.mark.parametrize("others", [1, 0])
def test_what_stays_keeps_its_attempts_beside_an_older_transaction(pg: Database, folder: Path, others: int) -> None:
    """The fast delete of rows that no open transaction can have changed takes the good tasks, and only theirs."""
    with psycopg.connect(**pg.conninfo) as older:
        for good in [True] * others + [False]:
            if not good:
                older.execute("SELECT pg_current_xact_id()")
            task = make_task("ERROR", start_time=timedelta(hours=0 if good else 2))
            Attempt.objects.create(task_id=task.pk, queue=task.queue, attempt=1, total_attempt=1)
        before = Census.of(folder)
        with pytest.raises(CheckFailed):
            archive(pg, folder)
    assert Census.of(folder) == before


def test_only_what_is_asked_for_is_archived(database: Database, folder: Path) -> None:
    fill()
    young = make_task("ERROR", queue="parcels")
    Task.objects.filter(pk=young.pk).update(finish_time=Now())
    wanted = {"queue": ["parcels"], "status": ["ERROR"], "older_than": "1h"}
    errors = set(Task.objects.filter(status="ERROR").exclude(pk=young.pk).values_list("pk", flat=True))
    others = set(Task.objects.values_list("pk", flat=True)) - errors
    batch = Batch.objects.create(name="b", total=9)
    Task.objects.filter(pk__in=errors).update(batch=batch.pk)
    assert archive(database, folder, dry_run=True, **wanted)["tasks"] == len(errors)
    assert not folder.exists()
    assert archive(database, folder, limit=2, batch_size=1, **wanted)["tasks"] == 2
    assert archive(database, folder, **wanted)["tasks"] == len(errors) - 2
    assert set(Task.objects.values_list("pk", flat=True)) == others
    assert BatchHandle(batch, "default").progress()["ERROR"] == len(errors)


def test_a_batch_under_way_into_another_lake_is_finished_there(pg: Database, folder: Path) -> None:
    fill()

    def cut(step: str, _done: int, _total: int) -> None:
        if step == "close":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        archive(pg, folder, source="task", progress=cut)
    with pytest.raises(PipelineError, match=re.escape(f"archive --lake {folder}")):
        archive(pg, folder.with_name("two"))
    assert archive(pg, folder)["resumed"] == 1


def test_two_archives_at_once_are_refused(database: Database, folder: Path) -> None:
    fill()
    refused = []

    def another(step: str, _done: int, _total: int) -> None:
        if step == "export" and not refused:
            for name in (folder.name, "other"):
                with pytest.raises(PipelineError, match=r"Another archive of .* is running"):
                    archive(database, folder.with_name(name))
                refused.append(name)

    archive(database, folder, progress=another)
    assert refused == [folder.name, "other"]


def test_files_that_changed_before_the_delete_stop_it(pg: Database, folder: Path) -> None:
    fill()
    number = Task.objects.count()

    def damage(step: str, _done: int, _total: int) -> None:
        if step == "verify":
            for path in folder.glob("tasks/*/*.parquet"):
                flip(path, path.stat().st_size // 2)

    with pytest.raises(LakeError, match=r"parquet is damaged: its checksum"):
        archive(pg, folder, source="task", progress=damage)
    assert Task.objects.count() == number
    assert archive(pg, folder, source="task")["tasks"] == number


def test_a_batch_that_another_process_has_taken_back_deletes_nothing(database: Database, folder: Path) -> None:
    """A run whose connection broke without its notice: the next one has revoked its batch."""
    fill()
    before = Census.of(folder)

    def revoke(step: str, _done: int, _total: int) -> None:
        if step == "publish":
            Lake.at(folder).revoke(ArchiveBatch.objects.get(state="open").token)

    with pytest.raises(PipelineError, match="was revoked by another process"):
        archive(database, folder, progress=revoke)
    assert Census.of(folder) == before and not ids(folder, "tasks")
    assert archive(database, folder)["tasks"] == before.tasks.total()
    assert Census.of(folder) == before


def test_small_files_are_merged(pg: Database, folder: Path) -> None:
    expected = {make_task("COMPLETED").pk for _ in range(4)}
    done = archive(pg, folder, source="task", batch_size=1, compact=4)
    assert done["batches"] == done["files_compacted"] == 4
    (file,) = Lake.at(folder).files("tasks")
    assert (file.rows, sorted(ids(folder, "tasks"))) == (4, sorted(expected))


def test_a_table_of_one_s_own_is_archived(own: Database, folder: Path) -> None:
    Parcel.objects.checkout("parcels", poller_instance="p", limit=1)[0].complete()
    assert archive(own, folder, queue=["parcels"])["tasks"] == 1
    (row,) = DeltaTable(str(folder / "tasks")).to_pyarrow_table().to_pylist()
    assert (row["location"], row["queue_name"], row["reference_number"]) == ("testapp.parcel", "parcels", "a")
    assert (Parcel.objects.count(), Task.objects.count()) == (2, 1)


# -- killed at any step, and random histories: hot + history + archive + deleted conserve ------------------------------
STEPS = ("export", "verify", "delete", "publish", "close")


@pytest.mark.parametrize("where", ["folder", pytest.param("bucket", marks=pytest.mark.slow), *ON_AZURE])
def test_a_run_killed_at_any_step_is_continued(postgres_process_database: Any, where: str, request: Any) -> None:
    lake = place_of(request.getfixturevalue(where))
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
    assert Census.of(lake) == before and [task.pk for task in Task.objects.all()] == [again.pk]
    assert set(ArchiveBatch.objects.values_list("state", flat=True)) == {"closed", "abandoned"}


class Killed(BaseException):
    """The end of a process, as far as code can tell that has no handler for it."""


VERBS: tuple[tuple[str, list[str]], ...] = (  # and the statuses of the tasks to which an operator does it
    *(("reprocess", ["ERROR"]), ("mark_poison", ["ERROR"]), ("unpoison", ["POISON"])),
    *(("housekeep", ["COMPLETED", "POISON"]), ("purge", ["COMPLETED", "CREATED"])),
)


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

    def operate() -> None:
        verb, statuses = chance.choice(VERBS)
        if pks := list(Task.objects.filter(status__in=statuses).values_list("pk", flat=True)):
            task = Task.objects.filter(pk=chance.choice(pks))
            task.housekeep(older_than=timedelta(0)) if verb == "housekeep" else getattr(task, verb)()

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
    assert max(found.tasks.values()) == 1 and set(found.tasks) <= made
    assert (found.tasks.total() + found.deleted, found.attempts.total()) == (len(made), failures)
    assert not set(Task.objects.values_list("status", flat=True)) - {"CREATED"}
    archived = sum(ArchiveBatch.objects.values_list("tasks", flat=True))
    assert archived == len(ids(folder, "tasks")) == len(counted(database, folder))
