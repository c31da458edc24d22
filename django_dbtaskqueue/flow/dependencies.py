"""Dependencies: what waits for the end of a task learns of it.

``watched`` on the row of a task says that something waits. The statement that ends the task returns it, so a task that
nothing waits for costs nothing. The news is told in a transaction of its own, which takes ``watched`` away. If the
process dies between the two, the row itself is the reminder: pollers look for such rows every few seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial

from django.db.utils import Error

from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session

logger = logging.getLogger(__name__)

ENDED_PER_TRANSACTION = 1000  # tasks whose ends are told in one transaction


def after_commit(session: Session, ids: Collection[int], left: Collection[int] = ()) -> None:
    """Tell the ends of tasks once the current transaction commits. ``left``: of tasks that completed and are gone."""
    notify.on_commit(session.connection, partial(_quietly, ended, session, ids, left))


def sweep_after_commit(session: Session) -> None:
    """Tell all ends of tasks of one table that are untold once the current transaction commits."""
    notify.on_commit(session.connection, partial(_quietly, sweep, session))


def _quietly(tell: Callable[..., object], session: Session, *ids: Collection[int]) -> None:
    try:
        tell(session, *ids)
    except Error as error:  # the next sweep of a poller tells it
        logger.debug("Ends of tasks in %s are told later: %s", session.location, error)


def ended(session: Session, ids: Collection[int], left: Collection[int] = ()) -> None:
    """Tell the ends of tasks of one table to what waits for them: each end once, however often it is called.

    ``left``: the ids of tasks that completed and whose rows are gone. Not inside the transaction that ended the tasks.
    """
    array = session.sql.dialect.array
    with session.atomic():
        locked = [row[0] for row in session.run(session.sql.lock_ended, {"ids": array(ids)})]
        if locked:
            session.run(session.sql.set_told, {"ids": array(locked), "open": array(())})
    wake_waiting(session, [*locked, *left])


def wake_waiting(session: Session, ids: Iterable[int]) -> None:
    """Wake the clients that wait for the ends of these tasks."""
    for task_id in ids:
        notify.notify(session.connection.alias, session.connection.vendor, f"{notify.TASK_ENDED}{task_id}")


def sweep(session: Session) -> int:
    """Tell the ends that a process left untold when it died, in one table; return how many."""
    number, after = 0, 0
    while ids := _untold(session, after):
        ended(session, ids)
        number, after = number + len(ids), ids[-1]
        if len(ids) < ENDED_PER_TRANSACTION:
            break
    return number


def _untold(session: Session, after: int) -> list[int]:
    params = {"after": after, "limit": ENDED_PER_TRANSACTION}
    return [row[0] for row in session.run(session.sql.ended_watched, params)]
