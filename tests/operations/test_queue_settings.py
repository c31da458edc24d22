"""Each setting that operators change, with hostile values, down every road: it works, or is refused by its name."""

from itertools import product
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError
from django.test import Client

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import FIXED_SETTINGS, QUEUE_KEYS
from django_dbtaskqueue.core.exceptions import QueueFull
from django_dbtaskqueue.models import Queue
from tests.factories import QUEUE
from tests.operations.site import QUEUES, command, post

HOSTILE: list[Any] = [
    10**400, float("nan"), float("inf"), 2**63, -1, "", True, "9" * 5000, f"{'9' * 400}/s", "geometric:1s,x1e999", [[]],
]  # fmt: skip
pytestmark = pytest.mark.slow
CASES = [*product([name for name in QUEUE_KEYS if name not in FIXED_SETTINGS], HOSTILE)]


def test_a_setting_in_a_row_that_sql_wrote_is_applied_or_refused() -> None:
    for name, value in CASES:
        try:
            conf.overlay(conf.QueueSettings(), {name: value})
        except ImproperlyConfigured as error:
            assert name in str(error)


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
        if op.get(f"{QUEUES}{QUEUE}/change/").status_code != 200:
            wrong.append(("then", name, value, "the queue's page"))
        try:
            enqueue(QUEUE)
        except QueueFull:
            pass
        except Exception as error:
            wrong.append(("then", name, value, repr(error)))
        Queue.objects.all().delete()
    assert not wrong, "\n".join(f"{one!r:.300}" for one in wrong)
