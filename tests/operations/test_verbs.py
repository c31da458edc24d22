"""The operator's verbs: what they skip and say, and how long a pause holds. What they change: test_matrix."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_dbtaskqueue.core.exceptions import TaskQueueError, UnknownQueue
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.models.control import IN_EFFECT
from django_dbtaskqueue.operations.actions import ActionRequest, preview
from django_dbtaskqueue.operations.queue_control import ensure_rows, pause, resume
from django_dbtaskqueue.operations.verb_inputs import VerbOptions
from django_dbtaskqueue.operations.verbs import QUEUE_VERBS, TASK_VERBS
from tests.factories import QUEUE, age, make_task

NOW = VerbOptions(timedelta(0), signal="approved")


@pytest.fixture(autouse=True)
def _known(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}}


def paused(name: str = QUEUE) -> bool:
    return Queue.objects.filter(IN_EFFECT, name=name).exists()


@pytest.mark.django_db
def test_the_update_tests_the_status_again() -> None:
    for name in ("reprocess", "mark_poison", "unpoison", "kick", "cancel", "release"):
        verb = TASK_VERBS[name]
        task = make_task(verb.sources[0])
        Task.objects.filter(pk=task.pk).delete()
        make_task(Status.COMPLETED, pk=task.pk)  # what was read is no longer true
        assert (verb.run([task], NOW), Task.objects.get(pk=task.pk).status) == (0, Status.COMPLETED), name


@pytest.mark.django_db
def test_housekeep_counts_and_takes_only_tasks_of_the_age() -> None:
    old, young = make_task(Status.ERROR), make_task(Status.ERROR)
    age(timedelta(days=15), pk=old.pk)
    verb = TASK_VERBS["housekeep"]
    assert str(preview(Task.objects.all(), ActionRequest(verb)).eligible) == "1"
    assert verb.run([old, young], VerbOptions(to="delete")) == 1
    assert [task.pk for task in Task.objects.all()] == [young.pk]


@pytest.mark.parametrize(
    ("verb", "options", "words"),
    [
        ("reprocess", VerbOptions(), "not in ERROR"),
        ("unpoison", VerbOptions(), "not in POISON"),
        ("housekeep", NOW, "not finished"),
        ("housekeep", VerbOptions(timedelta(days=1)), "not finished, or finished less than 1 day ago"),
        ("housekeep", VerbOptions(), "not finished, or finished less than 14 days ago"),
    ],
)
def test_a_verb_says_why_it_skips(verb: str, options: VerbOptions, words: str) -> None:
    assert TASK_VERBS[verb].skipped(options) == words


def test_a_verb_speaks_of_one_and_of_many() -> None:
    for verb in (*TASK_VERBS.values(), *QUEUE_VERBS.values()):
        one, two = (str(verb.done % {"number": number}) for number in (1, 2))
        assert one.startswith("1 ") and two != one.replace("1", "2")


@pytest.mark.django_db
def test_a_pause_holds_at_the_next_checkout_and_resume_ends_it() -> None:
    make_task()
    assert Task.objects.due().count() == 1
    # When the queue is paused, which makes its row
    assert pause([QUEUE], by="ada", reason="maintenance") == 1
    # Then nothing is taken, though it is due
    assert Task.objects.checkout(QUEUE, poller_instance="p") == []
    # When it is resumed, then the task is taken
    assert resume([QUEUE]) == 1
    assert len(Task.objects.checkout(QUEUE, poller_instance="p")) == 1


@pytest.mark.django_db
def test_a_pause_ends_by_itself() -> None:
    make_task()
    pause([QUEUE], by="ada", until=timezone.now() + timedelta(hours=1))
    assert Task.objects.checkout(QUEUE, poller_instance="p") == []
    age(timedelta(hours=2), model=Queue, name=QUEUE)
    assert len(Task.objects.checkout(QUEUE, poller_instance="p")) == 1
    assert resume([QUEUE]) == 0, "it was over already"


@pytest.mark.django_db
def test_pausing_again_gives_a_new_reason_and_keeps_since_when() -> None:
    pause([QUEUE], by="ada", reason="first")
    age(timedelta(hours=1), model=Queue, name=QUEUE)
    since = Queue.objects.get(name=QUEUE).paused_time
    pause([QUEUE], by="bob", reason="second")
    row = Queue.objects.get(name=QUEUE)
    assert (row.paused_time, row.paused_by, row.paused_reason) == (since, "bob", "second")


@pytest.mark.django_db
def test_pausing_after_a_pause_that_ended_begins_anew() -> None:
    pause([QUEUE], by="ada", until=timezone.now() + timedelta(hours=1))
    age(timedelta(hours=2), model=Queue, name=QUEUE)
    ended = Queue.objects.get(name=QUEUE).paused_time
    pause([QUEUE], by="ada")
    began = Queue.objects.get(name=QUEUE).paused_time
    assert began is not None and ended is not None and began > ended
    assert paused()


@pytest.mark.django_db
def test_which_queues_can_be_paused() -> None:
    assert pause([], by="ada") == resume([]) == 0
    with pytest.raises(UnknownQueue, match="Did you mean 'parcels'"):
        pause([QUEUE, "parcles"], by="ada")
    assert not Queue.objects.exists(), "pausing makes no queue known"
    Queue.objects.create(name="by-hand")
    assert pause(["by-hand"], by="ada") == 1 and paused("by-hand"), "it stands in the table only"
    ensure_rows([QUEUE], "default")
    ensure_rows([QUEUE], "default")
    assert Queue.objects.count() == 2


@pytest.mark.django_db(databases=["default", "sqlite"])
@pytest.mark.parametrize("alias", ["default", "sqlite"])
@pytest.mark.parametrize("zone", ["Pacific/Auckland", "America/New_York"])
def test_a_pause_ends_on_time_without_use_tz(settings: Any, alias: str, zone: str) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, zone
    end = timezone.now() + timedelta(minutes=10)  # the site's local time, without a zone
    rows = Queue.objects.using(alias).filter(IN_EFFECT, name=QUEUE)
    assert pause([QUEUE], by="ada", until=end, using=alias) == 1
    assert rows.exists()
    age(timedelta(minutes=9), model=Queue, using=alias, name=QUEUE)
    assert rows.exists()
    age(timedelta(minutes=2), model=Queue, using=alias, name=QUEUE)
    assert not rows.exists()
    assert pause([QUEUE], by="ada", using=alias) == resume([QUEUE], using=alias) == 1
    before = list(rows.model.objects.using(alias).values())
    with pytest.raises(TaskQueueError, match="would end before it begins"):
        pause([QUEUE], by="ada", until=timezone.now() - timedelta(minutes=1), using=alias)
    assert list(rows.model.objects.using(alias).values()) == before
