"""Schedules as operators see and change them: by functions, pages, the command line and the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from html import unescape
from io import StringIO
from itertools import islice
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.checks import run_checks
from django.core.exceptions import PermissionDenied
from django.core.management import CommandError, call_command
from django.db.models.functions import Now
from django.test import Client
from django.urls import include, path
from django.utils import translation

from django_dbtaskqueue import TaskQueueError, UnknownQueue, periodic, processor, registry
from django_dbtaskqueue.conf.cron import ticks
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.flow.schedule import Definition, declare
from django_dbtaskqueue.models import AuditEntry, Poller, Schedule, Task
from django_dbtaskqueue.operations.doctor import examine
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.schedule_control import SCHEDULE_VERBS, act_on_schedule, add_schedule, edit_schedule
from django_dbtaskqueue.operations.schedules import find, in_words, listed, next_times, schedule_document

urlpatterns = [path("admin/", admin.site.urls), path("api/", include("django_dbtaskqueue.api.urls"))]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]
LIST = "/admin/dbtaskqueue/schedule/"
HERE = Actor()
MADRID = Definition("bills", "0 7 * * mon-fri", "Europe/Madrid", {"kind": "daily", "token": "s3cret"})


def denied_here(user: Any, verb: str, queue: str) -> bool:
    return queue != "bills"


def apples_only(user: Any, queue: str) -> bool:
    return queue == "bills" or user.username != "apples"


@pytest.fixture(autouse=True)
def _site(settings: Any) -> Iterator[None]:
    settings.DBTASKQUEUE = {"QUEUES": {"bills": {}, "letters": {}}, "API": True}
    saved = registry.snapshot()
    periodic("0 7 * * mon-fri", queue="bills", name="daily", timezone="Europe/Madrid", payload=MADRID.payload)
    yield
    registry.restore(saved)


@pytest.fixture
def daily() -> Schedule:
    """The schedule that the code declares."""
    declare("default", {"daily": MADRID})
    return Schedule.objects.get()


def user_with(name: str, *codenames: str) -> User:
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    return User.objects.get(pk=user.pk)


def verb(name: str) -> Any:
    return SCHEDULE_VERBS[f"{name}_schedule"]


# -- words and times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("0 7 * * mon-fri", "every weekday at 07:00 UTC"),
        ("0 0 7 * * 1-5", "every weekday at 07:00 UTC"),
        ("30 6,18 * * *", "every day at 06:30 and 18:30 UTC"),
        ("5 9 * * mon,thu", "every Monday and Thursday at 09:05 UTC"),
        ("5 9 * * 0", "every Sunday at 09:05 UTC"),
        ("0 3 1 * *", "on day 1 of each month at 03:00 UTC"),
        ("* * * * *", "every minute UTC"),
        ("*/15 * * * *", "every 15 minutes UTC"),
        ("20 * * * *", "every hour at minute 20 UTC"),
        ("*/10 8-17 * * *", "every 10th minute from 08:00 through 17:59 UTC"),
        ("0 0 * * mon#1", "at 00:00 on the first Monday of the month UTC"),
        ("0 7 * *", "cron='0 7 * *' has 4 fields. A cron text has 5 fields"),
    ],
)
def test_a_cron_text_in_words(cron: str, words: str) -> None:
    assert in_words(cron, "UTC").startswith(words)


def test_words_are_those_of_the_language() -> None:
    with translation.override("de"):
        assert "Montag" in in_words("0 7 * * mon", "UTC")


def test_the_next_five_times_are_those_of_the_zone(daily: Schedule) -> None:
    (row,) = listed(HERE)
    found = next_times(row)
    assert found == list(islice(ticks(MADRID.cron, MADRID.timezone, datetime.now(UTC)), 5))
    assert {one.strftime("%H:%M") for one in found} == {"07:00"}
    assert all(one.weekday() < 5 for one in found)


def test_what_sql_wrote_breaks_no_page(daily: Schedule, admin_client: Client) -> None:
    Schedule.objects.update(cron="never", timezone="Nowhere/At-All")
    row = find("daily", HERE)
    assert row is not None
    document = schedule_document(row, HERE)
    assert (document["next_times"], "has 1 fields" in document["words"]) == ([], True)
    for address in (LIST, f"{LIST}daily/change/"):
        assert admin_client.get(address).status_code == 200
    act_on_schedule(verb("pause"), "daily", HERE)
    with pytest.raises(OperationRefused, match="has 1 fields"):
        act_on_schedule(verb("resume"), "daily", HERE)


# -- the verbs ---------------------------------------------------------------------------------------------------------


def test_pause_resume_run_and_delete_are_recorded(daily: Schedule) -> None:
    add_schedule("mine", {"queue": "bills", "cron": "* * * * *"}, HERE, reason="month end")
    act_on_schedule(verb("pause"), "mine", HERE, reason="too many")
    with pytest.raises(OperationRefused, match="is paused already"):
        act_on_schedule(verb("pause"), "mine", HERE)
    Schedule.objects.filter(pk="mine").update(next_time=Now() - timedelta(hours=3))
    act_on_schedule(verb("run"), "mine", HERE)
    task = Task.objects.get()
    assert str(task.reference).startswith("mine@run 20") and Schedule.objects.get(pk="mine").last_task == task.pk
    act_on_schedule(verb("resume"), "mine", HERE)
    row = Schedule.objects.get(pk="mine")
    assert row.next_time is not None and row.next_time > datetime.now(UTC)  # the pause is not made up for
    act_on_schedule(verb("delete"), "mine", HERE)
    assert not Schedule.objects.filter(pk="mine").exists()
    entries = AuditEntry.objects.order_by("pk").values_list("verb", "queue", "reason", "details")
    assert [(name, queue, reason, details["schedule"]) for name, queue, reason, details in entries] == [
        ("add_schedule", "bills", "month end", "mine"),
        ("pause_schedule", "bills", "too many", "mine"),
        ("run_schedule", "bills", "", "mine"),
        ("resume_schedule", "bills", "", "mine"),
        ("delete_schedule", "bills", "", "mine"),
    ]


def test_run_now_does_not_overlap_where_ticks_do_not(daily: Schedule) -> None:
    edit_schedule("daily", {"overlap": "skip"}, HERE)
    act_on_schedule(verb("run"), "daily", HERE)
    with pytest.raises(OperationRefused, match="The task before is not finished"):
        act_on_schedule(verb("run"), "daily", HERE)
    assert Task.objects.count() == 1


def test_a_person_wins_over_the_code_until_back_to_the_code(daily: Schedule) -> None:
    edit_schedule("daily", {"cron": "0 9 * * *", "priority": 4}, HERE, reason="later")
    declare("default", {"daily": Definition("letters", "0 8 * * *", "UTC")})
    row = Schedule.objects.get()
    assert (row.cron, row.priority, row.queue, row.timezone) == ("0 9 * * *", 4, "letters", "UTC")
    assert row.edited == ["cron", "priority"]
    assert row.next_time == next(ticks("0 9 * * *", "UTC", datetime.now(UTC)))
    assert AuditEntry.objects.get().details["changes"] == {
        "cron": ["0 7 * * mon-fri", "0 9 * * *"], "priority": [None, 4]
    }  # fmt: skip
    act_on_schedule(verb("reset"), "daily", HERE)
    row = Schedule.objects.get()
    assert (row.cron, row.priority, row.edited) == ("0 8 * * *", None, [])
    assert row.next_time == next(ticks("0 8 * * *", "UTC", datetime.now(UTC)))
    with pytest.raises(OperationRefused, match="Nothing of daily was changed by hand"):
        act_on_schedule(verb("reset"), "daily", HERE)


def test_a_row_of_another_release_is_edited_and_reset(daily: Schedule) -> None:
    Schedule.objects.update(code={"queue": "bills", "cron": "0 6 * * *", "timezone": "UTC", "news": True})
    edit_schedule("daily", {"priority": 3}, HERE)
    assert Schedule.objects.get().edited == ["cron", "timezone", "payload", "priority"]
    act_on_schedule(verb("reset"), "daily", HERE)
    row = Schedule.objects.get()
    assert (row.cron, row.payload, row.priority, row.missed, row.edited) == ("0 6 * * *", None, None, "one", [])


def test_what_the_code_declares_cannot_be_deleted_before_the_code_is_gone(daily: Schedule) -> None:
    with pytest.raises(OperationRefused, match="The code declares daily"):
        act_on_schedule(verb("delete"), "daily", HERE)
    registry.restore(({}, {}, {}))
    assert not schedule_document(listed(HERE)[0], HERE)["declared"]
    act_on_schedule(verb("delete"), "daily", HERE)
    assert not Schedule.objects.exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cron": "0 25 * * *"}, "'25' is not a hour"),
        ({"timezone": "Europe/Madird"}, "Did you mean 'Europe/Madrid'"),
        ({"queue": "billz"}, "Did you mean 'bills'"),
        ({"missed": "both"}, "must be one of 'skip', 'one', 'all'"),
        ({"payload_type": "no.such.Type"}, "no processor of queue 'bills' for it"),
        ({"priority": 99_999}, "must be a whole number"),
        ({"payload": {"kind": "daily", "token": "other"}}, "token is masked and cannot be changed here"),
    ],
)
def test_a_wrong_edit_is_refused_in_words(daily: Schedule, values: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskQueueError, match=words):
        edit_schedule("daily", values, HERE)
    assert Schedule.objects.get().edited == []
    assert not AuditEntry.objects.exists()


def test_a_name_is_taken_once_and_a_wrong_one_is_hinted_at(daily: Schedule) -> None:
    with pytest.raises(OperationRefused, match="There is a schedule 'daily' already"):
        add_schedule("daily", {"queue": "bills", "cron": "* * * * *"}, HERE)
    with pytest.raises(OperationRefused, match=r"There is no schedule 'dialy'. Did you mean 'daily'"):
        act_on_schedule(verb("run"), "dialy", HERE)


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_a_schedule_is_in_the_database_of_its_queue(settings: Any, admin_client: Client) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"bills": {"database": "sqlite"}, "letters": {}}}
    add_schedule("apart", {"queue": "bills", "cron": "0 7 * * *"}, HERE)
    assert not Schedule.objects.exists() and Schedule.objects.using("sqlite").exists()
    with pytest.raises(OperationRefused, match="already"):
        add_schedule("apart", {"queue": "letters", "cron": "0 7 * * *"}, HERE)
    with pytest.raises(OperationRefused, match="is in another database"):
        edit_schedule("apart", {"queue": "letters"}, HERE)
    for address in (LIST, f"{LIST}apart/change/"):
        assert "every day at 07:00 UTC" in text_of(admin_client, address)
    act_on_schedule(verb("run"), "apart", HERE)
    assert Task.objects.using("sqlite").get().queue == "bills"


# -- who may -----------------------------------------------------------------------------------------------------------

NEEDS = {"pause": "change", "resume": "change", "reset": "change", "run": "run", "delete": "delete"}


@pytest.mark.parametrize("name", NEEDS)
def test_each_verb_needs_its_own_permission_on_the_queue(daily: Schedule, name: str, settings: Any) -> None:
    everything = {f"{word}_schedule" for word in ("add", "change", "run", "delete", "view")}
    without = Actor(user_with("without", *everything - {f"{NEEDS[name]}_schedule"}))
    with pytest.raises(PermissionDenied):
        act_on_schedule(verb(name), "daily", without)
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "CAN_OPERATE": f"{__name__}.denied_here"}
    with pytest.raises(PermissionDenied):
        act_on_schedule(verb(name), "daily", Actor(user_with("all", *everything)))
    assert not AuditEntry.objects.exists() and not Task.objects.exists()


def test_a_payload_is_edited_and_seen_only_with_its_permission(daily: Schedule) -> None:
    actor = Actor(user_with("editor", "change_schedule", "view_schedule"))
    row = find("daily", actor)
    assert row is not None and schedule_document(row, actor)["payload"] is None
    with pytest.raises(PermissionDenied, match="permission to see payloads"):
        edit_schedule("daily", {"payload": {}}, actor)
    both = Actor(user_with("both", "change_schedule", "view_payload"))
    edit_schedule("daily", {"payload": {"kind": "weekly", "token": "•••"}}, both)
    assert Schedule.objects.get().payload == {"kind": "weekly", "token": "s3cret"}
    row = find("daily", both)
    assert row is not None
    document = schedule_document(row, both)
    assert document["payload"] == {"kind": "weekly", "token": "•••"}
    assert document["code"] == {"payload": {"kind": "daily", "token": "•••"}}
    assert "weekly" not in json.dumps(AuditEntry.objects.get().details)


def test_another_team_sees_nothing_of_it(daily: Schedule, settings: Any) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "CAN_VIEW": f"{__name__}.apples_only"}
    add_schedule("theirs", {"queue": "letters", "cron": "* * * * *"}, HERE)
    user = user_with("apples", *(f"{word}_schedule" for word in ("add", "change", "run", "delete", "view")))
    actor = Actor(user)
    assert [row.name for row in listed(actor)] == ["daily"]
    with pytest.raises(OperationRefused, match="There is no schedule 'theirs'"):
        act_on_schedule(verb("run"), "theirs", actor)
    with pytest.raises(UnknownQueue):
        add_schedule("new", {"queue": "letters", "cron": "* * * * *"}, actor)
    with pytest.raises(UnknownQueue):
        edit_schedule("daily", {"queue": "letters"}, actor)
    client = Client()
    client.force_login(user)
    assert "theirs" not in client.get(LIST).content.decode()
    assert client.get(f"{LIST}theirs/change/").status_code == 302
    assert client.get("/api/schedules/theirs").status_code == 404
    assert client.post("/api/schedules/theirs/run", {}, content_type="application/json").status_code == 404


# -- pages -------------------------------------------------------------------------------------------------------------


def text_of(client: Client, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200
    return unescape(answer.content.decode())


def test_the_page_shows_words_times_and_who_wins(daily: Schedule, admin_client: Client) -> None:
    assert "every weekday at 07:00 Europe/Madrid" in text_of(admin_client, LIST)
    shown = text_of(admin_client, f"{LIST}daily/change/")
    for one in next_times(listed(HERE)[0]):
        assert f"{one:%a %Y-%m-%d %H:%M:%S %Z}" in shown
    assert "The schedule is as the code says, and follows it." in shown
    assert "s3cret" not in shown and "•••" in shown
    edit_schedule("daily", {"cron": "0 9 * * *"}, HERE)
    shown = text_of(admin_client, f"{LIST}daily/change/")
    assert "stays until a person chooses “Back to the code”" in shown and "0 7 * * mon-fri" in shown
    registry.restore(({}, {}, {}))
    assert "The code that declared this schedule is not in this process." in text_of(
        admin_client, f"{LIST}daily/change/"
    )


def test_a_page_acts_after_a_confirmation(daily: Schedule, admin_client: Client) -> None:
    asked = {"action": "pause_schedule", "_selected_action": "daily"}
    assert "No task is enqueued until" in unescape(admin_client.post(LIST, asked).content.decode())
    assert not Schedule.objects.get().paused
    answer = admin_client.post(LIST, {**asked, "confirm": "yes", "reason": "quiet"}, follow=True)
    assert "1 schedule paused." in answer.content.decode() and Schedule.objects.get().paused
    answer = admin_client.post(LIST, {**asked, "confirm": "yes", "reason": ""}, follow=True)
    assert "daily is paused already." in answer.content.decode()


def test_a_form_makes_and_edits_schedules_and_says_what_is_wrong(daily: Schedule, admin_client: Client) -> None:
    form = {
        "action": "add_schedule", "confirm": "yes", "name": "mine", "queue": "letters", "timezone": "Europe/Madrid",
        "cron": "0 7 13 * fri", "payload": '{"n": 1}', "missed": "all", "overlap": "skip", "reason": "why",
    }  # fmt: skip
    assert 'value="one" selected' in admin_client.post(LIST, {"action": "add_schedule"}).content.decode()
    assert "is ambiguous" in unescape(admin_client.post(LIST, form).content.decode())
    assert "not JSON" in admin_client.post(LIST, {**form, "payload": "{"}).content.decode()
    assert admin_client.post(LIST, {**form, "cron": "0 7 * * fri"})["Location"] == f"{LIST}mine/change/"
    made = Schedule.objects.get(pk="mine")
    assert (made.source, made.payload, made.missed, made.overlap) == ("person", {"n": 1}, "all", "skip")
    edit = {"action": "edit_schedule", "_selected_action": "daily"}
    shown = unescape(admin_client.post(LIST, edit).content.decode())
    assert "0 7 * * mon-fri" in shown and "s3cret" not in shown
    answers = {**asdict(MADRID), "payload": '{"kind": "daily", "token": "•••"}', "priority": "7", "reason": ""}
    admin_client.post(LIST, {**edit, **answers, "confirm": "yes"})
    row = Schedule.objects.get(pk="daily")
    assert (row.priority, row.edited, row.payload) == (7, ["priority"], MADRID.payload)


def test_a_page_offers_what_the_user_may(daily: Schedule) -> None:
    client = Client()
    client.force_login(user_with("viewer", "view_schedule"))
    for address in (LIST, f"{LIST}daily/change/"):
        assert 'name="action"' not in text_of(client, address)
    answer = client.post(LIST, {"action": "run_schedule", "_selected_action": "daily", "confirm": "yes", "reason": ""})
    assert answer.status_code == 403 and not Task.objects.exists()


# -- the command line and the API --------------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("taskqueue", "schedules", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_line_does_it_all(daily: Schedule) -> None:
    assert "every weekday at 07:00 Europe/Madrid" in run()
    assert "1 schedule made." in run(
        "add", "mine", "--queue", "letters", "--cron", "*/5 * * * *", "--payload", '{"n": 1}'
    )
    (mine,) = [one for one in json.loads(run("list", "--json")) if one["name"] == "mine"]
    assert (mine["words"], mine["payload"], len(mine["next_times"])) == ("every 5 minutes UTC", {"n": 1}, 5)
    assert json.loads(run("edit", "mine", "--priority", "3", "--json"))["priority"] == 3
    for what, said in (("pause", "1 schedule paused."), ("resume", "1 schedule resumed."), ("run", "1 task enqueued."),
                       ("delete", "1 schedule deleted.")):  # fmt: skip
        assert said in run(what, "mine", "--reason", "why")
    for wrong in (["run"], ["edit", "daily", "--payload", "{"], ["edit", "daily", "--priority", "high"]):
        with pytest.raises(CommandError) as refused:
            run(*wrong)
        assert refused.value.returncode == 2
    with pytest.raises(CommandError, match="There is no schedule 'mine'"):
        run("show", "mine")


def test_the_api_does_it_all(daily: Schedule, admin_client: Client) -> None:
    def post(address: str, **body: Any) -> Any:
        return admin_client.post(f"/api/schedules/{address}", json.dumps(body), content_type="application/json")

    assert [one["name"] for one in admin_client.get("/api/schedules").json()["schedules"]] == ["daily"]
    assert post("mine/add", queue="letters", cron="0 7 * * *", priority=-2).json()["words"] == "every day at 07:00 UTC"
    assert post("mine/edit", cron="0 8 * * *").json()["cron"] == "0 8 * * *"
    for action in ("pause", "resume", "run", "delete"):
        assert post(f"mine/{action}").status_code == 200
    assert post("mine/edit", cron="0 8 * * *").status_code == 404
    assert post("daily/explode").status_code == 404
    assert "is not a hour" in post("daily/edit", cron="0 25 * * *").json()["error"]
    assert post("daily/delete").status_code == 400


# -- what is wrong -----------------------------------------------------------------------------------------------------


def findings() -> dict[str, str]:
    return {one.id: one.level for one in examine() if one.id.startswith("schedule.")}


def test_the_doctor_names_what_is_wrong_with_schedules(daily: Schedule) -> None:
    assert findings() == {"schedule.no_processor": "warning"}
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


def test_system_checks_name_schedules_that_cannot_work() -> None:
    found = {
        one.id: one for one in run_checks(tags=["dbtaskqueue"]) if one.id in ("dbtaskqueue.W004", "dbtaskqueue.E010")
    }
    assert (
        "Schedule 'daily' enqueues to 'bills', for which this code has no processor." in found["dbtaskqueue.W004"].msg
    )
    periodic("* * * * *", name="lost")(findings)
    (error,) = [one for one in run_checks(tags=["dbtaskqueue"]) if one.id == "dbtaskqueue.E010"]
    assert "lost is not a processor. Stack it on one @processor, or say queue=" in error.msg
