"""Objectives: what a queue is held to. ``"99.9%/5m"``: that share of what ends completes within five minutes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from django_dbtaskqueue.pipeline.arguments import duration, pair, share

EVERY_QUEUE = "*"


@dataclass(frozen=True)
class Objective:
    """``share`` (0 to 1) of the ended tasks of ``queue`` complete, ``within`` that time of their creation if given."""

    queue: str
    share: float
    within: timedelta | None = None

    def __str__(self) -> str:
        text = f"{self.share * 100:g}%"
        return text if self.within is None else f"{text} within {self.within.total_seconds():g} s"


DEFAULT = Objective(EVERY_QUEUE, 0.99)


def objective(text: str) -> Objective:
    """Return the objective of "claims=99.9%/5m", or of "*=99%" for every queue. Raises ValueError with a reason."""
    try:
        queue, rest = pair(text)
    except ValueError:
        raise ValueError(f'{text!r} is no objective. Write it as "claims=99.9%/5m" or "*=99%"') from None
    wanted, _, within = rest.partition("/")
    return Objective(queue, share(wanted), duration(within) if within else None)


def by_queue(objectives: Iterable[Objective]) -> dict[str, Objective]:
    """Return the objectives by queue, with one for ``*`` always among them. A later one wins."""
    return {EVERY_QUEUE: DEFAULT, **{one.queue: one for one in objectives}}
