"""``taskqueue shards move``: waiting tasks change their database once, wherever the command is killed."""

import json
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_dbtaskqueue import batch, enqueue, enqueue_many, registry
from django_dbtaskqueue.models import Attempt, AuditEntry, Task, UsedReference
from django_dbtaskqueue.testing import run_poller
from tests.factories import make_task

SHARDS = ("default", "sqlite")

pytestmark = pytest.mark.django_db(databases=SHARDS, transaction=True)


@pytest.fixture(autouse=True)
def queue_of_one_shard(settings: Any, taskqueue_registry: None) -> None:
    """The queue ``spread`` has one shard, and ``two_shards`` gives it both."""
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": ["default"]}}}


def two_shards(settings: Any, **more: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": SHARDS, **more}}}


def command(*arguments: str) -> Any:
    out = StringIO()
    call_command("taskqueue", "shards", *arguments, "--json", "--yes", stdout=out)
    return json.loads(out.getvalue())


def references() -> dict[str, list[str | None]]:
    return {alias: sorted(Task.objects.using(alias).values_list("reference", flat=True), key=str) for alias in SHARDS}


def drained() -> list[str]:
    seen: list[str] = []
    registry.register("spread", lambda task: seen.append(task.reference))
    with run_poller("spread", threads=1):
        return seen


def test_after_a_change_of_the_shards_each_task_is_where_an_enqueue_puts_it(settings: Any) -> None:
    enqueue_many("spread", ({"reference": f"r{n}", "payload": {"n": n, "x": 0.1}} for n in range(30)))
    two_shards(settings)
    [moved] = command("move", "spread")["moved"]
    found = references()
    assert len(found["sqlite"]) == moved["tasks"] >= 5
    for number in range(30):
        assert enqueue("spread", f"r{number}", on_duplicate="ignore").enqueue_note
    assert references() == found
    assert Task.objects.using("sqlite").values_list("payload", flat=True)[0]["x"] == 0.1
    assert sorted(drained()) == sorted(f"r{number}" for number in range(30))
    changed = {alias: AuditEntry.objects.using(alias).get(verb="move_shard").changed for alias in SHARDS}
    assert changed == dict.fromkeys(SHARDS, moved["tasks"])
    assert command("move", "spread") == {"moved": [], "refused": {}}


def test_tasks_keep_their_attempts_and_times(settings: Any) -> None:
    task = make_task(queue="spread", reference="r", attempt=2, total_attempt=3, ready_time=timedelta(hours=1), tag="t")
    Attempt.objects.create(task_id=task.pk, queue="spread", attempt=1, total_attempt=2, message="lost")
    two_shards(settings)
    command("move", "spread", "--to", "sqlite")
    there = Task.objects.using("sqlite").get()
    for name in ("reference", "attempt", "total_attempt", "max_attempts", "tag", "status", "payload"):
        assert getattr(there, name) == getattr(task, name), name
    assert abs(there.next_process_time - task.next_process_time) < timedelta(milliseconds=1)
    assert there.ready_time == there.next_process_time
    assert Attempt.objects.using("sqlite").get().task_id == there.pk and not Attempt.objects.exists()


def test_the_order_of_a_group_is_kept(settings: Any) -> None:
    enqueue_many("spread", ({"reference": f"g{n}", "group": "g"} for n in range(6)))
    two_shards(settings)
    assert ["--to" in reason for reason in command("move", "spread")["refused"]] == [True]
    command("move", "spread", "--to", "sqlite")
    enqueue("spread", "late", group="g", using="default")
    [reason] = command("move", "spread", "--to", "sqlite")["refused"]
    assert "--behind" in reason
    command("move", "spread", "--to", "sqlite", "--behind")
    assert drained() == [*(f"g{number}" for number in range(6)), "late"]


def test_references_that_stay_taken_move_with_their_tasks(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": ["default"], "unique_over": "history"}}}
    enqueue("spread", "r")
    two_shards(settings, unique_over="history")
    command("move", "spread", "--to", "sqlite")
    assert not UsedReference.objects.exists()
    assert UsedReference.objects.using("sqlite").get().reference == "r"


def test_what_cannot_move_is_named_and_stays(settings: Any) -> None:
    with pytest.raises(CommandError, match="No poller of spread looks at database sqlite"):
        command("move", "spread", "--to", "sqlite")
    with pytest.raises(CommandError, match="no alias 'moon'"):
        command("move", "spread", "--from", "moon")
    first = enqueue("spread", "first")
    enqueue("spread", "child", after=first)
    with batch("all"):
        enqueue("spread", "member")
    running = make_task("PROCESSING", queue="spread", reference="running", group_key="g")
    enqueue("spread", "in its group", group="g")
    two_shards(settings)
    enqueue("spread", "twice", using="default")
    enqueue("spread", "twice", using="sqlite")
    refused = command("move", "spread", "--to", "sqlite")["refused"]
    assert sum(map(len, refused.values())) == 5
    assert f"default/{first.pk}" in [one for names in refused.values() for one in names]
    assert references()["default"] == ["child", "first", "in its group", "member", "running", "twice"]
    assert references()["sqlite"] == ["twice"]
    assert Task.objects.get(reference="twice").ready_time is not None
    assert Task.objects.get(pk=running.pk).status == "PROCESSING"


def test_a_database_that_is_no_shard_any_more_is_emptied(settings: Any) -> None:
    two_shards(settings)
    enqueue_many("spread", ({"reference": f"r{n}"} for n in range(10)))
    enqueue("spread", using="sqlite")
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": ["default"]}}}
    shown = command("show", "spread", "--from", "sqlite")
    assert [(one["database"], one["is_shard"]) for one in shown] == [("default", True), ("sqlite", False)]
    command("move", "spread", "--from", "sqlite")
    assert (references()["sqlite"], len(references()["default"])) == ([], 11)
