"""Which queues a poller serves, and how often each has its turn: ``--queue mail:8,default:4 --exclude slow``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import UnknownQueue


def parse(texts: Iterable[str], excluded: Iterable[str] = ()) -> dict[str, int]:
    """Return queue names and weights (1 if not given) from texts; all queues with a processor if there are none.

    Raises ``UnknownQueue`` with the nearest name, and ``ImproperlyConfigured`` for a queue nobody here processes, for a
    bad weight, and when no queue is left.
    """
    wanted = dict(_pair(word) for word in _words(texts)) or dict.fromkeys(registry.queues(), 1)
    if not wanted:
        raise ImproperlyConfigured(
            "There is nothing to poll: no processor is registered. Write one with @processor(...) in the tasks.py of "
            "an installed app."
        )
    left_out = set(_words(excluded))
    for queue in [*wanted, *left_out]:
        _check(queue)
    chosen = {queue: weight for queue, weight in wanted.items() if queue not in left_out}
    if not chosen:
        raise ImproperlyConfigured(f"There is nothing to poll: --exclude leaves none of {', '.join(sorted(wanted))}.")
    return chosen


def _words(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, map(str.strip, text.split(",")))


def _pair(word: str) -> tuple[str, int]:
    name, colon, weight = word.rpartition(":")
    if not colon or word in registry.queues():  # a name may hold colons of its own
        return word, 1
    if not weight.isdecimal() or int(weight) < 1:
        raise ImproperlyConfigured(f"{word!r}: the weight of a queue is a whole number of at least 1, as in {name}:2.")
    return name, int(weight)


def _check(queue: str) -> None:
    known = registry.queues()
    if queue in known:
        return
    if queue in conf.known_queues():
        raise ImproperlyConfigured(
            f"Queue {queue!r} has no processor in this project, so nothing could process its tasks. Write one with "
            f"@processor({queue!r}) in the tasks.py of an installed app. "
            f"Queues with a processor: {', '.join(known) or 'none'}."
        )
    raise UnknownQueue(queue, {*known, *conf.known_queues()})
