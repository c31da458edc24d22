"""What the commands' arguments mean: text becomes a value, or an error that says what is wrong with it."""

from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.conf import settings as conf


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def duration(text: str) -> timedelta:
    """Return a duration of 0 or more."""
    try:
        found = conf.duration(text, where="the time")
    except ImproperlyConfigured as error:
        raise ArgumentTypeError(str(error)) from None
    if found < timedelta(0):
        raise ArgumentTypeError(f"{text!r} is negative")
    return found
