"""Searches that are given up as if the table were large, whatever the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from django.db import OperationalError

from django_dbtaskqueue.operations import paging

NO_TIME = timedelta(milliseconds=1)


def give_up(monkeypatch: pytest.MonkeyPatch, limit: str, *, window: int) -> None:
    """Let no statement end within ``paging``'s time limit of that name; a window has so many rows."""
    real = paging.time_limit

    @contextmanager
    def time_limit(alias: str, within: timedelta) -> Iterator[None]:
        if within == NO_TIME:
            raise OperationalError("statement timeout") from psycopg.errors.QueryCanceled()
        with real(alias, within):
            yield

    monkeypatch.setattr(paging, "time_limit", time_limit)
    monkeypatch.setattr(paging, limit, NO_TIME)
    monkeypatch.setattr(paging, "WINDOW_ROWS", window)
