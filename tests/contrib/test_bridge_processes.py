"""Two systems, each with its database and processes, and a proxy between them that loses messages."""

import json
import subprocess
import sys
from base64 import b64encode
from collections import Counter
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest
from django.conf import settings as django_settings
from django.db import connection

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.models import Task
from tests.chaos.processes import until_all
from tests.conftest import REPOSITORY, ProcessDatabase, _postgres_copy
from tests.contrib.bridging.server import PEM, lossy, serving
from tests.patience import PATIENCE

SECRET = "whsec_" + b64encode(b"k" * 32).decode()
ODD_PAYLOADS = ("null", "1.10", '{"b": 1, "a": [1e3, -0.5]}', '"\\u00e9\\n"', "123456789012345678901234567890")
# As SQL, because Python has no number that is written 1.10. The jsonb of the last column is NULL.
INSERT_ODD = """
INSERT INTO dbtaskqueue_task (queue_name, max_attempts, payload)
SELECT 'outbox', 1000, unnest(%s::text[])::jsonb UNION ALL SELECT 'outbox', 1000, NULL
"""
CONTENT = "SELECT reference_number, payload::text FROM dbtaskqueue_task WHERE queue_name = %s"


@pytest.mark.parametrize("number", [24, pytest.param(5000, marks=pytest.mark.soak)])
def test_each_task_arrives_once_though_messages_are_lost(
    number: int, postgres_process_database: ProcessDatabase, _postgres_template: str, settings: Any
) -> None:
    here = postgres_process_database
    lost: Counter[str] = Counter()
    settings.DBTASKQUEUE = {"QUEUES": {"outbox": {"retry": "fixed:10ms", "max_attempts": 1000}}}
    with _postgres_copy(django_settings.SERVER_URL, _postgres_template) as there:
        inbox = {"QUEUES": {"inbox": {}}, "BRIDGE": {"peers": {"here": {"secrets": [SECRET], "queues": ["inbox"]}}}}
        receiving = started(there, inbox, "-m", "tests.contrib.bridging.server")
        enqueue_many("outbox", [{"reference": f"r{one}", "payload": {"n": one}} for one in range(number)])
        with connection.cursor() as cursor:
            cursor.execute(INSERT_ODD, [list(ODD_PAYLOADS)])
        port: Future[int] = Future()
        with serving(lossy(port, 0.2, lost)) as proxy:
            peer = {
                "url": f"https://127.0.0.1:{proxy.port}/bridge/here/", "secrets": [SECRET], "ca_file": PEM,
                "allow_private": True, "queue_names": {"outbox": "inbox"},
            }  # fmt: skip
            outbox = {**settings.DBTASKQUEUE, "BRIDGE": {"peers": {"there": peer}}}
            sending = started(here, outbox, "manage.py", "runtaskpoller", "--queue", "outbox", "--threads", "8")
            try:
                port.set_result(int(receiving.stdout.readline()))  # type: ignore[union-attr]
                until_all("COMPLETED", timeout=60 + number / 10)
            finally:
                for process in (sending, receiving):
                    process.terminate()
                    process.communicate(timeout=PATIENCE)
        with psycopg.connect(there.url) as database:
            received = database.execute(CONTENT, ["inbox"]).fetchall()
    with connection.cursor() as cursor:
        cursor.execute(CONTENT, ["outbox"])
        sent = cursor.fetchall()
    assert len(received) == number + len(ODD_PAYLOADS) + 1
    assert Counter(received) == Counter(sent)
    assert lost["request"] > 0 < lost["answer"]
    assert Task.objects.filter(result__duplicate=True).exists()


def started(database: ProcessDatabase, dbtaskqueue: Any, *arguments: str) -> subprocess.Popen[str]:
    ours = {"BRIDGING": json.dumps(dbtaskqueue), "DJANGO_SETTINGS_MODULE": "tests.contrib.bridging.settings"}
    command, env = [sys.executable, *arguments], database.env | ours
    return subprocess.Popen(command, env=env, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
