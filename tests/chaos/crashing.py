"""Death by SIGKILL at a labelled point of a task's way, in the process whose environment names the point.

Nothing of the flow is replaced: the statement that is being watched runs, and the process dies while its transaction
is open ("before" a commit, "in" something) or after it has committed.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.signals import Listener

# The point -> the kind of the statements watched, the name of their thread, and whether they have committed by then.
POINTS = {
    "before checkout's commit": ("checkout", "fetch", False),
    "after checkout's commit": ("checkout", "fetch", True),
    "in the handler": ("", "", False),
    "before the outcome's commit": ("outcome", "fetch", False),
    "after the outcome's commit": ("outcome", "fetch", True),
    "in renewal": ("renew", "renew", False),
    "in rescue": ("write", "heartbeat", False),
}


class Leaves(Listener):
    """Ends the fetch thread after the first tasks it took, as code does whose error's text raises SystemExit."""

    def poller_executed(self, poller: Any, tasks: int) -> None:
        sys.exit(4)


def overflow() -> None:
    """Call itself, in C, until there is no stack left."""
    deeper = ctypes.CFUNCTYPE(None)(lambda: deeper())
    sys.setrecursionlimit(2**31 - 1)
    deeper()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    """Watch the statements of this process, and die at its point when one of them found rows."""
    Session.run = _deadly(Session.run)  # type: ignore[method-assign]
    Session.repeat = _deadly(Session.repeat)  # type: ignore[method-assign]


def _deadly(run: Callable[[Session, str, Any], Any]) -> Callable[[Session, str, Any], Any]:
    def run_and_die(self: Session, sql: str, params: Any) -> Any:
        kind, thread, committed = POINTS.get(os.environ.get("CHAOS_KILL", ""), ("", "no thread", False))
        if thread not in threading.current_thread().name or not kind or _kind(self, sql) != kind:
            return run(self, sql, params)
        if committed:
            rows = run(self, sql, params)
            return die() if rows else rows
        with self.atomic():
            if rows := run(self, sql, params):
                die()
        return rows

    return run_and_die


def _kind(session: Session, sql: str) -> str | None:
    for known in (session.sql, session.sql.one):
        checkouts = (
            known.checkout_skip_locked, known.checkout_beside_others,
            known.checkout_optimistic, known.checkout_single_writer(),
        )  # fmt: skip
        outcomes = known.complete_plain, known.complete
        kinds = {"checkout": checkouts, "outcome": outcomes, "renew": (known.renew,), "write": (known.write,)}
        for kind, texts in kinds.items():
            if sql in texts:
                return kind
    return None
