"""Plans that do not flip: for questions that must stay cheap whatever the statistics say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django_dbtaskqueue.db.session import Session

# Statistics lag behind a queue: by them the planner would now and then read all of a queue to count its first rows.
# And an estimate for parallel work would be one worker's share.
BY_INDEX = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "max_parallel_workers_per_gather": "0",
}


@contextmanager
def by_index(session: Session) -> Iterator[None]:
    """A transaction, or part of the caller's, whose statements go by an index wherever there is one."""
    if not session.postgresql:
        yield
        return
    with session.atomic():
        asked = ", ".join(f"current_setting('{name}')" for name in BY_INDEX)
        before = dict(zip(BY_INDEX, session.run(f"SELECT {asked}", {})[0], strict=True))
        change = "SELECT " + ", ".join(f"set_config('{name}', %({name})s, true)" for name in BY_INDEX)
        session.run(change, BY_INDEX)
        yield
        session.run(change, before)  # they outlive a savepoint
