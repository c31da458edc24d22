"""Time for tests. The clock stays as it is; the rows move."""

from __future__ import annotations

from datetime import timedelta

from django.apps import apps
from django.db import connections, router
from django.db.models import DateTimeField, Model

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.db.session import Session, aliases_of
from django_dbtaskqueue.flow import placement
from django_dbtaskqueue.models import AbstractTask, Task


def advance(delta: timedelta | str, *, using: str | None = None) -> None:
    """Let ``delta`` pass for the queue: every time in its tables moves that far into the past.

    Scheduled tasks come nearer, leases and pauses run out; the rest of the project does not notice. ``delta`` is a
    ``timedelta`` or text such as "15m"; negative is a ``ValueError``. ``using`` None: where any known queue lives.
    """
    passed = conf.duration(delta, where="advance(delta)")
    if passed < timedelta(0):
        raise ValueError(f"advance({delta!r}): time only goes forward, so delta must not be negative.")
    everywhere = sorted({router.db_for_write(Task)}.union(*map(aliases_of, known_queues())))
    for alias in everywhere if using is None else [using]:
        for model in apps.get_models():
            if model._meta.app_label == Task._meta.app_label or issubclass(model, AbstractTask):
                _shift(model, passed, alias)


def known_queues() -> list[str]:
    """Return the queues that have settings, a processor, or a row of those made at runtime."""
    return sorted({*placement.known_queues(), *registry.queues()})


def _shift(model: type[Model], passed: timedelta, alias: str) -> None:
    session, quote = Session.on(alias), connections[alias].ops.quote_name
    columns = [
        quote(field.column) for field in model._meta.local_fields if isinstance(field, DateTimeField) and field.column
    ]
    if columns:
        moved = [f"{column} = {session.sql.dialect.later('%(delta)s', start=column)}" for column in columns]
        update = f"UPDATE {quote(model._meta.db_table)} SET {', '.join(moved)}"  # noqa: S608 -- names of models
        session.run(update, {"delta": -passed.total_seconds()})
