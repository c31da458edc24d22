"""Shards: a queue spread over several databases. A task stays where it was enqueued."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

from django.db import connections
from django.db.utils import InterfaceError, OperationalError
from django.utils.module_loading import import_string

from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core.exceptions import EnqueueError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_turn = [0]


def route(settings: QueueSettings, reference: str | None, payload: Any) -> str:
    """Return the shard of a task: the router's word, else the reference's hash, else each in turn."""
    shards = settings.shards
    if settings.router is not None:
        router = import_string(settings.router) if isinstance(settings.router, str) else settings.router
        chosen = router(reference, payload, tuple(shards))
        if chosen not in shards:
            raise EnqueueError(f"router returned {chosen!r}, which is not one of the shards {', '.join(shards)}.")
        return str(chosen)
    if reference is None:
        _turn[0] += 1
        return shards[_turn[0] % len(shards)]
    return shards[crc32(reference.encode()) % len(shards)]


def with_fail_over(chosen: str, shards: Sequence[str], insert: Callable[[str], T]) -> T:
    """Run ``insert(alias)`` on the chosen shard, or on the next one when that is down.

    Inside a transaction on the chosen shard there is no way out: the error is raised.
    """
    start = list(shards).index(chosen)
    candidates = [*shards[start:], *shards[:start]]
    for alias in candidates[:-1]:
        try:
            return insert(alias)
        except (OperationalError, InterfaceError) as error:
            if connections[alias].in_atomic_block:
                raise
            connections[alias].close()
            logger.warning("Shard %s is down, enqueueing on the next one: %s", alias, error)
    return insert(candidates[-1])
