"""Death by SIGKILL at a labelled point of a task's way, in the process whose environment names the point.

Nothing of the flow is replaced: the statement that is being watched runs, and the process dies while its transaction
is open ("before" a commit, "in" something) or after it has committed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from django_dbtaskqueue.db.session import Session

# The point -> the statements watched, the name of the thread they run on, and whether they have committed by then.
POINTS: dict[str, tuple[set[str], str, bool]] = {
    "before checkout's commit": ({"checkout"}, "fetch", False),
    "after checkout's commit": ({"checkout"}, "fetch", True),
    "in the handler": (set(), "", False),
    "before the outcome's commit": ({"outcome"}, "fetch", False),
    "after the outcome's commit": ({"outcome"}, "fetch", True),
    "in renewal": ({"renew"}, "renew", False),
    "in rescue": ({"write"}, "heartbeat", False),
}
NOWHERE: tuple[set[str], str, bool] = (set(), "no thread", False)


def die() -> NoReturn:
    """End this process without a word to anybody."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process survived SIGKILL")


def in_handler() -> None:
    """A processor has begun."""
    if os.environ.get("CHAOS_KILL") == "in the handler":
        die()


def install() -> None:
    """Watch the statements of this process, and die at its point when one of them found rows."""
    Session.run = _deadly(Session.run)  # type: ignore[method-assign]
    Session.repeat = _deadly(Session.repeat)  # type: ignore[method-assign]


def _deadly(run: Callable[[Session, str, Any], Any]) -> Callable[[Session, str, Any], Any]:
    def run_and_die(self: Session, sql: str, params: Any) -> Any:
        kinds, thread, committed = POINTS.get(os.environ.get("CHAOS_KILL", ""), NOWHERE)
        if thread not in threading.current_thread().name or _kind(self, sql) not in kinds:
            return run(self, sql, params)
        if committed:
            rows = run(self, sql, params)
            return die() if rows else rows
        with self.atomic():
            rows = run(self, sql, params)
            if rows:
                die()
        return rows

    return run_and_die


def _kind(session: Session, sql: str) -> str | None:
    for known in (session.sql, session.sql.one):
        checkouts = known.checkout_skip_locked, known.checkout_optimistic, known.checkout_single_writer()
        outcomes = known.complete_plain, known.complete
        kinds = {"checkout": checkouts, "outcome": outcomes, "renew": (known.renew,), "write": (known.write,)}
        for kind, texts in kinds.items():
            if sql in texts:
                return kind
    return None
