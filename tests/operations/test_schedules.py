"""Schedules as operators see and change them: by functions, pages, the command line and the API."""

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from html import unescape
from itertools import islice
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.core.exceptions import PermissionDenied
from django.core.management import CommandError
from django.db.models.functions import Now
from django.test import Client
from django.utils import translation

from django_dbtaskqueue import UnknownQueue, periodic, processor, registry
from django_dbtaskqueue.conf.cron import ticks
from django_dbtaskqueue.flow.schedule import Definition, declare
from django_dbtaskqueue.models import AuditEntry, Poller, Schedule, Task
from django_dbtaskqueue.operations import schedules
from django_dbtaskqueue.operations.doctor import examine
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.schedules import add_schedule, edit_schedule, listed, next_times
from tests.operations.site import ADMIN, ONLY_PARCELS, command, data, logged_in, page, post, refused, text, user

LIST = f"{ADMIN}schedule/"
PAGE = f"{LIST}daily/change/"
HERE = Actor()
MADRID = Definition("bills", "0 7 * * mon-fri", "Europe/Madrid", {"kind": "daily", "token": "s3cret"})


def apples_only(user: Any, queue: str) -> bool:
    return queue == "bills" or user.username != "apples"


@pytest.fixture(autouse=True)
def _bills(settings: Any, taskqueue_registry: None) -> None:
    settings.DBTASKQUEUE |= {"QUEUES": {"bills": {}, "letters": {}}}
    periodic("0 7 * * mon-fri", queue="bills", name="daily", timezone="Europe/Madrid", payload=MADRID.payload)


@pytest.fixture
def daily() -> Schedule:
    declare("default", {"daily": MADRID})
    return Schedule.objects.get()


def user_with(name: str, *words: str) -> User:
    return user(*(word if "_" in word else f"{word}_schedule" for word in words), name=name, staff=True)


def act(name: str, schedule: str = "daily", actor: Actor = HERE, reason: str = "") -> None:
    schedules.act_on_schedule(schedules.SCHEDULE_VERBS[f"{name}_schedule"], schedule, actor, reason=reason)


def document_for(actor: Actor) -> dict[str, Any]:
    return schedules.schedule_document(schedules.find_schedule("daily", actor), actor)


def test_a_cron_text_in_words_of_the_language() -> None:
    for cron, words in (
        *((cron, "every weekday at 07:00 UTC") for cron in ("0 7 * * mon-fri", "0 0 7 * * 1-5")),
        ("30 6,18 * * *", "every day at 06:30 and 18:30 UTC"),
        ("5 9 * * mon,thu", "every Monday and Thursday at 09:05 UTC"),
        ("5 9 * * 0", "every Sunday at 09:05 UTC"),
        ("0 3 1 * *", "on day 1 of each month at 03:00 UTC"),
        *(("* * * * *", "every minute UTC"), ("*/15 * * * *", "every 15 minutes UTC")),
        ("*/10 8-17 * * *", "every 10th minute from 08:00 through 17:59 UTC"),
        ("0 0 * * mon#1", "at 00:00 on the first Monday of the month UTC"),
        ("0 7 * *", "cron='0 7 * *' has 4 fields. A cron text has 5 fields"),
    ):
        assert schedules.in_words(cron, "UTC").startswith(words)
    with translation.override("de"):
        assert "Montag" in schedules.in_words("0 7 * * mon", "UTC")


def test_the_next_five_times_are_those_of_the_zone_and_no_row_breaks_a_page(daily: Schedule, op: Client) -> None:
    found = next_times(daily)
    assert found == list(islice(ticks(MADRID.cron, MADRID.timezone, datetime.now(UTC)), 5))
    assert {one.strftime("%H:%M") for one in found} == {"07:00"} and all(one.weekday() < 5 for one in found)
    Schedule.objects.update(cron="never", timezone="Nowhere/At-All")
    document = document_for(HERE)
    assert (document["next_times"], "has 1 fields" in document["words"]) == ([], True)
    assert page(op, LIST) and page(op, PAGE)
    act("pause")
    refused("has 1 fields", act, "resume")


def test_pause_resume_run_and_delete_are_recorded(daily: Schedule) -> None:
    add_schedule("mine", {"queue": "bills", "cron": "* * * * *"}, HERE, reason="month end")
    act("pause", "mine", reason="too many")
    refused("is paused already", act, "pause", "mine")
    Schedule.objects.filter(pk="mine").update(next_time=Now() - timedelta(hours=3))
    act("run", "mine")
    task = Task.objects.get()
    mine = Schedule.objects.filter(pk="mine")
    assert str(task.reference).startswith("mine@run 20") and mine.get().last_task == task.pk
    act("resume", "mine")
    row = mine.get()
    assert row.next_time is not None and row.next_time > datetime.now(UTC)  # the pause is not made up for
    act("delete", "mine")
    assert not mine.exists()
    told = {"add": "month end", "pause": "too many", "run": "", "resume": "", "delete": ""}
    entries = AuditEntry.objects.order_by("pk").values_list("verb", "queue", "reason", "details__schedule")
    assert list(entries) == [(f"{name}_schedule", "bills", reason, "mine") for name, reason in told.items()]


def test_a_person_wins_over_the_code_until_back_to_the_code(daily: Schedule) -> None:
    edit_schedule("daily", {"cron": "0 9 * * *", "priority": 4}, HERE, reason="later")
    declare("default", {"daily": Definition("letters", "0 8 * * *", "UTC")})
    row = Schedule.objects.get()
    assert (row.cron, row.priority, row.queue, row.edited) == ("0 9 * * *", 4, "letters", ["cron", "priority"])
    assert row.next_time == next(ticks("0 9 * * *", "UTC", datetime.now(UTC)))
    changes = {"cron": ["0 7 * * mon-fri", "0 9 * * *"], "priority": [None, 4]}
    assert AuditEntry.objects.get().details["changes"] == changes
    act("reset")
    row = Schedule.objects.get()
    assert (row.cron, row.priority, row.edited) == ("0 8 * * *", None, [])
    assert row.next_time == next(ticks("0 8 * * *", "UTC", datetime.now(UTC)))
    refused("Nothing of daily was changed by hand", act, "reset")


def test_a_row_of_another_release_is_edited_and_reset_and_deleted_when_no_code_declares_it(daily: Schedule) -> None:
    Schedule.objects.update(code={"queue": "bills", "cron": "0 6 * * *", "timezone": "UTC", "news": True})
    edit_schedule("daily", {"priority": 3}, HERE)
    assert Schedule.objects.get().edited == ["cron", "timezone", "payload", "priority"]
    act("reset")
    row = Schedule.objects.get()
    assert (row.cron, row.payload, row.priority, row.missed, row.edited) == ("0 6 * * *", None, None, "one", [])
    refused("The code declares daily", act, "delete")
    registry.restore(({}, {}, {}))
    assert not document_for(HERE)["declared"]
    act("delete")
    assert not Schedule.objects.exists()


def test_a_wrong_edit_or_name_is_refused_in_words(daily: Schedule) -> None:
    for name, value, words in (
        ("cron", "0 25 * * *", "'25' is not a hour"),
        ("timezone", "Europe/Madird", "Did you mean 'Europe/Madrid'"),
        ("queue", "billz", "Did you mean 'bills'"),
        ("missed", "both", "must be one of 'skip', 'one', 'all'"),
        ("payload_type", "no.such.Type", "no processor of queue 'bills' for it"),
        ("priority", 99_999, "must be a whole number"),
        ("priority", "0" * 8 + "99999", "must be a whole number"),
        ("payload", {"kind": "daily", "token": "other"}, "token is masked and cannot be changed here"),
    ):
        refused(words, edit_schedule, "daily", {name: value}, HERE)
    refused("There is a schedule 'daily' already", add_schedule, "daily", {"queue": "bills", "cron": "* * * * *"}, HERE)
    refused("There is no schedule 'dialy'. Did you mean 'daily'", act, "run", "dialy")
    assert Schedule.objects.get().edited == [] and not AuditEntry.objects.exists()


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_a_schedule_is_in_the_database_of_its_queue(settings: Any, op: Client) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"bills": {"database": "sqlite"}, "letters": {}}}
    bills, letters = ({"queue": queue, "cron": "0 7 * * *"} for queue in ("bills", "letters"))
    add_schedule("apart", bills, HERE)
    assert not Schedule.objects.exists() and Schedule.objects.using("sqlite").exists()
    refused("already", add_schedule, "apart", letters, HERE)
    refused("is in another database", edit_schedule, "apart", {"queue": "letters"}, HERE)
    refused("is in another database", add_schedule, "lost", letters, HERE, using="sqlite")
    for address in (LIST, f"{LIST}apart/change/"):
        assert "every day at 07:00 UTC" in page(op, address)
    edit_schedule("apart", {"overlap": "skip"}, HERE)
    act("run", "apart")
    refused("The task before is not finished", act, "run", "apart")
    assert Task.objects.using("sqlite").get().queue == "bills"


EVERYTHING = {"add", "change", "run", "delete", "view"}
NEEDS = {"pause": "change", "resume": "change", "reset": "change", "run": "run", "delete": "delete"}


def test_each_verb_needs_its_own_permission_on_the_queue(daily: Schedule, settings: Any) -> None:
    everybody = Actor(user_with("all", *EVERYTHING))
    settings.DBTASKQUEUE |= {"CAN_OPERATE": ONLY_PARCELS}
    for name in NEEDS:
        refused(None, act, name, "daily", everybody, error=PermissionDenied)
    settings.DBTASKQUEUE = {name: one for name, one in settings.DBTASKQUEUE.items() if name != "CAN_OPERATE"}
    for name, permission in NEEDS.items():
        without = Actor(user_with(f"no {name}", *EVERYTHING - {permission}))
        refused(None, act, name, "daily", without, error=PermissionDenied)
    assert not AuditEntry.objects.exists() and not Task.objects.exists()


def test_a_payload_is_edited_and_seen_only_with_its_permission(daily: Schedule) -> None:
    actor = Actor(user_with("editor", "change", "view"))
    assert document_for(actor)["payload"] is None
    refused("permission to see payloads", edit_schedule, "daily", {"payload": {}}, actor, error=PermissionDenied)
    both = Actor(user_with("both", "change", "view_payload"))
    edit_schedule("daily", {"payload": {"kind": "weekly", "token": "•••"}}, both)
    assert Schedule.objects.get().payload == {"kind": "weekly", "token": "s3cret"}
    document = document_for(both)
    assert document["payload"] == {"kind": "weekly", "token": "•••"}
    assert document["code"] == {"payload": {"kind": "daily", "token": "•••"}}
    assert "weekly" not in json.dumps(AuditEntry.objects.get().details)


def test_another_team_sees_nothing_of_it(daily: Schedule, settings: Any) -> None:
    settings.DBTASKQUEUE |= {"CAN_VIEW": f"{__name__}.apples_only"}
    add_schedule("theirs", {"queue": "letters", "cron": "* * * * *"}, HERE)
    actor = Actor(user_with("apples", *EVERYTHING))
    assert [row.name for row in listed(actor)] == ["daily"]
    refused("There is no schedule 'theirs'", act, "run", "theirs", actor)
    refused(None, add_schedule, "new", {"queue": "letters", "cron": "* * * * *"}, actor, error=UnknownQueue)
    refused(None, edit_schedule, "daily", {"queue": "letters"}, actor, error=UnknownQueue)


def said(answer: Any) -> str:
    return unescape(text(answer))


def test_the_page_shows_words_times_and_who_wins(daily: Schedule, op: Client) -> None:
    assert "every weekday at 07:00 Europe/Madrid" in page(op, LIST)
    shown = page(op, PAGE)
    for one in next_times(listed(HERE)[0]):
        assert f"{one:%a %Y-%m-%d %H:%M:%S %Z}" in shown
    assert "The schedule is as the code says, and follows it." in shown and "s3cret" not in shown and "•••" in shown
    edit_schedule("daily", {"cron": "0 9 * * *"}, HERE)
    shown = page(op, PAGE)
    assert "stays until a person chooses “Back to the code”" in shown and "0 7 * * mon-fri" in shown
    registry.restore(({}, {}, {}))
    assert "The code that declared this schedule is not in this process." in page(op, PAGE)


def test_a_page_acts_after_a_confirmation_and_offers_what_the_user_may(daily: Schedule, op: Client) -> None:
    asked = {"action": "pause_schedule", "_selected_action": "daily"}
    assert "No task is enqueued until" in said(op.post(LIST, asked))
    assert not Schedule.objects.get().paused
    sure = {**asked, "confirm": "yes", "reason": "quiet"}
    assert "1 schedule paused." in said(op.post(LIST, sure, follow=True)) and Schedule.objects.get().paused
    assert "daily is paused already." in said(op.post(LIST, sure, follow=True))
    client = logged_in(user_with("viewer", "view"))
    for address in (LIST, PAGE):
        assert 'name="action"' not in page(client, address)
    answer = client.post(LIST, {"action": "run_schedule", "_selected_action": "daily", "confirm": "yes"})
    assert answer.status_code == 403 and not Task.objects.exists()


def test_a_form_makes_and_edits_schedules_and_says_what_is_wrong(daily: Schedule, op: Client) -> None:
    facts = {"name": "mine", "queue": "letters", "timezone": "Europe/Madrid", "payload": '{"n": 1}', "missed": "all"}
    form = {"action": "add_schedule", "confirm": "yes", "overlap": "skip", "reason": "why", **facts}
    assert 'value="one" selected' in said(op.post(LIST, {"action": "add_schedule"}))
    assert "is ambiguous" in said(op.post(LIST, {**form, "cron": "0 7 13 * fri"}))
    assert "not JSON" in said(op.post(LIST, {**form, "cron": "0 7 * * fri", "payload": "{"}))
    assert op.post(LIST, {**form, "cron": "0 7 * * fri"})["Location"] == f"{LIST}mine/change/"
    made = Schedule.objects.get(pk="mine")
    assert (made.source, made.payload, made.missed, made.overlap) == ("person", {"n": 1}, "all", "skip")
    edit = {"action": "edit_schedule", "_selected_action": "daily"}
    shown = said(op.post(LIST, edit))
    assert "0 7 * * mon-fri" in shown and "s3cret" not in shown
    answers = {**asdict(MADRID), "payload": '{"kind": "daily", "token": "•••"}', "priority": "7", "reason": ""}
    op.post(LIST, {**edit, **answers, "confirm": "yes"})
    row = Schedule.objects.get(pk="daily")
    assert (row.priority, row.edited, row.payload) == (7, ["priority"], MADRID.payload)


def test_the_command_line_does_it_all(daily: Schedule) -> None:
    run = partial(command, "schedules")
    assert "every weekday at 07:00 Europe/Madrid" in run()
    facts = ("--queue", "letters", "--cron", "*/5 * * * *", "--payload", '{"n": 1e16}')
    assert "1 schedule made." in run("add", "mine", *facts)
    (made,) = [one for one in data("schedules", "list") if one["name"] == "mine"]
    assert (made["words"], repr(made["payload"]), len(made["next_times"])) == ("every 5 minutes UTC", "{'n': 1e+16}", 5)
    assert data("schedules", "edit", "mine", "--priority", "3")["priority"] == 3
    assert data("schedules", "edit", "mine", "--priority", "null")["priority"] is None
    for what, done in {"pause": "schedule paused", "resume": "schedule resumed", "run": "task enqueued"}.items():
        assert f"1 {done}." in run(what, "mine", "--reason", "why")
    assert "1 schedule deleted." in run("delete", "mine")
    with pytest.raises(CommandError) as error:
        run("run")
    assert error.value.returncode == 2
    for wrong, words in (("--payload {", "not JSON"), ("--priority high", "'high'")):  # argparse ends with 2, too
        refused(words, run, "edit", "daily", *wrong.split(), error=CommandError)
    refused("There is no schedule 'mine'", run, "show", "mine", error=CommandError)


def test_the_api_does_it_all(daily: Schedule, op: Client) -> None:
    def ask(address: str, **body: Any) -> Any:
        return post(op, f"schedules/{address}", **body)

    assert [one["name"] for one in op.get("/api/schedules").json()["schedules"]] == ["daily"]
    given = {"queue": "letters", "cron": "0 7 * * *", "priority": -2, "payload": {"n": 1}}
    assert ask("mine/add", **given).json()["words"] == "every day at 07:00 UTC"
    assert ask("eu/pause/add", queue="letters", cron="0 7 * * *").status_code == 200  # it looks like a verb's address
    assert op.get("/api/schedules/eu/pause").json()["name"] == op.get("/api/schedules/eu%2Fpause").json()["name"]
    assert [ask(f"eu/pause/{action}").status_code for action in ("pause", "delete")] == [200, 200]
    made = ask("mine/edit", cron="0 8 * * *", priority=None, payload=None).json()
    assert (made["cron"], made["priority"], made["payload"]) == ("0 8 * * *", None, None)
    for action in ("pause", "resume", "run", "delete"):
        assert ask(f"mine/{action}").status_code == 200
    wrong = (ask("mine/edit", priority=1), ask("daily/explode"), ask("daily/delete"), ask("daily/edit", cron=None))
    assert [answer.status_code for answer in wrong] == [404, 404, 400, 400]
    assert "is not a hour" in ask("daily/edit", cron="0 25 * * *").json()["error"]


def findings() -> dict[str, str]:
    return {one.id: one.level for one in examine() if one.id.startswith("schedule.")}


def test_the_doctor_and_the_checks_name_what_is_wrong_with_schedules(daily: Schedule) -> None:
    assert findings() == {"schedule.no_processor": "warning"}
    found = {one.id: one.msg for one in run_checks(tags=["dbtaskqueue"])}
    assert "Schedule 'daily' enqueues to 'bills', for which this code has no processor." in found["dbtaskqueue.W004"]
    processor("bills")(lambda task: None)
    assert findings() == {}
    Schedule.objects.update(next_time=Now() - timedelta(minutes=5), note="queue 'bills' is full")
    assert findings() == {}  # without a poller that is no news
    Poller.objects.create(instance="here", state="RUNNING", queues=["bills"])
    assert findings() == {"schedule.overdue": "error"}
    (words,) = [one.words for one in examine() if one.id == "schedule.overdue"]
    assert words == "Schedule daily is overdue although pollers run: queue 'bills' is full."
    Schedule.objects.update(paused=True)
    assert findings() == {}
    Schedule.objects.update(paused=False)
    registry.restore(({}, {}, {}))
    assert findings() == {"schedule.gone": "info"}
    periodic("* * * * *", name="lost")(findings)
    (error,) = [one for one in run_checks(tags=["dbtaskqueue"]) if one.id == "dbtaskqueue.E010"]
    assert "lost is not a processor. Stack it on one @processor, or say queue=" in error.msg
