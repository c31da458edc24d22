"""Log lines of ``runtaskpoller`` as text, JSON or logfmt.

A project names the formatters in its ``LOGGING``. If ``LOGGING`` has no handler for us, the command adds one.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from django_dbtaskqueue.core import logger

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["JsonFormatter", "LogfmtFormatter", "TextFormatter"]

# Of flow.observe: ``fields`` and ``life_fields``.
TASK_FIELDS = (
    "task_id", "queue", "reference", "attempt", "task_event", "wait_seconds", "run_seconds", "due_time", "trace_id",
)  # fmt: skip
LOG_FIELDS = ("time", "level", "logger", "message", *TASK_FIELDS, "exception")  # stable: alerts and searches name them
UNQUOTED = re.compile(r'[^\s"=\x00-\x1f\x7f]+')  # a value of logfmt that needs no quotes
LEVEL_BY_VERBOSITY = (logging.WARNING, logging.INFO, logging.DEBUG)
# A reference or an error text may hold line ends that fake a log line, or control codes for the terminal.
CONTROL_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
CONTROL_ESCAPES |= str.maketrans({"\r": "\\r", "\n": "\\n", "\t": "\t", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class TextFormatter(logging.Formatter):
    """``12:03:07 INFO    message``, with the traceback indented below it."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{when} {record.levelname:<7} {record.getMessage().translate(CONTROL_ESCAPES)}"
        if record.exc_info:
            frames = (record.exc_text or self.formatException(record.exc_info)).splitlines()
            line = "\n".join([line, *("    " + frame.translate(CONTROL_ESCAPES) for frame in frames)])
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the fields of the task if the line is about one."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.facts(record), default=str)

    def facts(self, record: logging.LogRecord) -> dict[str, object]:
        facts: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts |= {name: getattr(record, name) for name in TASK_FIELDS if hasattr(record, name)}
        if record.exc_info:
            facts["exception"] = record.exc_text or self.formatException(record.exc_info)
        return facts


class LogfmtFormatter(JsonFormatter):
    """The same fields as ``name=value``, without those that are not known."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_logfmt(value)}" for name, value in self.facts(record).items() if value is not None)


def _logfmt(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if UNQUOTED.fullmatch(text) else json.dumps(text)


FORMATTERS = {"text": TextFormatter, "json": JsonFormatter, "logfmt": LogfmtFormatter}


@contextmanager
def configured(kind: str, verbosity: int, stream: SupportsWrite[str] | None = None) -> Iterator[None]:
    """Log to ``stream`` (default: standard error) inside the block, unless the project's ``LOGGING`` has a handler.

    At verbosity 1 our loggers show INFO and above, other loggers WARNING and above. 0 shows less, 2 and 3 show more.
    """
    if logger.hasHandlers():
        yield
        return
    root = logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FORMATTERS[kind]())
    before = root.level, logger.level
    root.addHandler(handler)
    root.setLevel(logging.INFO if verbosity > 1 else logging.WARNING)
    logger.setLevel(LEVEL_BY_VERBOSITY[min(verbosity, len(LEVEL_BY_VERBOSITY) - 1)])
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        logger.setLevel(before[1])
