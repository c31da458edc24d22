"""Log lines of ``runtaskpoller``, as text or JSON, for projects whose ``LOGGING`` has no handler for us."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")
FIELDS = ("task_id", "queue", "reference", "attempt")  # of flow.observe.fields
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # by verbosity
# A reference or an error text could forge log lines, or drive the terminal that shows them.
HARMLESS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    ord("\r"): "\\r",
    ord("\n"): "\\n",
    ord("\t"): "\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


class TextFormatter(logging.Formatter):
    """``12:03:07 INFO    message``, and tracebacks indented below it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{when} {record.levelname:<7} {record.getMessage().translate(HARMLESS)}"
        if record.exc_info:
            frames = self.formatException(record.exc_info).splitlines()
            line = "\n".join([line, *("    " + frame.translate(HARMLESS) for frame in frames)])
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the task's fields where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        facts: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)


class LineHandler(logging.Handler):
    """Hands whole lines to ``write``, or to standard error as it is at that moment."""

    def __init__(self, formatter: logging.Formatter, write: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._write = write or _to_stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; a failure to do so never reaches the caller."""
        try:
            self._write(self.format(record))
        except Exception:
            self.handleError(record)


def needed() -> bool:
    """Whether the project's ``LOGGING`` leaves our loggers without any handler."""
    return not logging.getLogger("django_dbtaskqueue").hasHandlers()


@contextmanager
def configured(kind: str, verbosity: int, write: Callable[[str], None] | None = None) -> Iterator[None]:
    """Log to standard error meanwhile, or to ``write``; does nothing where the project logs by itself.

    Our own events show from INFO on, those of others from WARNING on; less or more by ``verbosity`` (0 to 3).
    """
    if not needed():
        yield
        return
    root, ours = logging.getLogger(), logging.getLogger("django_dbtaskqueue")
    handler = LineHandler(JsonFormatter() if kind == "json" else TextFormatter(), write)
    before = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(logging.INFO if verbosity > 1 else logging.WARNING)
    ours.setLevel(LEVELS[min(verbosity, len(LEVELS) - 1)])
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        ours.setLevel(before[1])


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
