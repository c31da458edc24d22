"""Which queues a poller serves, and with which weight: ``--queue mail:8,default:4 --exclude slow``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import UnknownQueue, near_match
from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.flow.placement import known_queues


def parse(texts: Iterable[str], excluded: Iterable[str] = ()) -> dict[str, int]:
    """Return queue names and weights (1 if not given) from texts; all queues with a processor if there are none.

    Raises ``UnknownQueue`` with the nearest name, and ``ImproperlyConfigured`` for a queue without a processor, for a
    bad weight, and when no queue is left.
    """
    requested = dict(_pair(text) for text in _names(texts)) or dict.fromkeys(registry.queues(), 1)
    if not requested:
        raise ImproperlyConfigured(
            "There is nothing to poll: no processor is registered. Write one with @processor(...) in the tasks.py of "
            "an installed app."
        )
    excluded_names = set(_names(excluded))
    for queue in [*requested, *excluded_names]:
        _check(queue)
    selected = {queue: weight for queue, weight in requested.items() if queue not in excluded_names}
    if not selected:
        raise ImproperlyConfigured(
            f"There is nothing to poll: --exclude leaves none of {', '.join(sorted(requested))}."
        )
    return selected


def check_databases(queues: Iterable[str], using: str | None) -> None:
    """Raise ``ImproperlyConfigured`` for a database that ``DATABASES`` does not have."""
    for queue in queues:
        alias = alias_for(queue, using)
        if alias not in connections:
            raise ImproperlyConfigured(
                f"There is no database {alias!r} in DATABASES for queue {queue!r}.{near_match(alias, connections)}"
            )


def _names(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, map(str.strip, text.split(",")))


def _pair(text: str) -> tuple[str, int]:
    name, colon, weight = text.rpartition(":")
    if not colon or text in registry.queues():  # a name may hold colons of its own
        return text, 1
    if not weight.isdecimal() or int(weight) < 1:
        raise ImproperlyConfigured(f"{text!r}: the weight of a queue is a whole number of at least 1, as in {name}:2.")
    return name, int(weight)


def _check(queue: str) -> None:
    known = registry.queues()
    if queue in known:
        return
    try:
        there = known_queues()  # with those made at runtime
    except DatabaseError:
        there = {*conf.known_queues()}
    if queue in there:
        raise ImproperlyConfigured(
            f"Queue {queue!r} has no processor in this project, so nothing could process its tasks. Write one with "
            f"@processor({queue!r}) in the tasks.py of an installed app. "
            f"Queues with a processor: {', '.join(known) or 'none'}."
        )
    raise UnknownQueue(queue, {*known, *there})
