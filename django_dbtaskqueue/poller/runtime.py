"""Runtime control: what an operator changed on a queue's row or in the settings file, applied while running.

Each poller on each host looks once per heartbeat, and says in its log and on its own row what it applied.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core import retry
from django_dbtaskqueue.core.durations import iso
from django_dbtaskqueue.models import Queue
from django_dbtaskqueue.poller.queue_state import Lane

logger = logging.getLogger("django_dbtaskqueue")

FIXED = ("database", "model", "temporary", "strategy")  # where the tasks live cannot change under a running poller


def apply_overrides(lanes: list[Lane], alias: str) -> list[str]:
    """Bring lanes to the settings in force; return the differences applied, like ``claims: lease=PT5M<PT15M``.

    A row that cannot be applied is logged and changes nothing.
    """
    rows = dict(
        Queue.objects.using(alias).filter(pk__in=[lane.queue for lane in lanes]).values_list("name", "overrides")
    )
    return [change for lane in lanes for change in _apply(lane, rows.get(lane.queue) or {})]


def _apply(lane: Lane, overrides: dict[str, Any]) -> list[str]:
    new, lane.overrides = overrides != lane.overrides, overrides
    try:
        settings = conf.overlay(conf.default_settings(lane.queue), overrides)
    except ImproperlyConfigured as error:
        if new:
            logger.error("Overrides of queue %s are not applied: %s", lane.queue, error)
        return []
    changes = difference(lane.settings, settings)
    if changes or new:
        lane.apply(settings)
    if changes:
        logger.info("Queue %s: %s", lane.queue, " ".join(changes))
    return [f"{lane.queue}: {change}" for change in changes]


def difference(old: QueueSettings, new: QueueSettings) -> list[str]:
    """Return what changed as ``name=new<old``, durations in ISO 8601."""
    return [
        f"{field.name}={shown(getattr(new, field.name))}<{shown(getattr(old, field.name))}"
        for field in fields(QueueSettings)
        if field.name not in FIXED and getattr(new, field.name) != getattr(old, field.name)
    ]


def shown(value: Any) -> str:
    """Return a setting's value as people write it."""
    if isinstance(value, timedelta):
        return iso(value)
    return retry.describe(value) if callable(value) else str(value)
