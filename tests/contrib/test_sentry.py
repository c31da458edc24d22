"""Sentry: what its own SDK sends of failed attempts and of schedules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from django_dbtaskqueue import Fail, enqueue, periodic, processor, signals
from django_dbtaskqueue.contrib import sentry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.testing import drain

QUEUE, TICK = "watched", "2026-11-22T03:00:00Z"
pytestmark = pytest.mark.django_db


class Sent(Transport):
    """Keeps what the SDK would send."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[tuple[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.items += [(str(item.type), item.payload.json) for item in envelope.items]

    def of(self, kind: str) -> list[Any]:
        return [document for name, document in self.items if name == kind]


@contextmanager
def reporting() -> Iterator[Sent]:
    found = Sent()
    sentry_sdk.init("https://key@sentry.invalid/1", transport=found, default_integrations=False)
    sentry.report()
    yield found
    signals.unregister(sentry._reporter)
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


@pytest.fixture
def sent(settings: Any, taskqueue_registry: None) -> Iterator[Sent]:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"retry": "fixed:0s", "max_attempts": 2}}}
    with reporting() as found:
        yield found


def test_each_failed_attempt_is_one_event_with_tags_and_without_secrets(sent: Sent) -> None:
    @processor(QUEUE)
    def process(task: Lease) -> None:
        raise ConnectionError(f"password={task.payload['password']} was refused")

    task = enqueue(QUEUE, "order 7", {"password": "hunter2"})
    drain(QUEUE)
    drain(QUEUE)
    events = sent.of("event")
    named = {"queue": QUEUE, "task": str(task.pk), "reference": "order 7"}
    tags = [{f"dbtaskqueue.{name}": value for name, value in (named | {"attempt": n}).items()} for n in "12"]
    assert [event["tags"] for event in events] == tags
    (error,) = events[0]["exception"]["values"]
    assert error["type"] == "ConnectionError" and error["value"].endswith("was refused")
    assert error["stacktrace"]["frames"][-1]["function"] == "process" and "hunter2" not in str(sent.items)


def test_a_failure_without_an_exception_is_a_message_and_what_works_is_no_event(sent: Sent) -> None:
    processor(QUEUE)(lambda task: task.payload or Fail("no stamp", retry=False))
    enqueue(QUEUE, payload="done")
    drain(QUEUE)
    assert sent.items == []
    enqueue(QUEUE)
    drain(QUEUE)
    (event,) = sent.of("event")
    assert (event["message"], event["level"]) == ("no stamp", "error")


def test_a_schedule_checks_in_and_out(sent: Sent) -> None:
    @periodic("0 3 * * *", name="Nightly report", timezone="Europe/Madrid")
    @processor(QUEUE)
    def process(task: Lease) -> None:
        if "23T" in str(task.reference):
            raise RuntimeError("no")

    enqueue(QUEUE, f"Nightly report@{TICK}")
    enqueue(QUEUE, f"unknown@{TICK}")
    drain(QUEUE)
    began, ended = sent.of("check_in")
    assert (began["monitor_slug"], began["status"], ended["status"]) == ("nightly-report", "in_progress", "ok")
    assert began["check_in_id"] == ended["check_in_id"]
    schedule = {"type": "crontab", "value": "0 3 * * *"}
    assert began["monitor_config"] == {"schedule": schedule, "timezone": "Europe/Madrid"}
    enqueue(QUEUE, f"Nightly report@{TICK.replace('22T', '23T')}")
    drain(QUEUE)
    assert sent.of("check_in")[3]["status"] == "error"
