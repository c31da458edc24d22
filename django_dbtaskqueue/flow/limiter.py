"""Limits of a queue over all pollers: how many of its tasks run at a time, and how many start in a time.

A checkout of a limited queue is one transaction that begins with a lock on the queue's row in ``QueueLimit``. The row
names the leases that count. Whether they hold is read from the tasks, so a killed poller leaves no count behind. The
row also has the tokens of the rate. Two pollers cannot exceed a limit together, because they take turns at the row.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from math import floor

from django.db import OperationalError

from django_dbtaskqueue.conf.queue import QueueSettings
from django_dbtaskqueue.core.lease import LEASED
from django_dbtaskqueue.db.session import Params, Row, Session

MAX_UNWATCHED_S = 30.0  # without a checkout: then the leases are found anew, because the limit may have been off
MIN_TOKEN_PAUSE_S = 0.01  # until the next poll of a queue that waits for tokens
LOCKED_PAUSE_S = 0.05  # until the next poll of a queue whose row another transaction holds
LOCK_TIMEOUT_SQLSTATE = "55P03"
TOKEN_ROUNDING = 1e-6  # tokens that are missing only because floats are rounded
TOTAL_ATTEMPT = [column.name for column in LEASED].index("total_attempt")
Fence = tuple[int, int]  # a lease: id and total_attempt of its task
TakeRows = Callable[[Params], list[Row]]  # takes at most ``limit`` rows


class Limiter(threading.local):
    """The limits of one queue, as one process applies them.

    ``pause``, of the calling thread's last checkout: seconds until the limits allow a task; 0: until a task that runs
    ends; None: they held none back. A fetch on another thread must not change it.
    """

    def __init__(self, queue: str, settings: QueueSettings) -> None:
        self.queue = queue
        self.max_running = settings.max_running
        self.rate = 0.0 if settings.rate is None else settings.rate.per_second
        self.burst = float(settings.burst or max(1, floor(self.rate)))
        self.pause: float | None = None

    @classmethod
    def of(cls, queue: str, settings: QueueSettings) -> Limiter | None:
        """Return the limits of a queue; None if it has none."""
        return None if settings.max_running is None and settings.rate is None else cls(queue, settings)

    def used(self, session: Session) -> tuple[int, float]:
        """Return how many tasks run, and how many may start now by the rate. Locks nothing."""
        found = session.run(session.sql.limit_state, {"queue_name": self.queue})
        text, tokens, seconds = found[0] if found else (None, self.burst, 0.0)
        live, _ = _leases(session, _stored(text or "[]"), 0.0)
        return len(live), min(self.burst, tokens + max(0.0, seconds) * self.rate)

    def take(self, session: Session, params: Params, take_rows: TakeRows) -> list[Row]:
        """Take at most ``params["limit"]`` rows within the limits. Leases that ran out are taken over first."""
        params = {**params, "queue_name": self.queue}
        try:
            with session.atomic():
                return self._take(session, params, take_rows)
        except OperationalError as error:
            if not session.owned or getattr(error.__cause__, "sqlstate", "") != LOCK_TIMEOUT_SQLSTATE:
                raise
            self.pause = LOCKED_PAUSE_S  # code with a long transaction takes from the queue
            return []

    def _take(self, session: Session, params: Params, take_rows: TakeRows) -> list[Row]:
        limited = {"queue_name": self.queue, "rate": self.rate, "burst": self.burst}
        text, tokens, unwatched = session.run(session.sql.lock_limit, limited)[0]
        wanted: int = params["limit"]
        allowed = min(wanted, floor(tokens + TOKEN_ROUNDING)) if self.rate else wanted
        taken: list[Row] = []
        live: list[Fence] = []
        free = allowed
        if self.max_running is not None:
            known = None if text is None or (unwatched or 0.0) > MAX_UNWATCHED_S else _stored(text)
            if known is None:
                known = dict(session.run(session.sql.all_running, params))
            live, lapsed = _leases(session, known, params["lease"])
            over = lapsed[: max(0, min(allowed, self.max_running - len(live)))]
            taken = session.run(session.sql.checkout_optimistic, {**params, "rows": fenced(over)}) if over else []
            again = {row[0] for row in taken}
            live += [fence for fence in lapsed if fence[0] not in again]
            free = min(allowed, self.max_running - len(live)) - len(taken)
        found = take_rows({**params, "limit": free}) if free > 0 else []
        taken = taken + found
        if taken or self.max_running is not None:
            running = [*live, *[(row[0], row[TOTAL_ATTEMPT]) for row in taken]]
            stored = json.dumps(list(chain.from_iterable(running))) if self.max_running is not None else None
            session.run(
                session.sql.store_limit, {"queue_name": self.queue, "running": stored, "taken": float(len(taken))}
            )
        self.pause = None
        if len(taken) < wanted and len(found) >= free:  # there may be more tasks
            by_rate = self.rate and len(taken) == allowed
            missing = 1 - (tokens - len(taken))
            self.pause = max(MIN_TOKEN_PAUSE_S, missing / self.rate) if by_rate else 0.0
        return taken


def _stored(text: str) -> dict[int, int]:
    """Return leases as the row has them: a flat list, which is read sooner than pairs."""
    numbers = json.loads(text)
    return dict(zip(numbers[::2], numbers[1::2], strict=True))


def _leases(session: Session, known: Mapping[int, int], lease: float) -> tuple[list[Fence], list[Fence]]:
    """Return which leases hold, and which ran out and may still be renewed or taken over.

    One that ran out counts for one more ``lease`` at most: then no poller works for it that is not stuck.
    """
    ids = f"{{{','.join(map(str, known))}}}" if session.postgresql else json.dumps(list(known))
    rows = session.run(session.sql.running_of, {"ids": ids}) if known else []
    found = [(task_id, token, left) for task_id, token, left in rows if known[task_id] == token]
    live = [(task_id, token) for task_id, token, left in found if left > 0]
    return live, [(task_id, token) for task_id, token, left in found if -lease < left <= 0]


def fenced(leases: Iterable[Fence]) -> str:
    """Return leases as the rows of a statement."""
    return json.dumps([{"task_id": task_id, "token": token} for task_id, token in sorted(leases)])
