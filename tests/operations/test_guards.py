"""One secret down every road: whatever holds it, no page, answer, command, log line or hook shows it.

That each road refuses what a user may not do, in the same words, is in ``test_matrix``.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db.models.functions import Now
from django.test import Client

from django_dbtaskqueue import batch, enqueue, processor, signal
from django_dbtaskqueue.api.urls import ROUTES
from django_dbtaskqueue.contrib import otel
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.masking import MASKED
from django_dbtaskqueue.flow.schedule import enqueue_due
from django_dbtaskqueue.models import Attempt, Batch, BulkOperation, Schedule, Task
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.testing import drain
from tests.contrib import test_bridge
from tests.contrib.test_otel import Site
from tests.contrib.test_sentry import reporting
from tests.factories import QUEUE, make_task
from tests.operations.site import TASKS, command, crawled, failure_group, logged_in, post, work
from tests.support import sql

SECRET = "c4n4ry"
SAID = f"password={SECRET} was refused"
HELD: dict[str, Any] = {
    "password": SECRET, "headers": [{"name": "Authorization", "value": SECRET}], "pair": ["token", SECRET],
    "note": SAID, "plain": "sh0wn",
}  # fmt: skip
REFERENCES = ("ends", "runs", "waits", "poison", "fails")
COMMANDS = """
    status|list|list --filter status:ERROR|doctor|settings parcels|bulk list|bulk show {bulk}|tokens|batches list
    schedules list|schedules show nightly|batches show {batch}|tail --count 1|reprocess --filter status:ERROR --dry-run
    edit --id {pk} --payload {{}} --dry-run|mask --dry-run
"""


def process(task: Lease) -> Any:
    """Say the secret in each way that a task has, and end as the reference says."""
    task.step("ask", lambda: HELD)
    task.report_progress(0.5, SAID)
    if task.reference == "waits":
        task.wait_for("go")
    if task.reference == "poison":
        task.poison(SAID)
    if task.reference == "fails":
        raise ConnectionError(SAID)
    return HELD


@pytest.fixture
def sent(settings: Any, taskqueue_registry: None, caplog: Any) -> Iterator[Callable[[], str]]:
    """What leaves the process by itself: call it."""
    settings.DBTASKQUEUE |= {"QUEUES": {QUEUE: {"max_attempts": 1, "log_level": "INFO"}}}
    spans = Site()
    otel.instrument(spans.traces, spans.meters)
    with reporting() as events, caplog.at_level(logging.DEBUG, "django_dbtaskqueue"):
        yield lambda: f"{[vars(one) for one in caplog.records]} {events.items} {spans.shown()}"
    otel.uninstrument()


@pytest.fixture
def made(sent: Callable[[], str]) -> dict[str, Any]:
    processor(QUEUE)(process)
    with batch("all"):
        tasks = {name: enqueue(QUEUE, name, HELD, context={"session": SECRET, "note": SAID}) for name in REFERENCES}
    drain(QUEUE)
    signal(tasks["waits"], "go", HELD)
    Schedule.objects.create(name="nightly", queue=QUEUE, cron="0 3 * * *", payload=HELD)
    operator = User.objects.create_superuser("ada")
    order = bulk.start("reprocess", "ref:fails", operator)
    work()
    drain(QUEUE)
    post(logged_in(operator), "tasks/edit/ids", ids=[tasks["fails"].pk], payload={"plain": 1})
    drain(QUEUE)
    # As SQL, or a release without masking, wrote it.
    Task.objects.exclude(status="COMPLETED").update(process_result=f"50% {SAID}")
    Attempt.objects.update(message=SAID, traceback=SAID)
    failed = Task.objects.get(pk=tasks["fails"].pk)
    failure_group(str(failed.fingerprint), message=SAID)
    return {"pk": failed.pk, "print": failed.fingerprint, "bulk": order.pk, "batch": Batch.objects.get().pk}


def answers(browser: Client, made: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tasks = [*Task.objects.values_list("pk", flat=True)]
    pages = [f"{TASKS}{pk}/{name}/" for pk in tasks for name in ("change", "history")]
    searches = [f"{TASKS}?q={search}" for search in ("payload.plain:sh0wn", "error:refused")]
    for address, answer in crawled(browser, *pages, *searches):
        yield address, (b"".join(answer.streaming_content) if answer.streaming else answer.content).decode()
    for pk in tasks:
        yield f"API {pk}", browser.get(f"/api/tasks/{pk}").content.decode()
        yield f"show {pk}", command("show", pk, "--json") + command("show", pk)
    values = {"int:pk": made["bulk"], "path:queue": QUEUE, "path:schedule": "nightly", "str:fingerprint": made["print"]}
    for route in ROUTES:
        if route.method == "GET" and "poller>" not in route.path and route.path != "tasks/<int:pk>":
            where = re.sub("<(.*?)>", lambda part: str(values[part[1]]), route.path)
            yield where, browser.get(f"/api/{where}").content.decode()
    for verb, given in (("reprocess", {}), ("edit", {"payload": {"plain": 2}})):
        yield verb, post(browser, f"tasks/{verb}/preview", q="ref:fails", **given).content.decode()
    yield "metrics", browser.get("/metrics").content.decode()
    for line in COMMANDS.replace("\n", "|").split("|"):
        for flags in ([], ["--json"]):
            with suppress(SystemExit):
                if words := line.format(**made).split():
                    yield line, command(*words, *flags)


def test_a_secret_is_shown_by_no_road(made: dict[str, Any], sent: Callable[[], str]) -> None:
    browser = logged_in(User.objects.get(username="ada"))
    roads = [("logs and hooks", sent()), *answers(browser, made), ("log", str([*LogEntry.objects.values()]))]
    shown = [(where, unescape(text)) for where, text in roads]
    assert {where: text[text.index(SECRET) - 90 :][:110] for where, text in shown if SECRET in text} == {}
    assert sum(MASKED in text for _where, text in shown) > 20 and len(shown) > 100


def test_a_traceback_is_logged_without_its_secrets(taskqueue_registry: None, caplog: Any) -> None:
    def refuse(attempt: int, error: BaseException | None) -> None:
        raise ValueError(SAID)

    processor(QUEUE, max_attempts=2, retry=refuse)(process)
    enqueue(QUEUE, "fails")
    drain(QUEUE)
    assert SECRET not in caplog.text and caplog.text.count(MASKED) > 1


def test_an_error_of_the_database_is_noted_without_its_secrets(settings: Any, caplog: Any) -> None:
    """On a bulk operation and on a schedule, whose pages and answers show the note; of the bridge in the log."""
    test_bridge.configure(settings)
    settings.DBTASKQUEUE["QUEUES"][QUEUE] = {}
    make_task("ERROR", reference="refused")
    sql(f"""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{SAID}'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON dbtaskqueue_task FOR EACH ROW EXECUTE FUNCTION refuse()
    """)
    Schedule.objects.create(name="nightly", queue=QUEUE, cron="0 3 * * *", next_time=Now())
    bulk.start("reprocess", "ref:refused", None)
    work()
    enqueue_due("default", ())
    assert test_bridge.post(test_bridge.body_of()).status_code == 503
    for note in (*Schedule.objects.values_list("note", flat=True), BulkOperation.objects.get().note, caplog.text):
        assert MASKED in note and SECRET not in note
    assert "The bridge could not store" in caplog.text
