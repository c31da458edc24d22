"""The notifier of a whole process: nothing before the first task, and no wake-up lost at the end."""

from __future__ import annotations

import psycopg

from django_dbtaskqueue.db import notify
from tests.conftest import ProcessDatabase

PROGRAM = """
import threading
from django_dbtaskqueue import enqueue
names = lambda: [t.name for t in threading.enumerate() if "notifier" in t.name]
assert names() == []
enqueue("claims")
"""


def test_a_short_command_wakes_pollers(postgres_process_database: ProcessDatabase) -> None:
    with psycopg.connect(postgres_process_database.url, autocommit=True) as recorder:
        recorder.execute(f"LISTEN {notify.CHANNEL}")
        heard: list[str] = []
        recorder.add_notify_handler(lambda note: heard.append(note.payload))
        postgres_process_database.run("shell", "--command", PROGRAM)
        recorder.execute("SELECT 1")
        assert heard == ["claims"]
