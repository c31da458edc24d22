"""Log lines: one per event, harmless, and only where the project has none of its own."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from django_dbtaskqueue.poller.process import logs

HOSTILE = "one\r\n12:00:00 INFO forged\x1b[2J\u2028end"


def record(message: str = HOSTILE, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("django_dbtaskqueue", logging.WARNING, __file__, 1, "said: %s", (message,), None)
    made.__dict__.update(extra)
    return made


def failed() -> logging.LogRecord:
    made = record("no")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def test_text_is_one_line_whatever_the_message_holds() -> None:
    line = logs.TextFormatter().format(record())
    assert line[8:] == " WARNING said: one\\r\\n12:00:00 INFO forged\\x1b[2J\\u2028end"
    assert len(line.splitlines()) == 1


def test_a_traceback_follows_indented() -> None:
    first, *rest = logs.TextFormatter().format(failed()).splitlines()
    assert first.endswith("said: no")
    assert rest and all(line.startswith("    ") and "\x1b" not in line for line in rest)


def test_logfmt_is_one_line_with_quotes_where_a_value_needs_them() -> None:
    line = logs.LogfmtFormatter().format(record(task_id=7, reference='a "b"', run_seconds=0.5, trace_id=None))
    assert len(line.splitlines()) == 1
    assert ' level=WARNING logger=django_dbtaskqueue message="said: one\\r\\n' in line
    assert line.endswith(' task_id=7 reference="a \\"b\\"" run_seconds=0.5')


def test_json_is_one_object_per_line_with_the_tasks_fields() -> None:
    line = logs.JsonFormatter().format(record(task_id=7, queue="q", reference="r\n", attempt=2))
    assert len(line.splitlines()) == 1
    facts = json.loads(line)
    assert facts.pop("time").endswith("+00:00")
    assert facts == {
        "level": "WARNING",
        "logger": "django_dbtaskqueue",
        "message": f"said: {HOSTILE}",
        "task_id": 7,
        "queue": "q",
        "reference": "r\n",
        "attempt": 2,
    }
    assert "ValueError" in json.loads(logs.JsonFormatter().format(failed()))["exception"]


@contextmanager
def without_handlers() -> Iterator[None]:
    """As in a process that configured no logging: pytest's own handlers step aside."""
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = kept
        root.setLevel(level)


@pytest.mark.parametrize(
    ("verbosity", "shown"), [(0, ["warning"]), (1, ["info", "warning"]), (2, ["debug", "info", "warning"])]
)
def test_verbosity_and_the_way_back(verbosity: int, shown: list[str]) -> None:
    said = io.StringIO()
    ours = logging.getLogger("django_dbtaskqueue")
    before = ours.level
    with without_handlers(), logs.configured("text", verbosity, said):
        for level in ("debug", "info", "warning"):
            getattr(ours, level)(level)
        assert len(logging.getLogger().handlers) == 1
    assert [line.split()[-1] for line in said.getvalue().splitlines()] == shown
    assert ours.level == before
    assert not any(isinstance(handler.formatter, logs.TextFormatter) for handler in logging.getLogger().handlers)


def test_the_projects_own_logging_wins() -> None:
    said = io.StringIO()
    with logs.configured("text", 1, said):  # pytest has handlers on the root
        logging.getLogger("django_dbtaskqueue").warning("for the project")
    assert said.getvalue() == ""


def test_a_project_names_the_json_formatter_in_its_logging_setting() -> None:
    said, ours = io.StringIO(), logging.getLogger("django_dbtaskqueue.test_of_logging")
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": "django_dbtaskqueue.poller.process.logs.JsonFormatter"}},
            "handlers": {"lines": {"class": "logging.StreamHandler", "formatter": "json", "stream": said}},
            "loggers": {ours.name: {"handlers": ["lines"], "propagate": False}},
        }
    )
    try:
        ours.warning("Task %s failed", 7, extra={"task_id": 7, "queue": "claims"})
    finally:
        ours.handlers.clear()
        ours.propagate = True
    assert {"message": "Task 7 failed", "task_id": 7, "queue": "claims"}.items() <= json.loads(said.getvalue()).items()
