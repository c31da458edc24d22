"""``manage.py taskqueue``: what it shows, what it asks, what it changes, and how it ends."""

import io
import json
import re
import threading
from argparse import _SubParsersAction
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import transaction

from django_dbtaskqueue import batch, enqueue, enqueue_many, models, queue
from django_dbtaskqueue.conf.settings import declarations, declare_queue, redeclare
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.management import reading
from django_dbtaskqueue.management.commands import taskqueue
from django_dbtaskqueue.models import ApiToken, AuditEntry, BulkOperation, Poller, Queue, Task, TaskHistory
from django_dbtaskqueue.models.control import IN_EFFECT
from django_dbtaskqueue.operations import actions, bulk
from django_dbtaskqueue.operations.search.query import select
from tests.docs.pages import FROM_CODE
from tests.factories import QUEUE, age, make_task
from tests.operations.site import attempt, client, command, data, failure_group, post
from tests.support import sql

COMMANDS = Path(__file__).parents[2] / "docs/reference/commands.md"


def code_of(*words: object) -> int | None:
    with pytest.raises((CommandError, SystemExit)) as ended:
        command(*words)
    return getattr(ended.value, "code", None) or getattr(ended.value, "returncode", None)


def refused(words: str, *asked: object, code: int = taskqueue.REFUSED_CODE) -> None:
    with pytest.raises(CommandError, match=words) as error:
        command(*asked)
    assert error.value.returncode == code


def test_status_tells_the_health_first_then_each_queue() -> None:
    make_task(ready_time=-timedelta(minutes=5))
    make_task(Status.ERROR)
    for instance in ("here", "gone"):
        Poller.objects.create(instance=instance, state="RUNNING", queues=[{"queue": QUEUE, "weight": 1}])
    age(timedelta(hours=1), model=Poller, instance="gone")
    command("pause", "letters", "--reason", "mail server is down")
    shown = command("status")
    health = r"1 queue late, oldest 5m(\d+s)?; 1 ERROR; 1 queue paused; 1 poller alive\n"
    assert re.match(health + r"Late: .*\nPaused: letters \(by \w+: mail server is down\)\.\n", shown)
    assert re.search(rf"{QUEUE} +running +5m(\d+s)? +0.0 +0.0 +0 +- +- +- +- +- +1 +0 +0 +1 +0 +2\n", shown)
    assert re.search(r"letters +paused +- +0.0 +0.0 +0 +- +- +- +- +- +0 +0 +0 +0 +0 +0\n", shown)
    (facts,) = data("status", "--queue", QUEUE)["queues"]
    assert (facts["queue"], facts["statuses"]["ERROR"]["number"], facts["oldest"] >= 300) == (QUEUE, 1, True)
    refused("Did you mean 'letters'", "status", "--queue", "leters")


def test_list_shows_the_newest_first_in_pages_and_no_secret() -> None:
    tasks = [make_task(Status.ERROR, reference=f"r{n}", process_result="KeyError: token=abc") for n in range(3)]
    make_task(Status.COMPLETED)
    shown = command("list", "--filter", "status:ERROR", "--limit", "2")
    assert shown.index("r2") < shown.index("r1")
    assert "r0" not in shown and f"More follow: --before {tasks[1].pk}" in shown
    assert "KeyError: token=•••" in shown and "abc" not in shown
    (rest,) = data("list", "--filter", "status:ERROR", "--before", tasks[1].pk)
    assert rest["reference"] == "r0" and "payload" not in rest
    assert "No task matches queue:nobody." in command("list", "--filter=queue:nobody")
    assert len(data("list", "--filter=-status:ERROR")) == 1


def test_show_tells_all_of_a_task_and_masks_secrets() -> None:
    task = make_task(Status.ERROR, reference="A", payload={"name": "Ada", "api_key": "s3cret"})
    trace = "Traceback (most recent call last):\n  password = 'hunter2'\nValueError: no"
    attempt(task, attempt=5, total_attempt=5, error_type="ValueError", message="no\x1b[31m", traceback=trace)
    for name in (task.pk, f"{QUEUE}/A"):
        shown = command("show", name)
        assert '"name": "Ada"' in shown and "attempt 5 failed: ValueError: no\\x1b[31m" in shown
        assert "s3cret" not in shown and "hunter2" not in shown and "\x1b" not in shown
    facts = data("show", task.pk)
    assert facts["explanation"]["code"] == "finished" and "now  The task ended in ERROR" in shown
    assert facts["payload"] == {"name": "Ada", "api_key": "•••"}
    assert facts["attempts"][0]["traceback"].splitlines()[1] == "  password = '•••'"
    for name in ("0", "9" * 5000):
        refused("There is no task '" + name[:9], "show", name)


def test_show_finds_a_task_in_the_history_and_in_a_table_of_its_queue(settings: Any) -> None:
    settings.DBTASKQUEUE |= {"QUEUES": {QUEUE: {}, "brief": {"model": "dbtaskqueue.TemporaryTask"}}}
    gone = TaskHistory.objects.create(queue=QUEUE, reference="gone", task_id=4711, status="COMPLETED", payload={"a": 1})
    for name in ("4711", f"{QUEUE}/gone"):
        shown = data("show", name)
        assert (shown["id"], shown["reference"], shown["payload"]) == (4711, "gone", {"a": 1}) and shown["moved_time"]
    assert f"{gone.moved_time:%Y-%m-%d %H:%M:%S}" in command("show", "4711")
    TaskHistory.objects.create(queue="brief", task_id=4711, location="dbtaskqueue.temporarytask", status="COMPLETED")
    refused(r"There is more than one task 4711.*--queue", "show", "4711")
    assert data("show", "4711", "--queue", "brief")["queue"] == "brief"
    models.TemporaryTask.objects.create(pk=4712, queue="brief", reference="short")
    assert data("show", "4712")["reference"] == "short"
    Task.objects.create(pk=4712, queue=QUEUE, reference="long")
    refused(r"There is more than one task 4712.*--queue", "show", "4712")
    assert data("show", "4712", "--queue", "brief")["reference"] == "short"
    assert data("show", "brief/short")["id"] == 4712
    ada, act = client("view_task", "cancel_task"), ("cancel", "--id", "4712", "--yes")
    for answer in (ada.get("/api/tasks/4712"), post(ada, "tasks/cancel/ids", ids=[4712])):
        assert (answer.status_code, "Queue 'brief' has a task 4712" in answer.json()["error"]) == (400, True)
    refused("Queue 'brief' has a task 4712", *act)
    assert "1 task cancelled" in command(*act, "--queue", "brief") and Task.objects.get().status == "CREATED"
    assert post(ada, "tasks/cancel/ids", ids=[4712], queue=QUEUE).json()["changed"] == 1


def test_tail_shows_what_comes_after_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    make_task(reference="before")

    def meanwhile(_: threading.Event, seconds: float) -> None:
        if seconds:
            attempt(make_task(reference=f"fresh{Task.objects.count()}"), error_type="KeyError")
            attempt(Task(queue="letters", pk=1), error_type="Other")

    monkeypatch.setattr(reading, "clock", SimpleNamespace(wait=meanwhile))
    shown = command("tail", "--count", "2", "--filter", f"queue:{QUEUE}")
    assert f"{QUEUE}/fresh1  CREATED" in shown and "attempt 1 failed: KeyError" in shown
    assert "before" not in shown and "Other" not in shown
    lines = [json.loads(line) for line in command("tail", "--count", "2", "--json").splitlines()]
    assert [line["event"] for line in lines] == ["task", "failed", "failed"]


def test_the_doctor_says_what_is_wrong_and_what_helps_and_ends_so(capsys: pytest.CaptureFixture[str]) -> None:
    make_task(ready_time=-timedelta(hours=2))

    def examined(*words: str) -> str:
        with pytest.raises(SystemExit, match="1"):  # no poller serves the queue
            call_command("taskqueue", "doctor", *words, no_color=True)
        return capsys.readouterr().out

    findings, shown = json.loads(examined("--json")), examined()
    assert "error" in {finding["level"] for finding in findings} <= {"error", "warning", "info"}
    for finding in findings:
        assert finding["words"] and finding["remedy"]
        assert f"{finding['level'].upper()}  " in shown and f"[{finding['id']}]" in shown


def test_batches_are_listed_shown_and_cancelled() -> None:
    assert "no batch" in command("batches")
    with batch("import") as b:
        enqueue(QUEUE)
        enqueue(QUEUE)
    [document] = data("batches", "list")
    assert (document["name"], document["total"], document["statuses"]["CREATED"]) == ("import", 2, 2)
    assert "0 of 2" in command("batches")
    assert "2 tasks cancelled." in command("batches", "cancel", b.id)
    assert "0 tasks reprocessed." in command("batches", "retry", b.id)
    refused("no batch '999'", "batches", "show", "999")


def test_a_large_act_becomes_a_bulk_operation_that_is_followed_or_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "MAX_TASKS_PER_ACTION", 3)
    monkeypatch.setattr(bulk, "TASKS_PER_CHUNK", 2)
    for status in (*[Status.ERROR] * 4, Status.COMPLETED):
        make_task(status)
    said = command("reprocess", "--filter", f"queue:{QUEUE}", "--yes")
    assert "skipped 1: in COMPLETED, not in ERROR" in said and "4 tasks reprocessed." in said
    assert "100%  4 changed, 1 skipped" in said
    assert data("bulk", "show", BulkOperation.objects.get().pk)["changed"] == 4
    assert [row["state"] for row in data("bulk", "list")] == ["FINISHED"]
    assert f"queue:{QUEUE}" in command("bulk", "list")
    make_task(Status.ERROR)
    command("reprocess", "--filter", "status:ERROR", "--yes", "--background")
    number = BulkOperation.objects.latest("pk").pk
    assert "CANCELLED" in command("bulk", "cancel", number, "--reason", "wrong")
    assert data("bulk", "run")["chunks"] == 0
    BulkOperation.objects.filter(pk=number).update(state="WAITING", query="stauts:ERROR")
    assert code_of("bulk", "run") == taskqueue.REFUSED_CODE
    assert code_of("bulk", "cancel", number) == taskqueue.REFUSED_CODE
    refused("Give its number: taskqueue bulk cancel N", "bulk", "cancel", code=taskqueue.USAGE_ERROR_CODE)


def test_without_a_terminal_an_act_needs_yes_and_on_one_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(Status.ERROR)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    refused("add --yes", "reprocess", "--id", task.pk)
    monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})("n\ny\n"))
    assert code_of("reprocess", "--id", task.pk) == taskqueue.REFUSED_CODE
    assert Task.objects.get().status == Status.ERROR
    assert "1 task reprocessed." in command("reprocess", "--id", task.pk)


def test_pause_resume_and_purge() -> None:
    make_task(Status.COMPLETED)
    make_task(queue="letters")
    assert data("pause", QUEUE, "--dry-run") == {"dry_run": True, "queues": [QUEUE]}
    for words in ([QUEUE, "nosuch"], ["nosuch", "--dry-run"]):
        refused("Unknown queue 'nosuch'", "pause", *words)
    assert not Queue.objects.exists()
    assert data("pause", QUEUE, "letters", "--for", "30m", "--yes") == {"changed": 2}
    assert Queue.objects.filter(IN_EFFECT, paused_until__isnull=False).count() == 2
    assert data("resume", QUEUE, "--dry-run") == {"dry_run": True, "queues": [QUEUE]}
    assert data("resume", QUEUE) == {"changed": 1}
    assert code_of("purge", QUEUE, "--yes") == taskqueue.REFUSED_CODE
    assert "1 task deleted" in command("purge", QUEUE, "--yes", "--reason", "test data")
    assert [task.queue for task in Task.objects.all()] == ["letters"]


def settings_there(*arguments: str) -> dict[str, tuple[Any, str]]:
    return {one["name"]: (one["value"], one["source"]) for one in data(*arguments)["settings"]}


def test_an_operator_sets_the_limits_of_a_queue_and_takes_them_back(alias: str) -> None:
    limits = {
        "max_running": 5, "rate": "100/s", "burst": 10, "max_running_per_group": 2, "rate_per_group": "5/m",
        "burst_per_group": 3, "concurrency": 0, "lease": "2m", "unique": "throttle:1h",
    }  # fmt: skip
    there = ("--database", alias)
    words = [f"{name}={value}" for name, value in limits.items()]
    changed = settings_there("set", QUEUE, *words, "--reason", "the partner allows 5", "--yes", *there)
    assert changed == {name: (value, "operator") for name, value in limits.items()}
    assert changed.items() <= settings_there("settings", QUEUE, *there).items()
    assert Queue.objects.using(alias).get().overrides == {**limits, "lease": "PT2M"}
    # Taken back, none of them is the operator's any more
    reset = [part for name in limits if name != "lease" for part in ("--reset", name)]
    assert settings_there("set", QUEUE, "rate=None", *there, *reset)["rate"] == (None, "built in")
    assert Queue.objects.using(alias).get().overrides == {"lease": "PT2M"}
    entries = AuditEntry.objects.using(alias).order_by("pk").values_list("verb", "queue", "reason")
    assert list(entries) == [("change_settings", QUEUE, reason) for reason in ("the partner allows 5", "")]


def test_a_limit_that_was_set_holds_at_the_next_checkout() -> None:
    enqueue_many(QUEUE, [{}] * 3)
    command("set", QUEUE, "max_running=1")
    assert f"{QUEUE}: 0 of 1 running" in command("status")
    assert (queue(QUEUE).take() is None, queue(QUEUE).take()) == (False, None)
    assert f"{QUEUE}: 1 of 1 running; due tasks held back: 2" in command("status")
    command("set", QUEUE, "--reset", "max_running")
    assert queue(QUEUE).take() is not None


def test_each_setting_has_a_value_and_a_source(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"lease": "2m"}}, "DEFAULTS": {"max_attempts": 3, "lease": "1m"}}
    saved = declarations()
    declare_queue(QUEUE, priority=4, lease="3m")
    try:
        shown = command("set", QUEUE, "rate=5/m") + command("settings", QUEUE)
    finally:
        redeclare(saved)
    head = r"Every poller applies .* within a heartbeat\.\nsetting +value +source\nrate +5/m +operator\n"
    assert re.match(head, shown)
    for line in (
        *("rate +5/m +operator", "lease +2m +settings", "priority +4 +processor", "max_attempts +3 +defaults"),
        *("batch_size +500 +built in", "max_running +None +built in"),
    ):
        assert re.search(rf"^{line}$", shown, re.MULTILINE), line


def test_what_would_be_set_is_checked_and_what_cannot_be_is_refused_with_what_is_allowed() -> None:
    dry = data("set", QUEUE, "rate=60/m", "--dry-run")
    assert (dry["dry_run"], dry["queue"], dry["settings"][0]["value"]) == (True, QUEUE, "60/m")
    assert "Nothing was changed" in command("set", QUEUE, "rate=60/m", "--dry-run")
    for arguments, words in (
        ((QUEUE, "max_runing=5"), "Queue parcels has no setting 'max_runing'. Did you mean 'max_running'"),
        ((QUEUE, "batch_size=true"), "batch_size=True is not valid: a whole number from 1 to 5000"),
        ((QUEUE, "rate=fast", "--dry-run"), "'fast' is not a rate. .* 100/s, 5/m or 1/10s"),
        ((QUEUE, "rate=5/m", "database=other"), r'DBTASKQUEUE\["QUEUES"\]'),
        ((QUEUE, "paused=true"), "To stop the queue now, pause it"),
        ((QUEUE, "max_running"), "write NAME=VALUE"),
        ((QUEUE, "max_running="), "To take a setting back: --reset NAME"),
        ((QUEUE,), f"taskqueue settings {QUEUE} shows all settings"),
        ((QUEUE, "--reset", "max_runing"), "Did you mean 'max_running'"),
    ):
        refused(words, "set", *arguments, code=taskqueue.USAGE_ERROR_CODE)
    acts = ("purge lettres", "cancel --id 1 --queue lettres", "index --queue lettres", "index --queue lettres --drop")
    for asked in ("settings lettres", "set lettres rate=5/m", "resume lettres", "shards show lettres", *acts):
        refused("Did you mean 'letters'", *asked.split())
    assert not Queue.objects.exists() and not AuditEntry.objects.exists()


def test_a_secret_in_a_stored_failure_is_masked_for_searches_too() -> None:
    old = "ValueError: password=hunter2 for UA-15"
    task, waiting, _done = (make_task(one, process_result=old) for one in ("ERROR", "CREATED", "COMPLETED"))
    tried = attempt(task, message=old, traceback=old)
    failure_group("f" * 40, message=old)
    assert code_of("mask") != 0, "there is no terminal to ask on"
    assert data("mask", "--dry-run") == {"dry_run": True, "would_mask": 4}
    assert data("mask", "--yes") == {"masked": 4}
    assert data("list", "--filter", "error:hunter") == []
    assert [row["id"] for row in data("list", "--filter", "error:UA-15")] == [waiting.pk, task.pk]
    tried.refresh_from_db()
    assert "hunter" not in tried.message + tried.traceback + models.FailureGroup.objects.get().message
    assert Task.objects.get(status=Status.COMPLETED).process_result == old, "a result is no failure"
    assert data("mask", "--yes") == {"masked": 0}


def test_every_command_that_changes_something_takes_yes_and_is_in_the_audit() -> None:
    User.objects.create_user("ada")
    make_task(Status.ERROR)
    assert data("bulk", "list", "--yes") == []
    assert data("token", "ada", "--yes")["user"] == "ada"
    assert data("tokens", "--revoke", ApiToken.objects.get().pk, "--yes")["revoked"]
    refused("'note' has 201 characters; at most 200", "token", "ada", "--note", "x" * 201)
    assert "_payload_in" in data("index", "--drop", "--yes")["index"]
    data("mask", "--yes")
    assert [one.verb for one in AuditEntry.objects.order_by("pk")] == ["make_token", "revoke_token", "mask"]


def test_exit_codes(settings: Any) -> None:
    make_task(Status.ERROR)
    wrong = ("list --filter stauts:ERROR", "reprocess --yes", "cancel --filter status:ERROR --queue parcels --yes")
    wrong += ("delete --id 1 --limit 1 --yes --reason x", "delete --id 1 --background --yes --reason x")
    wrong += ("schedules delete s --dry-run", "schedules edit s", "schedules list --queue parcels")
    wrong += ("schedules import --from django-q2 --database default",)
    for words in (*wrong, "delete --filter status:ERROR --yes", "pause nobody-knows"):
        assert code_of(*words.split()) == (taskqueue.USAGE_ERROR_CODE if words in wrong else taskqueue.REFUSED_CODE)
    refused("unrecognized arguments: --database", "shards", "show", QUEUE, "--database", "default")
    settings.DBTASKQUEUE = {"QEUES": {}}
    assert code_of("status") == taskqueue.SETTINGS_CODE


@pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
def test_searches_of_payloads_go_by_an_index_for_those_who_want_it() -> None:
    def plan() -> str:
        with transaction.atomic():
            sql("SET LOCAL enable_seqscan = off; SET LOCAL enable_indexscan = off")
            return str(select("payload.carrier:UA", Task.objects.all()).explain())

    try:
        name = data("index")["index"]
        assert name in plan() and "nothing to do" in command("index")
        sql(f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{name}'::regclass")
        assert name not in plan() and "created" in command("index") and name in plan()
    finally:
        command("index", "--drop")
    assert name not in plan() and "nothing to do" in command("index", "--drop")
    assert [one.verb for one in AuditEntry.objects.order_by("pk")] == [*["create_index"] * 2, "drop_index"]
    refused("is not PostgreSQL", "index", "--database", "sqlite")


def test_a_token_is_shown_once_and_only_its_hash_is_stored() -> None:
    User.objects.create_user("ada")
    for words in (("token", "nobody"), ("tokens", "--revoke", "9")):
        refused("There is no", *words)
    refused("Unknown queue 'nosuch'", "token", "ada", "--queue", "nosuch")
    assert not ApiToken.objects.exists()
    made = data("token", "ada", "--scope", "read", "--queue", QUEUE, "--expires", "90d", "--note", "board")
    assert len(made["token"]) >= 40 and data("token", "ada")["token"] != made["token"]
    stored = ApiToken.objects.order_by("pk")[0]
    assert (stored.digest, stored.scope, stored.queues) == (made["hash"], "read", [QUEUE])
    assert made["token"] not in json.dumps(data("tokens")) + command("tokens")
    assert [row["number"] for row in data("tokens")] == [stored.pk, stored.pk + 1]
    assert "is refused from now on" in command("tokens", "--revoke", stored.pk)
    assert [row["number"] for row in data("tokens")] == [stored.pk + 1]


def test_every_subcommand_and_option_is_documented() -> None:
    text = FROM_CODE["fill"](COMMANDS.read_text().split("\n## taskqueue\n", 1)[1].split("\n## ", 1)[0])
    parser = taskqueue.Command().create_parser("manage.py", "taskqueue")
    (commands,) = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    assert [name for name in commands.choices if f"`{name}" not in text] == []
    actions = [action for one in commands.choices.values() for action in one._actions]
    options = {option for action in actions for option in action.option_strings if option.startswith("--")}
    common = {"--help", "--version", "--settings", "--pythonpath", "--traceback", "--no-color", "--force-color",
              "--verbosity", "--skip-checks"}  # fmt: skip
    assert [option for option in options - common if f"`{option}" not in text] == []
    ends = (taskqueue.REFUSED_CODE, taskqueue.USAGE_ERROR_CODE, taskqueue.SETTINGS_CODE, taskqueue.TOO_SLOW_CODE)
    assert [code for code in (0, *ends) if f"\n| {code} |" not in text] == []


def test_waiting_tasks_move_to_another_queue_unless_their_reference_is_taken_there(settings: Any) -> None:
    free, taken = make_task(reference="A"), make_task(reference="B")
    other = make_task(reference="B", queue="letters")
    said = command("move", "--id", free.pk, "--id", taken.pk, "--to-queue", "letters", "--yes")
    assert "1 task moved" in said and "its reference is taken" in said
    queues = Task.objects.order_by("pk").values_list("queue", flat=True)
    assert [*queues.all()] == ["letters", QUEUE, "letters"]
    # Two tasks of one reference cannot both move
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}, "third": {}}}
    command("move", "--id", taken.pk, "--id", other.pk, "--to-queue", "third", "--yes")
    assert [*queues.all()] == ["letters", "third", "letters"]


def test_what_a_verb_needs_is_asked_for_and_what_cannot_be_is_refused() -> None:
    payload = {"email": "zoe@exmaple.org", "card_token": "tok_4242", "tries": [1, {"password": "x"}]}
    task = make_task(Status.ERROR, payload=payload)
    for words, said in (
        *((["snooze"], "--for"), (["snooze", "--for", "soon"], "soon"), (["move", "--to-queue", "nosuch"], "nosuch")),
        *((["change-priority", "--priority", "99999"], "32767"), (["edit", "--payload", "{"], "JSON")),
        (["edit", "--payload", json.dumps({**payload, "card_token": "tok_1"})], "card_token"),
        (["edit", "--payload", '{"email": "•••"}'], "•••"),
        (["edit", "--payload", "{}", "--id", "987654321"], "one task"),
    ):
        with pytest.raises(CommandError, match=said):
            command(words[0], "--id", task.pk, *words[1:], "--yes")
    assert Task.objects.get().payload == payload and not AuditEntry.objects.exists()
    command("edit", "--id", task.pk, "--payload", "1e16", "--yes")
    assert repr(Task.objects.get().payload) == "1e+16", "not an integer"


def test_groups_stay_in_order_when_their_tasks_are_snoozed_and_moved_and_parked_ones_stay() -> None:
    first, second = make_task(group_key="g"), make_task(group_key="g", parked_by="group")
    command("snooze", "--id", first.pk, "--for", "1h", "--yes")
    assert list(Task.objects.due()) == [second], "it takes the place of the first"
    # When it moves away, then the first is the head again, and the second one of its own
    command("move", "--id", second.pk, "--to-queue", "letters", "--yes")
    assert list(Task.objects.due()) == [second]
    assert "1 task due now" in command("run-now", "--id", first.pk, "--yes")
    assert set(Task.objects.due()) == {first, second}
    assert "parked" in command("run-now", "--id", make_task(parked_by="no handler for payload type Refund").pk, "--yes")
