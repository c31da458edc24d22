"""``DBTASKQUEUE["FILE"]``: a TOML file of ``[queues.NAME]`` tables, followed while the process runs.

All its faults are reported together. At the first reading a fault is an error; later a bad edit changes nothing and is
logged once, and the next good edit is applied.
"""

from __future__ import annotations

import logging
import threading
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from time import time
from typing import Any, Generic, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import near_match

logger = logging.getLogger("django_dbtaskqueue")
T = TypeVar("T")

CHECK_INTERVAL_S = 1.0  # between two checks whether the file changed
HALF_WRITTEN_S = 0.1  # a file that changed less than this time ago may be half written
NONE_TEXT = "none"  # how the file says None, which TOML lacks


class SettingsFile(Generic[T]):
    """A file, and what ``check`` makes of its parsed text: a value and a list of faults."""

    def __init__(self, path: Path, check: Callable[[Mapping[str, Any]], tuple[T, list[str]]]) -> None:
        self.path = path
        self._check = check
        self._checking = threading.Lock()
        self._next_check = 0.0
        self._seen: tuple[int, ...] | None = None
        self._text: str | None = None  # as last read, good or bad

    def load(self) -> T:
        """Read the file; raise ``ImproperlyConfigured`` that lists every fault with its place, value and fix."""
        self._seen, self._next_check = self._signature(), clock.monotonic() + CHECK_INTERVAL_S
        self._text = self._read()
        return self._checked(self._text)

    def reload(self) -> T | None:
        """Return the new value when the file changed and is good; None otherwise. Checks at most once a second."""
        if clock.monotonic() < self._next_check or not self._checking.acquire(blocking=False):
            return None
        try:
            self._next_check = clock.monotonic() + CHECK_INTERVAL_S
            seen = self._signature()
            if seen and 0 <= time() - seen[0] / 1e9 < HALF_WRITTEN_S:
                self._next_check = clock.monotonic() + HALF_WRITTEN_S
            elif seen != self._seen:
                self._seen, before, self._text = seen, self._text, None
                self._text = self._read()
                if self._text != before:
                    value = self._checked(self._text)
                    logger.info("Settings file %s applied", self.path)
                    return value
        except ImproperlyConfigured as error:
            logger.error("The settings stay as they were. %s", error)
        finally:
            self._checking.release()
        return None

    def _signature(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ImproperlyConfigured(
                f'DBTASKQUEUE["FILE"]: {self.path} cannot be read: {error}. It must be TOML with [queues.NAME] tables.'
            ) from None

    def _checked(self, text: str) -> T:
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ImproperlyConfigured(f"{self.path} is not valid TOML: {error}.") from None
        value, faults = self._check(document)
        if faults:
            number = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
            raise ImproperlyConfigured("\n  - ".join([f"{self.path} has {number}:", *faults]))
        return value


def tables(
    document: Mapping[str, Any], check: Callable[..., dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the queues' settings that are good, by queue, and the faults of the others.

    ``check(values, where=…)`` returns settings parsed, or raises.
    """
    faults = [
        f"{name!r} is not known here.{near_match(name, ['queues'])} Write settings in [queues.NAME] tables."
        for name in document
        if name != "queues"
    ]
    queues = document.get("queues", {})
    if not isinstance(queues, Mapping):
        return {}, [*faults, f"queues = {queues!r} must be tables: write [queues.NAME]."]
    found: dict[str, dict[str, Any]] = {}
    for name, table in queues.items():
        if not isinstance(table, Mapping):
            faults.append(f"queues.{name} = {table!r} must be a table: write [queues.{name}] above its settings.")
            continue
        where, found[name] = f"[queues.{name}]", {}
        for key, value in table.items():
            try:
                found[name] |= check({key: None if value == NONE_TEXT else value}, where=where)
            except (ImproperlyConfigured, TypeError, ValueError) as error:
                why = str(error).removeprefix(where).removeprefix(f"[{key!r}]").lstrip(": ")
                faults.append(f"{where} {key} = {value!r}: {why}")
    return found, faults
