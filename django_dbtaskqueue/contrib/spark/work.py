"""What a Spark worker does with a partition of leased tasks: run them, settle them with their fence, report outcomes.

Nothing here depends on the answer's arrival. Of a partition that Spark runs again, only tasks whose leases are still
valid run: a settled task does not run twice.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from django.db import close_old_connections

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.contrib.spark import Place
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import PipelineError, TaskQueueError
from django_dbtaskqueue.core.failure_signature import RemoteError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Fail, Lost, Settlement, with_error, without_result
from django_dbtaskqueue.db.liveness import DatabaseUse, database_use
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.run import run_all
from django_dbtaskqueue.flow.settle import Decided, find_out, resolve, settle_surely
from django_dbtaskqueue.poller.executors import Answer
from django_dbtaskqueue.poller.executors.pool import portable_outcome
from django_dbtaskqueue.poller.executors.thread import check, tidied, tidy

logger = logging.getLogger("django_dbtaskqueue")

SHORT_JOB_S = 0.005  # outcomes of shorter jobs wait for others to share a commit
MAX_SETTLE_WAIT_S = 0.05  # how long the outcomes of short jobs wait
DATABASE_NAME = "SELECT current_database(), has_function_privilege('pg_control_system()', 'execute')"
SERVER_NUMBER = "SELECT system_identifier::text FROM pg_control_system()"


def place_of(alias: str) -> Place:
    """Return which database an alias means in this process."""
    session = Session.on(alias)
    if not session.postgresql:
        return None, os.path.realpath(str(session.connection.settings_dict["NAME"]))
    ((name, may_ask),) = session.run(DATABASE_NAME, {})
    return (session.run(SERVER_NUMBER, {})[0][0] if may_ask else None), name


def perform_rows(rows: list[dict[str, Any]], *, again: bool, places: Mapping[str, Place]) -> list[dict[str, Any]]:
    """Run and settle the jobs of a partition; return a summary of each. Raises only before the first has begun.

    ``again``: Spark has run this partition before, and that run may have settled some of the tasks. ``places`` are the
    poller's databases by alias; raises PipelineError if one is another here.
    """
    for alias, there in places.items():
        here = place_of(alias)
        if here[1] != there[1] or len({here[0], there[0]} - {None}) > 1:
            mine, theirs = (f"{name}{f' of server {server}' if server else ''}" for server, name in (here, there))
            raise PipelineError(
                f"The database {alias!r} of this Spark worker is not the poller's: it is {mine} here, and {theirs} for "
                "the poller. No task was started. Give the workers the poller's settings and environment, for example "
                "with --worker-env DATABASE_URL."
            )
    jobs: dict[int, list[Lease]] = {row["number"]: pickle.loads(row["leases"]) for row in rows}  # noqa: S301 -- made by our own driver
    unsettled = held([lease for leases in jobs.values() for lease in leases])
    runner = JobRunner()
    seconds: dict[int, float] = {}
    for number, leases in jobs.items():
        began = clock.monotonic()
        for lease in leases:
            if lease not in unsettled:
                runner.answers[lease] = Answer(None, None, "" if again else "start")
        if left := [lease for lease in leases if lease in unsettled]:
            runner.perform(left)
        seconds[number] = clock.monotonic() - began
    runner.settle()
    close_old_connections()
    answers = {number: pickle.dumps([runner.answers[lease] for lease in leases]) for number, leases in jobs.items()}
    return [{"number": number, "answers": answers[number], "seconds": seconds[number]} for number in jobs]


class JobRunner:
    """Runs jobs and settles their tasks; ``answers`` tell the poller what is left to do."""

    def __init__(self) -> None:
        self.answers: dict[Lease, Answer] = {}
        self._open: defaultdict[tuple[str, str], list[Decided]] = defaultdict(list)
        self._settled_at = clock.monotonic()

    def perform(self, leases: list[Lease]) -> None:
        """Run one job. Its outcomes are stored before the next one begins, unless jobs are short."""
        began, queue, payload = clock.monotonic(), leases[0].queue, leases[0].payload_type
        processor = registry.find(queue, payload)  # the one that is registered here, never one that a row names
        if processor is None:
            reason = TaskQueueError(
                f"Queue {queue!r} has no processor for payload {payload or 'plain JSON'} on this Spark worker, though "
                "its poller has one. Give the cluster the same code and settings as the poller."
            )
            self.answers.update(dict.fromkeys(leases, Answer(Fail(reason), None, "")))
            return
        check()
        database_use.set(DatabaseUse())
        for lease, outcome in zip(leases, tidied(run_all(leases, processor)), strict=True):
            if outcome is None:
                settled = _summary(lease.outcome, lease.queue) if lease.outcome is not None and lease.settled else None
                self.answers[lease] = Answer(None, settled, lease.lost)
            else:
                self._open[lease.port.alias, lease.port.key].append((lease, outcome))
        now = clock.monotonic()
        each = conf.default_settings(queue).settle == "each"
        if each or now - began >= SHORT_JOB_S or now - self._settled_at >= MAX_SETTLE_WAIT_S:
            self.settle()

    def settle(self) -> None:
        """Store the outcomes that are not stored yet. Never raises: the poller stores those that fail here."""
        for pairs in self._open.values():
            try:
                self._settle(pairs)
            except Exception as error:
                logger.warning("Outcomes of %s are left to the poller: %s", pairs[0][0].queue, error)
                tidy()
                self.answers.update(
                    {lease: Answer(portable_outcome(lease, outcome), None, "") for lease, outcome in pairs}
                )
        self._open.clear()
        self._settled_at = clock.monotonic()

    def _settle(self, pairs: list[Decided]) -> None:
        port: Any = pairs[0][0].port
        session = Session.on(port.alias, port.model)
        # The poller, which tries for longer, decides whether a task is to blame for an error of the database.
        settled = settle_surely(session, pairs, keep=port.keep, group_retry=port.group_retry, patience=math.inf)
        held_leases = find_out(session, pairs, settled, keep=port.keep) if len(settled) < len(pairs) else set()
        for lease, outcome in pairs:
            if lease.id in held_leases:  # the row is locked, or was refused
                self.answers[lease] = Answer(portable_outcome(lease, outcome), None, "")
                continue
            result = lease.result_of(outcome) or outcome
            stored = None if isinstance(result, Lost) else _summary(result, lease.queue)
            self.answers[lease] = Answer(None, stored, lease.lost if stored is None else "")


def held(leases: Iterable[Lease]) -> set[Lease]:
    """Return the leases that are neither settled nor lost."""
    by_location: defaultdict[tuple[str, Any], list[Lease]] = defaultdict(list)
    for lease in leases:
        by_location[lease.port.alias, lease.port.model].append(lease)  # type: ignore[attr-defined]
    found: set[Lease] = set()
    for (alias, model), group in by_location.items():
        held_leases = resolve(Session.on(alias, model), group)[1]
        found |= {lease for lease in group if lease.id in held_leases}
    return found


def _summary(outcome: Settlement, queue: str) -> Settlement:
    """Return a stored outcome without its large parts, because it is sent to the poller."""
    error = outcome.facts.error
    return without_result(outcome) if error is None else with_error(outcome, RemoteError.of(error, queue))
