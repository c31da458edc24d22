"""A queue spread over two databases, PostgreSQL and SQLite: where its tasks go, and ``taskqueue shards move``."""

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError
from django.db import connections, transaction
from django.db.models.functions import Now
from django.db.utils import DatabaseError

from django_dbtaskqueue import SignalRefused, batch, enqueue, enqueue_many, queue, registry, signal
from django_dbtaskqueue.backend import compat
from django_dbtaskqueue.backend.results import find_place
from django_dbtaskqueue.core.exceptions import EnqueueError
from django_dbtaskqueue.flow.schedule import enqueue_due
from django_dbtaskqueue.flow.shard_move import ShardMove
from django_dbtaskqueue.models import Attempt, AuditEntry, MinuteCount, Queue, Schedule, Step, Task, UsedReference
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.queue_control import move_shards
from django_dbtaskqueue.operations.search import parse
from django_dbtaskqueue.operations.search.query import tasks_for
from django_dbtaskqueue.testing import run_poller
from tests.factories import make_task
from tests.operations.site import ADMIN, OVERVIEW, QUEUES, TASKS, client, command, data, page, post, refused, text
from tests.support import alias_beside, taken_back

SHARDS = ("default", "sqlite")
pytestmark = pytest.mark.django_db(databases=SHARDS, transaction=True)


def spread(settings: Any, *shards: str, **options: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"spread": {"shards": shards or SHARDS, **options}}, "API": True}


@pytest.fixture(autouse=True)
def _one_shard(settings: Any, taskqueue_registry: None) -> None:
    settings.ROOT_URLCONF = "tests.operations.site"
    spread(settings, "default")


def references() -> dict[str, list[str | None]]:
    return {alias: sorted(Task.objects.using(alias).values_list("reference", flat=True), key=str) for alias in SHARDS}


def test_a_reference_always_goes_to_the_same_shard(settings: Any) -> None:
    spread(settings)
    names = [f"r{number}" for number in range(20)]
    enqueue_many("spread", ({"reference": name} for name in names))
    found = references()
    for name in names:
        enqueue("spread", name, on_duplicate="ignore")
    assert references() == found
    assert sorted(found["default"] + found["sqlite"]) == sorted(names)
    assert all(len(references) >= 4 for references in found.values())


def test_lists_and_counts_say_which_shards_they_leave_out_and_a_purge_leaves_none(
    settings: Any, capsys: Any, admin_client: Any
) -> None:
    spread(settings)
    made = {task._state.db: f"{task.reference}" for task in (enqueue("spread", f"r{n}") for n in range(20))}
    others = "These are the tasks on database default. For sqlite give --database; in the API, database."
    *_, last = bulk.preview("cancel", "queue:spread").sentences
    assert last.startswith(others) and others in page(admin_client, TASKS)
    assert made["default"] in command("list", "--filter", "queue:spread", "--limit", 20)
    assert capsys.readouterr().err.startswith(others)
    number = {alias: Task.objects.using(alias).count() for alias in SHARDS}
    for here, there, where in (*SHARDS, {}), (*SHARDS[::-1], {"database": "sqlite"}):
        found = admin_client.get("/api/tasks", {"q": "queue:spread", **where}).json()
        counted = admin_client.get("/api/tasks/count", {"queue": "spread", **where}).json()
        assert made[here] in str(found["tasks"]) and counted["count"]["number"] == number[here]
        assert found["elsewhere"] == counted["elsewhere"] and f"{here}. For {there} give" in found["elsewhere"]
        assert post(admin_client, "tasks/cancel/search", q="queue:spread", **where).json()["estimate"] == number[here]
    for alias in SHARDS:
        MinuteCount.objects.using(alias).create(kind="outcome", queue="spread", name="completed", minute=Now(), count=3)
    points = admin_client.get("/api/trends", {"queue": "spread"}).json()["points"]
    assert sum(point["outcomes"].get("completed", 0) for point in points) == 6, "counts are of all shards"
    make_task(queue="spread", using="sqlite", ready_time=-timedelta(hours=9))
    assert admin_client.get("/api/audit", {"database": "sqlite"}).json()["entries"][0]["verb"] == "cancel"
    for where in ("/api/doctor", f"{ADMIN}doctor/"):
        assert "sqlite: No poller is alive" in admin_client.get(where).content.decode()
    asked, words = {"confirm": "spread", "reason": "test data"}, "Name the database: default or sqlite"
    for where, given in ("queues/spread/purge", asked), ("tasks/purge/search", {"q": "queue:spread", "reason": "x"}):
        assert words in post(admin_client, where, **given).json()["error"]
    refused(words, data, "purge", "spread", "--yes", "--reason", "x", error=CommandError)
    assert post(admin_client, "queues/spread/purge", database="sqlite", **asked).status_code == 202
    admin_client.post(QUEUES, {"purge": "spread", "typed": "spread", "reason": "test data"})
    assert [AuditEntry.objects.using(alias).filter(verb="purge").count() for alias in SHARDS] == [1, 2]
    spread(settings, "sqlite")
    assert "database" not in "".join(bulk.preview("cancel", "queue:spread").sentences)


def test_a_page_is_about_the_database_that_its_address_names(settings: Any, admin_client: Any, client: Any) -> None:
    spread(settings)
    for one in SHARDS:
        task = make_task(queue="spread", reference=f"on {one}", status="ERROR", using=one)
        operation = bulk.start("cancel", "queue:spread", Actor(), f"on {one}", one)
        operation.changes.create(audit_id=1, task_ids=[task.pk], skip_reason="x", first_task_id=0, last_task_id=0)
    assert "on default" in (shown := page(admin_client, TASKS)) and "on sqlite" not in shown
    assert f'href="{TASKS}?database=sqlite"' in shown
    rows = f"{TASKS}{task.pk}/change/", f"{ADMIN}bulkoperation/{operation.pk}/change/"
    for address in (*rows, TASKS, QUEUES, f"{QUEUES}spread/change/", OVERVIEW, f"{ADMIN}bulkoperation/"):
        shown = page(admin_client, address, database="sqlite").partition('<div id="dbtq"')[2]
        links = {link for link in re.findall(r'(?:href|action)="([^"]*)"', shown) if link.startswith((ADMIN, "?"))}
        assert [link for link in links if "database=" not in link or link.count("?") > 1] == [], address
        assert ("on sqlite" in shown and "on default" not in shown) or address not in (*rows, TASKS)
    given = {"action": "reprocess", "_selected_action": task.pk, "confirm": "yes", "reason": "x", "origin": "page"}
    done = admin_client.post(f"{TASKS}?database=sqlite", given)
    logged = admin_client.get(LogEntry.objects.get(content_type__model="task").get_admin_url())
    assert logged["Location"] == done["Location"] == f"{rows[0]}?database=sqlite"
    assert f"{TASKS}{task.pk}/history/" not in page(admin_client, rows[0], database="sqlite")
    assert [Task.objects.using(alias).get().status for alias in SHARDS] == ["ERROR", "CREATED"]
    assert admin_client.get(f"{TASKS}default_3A/change/").status_code == 302, "no row has that name"
    assert [one.get(TASKS, {"database": "moon"}).status_code for one in (admin_client, client)] == [404, 302]


def test_the_links_of_a_page_lead_to_the_database_where_a_queue_is(settings: Any, admin_client: Any) -> None:
    settings.DBTASKQUEUE["QUEUES"]["away"] = {"database": "sqlite"}
    with batch("all", using="sqlite"):
        task = enqueue("away")
    Schedule.objects.using("sqlite").create(name="tick", queue="away", cron="@daily", last_task=task.pk)
    for address in (f"{ADMIN}batch/sqlite:{task.batch}/change/", f"{ADMIN}schedule/tick/change/", QUEUES):
        shown = text(admin_client.get(address, follow=True)).partition('<div id="dbtq"')[2]
        links = re.findall(f'href="({TASKS}[^"]+)"', shown)
        assert links and all("database=sqlite" in link for link in links), address
    settings.DBTASKQUEUE = {"DEFAULTS": {"database": "sqlite"}, "QUEUES": {"home": {}}}
    assert "database=" not in page(admin_client, TASKS).partition('<div id="dbtq"')[2]


def test_a_router_decides_by_payload(settings: Any) -> None:
    spread(settings, router=lambda _reference, payload, shards: shards[payload["shard"]])
    enqueue("spread", "a", {"shard": 0})
    enqueue_many("spread", [("b", {"shard": 1})])
    assert references() == {"default": ["a"], "sqlite": ["b"]}
    spread(settings, router=lambda *_: "moon")
    refused(r"'moon'.*default, sqlite", enqueue, "spread", "c", error=EnqueueError)
    report = enqueue_many("spread", [("c", 1)], on_invalid="reject")
    assert (report.enqueued, str(report.rejections[0].error)[:8]) == (0, "items[0]")


@pytest.mark.parametrize("shards", [SHARDS, ("sqlite",)])
def test_a_pause_and_a_setting_hold_on_each_shard(settings: Any, shards: tuple[str, ...], admin_client: Any) -> None:
    spread(settings, *shards)
    assert data("pause", "spread", "--reason", "why")["changed"] == 1
    assert admin_client.get("/api/queues/spread").json()["paused"]["reason"] == "why"
    assert admin_client.get("/api/audit", {"queue": "spread"}).json()["entries"][0]["verb"] == "pause"
    data("set", "spread", "max_attempts=9")
    enqueue_many("spread", [(f"r{number}", None) for number in range(9)])
    assert queue("spread").take() is None
    assert all(Queue.objects.using(alias).get().changes == {"max_attempts": 9} for alias in shards)
    assert data("resume", "spread")["changed"] == 1
    taken = [lease for _number in range(20) if (lease := queue("spread").take()) is not None]
    assert len(taken) == 9 and enqueue("spread").max_attempts == 9
    found = tasks_for(parse("queue:spread"))
    assert found.db == shards[0] and found.exists()


def test_a_producer_fails_over_to_the_next_shard(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    with alias_beside("down", PORT="1", HOST="127.0.0.1"):  # nobody answers there
        spread(settings, "sqlite", "down", router=lambda *_: "down")
        assert enqueue("spread", "a")._state.db == "sqlite"
    assert "Shard down is down" in caplog.text
    spread(settings, router=lambda *_: "default")
    with pytest.raises(DatabaseError), transaction.atomic():
        connections["default"].connection.close()  # as when the server goes away in the middle of a transaction
        enqueue("spread", "b")
    assert Task.objects.using("sqlite").get().reference == "a"


# -- taskqueue shards move: waiting tasks change their database once, wherever the command is killed -------------------
def move(*arguments: str) -> Any:
    return data("shards", "move", "spread", *arguments, "--yes")


def drained() -> list[str]:
    seen: list[str] = []
    registry.register("spread", lambda task: seen.append(task.reference))
    with run_poller("spread", threads=1):
        return seen


def test_after_a_change_of_the_shards_each_task_is_where_an_enqueue_puts_it(settings: Any) -> None:
    enqueue_many("spread", ({"reference": f"r{n}", "payload": {"n": n, "x": 0.1}} for n in range(30)))
    spread(settings)
    [moved] = move()["moved"]
    found = references()
    assert len(found["sqlite"]) == moved["tasks"] >= 5
    for number in range(30):
        assert enqueue("spread", f"r{number}", on_duplicate="ignore").enqueue_note
    assert references() == found
    assert Task.objects.using("sqlite").values_list("payload", flat=True)[0]["x"] == 0.1
    assert sorted(drained()) == sorted(f"r{number}" for number in range(30))
    changed = {alias: AuditEntry.objects.using(alias).get(verb="move_shard").changed for alias in SHARDS}
    assert changed == dict.fromkeys(SHARDS, moved["tasks"])
    assert move() == {"moved": [], "refused": {}}


def test_tasks_keep_their_attempts_and_times(settings: Any) -> None:
    task = make_task(queue="spread", reference="r", attempt=2, total_attempt=3, ready_time=timedelta(hours=1), tag="t")
    Attempt.objects.create(task_id=task.pk, queue="spread", attempt=1, total_attempt=2, message="lost")
    spread(settings)
    move("--to", "sqlite")
    there = Task.objects.using("sqlite").get()
    for name in ("reference", "attempt", "total_attempt", "max_attempts", "tag", "status", "payload"):
        assert getattr(there, name) == getattr(task, name), name
    assert abs(there.next_process_time - task.next_process_time) < timedelta(milliseconds=1)
    assert there.ready_time == there.next_process_time
    assert Attempt.objects.using("sqlite").get().task_id == there.pk and not Attempt.objects.exists()


def test_the_order_of_a_group_is_kept_and_references_stay_taken(settings: Any) -> None:
    enqueue_many("spread", ({"reference": f"g{n}", "group": "g"} for n in range(6)))
    spread(settings)
    assert ["--to" in reason for reason in move()["refused"]] == [True]
    move("--to", "sqlite")
    enqueue("spread", "late", group="g", using="default")
    [reason] = move("--to", "sqlite")["refused"]
    assert "--behind" in reason
    move("--to", "sqlite", "--behind")
    assert drained() == [*(f"g{number}" for number in range(6)), "late"]
    spread(settings, "default", unique_over="history")
    enqueue("spread", "r")
    spread(settings, unique_over="history")
    move("--to", "sqlite")
    assert not UsedReference.objects.exists() and UsedReference.objects.using("sqlite").get().reference == "r"


def test_what_cannot_move_is_named_and_stays(settings: Any) -> None:
    refused("No poller of spread looks at database sqlite", move, "--to", "sqlite", error=CommandError)
    refused("no database 'moon'", move, "--from", "moon", error=CommandError)
    first = enqueue("spread", "first")
    enqueue("spread", "child", after=first)
    with batch("all"):
        enqueue("spread", "member")
    running = make_task("PROCESSING", queue="spread", reference="running", group_key="g")
    enqueue("spread", "in its group", group="g")
    spread(settings)
    for alias in SHARDS:
        enqueue("spread", "twice", using=alias)
    stay = [one for names in move("--to", "sqlite")["refused"].values() for one in names]
    assert len(stay) == 5 and f"default/{first.pk}" in stay
    here = ["child", "first", "in its group", "member", "running", "twice"]
    assert references() == {"default": here, "sqlite": ["twice"]}
    assert Task.objects.get(reference="twice").ready_time is not None
    assert Task.objects.get(pk=running.pk).status == "PROCESSING"


def test_the_id_of_a_django_task_names_its_task_on_any_shard(settings: Any) -> None:
    spread(settings)
    settings.TASKS = {"default": {"BACKEND": "django_dbtaskqueue.backend.DatabaseTaskBackend", "QUEUES": []}}
    from tests.testapp import functions

    add = functions.add.using(queue_name="spread")
    with taken_back(), taken_back("sqlite"):
        gone = [add.enqueue(1, 2) for _ in SHARDS]
    kept = [add.enqueue(3, 4) for _ in SHARDS]
    assert {one.id[:13] for one in gone} & {one.id[:13] for one in kept}, "SQLite gives a number to the next task"
    for one in gone:
        with pytest.raises(compat.TaskResultDoesNotExist):
            add.get_result(one.id)
    assert "Django task" in str(move("--to", "sqlite")["refused"])
    assert [add.get_result(one.id).args for one in kept] == [[3, 4]] * 2
    for one in kept:
        session, pk = find_place(one.id)
        (other,) = {*SHARDS} - {session.connection.alias}
        Task.objects.using(other).exists() or make_task(pk=pk, using=other)
        listed = {alias: data("list", "--filter", f"id:{one.id}", "--database", alias) for alias in SHARDS}
        assert (len(listed[session.connection.alias]), listed[other], data("show", one.id)["id"]) == (1, [], pk)


def test_a_task_stays_whose_end_its_schedule_waits_for(settings: Any) -> None:
    tick = {"queue": "spread", "cron": "0 0 1 1 *", "next_time": Now()}
    for overlap in ("skip", "allow"):
        Schedule.objects.create(name=overlap, overlap=overlap, **tick)
    enqueue_due("default", ())
    spread(settings)
    [reason] = move("--to", "sqlite")["refused"]
    assert "its schedule" in reason
    [[stays], [moved]] = references().values()
    assert str(stays).startswith("skip@") and str(moved).startswith("allow@")
    due = Schedule.objects.filter(pk="skip")
    due.update(next_time=Now())
    enqueue_due("default", ())
    assert references()["default"] == [stays] and "not finished" in due.get().note


def test_what_is_on_its_way_gets_neither_signals_nor_children(settings: Any) -> None:
    """They would stay behind: a signal is lost then, and a child runs before its parent."""
    task = enqueue("spread", "r")
    spread(settings)

    def killed(step: str) -> None:
        raise InterruptedError(step)

    refused("marked", move_shards, ShardMove("spread", "sqlite", at_step=killed), Actor(), error=InterruptedError)
    refused("on its way to another shard", signal, task, "approved", error=SignalRefused)
    refused("on its way", enqueue, "spread", after=task, error=EnqueueError)
    assert not Step.objects.exists()
    move()
    there = Task.objects.using("sqlite").get()
    assert enqueue("spread", "child", after=there)._state.db == "sqlite"
    parent, words = enqueue("spread", using="default"), "'child' belongs in shard 'sqlite', and after= names tasks of"
    refused(words, enqueue, "spread", "child", after=parent, error=EnqueueError)
    assert not signal(there, "approved")
    refused("each has its own ids", signal, there.pk, "approved", queue="spread")


def test_an_id_names_no_task_until_its_shard_is_named(settings: Any) -> None:
    spread(settings)
    for alias in SHARDS:
        make_task(queue="spread", reference=alias, pk=7, using=alias)
    refused("more than one task 7", data, "show", "7", "--queue", "spread", error=CommandError)
    refused("has shards", data, "cancel", "--id", "7", "--queue", "spread", "--yes", error=CommandError)
    assert data("show", "spread/sqlite")["reference"] == data("show", "7", "--database", "sqlite")["reference"]
    ada, given = client("cancel_task"), {"ids": [7], "queue": "spread"}
    assert "has shards" in post(ada, "tasks/cancel/ids", **given).json()["error"]
    assert post(ada, "tasks/cancel/ids", **given, database="sqlite").json()["changed"] == 1
    assert [Task.objects.using(alias).get().status for alias in SHARDS] == ["CREATED", "POISON"]


def test_a_database_that_is_no_shard_any_more_is_emptied(settings: Any) -> None:
    spread(settings)
    enqueue_many("spread", ({"reference": f"r{n}"} for n in range(10)))
    enqueue("spread", using="sqlite")
    spread(settings, "default")
    shown = data("shards", "show", "spread", "--from", "sqlite", "--yes")
    assert [(one["database"], one["is_shard"]) for one in shown] == [("default", True), ("sqlite", False)]
    move("--from", "sqlite")
    assert (references()["sqlite"], len(references()["default"])) == ([], 11)
