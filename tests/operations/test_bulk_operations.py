"""Bulk operations: what is promised before, what is done in chunks, and what a kill, a rival or a cancel leaves."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, transaction
from django.utils import timezone

from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AuditEntry, BulkOperation, Task, TaskChange
from django_dbtaskqueue.models.control import CANCELLED, FAILED, FINISHED, RUNNING, WAITING
from django_dbtaskqueue.operations import actions, bounded_reads, bulk
from django_dbtaskqueue.operations.search import parse
from django_dbtaskqueue.operations.search.query import bounds_of, select
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.factories import QUEUE, make_task
from tests.operations.site import ONLY_PARCELS, refused, user, work as run
from tests.support import PATIENCE, at_once, blocked, held, sql, until


@pytest.fixture(autouse=True)
def _chunks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "TASKS_PER_CHUNK", 2)


def failures(number: int, **columns: Any) -> list[int]:
    return [make_task(Status.ERROR, **columns).pk for _ in range(number)]


def started(number: int = 0, by: User | None = None, **options: Any) -> BulkOperation:
    """Make so many failed tasks, and order that all of them are reprocessed."""
    failures(number)
    return bulk.start("reprocess", "status:ERROR", by, **options)


def of(operation: BulkOperation) -> BulkOperation:
    operation.refresh_from_db()
    return operation


def test_a_preview_counts_to_a_bound_says_the_effect_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failures(3)
    make_task(Status.COMPLETED)
    seen = bulk.preview("reprocess", f"queue:{QUEUE}")
    assert (str(seen.selected), str(seen.eligible)) == ("4", "3")
    assert seen.sentences[1:] == ["4 tasks match.", "3 would change; the others are skipped: not in ERROR."]
    only_failed = bulk.preview("reprocess", f"queue:{QUEUE} status:ERROR")
    assert only_failed.sentences[1:] == ["3 tasks match.", "3 would change."]
    make_task(Status.PROCESSING)
    make_task(Status.CREATED)
    words = bulk.preview("cancel", f"queue:{QUEUE}").sentences
    assert words[2].startswith("2 would change") and words[3:] == ["1 of them runs now."]
    assert not BulkOperation.objects.exists() and not AuditEntry.objects.exists()
    failures(3)
    count = bounded_reads.bounded_count
    monkeypatch.setattr(bounded_reads, "bounded_count", lambda tasks: count(tasks, 2))
    seen = bulk.preview("reprocess", f"queue:{QUEUE}")
    assert str(seen.selected) == "2+" and isinstance(seen.estimate, int)
    assert any("≈" in sentence for sentence in seen.sentences)


def test_an_order_that_cannot_be_is_refused_and_nothing_is_written() -> None:
    for verb, q, reason, words in (
        ("reproces", "status:ERROR", "", "no verb 'reproces' for tasks"),
        ("reprocess", "  ", "", "An empty search would reprocess every task"),
        ("delete", "status:ERROR", " ", "delete needs a reason"),
        ("purge", "queue:parcels", "", "purge needs a reason"),
        *(("purge", f"{q}queue:parcels", "gone", "purge deletes one whole queue") for q in ("status:ERROR ", "-")),
        ("cancel", "status:CREATED", "x" * 501, "at most 500 characters"),
        ("reprocess", "stauts:ERROR", "", "Did you mean 'status'"),
    ):
        refused(words, bulk.start, verb, q, None, reason)
    assert not BulkOperation.objects.exists() and not AuditEntry.objects.exists()


def test_all_that_match_are_changed_in_chunks_and_each_skipped_task_has_its_reason() -> None:
    wanted = failures(5)
    done, other = make_task(Status.COMPLETED).pk, make_task(Status.ERROR, queue="letters").pk
    operation = bulk.start("reprocess", f"queue:{QUEUE}", None, "fixed")
    assert (operation.state, operation.estimate, operation.progress) == (WAITING, 6, 0.0)
    late = failures(1)
    assert bulk.turn("default")
    assert (of(operation).state, operation.changed, 0 < operation.progress < 1) == (RUNNING, 2, True)
    run()
    assert (of(operation).state, operation.progress, operation.changed, operation.skipped) == (FINISHED, 1.0, 5, 1)
    assert set(Task.objects.filter(status="CREATED").values_list("pk", flat=True)) == set(wanted)
    assert set(Task.objects.filter(status="ERROR").values_list("pk", flat=True)) == {other, *late}
    assert operation.skips == {"in COMPLETED, not in ERROR": 1}
    assert TaskChange.objects.get(skip_reason="in COMPLETED, not in ERROR").task_ids == [done]
    entry = AuditEntry.objects.get()
    assert (entry.verb, entry.query, entry.reason, entry.queue) == ("reprocess", f"queue:{QUEUE}", "fixed", QUEUE)
    assert (entry.changed, entry.skipped, entry.operation) == (5, 1, operation)
    assert not bulk.turn("default")


@pytest.mark.parametrize("q", ["created:{0}", "created:{1}..{0}", "created:>=01:00", "-age:1h..870000h"])
def test_the_times_of_an_order_are_those_of_its_moment(q: str) -> None:
    begin = timezone.now().replace(hour=0) - timedelta(days=1)
    q = q.format((begin + timedelta(days=1)).date(), begin.date())
    for hours, task in enumerate(failures(48)):
        Task.objects.filter(pk=task).update(create_time=begin + timedelta(hours=hours))
    with timezone.override("Asia/Tokyo"):
        wanted = set(select(q, Task.objects.all()).values_list("pk", flat=True))
        operation = bulk.start("reprocess", q, None)
    run()
    assert {*Task.objects.filter(status="CREATED").values_list("pk", flat=True)} == wanted
    assert all(isinstance(at, datetime) for _, at in bounds_of(parse(operation.query).terms[0].matches[0]))


def test_operations_take_turns() -> None:
    failures(4)
    failures(4, queue="letters")
    both = [bulk.start("reprocess", f"queue:{queue}", None) for queue in (QUEUE, "letters")]
    assert bulk.turn("default") and bulk.turn("default")
    assert [of(operation).changed for operation in both] == [2, 2]


def test_gaps_between_ids_and_windows_without_a_match_are_passed_over() -> None:
    make_task(Status.COMPLETED)
    far = make_task(Status.ERROR)
    Task.objects.filter(pk=far.pk).update(id=far.pk + 10**12)
    operation = started()
    assert run() <= 2 and of(operation).changed == 1


def test_an_operation_can_be_bounded_and_ends_at_once_over_an_empty_table(django_assert_num_queries: Any) -> None:
    empty = started()
    run()
    assert (of(empty).state, empty.changed, empty.progress) == (FINISHED, 0, 1.0)
    with django_assert_num_queries(1):
        assert not bulk.turn("default")
    operation = started(6, max_tasks=3)
    run()
    assert (of(operation).state, operation.changed, Task.objects.filter(status="ERROR").count()) == (FINISHED, 3, 3)


def test_a_connection_that_dies_in_a_chunk_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = started(5)
    bulk.turn("default")
    cursor, whole = of(operation).cursor, actions.change_tasks

    def dies(*arguments: Any) -> None:
        whole(*arguments)
        raise OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch, pytest.raises(OperationalError):
        patch.setattr(actions, "change_tasks", dies)
        bulk.turn("default")
    assert (of(operation).cursor, operation.changed, operation.state) == (cursor, 2, RUNNING)
    assert Task.objects.filter(status="ERROR").count() == 3
    run()
    assert (of(operation).changed, AuditEntry.objects.get().changed) == (5, 5)


def test_an_operation_that_the_database_does_not_carry_out_lets_others_go_first() -> None:
    failures(2)
    slow, other = Task.objects.order_by("pk")
    body = f"BEGIN IF OLD.id = {slow.pk} THEN RAISE query_canceled; END IF; RETURN NEW; END"
    sql(f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
    sql("CREATE TRIGGER slow BEFORE UPDATE ON dbtaskqueue_task FOR EACH ROW EXECUTE FUNCTION slow()")
    orders = [bulk.start("reprocess", f"id:{task.pk}", None) for task in (slow, other)]
    for _turn in range(4):
        with suppress(OperationalError):
            bulk.turn("default")
    assert [of(one).state for one in orders] == ["WAITING", FINISHED]


@pytest.mark.django_db(transaction=True)
def test_four_workers_change_each_task_once() -> None:
    failures(24)
    before = set(Task.objects.values_list("pk", "total_attempt"))
    operation = started()
    turns = at_once(4, lambda _index: run())
    run()
    assert (of(operation).state, operation.changed, operation.skipped) == (FINISHED, 24, 0)
    assert sum(turns) <= 13
    assert set(Task.objects.filter(status="CREATED").values_list("pk", "total_attempt")) == before


@pytest.mark.django_db(transaction=True)
def test_what_another_transaction_holds_is_left_alone_and_nobody_waits() -> None:
    first, second = failures(2)
    operation = started()
    with held(lambda: BulkOperation.objects.select_for_update().get(pk=operation.pk)):
        assert not bulk.turn("default")
    with held(lambda: Task.objects.select_for_update().get(pk=first)):
        run()
    assert of(operation).skips == {"another transaction is changing it": 1}
    assert TaskChange.objects.exclude(skip_reason="").get().task_ids == [first]
    assert Task.objects.get(pk=second).status == Status.CREATED


def test_a_user_is_named_in_django_s_log() -> None:
    ada = user("reprocess_task")
    operation = started(1, ada, reason="fixed")
    assert LogEntry.objects.get().change_message == "Retry (fixed): status:ERROR"
    run()
    assert [entry.user for entry in LogEntry.objects.all()] == [ada, ada]
    assert (of(operation).actor, AuditEntry.objects.get().actor, operation.changed) == ("ada", "ada", 1)


TAKE_AWAY = (User.delete, lambda ada: ada.user_permissions.clear(), lambda ada: User.objects.update(is_active=False))


@pytest.mark.parametrize("take_away", TAKE_AWAY, ids=["account", "permission", "active"])
def test_rights_taken_away_stop_the_operation_at_the_next_chunk(take_away: Callable[[User], object]) -> None:
    ada = user("reprocess_task")
    operation = started(4, ada)
    bulk.turn("default")
    take_away(ada)
    run()
    assert (of(operation).state, operation.changed) == (FAILED, 2)
    assert "ada" in operation.note and operation.finish_time is not None


def test_tasks_of_queues_the_user_may_not_touch_are_skipped(settings: Any) -> None:
    settings.DBTASKQUEUE |= {"CAN_OPERATE": ONLY_PARCELS}
    ada = user("reprocess_task")
    failures(1, queue="letters")
    words = "ada may not use reprocess on queue letters"
    refused(words, bulk.start, "reprocess", "queue:letters", ada, error=PermissionDenied)
    operation = started(1, ada)
    run()
    assert (of(operation).changed, operation.skips) == (1, {"not permitted on queue letters": 1})


def test_a_cancelled_and_a_broken_operation_stop_and_let_others_pass(caplog: pytest.LogCaptureFixture) -> None:
    operation = started(4)
    bulk.turn("default")
    refused(None, bulk.cancel, operation.pk, user(), error=PermissionDenied)
    assert bulk.cancel(operation.pk, user("reprocess_task", name="bob"), "wrong queue")
    assert not bulk.turn("default")
    assert (of(operation).state, operation.changed) == (CANCELLED, 2)
    assert operation.note == "cancelled by bob: wrong queue"
    assert not bulk.cancel(operation.pk, None), "it had ended"
    assert [entry.reason for entry in AuditEntry.objects.order_by("pk")] == ["", "wrong queue"]
    bad, good = started(1), started()
    BulkOperation.objects.filter(pk=bad.pk).update(query="stauts:ERROR")
    run()
    assert (of(bad).state, of(good).state, good.changed) == (FAILED, FINISHED, 3)
    assert bad.note.startswith("SearchError: ") and f"Bulk operation {bad.pk} failed" in caplog.text


def test_a_killed_process_leaves_nothing_of_its_chunk(postgres_process_database: ProcessDatabase) -> None:
    operation = started(3)
    command = [sys.executable, str(REPOSITORY / "manage.py"), "taskqueue", "bulk", "run"]
    with transaction.atomic():
        # The worker waits for the audit, the last thing that a chunk writes
        AuditEntry.objects.select_for_update().get()
        worker = subprocess.Popen(command, env=postgres_process_database.env, cwd=REPOSITORY)
        until(lambda: blocked() or worker.poll() is not None)
        worker.kill()
        assert worker.wait(PATIENCE) == -signal.SIGKILL
    until(free)
    assert (of(operation).cursor, operation.changed) == (operation.first_id, 0)
    assert Task.objects.filter(status="ERROR").count() == 3
    run()
    assert (of(operation).changed, AuditEntry.objects.get().changed) == (3, 3)


def free() -> bool:
    """Whether the server has noticed the death: the operation's row is locked no more."""
    with transaction.atomic():
        return bool(BulkOperation.objects.select_for_update(skip_locked=True))
