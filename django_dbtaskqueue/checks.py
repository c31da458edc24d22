"""System checks: what can be known to be wrong before a task is lost by it."""

from __future__ import annotations

from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import conf
from django_dbtaskqueue.session import model_for


@register("dbtaskqueue")
def check_settings(**_: Any) -> list[CheckMessage]:
    """E001: DBTASKQUEUE cannot be read. E002: a queue has an unknown database. E003: or an unknown table."""
    try:
        queues = {name: conf.default_settings(name) for name in conf.known_queues()}
    except ImproperlyConfigured as error:
        return [Error(str(error), id="dbtaskqueue.E001")]
    for name in queues:
        try:
            model_for(name)
        except ImproperlyConfigured as error:
            return [Error(f"Queue {name!r}: {error}", id="dbtaskqueue.E003")]
    return [
        Error(
            f"Queue {name!r} lives on database {queue.database!r}, which is not in DATABASES.",
            hint=f"Aliases: {', '.join(django_settings.DATABASES)}.",
            id="dbtaskqueue.E002",
        )
        for name, queue in queues.items()
        if queue.database not in django_settings.DATABASES
    ]
