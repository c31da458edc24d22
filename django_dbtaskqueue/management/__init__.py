"""The management commands. Here: how they read an argument, or say what is wrong with it."""

from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import timedelta

from django_dbtaskqueue.core.durations import parse_length


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
