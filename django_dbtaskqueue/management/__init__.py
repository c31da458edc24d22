"""The management commands. Here: how they read an argument, or say what is wrong with it."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import CommandError, OutputWrapper
from django.core.management.color import Style

from django_dbtaskqueue.core.durations import format_duration, parse_length
from django_dbtaskqueue.operations.serializers import DocumentEncoder

Options = dict[str, Any]  # of argparse


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def duration(text: str) -> timedelta:
    """Return a duration of 0 or more."""
    try:
        return parse_length(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def positive_duration(text: str) -> timedelta:
    """Return a duration of more than 0."""
    found = duration(text)
    if not found:
        raise ArgumentTypeError(f"{text!r} must be more than 0")
    return found


# -- output ------------------------------------------------------------------------------------------------------------

EMPTY_CELL = "-"
NO_BREAK_SPACES = "\u00a0\u202f"  # in numbers and estimates
STYLE_OF_WORD = {
    "ERROR": "ERROR",
    "POISON": "WARNING",
    "COMPLETED": "SUCCESS",
    "PROCESSING": "NOTICE",
    "paused": "WARNING",
}


@dataclass(frozen=True, slots=True)
class Output:
    """Writes answers, as text with colours or as one JSON document."""

    out: OutputWrapper
    style: Style
    err: OutputWrapper
    as_json: bool = False
    yes: bool = False  # the operator has confirmed by an option

    def ask(self, question: str) -> bool:
        """Ask the operator, on a terminal. Elsewhere ``--yes`` is required."""
        if self.yes:
            return True
        if not sys.stdin.isatty():
            raise CommandError("There is no terminal to ask on: add --yes, or try --dry-run first.")
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")

    def write(self, text: str = "") -> None:
        """Write a line of text; with ``as_json`` nothing."""
        if not self.as_json:
            self.out.write(text)

    def progress(self, text: str) -> None:
        """Write a line about the work itself, where it does not mix with the answer."""
        self.err.write(text)

    def data(self, value: object) -> None:
        """Write a JSON document; without ``as_json`` nothing."""
        if self.as_json:
            self.out.write(json.dumps(value, cls=DocumentEncoder, ensure_ascii=False))

    def answer(self, document: object, text: str, code: int = 0) -> int:
        """Write an answer as JSON or as text; return the exit code."""
        self.data(document)
        self.write(text)
        return code

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> None:
        """Write a table, each column as wide as its longest cell; ``right`` names the columns of numbers."""
        columns = []
        for name, cells in zip(head, zip(*rows, strict=True), strict=True):
            column = [name, *map(_cell, cells)]
            width = max(map(len, column))
            columns.append([cell.rjust(width) if name in right else cell.ljust(width) for cell in column])
        first, *lines = zip(*columns, strict=True)
        self.write(self.style.MIGRATE_HEADING("  ".join(first).rstrip()))
        for line in lines:
            self.write("  ".join(map(self._coloured, line)).rstrip())

    def facts(self, pairs: Mapping[str, object]) -> None:
        """Write names and values, one pair per line, without the empty ones."""
        shown = {name: _cell(value) for name, value in pairs.items() if value not in (None, "", [], {})}
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            self.write(f"{name.rjust(width)}  {self._coloured(value)}")

    def _coloured(self, text: str) -> str:
        name = STYLE_OF_WORD.get(text.strip())
        return str(getattr(self.style, name)(text)) if name else text


def _cell(value: object) -> str:
    return EMPTY_CELL if value is None or value == "" else printable(str(value))


def printable(text: str) -> str:
    """Return text without control characters for the terminal: each is shown as its escape sequence."""
    return "".join(char if char.isprintable() or char in NO_BREAK_SPACES else repr(char)[1:-1] for char in text)


def ago(value: datetime | None, now: datetime) -> str:
    """Return a time as its distance from now."""
    if value is None:
        return EMPTY_CELL
    age = format_duration(abs(now - value), rough=True)
    return f"{age} ago" if value <= now else f"in {age}"
