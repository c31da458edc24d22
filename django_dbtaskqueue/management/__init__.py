"""The management commands. Here: how they read an argument, or say what is wrong with it."""

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, OutputWrapper
from django.core.management.color import Style

from django_dbtaskqueue.core.durations import UNKNOWN, format_duration, parse_length
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.json import whole_number
from django_dbtaskqueue.db.session import migrated
from django_dbtaskqueue.operations.serializers import DocumentEncoder
from django_dbtaskqueue.operations.verbs import positive_length

FAILED_CODE, USAGE_CODE = 1, 2  # exit codes
CODES_OF_SETTINGS: Mapping[type[BaseException], int] = {ImproperlyConfigured: 3, TaskQueueError: 3}

Options = dict[str, Any]  # of argparse
AddArgument = Callable[..., object]  # of argparse
Names = Sequence[str]
Row = Sequence[object]
T = TypeVar("T")


def argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a reader that says what is wrong with an argument: argparse leaves the words of a ``ValueError`` out."""

    def reading(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return reading


@argument
def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if (number := whole_number(text) or 0) < 1:
        raise ValueError(f"{text!r:.50} is not a whole number of at least 1")
    return number


duration, positive_duration = argument(parse_length), argument(positive_length)


def wrong_usage(words: str) -> CommandError:
    """Return the error of a command that was not written as it must be."""
    return CommandError(words, returncode=USAGE_CODE)


@contextmanager
def exit_codes(codes: Mapping[type[BaseException], int] = CODES_OF_SETTINGS) -> Iterator[None]:
    """End a command with the code of what is raised inside: that of the first class that fits."""
    try:
        with migrated():
            yield
    except tuple(codes) as error:
        code = next(code for kind, code in codes.items() if isinstance(error, kind))
        raise CommandError(str(error) or "Stopped.", returncode=code) from error


NO_BREAK_SPACES = "\u00a0\u202f"  # in numbers and estimates
STYLE_OF_WORD = {
    "ERROR": "ERROR", "POISON": "WARNING", "COMPLETED": "SUCCESS", "PROCESSING": "NOTICE", "paused": "WARNING",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Output:
    """Writes answers, as text with colours or as one JSON document."""

    out: OutputWrapper
    style: Style
    err: OutputWrapper  # for lines about the work itself, so that they do not mix with the answer
    as_json: bool = False
    yes: bool = False  # the operator has confirmed by an option

    def ask(self, question: str) -> None:
        """Ask the operator on a terminal, and raise ``CommandError`` unless they agree. Elsewhere ``--yes`` does."""
        if self.yes:
            return
        if not sys.stdin.isatty():
            raise CommandError("There is no terminal to ask on: add --yes, or try --dry-run first.")
        if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing was changed.", returncode=FAILED_CODE)

    def write(self, text: str = "") -> None:
        """Write a line of text; with ``as_json`` nothing."""
        if not self.as_json:
            self.out.write(text)

    def data(self, value: object) -> None:
        """Write a JSON document; without ``as_json`` nothing."""
        if self.as_json:
            self.out.write(json.dumps(value, cls=DocumentEncoder, ensure_ascii=False))

    def answer(self, document: object, text: str = "", code: int = 0) -> int:
        """Write an answer as JSON or as text; return the exit code."""
        self.data(document)
        if text:
            self.write(text)
        return code

    def table(self, documents: object, head: Names, rows: Sequence[Row], none: str = "", right: Names = ()) -> int:
        """Write documents as JSON, or rows as a table, or ``none``; ``right`` names the columns of numbers."""
        if not rows:
            return self.answer(documents, none)
        self.data(documents)
        columns = []
        for name, cells in zip(head, zip(*rows, strict=True), strict=True):
            column = [name, *map(_cell, cells)]
            width = max(map(len, column))
            columns.append([cell.rjust(width) if name in right else cell.ljust(width) for cell in column])
        first, *lines = zip(*columns, strict=True)
        self.write(self.style.MIGRATE_HEADING("  ".join(first).rstrip()))
        for line in lines:
            self.write("  ".join(map(self._coloured, line)).rstrip())
        return 0

    def facts(self, document: object, pairs: Mapping[str, object]) -> int:
        """Write a document as JSON, or names and values, one pair per line, without the empty ones."""
        self.data(document)
        shown = {name: _cell(value) for name, value in pairs.items() if value not in (None, "", [], {})}
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            self.write(f"{name.rjust(width)}  {self._coloured(value)}")
        return 0

    def _coloured(self, text: str) -> str:
        name = STYLE_OF_WORD.get(text.strip())
        return str(getattr(self.style, name)(text)) if name else text


def _cell(value: object) -> str:
    return UNKNOWN if value is None or value == "" else printable(str(value))


def printable(text: str) -> str:
    """Return text without control characters for the terminal: each is shown as its escape sequence."""
    return "".join(char if char.isprintable() or char in NO_BREAK_SPACES else repr(char)[1:-1] for char in text)


def from_now(value: datetime | None, now: datetime) -> str:
    """Return a time as its distance from now."""
    if value is None:
        return UNKNOWN
    age = format_duration(abs(now - value), rough=True)
    return f"{age} ago" if value <= now else f"in {age}"
