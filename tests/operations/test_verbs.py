"""The operator's verbs: what they skip and say, and how long a pause holds. What they change: test_matrix."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, cast

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, IntegrityError, transaction
from django.test import Client
from django.utils import timezone

from django_dbtaskqueue import UnknownQueue, enqueue
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import dependencies
from django_dbtaskqueue.models import AuditEntry, BulkOperation, Queue, Task
from django_dbtaskqueue.models.control import IN_EFFECT
from django_dbtaskqueue.operations import bulk, queue_control
from django_dbtaskqueue.operations.actions import ActionRequest, act_on_ids, enqueue_copy, preview
from django_dbtaskqueue.operations.permissions import PAUSE, RESUME, Actor
from django_dbtaskqueue.operations.queue_control import ensure_row, pause, resume
from django_dbtaskqueue.operations.schedules import add_schedule, edit_schedule
from django_dbtaskqueue.operations.verbs import DELETE, MOVE, QUEUE_VERBS, REPROCESS, TASK_VERBS, VerbOptions
from django_dbtaskqueue.testing import advance
from tests.factories import QUEUE, age, make_task
from tests.operations.site import ONLY_PARCELS, QUEUES, command, page, post, refused, work

NOW, HOUR = VerbOptions(timedelta(0), signal="approved"), timedelta(hours=1)


def taken() -> int:
    return len(Task.objects.checkout(QUEUE, poller_instance="p"))


def test_housekeep_counts_and_takes_only_tasks_of_the_age() -> None:
    old, young = make_task(Status.ERROR), make_task(Status.ERROR)
    age(timedelta(days=15), pk=old.pk)
    verb = TASK_VERBS["housekeep"]
    assert str(preview(Task.objects.all(), ActionRequest(verb)).eligible) == "1"
    assert verb.run([old, young], VerbOptions(to="delete")) == 1
    assert [task.pk for task in Task.objects.all()] == [young.pk]
    for name in ("reprocess", "mark_poison", "unpoison", "kick", "cancel", "release"):
        verb = TASK_VERBS[name]
        task = make_task(verb.sources[0])
        Task.objects.filter(pk=task.pk).delete()
        make_task(Status.COMPLETED, pk=task.pk)  # what was read is no longer true
        assert (verb.run([task], NOW), Task.objects.get(pk=task.pk).status) == (0, Status.COMPLETED), name


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_housekeep_says_which_task_is_waited_for_until_nothing_waits(alias: str) -> None:
    parent, alone = enqueue(QUEUE, using=alias), make_task(Status.POISON, using=alias)
    child = enqueue(QUEUE, after=parent, using=alias)
    (lease,) = Task.objects.db_manager(alias).checkout(QUEUE, poller_instance="p")
    lease.poison()
    tasks, ids = Task.objects.db_manager(alias).all(), [parent.pk, alone.pk]
    report = act_on_ids(tasks, ids, ActionRequest(TASK_VERBS["housekeep"], options=NOW), Actor())
    words = "another task or a client waits for its end on this database"
    assert (report.changed, report.tasks, report.skips) == (1, [alone], {words: [parent.pk]})
    tasks.filter(pk=child.pk).purge()
    dependencies.sweep_missing(Session.on(alias), 0)
    report = act_on_ids(tasks, ids, ActionRequest(TASK_VERBS["housekeep"], options=NOW), Actor())
    assert (report.changed, report.skips) == (1, {"there is no such task": [alone.pk]})


def test_a_verb_says_why_it_skips_and_speaks_of_one_and_of_many() -> None:
    for verb, options, words in (
        *(("reprocess", NOW, "not in ERROR"), ("unpoison", NOW, "not in POISON"), ("housekeep", NOW, "not finished")),
        ("housekeep", VerbOptions(timedelta(hours=12)), "not finished, or finished less than 12h ago"),
        ("housekeep", VerbOptions(), "not finished, or finished less than 14d ago"),
    ):
        assert TASK_VERBS[verb].skipped(options) == words
    for verb in (*TASK_VERBS.values(), *QUEUE_VERBS.values()):
        one, two = (str(verb.done % {"number": number}) for number in (1, 2))
        assert one.startswith("1 ") and two != one.replace("1", "2")


def test_a_pause_holds_at_the_next_checkout_until_its_end_or_resume() -> None:
    make_task()
    assert (pause(QUEUE, "default", by="ada", until=timezone.now() + HOUR), taken()) == (1, 0)
    age(2 * HOUR, model=Queue, name=QUEUE)
    assert taken() == 1
    assert resume(QUEUE, "default") == 0, "it was over already"
    pause(QUEUE, "default", by="ada", reason="first", until=timezone.now() + 2 * HOUR)
    age(HOUR, model=Queue, name=QUEUE)
    since = Queue.objects.get().paused_time
    pause(QUEUE, "default", by="bob", reason="second", until=timezone.now() + HOUR)
    row = Queue.objects.get()
    assert (row.paused_time, row.paused_by, row.paused_reason) == (since, "bob", "second")
    age(2 * HOUR, model=Queue, name=QUEUE)
    make_task()
    assert (pause(QUEUE, "default", by="ada", reason="maintenance"), taken()) == (1, 0)
    again = Queue.objects.filter(IN_EFFECT).get().paused_time
    assert again is not None and since is not None and again > since
    assert (resume(QUEUE, "default"), taken()) == (1, 1)


def test_which_queues_can_be_paused() -> None:
    refused("Did you mean 'parcels'", pause, "parcles", "default", by="ada", error=UnknownQueue)
    assert not Queue.objects.exists(), "pausing makes no queue known"
    Queue.objects.create(name="by-hand")
    assert pause("by-hand", "default", by="ada") == 1, "it stands in the table only"
    ensure_row(QUEUE, "default")
    ensure_row(QUEUE, "default")
    assert Queue.objects.count() == 2


@pytest.mark.parametrize("zone", ["Pacific/Auckland", "America/New_York"])
def test_a_pause_ends_on_time_without_use_tz(settings: Any, alias: str, zone: str) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, zone
    end = timezone.now() + timedelta(minutes=10)  # the site's local time, without a zone
    rows = Queue.objects.using(alias).filter(IN_EFFECT, name=QUEUE)
    assert pause(QUEUE, alias, by="ada", until=end) == 1
    for minutes, paused in ((0, True), (9, True), (2, False)):
        age(timedelta(minutes=minutes), model=Queue, using=alias, name=QUEUE)
        assert rows.exists() is paused
    assert pause(QUEUE, alias, by="ada") == resume(QUEUE, alias) == 1
    before = Queue.objects.using(alias).values().get()
    over = timezone.now() - timedelta(minutes=1)
    refused("would end before it begins", pause, QUEUE, alias, by="ada", until=over)
    assert Queue.objects.using(alias).values().get() == before


@pytest.fixture
def ada() -> Actor:
    return Actor(User.objects.create_superuser("ada"), "admin")


def test_an_act_is_recorded_with_who_what_how_many_and_why(ada: Actor) -> None:
    failed, done = make_task(Status.ERROR, reference="A"), make_task(Status.COMPLETED)
    why = "in COMPLETED, not in ERROR"
    request = ActionRequest(REPROCESS, "fixed", query="status:ERROR")
    report = act_on_ids(Task.objects.all(), [failed.pk, done.pk], request, ada)
    assert (report.changed, report.skips) == (1, {why: [done.pk]})
    entry = AuditEntry.objects.get()
    assert (entry.actor, entry.source, entry.verb, entry.queue) == ("ada", "admin", "reprocess", QUEUE)
    assert (entry.query, entry.reason, entry.changed, entry.skipped) == ("status:ERROR", "fixed", 1, 1)
    changed = {"tasks": [{"id": failed.pk, "reference": "A"}]}
    assert entry.details == {**changed, "skips": {why: 1}, "skipped_ids": {why: [done.pk]}}
    logged = LogEntry.objects.get()
    assert (logged.user, logged.object_id, logged.action_flag) == (ada.user, str(failed.pk), CHANGE)
    assert (logged.object_repr, logged.change_message) == (f"{QUEUE}/A", "Retry (fixed)")
    act_on_ids(Task.objects.all(), [failed.pk, make_task(queue="letters").pk], ActionRequest(DELETE, "test data"), ada)
    assert AuditEntry.objects.latest("pk").queue == "", "it was of two queues"


@pytest.mark.django_db(transaction=True)
def test_without_the_record_there_is_no_act() -> None:
    task = make_task(Status.ERROR)
    nobody = Actor(User(pk=987654, username="nobody", is_superuser=True))  # Django's log knows no such user
    refused(None, act_on_ids, Task.objects.all(), [task.pk], ActionRequest(REPROCESS), nobody, error=IntegrityError)
    assert Task.objects.get(pk=task.pk).status == Status.ERROR
    assert not AuditEntry.objects.exists() and not LogEntry.objects.exists()


def test_a_pause_of_several_queues_is_asked_for_each_before_any(settings: Any, ada: Actor) -> None:
    settings.DBTASKQUEUE |= {"CAN_OPERATE": ONLY_PARCELS}
    words = "ada may not use pause on queue letters"
    refused(words, queue_control.apply_to_queues, PAUSE, [QUEUE, "letters"], ada, error=PermissionDenied)
    assert queue_control.apply_to_queues(RESUME, [QUEUE], ada) == 0, "it was not paused"
    assert not Queue.objects.exists() and not AuditEntry.objects.exists()


def payloads_of_parcels(user: User, verb: str, queue: str) -> bool:
    return verb != "view_payload" or queue == QUEUE


def test_no_payload_is_moved_to_where_it_could_be_read(settings: Any, ada: Actor) -> None:
    settings.DBTASKQUEUE |= {"CAN_OPERATE": f"{__name__}.payloads_of_parcels"}
    add_schedule("daily", {"queue": "letters", "cron": "0 7 * * *"}, Actor())
    refused("queue letters", edit_schedule, "daily", {"queue": QUEUE}, ada, error=PermissionDenied)
    task, there = make_task(queue="letters"), VerbOptions(queue=QUEUE)
    assert act_on_ids(Task.objects.all(), [task.pk], ActionRequest(MOVE, options=there), ada).skipped == 1
    away = replace(there, queue="letters")
    moved = act_on_ids(Task.objects.all(), [make_task().pk], ActionRequest(MOVE, options=away), ada).operation
    orders = [bulk.start(MOVE, "queue:letters", ada, options=there), bulk.put_back(cast(Any, moved), ada)]
    work()
    skips = BulkOperation.objects.filter(pk__in=[order.pk for order in orders]).values_list("skips", flat=True)
    assert [*map(list, skips)] == [["not permitted on queue letters"]] * 2
    assert {*Task.objects.values_list("queue", flat=True)} == {"letters"}


def test_a_verb_of_queues_has_its_command_its_route_and_its_button(op: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUEUE_VERBS, "wake", replace(RESUME, name="wake", label="Wake up"))
    form = {"action": "wake", "_selected_action": QUEUE, "confirm": "yes", "reason": "why"}
    by_page, by_api = partial(op.post, QUEUES, form), partial(post, op, f"queues/{QUEUE}/wake")
    for use in (partial(command, "wake", QUEUE), by_page, by_api):
        pause(QUEUE, "default", by="ada")
        assert "Wake up" in page(op, QUEUES)
        use()
        assert not Queue.objects.filter(IN_EFFECT).exists()
    assert list(AuditEntry.objects.values_list("verb", flat=True)) == ["wake"] * 3


def test_a_pause_ends_at_a_time_that_can_be_read_and_a_copy_has_the_time_to_live() -> None:
    late = "too long: it ends in the year 2200"
    ends = {"9999-12-31T23:59:59-12:00": late, "2201-01-01T00:00+00:00": late, "1999-01-01T00:00+00:00": "before it"}
    for end, words in ends.items():
        refused(words, pause, QUEUE, "default", by="ada", until=datetime.fromisoformat(end))
    with pytest.raises(DatabaseError), transaction.atomic():
        Queue.objects.create(name="by-hand", paused_until=datetime(9999, 12, 31, tzinfo=UTC))
    task = enqueue(QUEUE, delay=5 * HOUR, ttl=HOUR)

    def ttl_of_copy() -> timedelta:
        copy = Task.objects.get(pk=enqueue_copy(Task.objects.get(pk=task.pk)).pk)
        copy.delete()
        return copy.expire_time - copy.next_process_time

    waits, _ = ttl_of_copy(), advance(5 * HOUR)
    (lease,) = Task.objects.checkout(QUEUE, poller_instance="p")
    runs, _ = ttl_of_copy(), lease.fail("down", retry=False)
    assert [waits, runs, ttl_of_copy()] == [HOUR] * 3
