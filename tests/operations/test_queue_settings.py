"""Each setting that operators change, with hostile values, down every road: it works, or is refused by its name."""

from itertools import product
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import DatabaseError, transaction
from django.test import Client

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.conf.queue import FIXED_SETTINGS, QUEUE_KEYS
from django_dbtaskqueue.core.exceptions import QueueFull
from django_dbtaskqueue.models import Queue
from django_dbtaskqueue.poller.heartbeat import apply_overrides
from django_dbtaskqueue.poller.loop import _queue_state
from tests.factories import QUEUE
from tests.operations.site import QUEUES, command, post

HOSTILE: list[Any] = [
    10**400, float("nan"), float("inf"), 2**63, -1, "", True, "9" * 5000, f"{'9' * 400}/s", "geometric:1s,x1e999", [[]],
]  # fmt: skip
pytestmark = pytest.mark.slow
CASES = [*product([name for name in QUEUE_KEYS if name not in FIXED_SETTINGS], HOSTILE)]
PLACES = (QUEUES, f"{QUEUES}{QUEUE}/change/", f"/api/queues/{QUEUE}", "/api/status", "/api/doctor")
# After each case one page is read. Of each setting, so of 11 values, each page is.
LOOKS = [(name, value, PLACES[number % len(PLACES)]) for number, (name, value) in enumerate(CASES)]


def test_a_setting_by_a_page_the_api_and_the_command_line(op: Client) -> None:
    op.raise_request_exception = False
    wrong = []
    for name, value in CASES:
        answer = post(op, f"queues/{QUEUE}/settings", values={name: value}, reason="why")
        if answer.status_code not in (200, 400) or (answer.status_code == 400 and name not in answer.json()["error"]):
            wrong.append(("API", name, value, answer.content))
        text = str(value).encode("utf-8", "replace").decode()
        form = {"queue": QUEUE, "set": name, "value": text, "confirm": "yes", "reason": "why"}
        if (code := op.post(QUEUES, form).status_code) not in (200, 302):
            wrong.append(("page", name, value, code))
        try:
            command("set", QUEUE, f"{name}={text}")
        except CommandError as error:
            if name not in str(error):
                wrong.append(("command line", name, value, error))
        except Exception as error:
            wrong.append(("command line", name, value, repr(error)))
        if op.get(PLACES[1]).status_code != 200:
            wrong.append(("then", name, value, "the queue's page"))
        try:
            enqueue(QUEUE)
        except QueueFull:
            pass
        except Exception as error:
            wrong.append(("then", name, value, repr(error)))
        Queue.objects.all().delete()
    assert not wrong, "\n".join(f"{one!r:.300}" for one in wrong)


def test_a_setting_in_a_row_that_sql_wrote(op: Client, alias: str, settings: Any) -> None:
    """What was in force stays so for a poller; a producer has what the project says; pages show the row."""
    settings.DBTASKQUEUE |= {"QUEUES": {QUEUE: {"database": alias}, "letters": {"database": alias}}}
    op.raise_request_exception = False
    states, wrong = [_queue_state(name, 1, alias) for name in (QUEUE, "letters")], []
    for name, value, place in LOOKS:
        try:
            with transaction.atomic(using=alias):
                row = {QUEUE: {name: value}, "letters": {"batch_size": 7}}
                for queue, overrides in row.items():
                    Queue.objects.using(alias).update_or_create(name=queue, defaults={"overrides": overrides})
        except (DatabaseError, UnicodeEncodeError, ValueError):
            continue
        try:
            apply_overrides(states, alias)
            assert states[1].settings.batch_size == 7
            queue_settings(QUEUE, alias)
            enqueue(QUEUE)
        except QueueFull:
            pass
        except Exception as error:
            wrong.append((name, value, repr(error)))
        if op.get(place).status_code != 200:
            wrong.append((name, value, place))
        apply_overrides(states, alias)
        Queue.objects.using(alias).all().delete()
        apply_overrides(states, alias)
    assert not wrong, "\n".join(f"{one!r:.300}" for one in wrong)
