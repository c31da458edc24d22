"""The executor whose processors run on Spark's workers.

It gathers the poller's jobs into Spark jobs of about two seconds. Two run at a time, so that no core waits for the last
partition of the other. The workers settle the tasks, and an answer only reports the outcomes: if Spark loses or repeats
a partition, or never answers, each task is still completed once, under its lease.
"""

import math
import os
import pickle
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow as pa
from django.conf import settings
from django.db import close_old_connections, connections
from pyspark import SparkContext, cloudpickle
from pyspark.sql import SparkSession

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.contrib.spark import ANSWER_DDL, JOB_SCHEMA, Place, on_worker
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import PipelineError, TaskQueueError
from django_dbtaskqueue.core.failure_signature import RemoteError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.core.outcomes import Fail, Lost, Settlement, with_error, without_result
from django_dbtaskqueue.db.liveness import DatabaseUse, database_use
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.run import run_all, smoothed
from django_dbtaskqueue.flow.settle import Decided, find_out, resolve, settle_surely
from django_dbtaskqueue.pipeline.spark import one_paragraph, spark_session
from django_dbtaskqueue.poller.executors import Answer, Job
from django_dbtaskqueue.poller.executors.pool import portable_outcome
from django_dbtaskqueue.poller.executors.thread import check_connections, tidied, tidy

CONCURRENT_SPARK_JOBS = 2
SPARK_JOB_TARGET_S = 2.0  # Spark's own cost of a job is a tenth of that
MAX_SPARK_JOB_TASKS = 2000
PARTITIONS_PER_CORE = 4  # small ones, because a lost partition runs again from its beginning
GATHER_WAIT_S = 0.02  # the poller may hand over more
REFUSED_PAUSE_S = 5.0
LOST_TASK_PATTERN = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \([^)]*\): ([^\n]+)")


class Call(NamedTuple):
    """One job of the poller, and the future of its answer."""

    job: Job
    future: Future[list[Answer]]


class SparkExecutor:
    """Runs processors on Spark's workers: ``executor=SparkExecutor`` of a processor, or ``--executor spark``.

    ``master`` is Spark's (default: that of `spark_session`), ``conf`` its settings, ``environment`` the workers'
    environment variables besides ``DJANGO_SETTINGS_MODULE``; they travel with the tasks and do not appear in Spark's
    logs. The workers need the project's code, settings and database. Starts Spark at once, or raises PipelineError.
    """

    def __init__(
        self, *, master: str | None = None,
        conf: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._start = partial(spark_session, master=master, app_name="runtaskpoller", conf=conf)
        module = getattr(settings, "SETTINGS_MODULE", None) or os.environ.get("DJANGO_SETTINGS_MODULE")
        self._environment = {**({"DJANGO_SETTINGS_MODULE": module} if module else {}), **(environment or {})}
        self._spark: SparkSession | None = None
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._ended = threading.Event()
        self._mean: float | None = None  # seconds of one job on a worker, smoothed
        self._cores = 1
        self._known_places: dict[str, Place] = {}
        self._session()
        for number in range(CONCURRENT_SPARK_JOBS):
            threading.Thread(target=self._serve, name=f"dbtaskqueue-spark-{number}", daemon=True).start()

    @property
    def slots(self) -> int:
        """How many jobs the poller may hand over at a time."""
        return CONCURRENT_SPARK_JOBS * self._size

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[list[Answer]]:
        """Take one job of a poller; a worker runs it by its queue and payload type. Else TypeError."""
        if len(arguments) != 1 or not isinstance(arguments[0], Job):
            raise TypeError(f"A SparkExecutor runs the tasks of a poller, and no call such as {function!r}.")
        call = Call(arguments[0], Future())
        with self._changed:
            if self._ended.is_set():
                raise RuntimeError("This SparkExecutor is shut down.")
            self._waiting.append(call)
            self._changed.notify()
        return call.future

    def shutdown(self, *, wait: bool = True) -> None:
        """Stop Spark. Unsettled tasks are released without a charge, or their leases expire."""
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
            waiting = list(self._waiting)
        for call in waiting:
            call.future.cancel()
        if self._spark is not None:
            _stop(self._spark)

    @property
    def _size(self) -> int:
        wanted = 0 if self._mean is None else int(SPARK_JOB_TARGET_S * self._cores / self._mean)
        return max(2 * self._cores, min(MAX_SPARK_JOB_TASKS, wanted))

    def _session(self) -> SparkSession:
        """Return Spark's session; a new one if the last has ended, because its master was gone for long."""
        with self._starting:
            if self._spark is not None and _has_ended(self._spark):
                _stop(self._spark)
                self._spark = None
            if self._spark is None:
                self._spark = self._start().newSession()
                self._spark.conf.set("spark.sql.execution.arrow.localRelationThreshold", "0")
            self._cores = max(1, self._spark.sparkContext.defaultParallelism)
        return self._spark

    def _serve(self) -> None:
        while not self._ended.is_set():
            calls = self._gather()
            try:
                self._process(calls)
            except Exception as error:  # without this thread the tasks would stay leased
                logger.exception("The answers of Spark's workers could not be read")
                for call in calls:
                    if not call.future.done():
                        call.future.set_exception(error)

    def _gather(self) -> list[Call]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended.is_set())
            self._changed.wait_for(lambda: len(self._waiting) >= self._size or self._ended.is_set(), GATHER_WAIT_S)
            calls = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._size))]
        return [call for call in calls if call.future.set_running_or_notify_cancel()]

    def _process(self, calls: list[Call], *, again: bool = False) -> None:
        try:
            answers = self._run(calls, again=again) if calls else []
        except Exception as error:
            self._failed(calls, error)
            return
        if refusals := {row["refused"] for row in answers if row["refused"]}:
            logger.error("Spark's workers cannot run tasks; they are given back. %s", "\n".join(refusals).strip())
            self._ended.wait(REFUSED_PAUSE_S)
        for call, row in zip(calls, answers, strict=True):
            if row["refused"]:
                call.future.set_exception(CancelledError())
            else:
                found: list[Answer] = pickle.loads(row["answers"])  # noqa: S301 -- made by our own workers
                call.future.set_result([one._replace(seconds=row["seconds"] / len(found)) for one in found])
        if seconds := [row["seconds"] for row in answers if not row["refused"]]:
            self._mean = smoothed(self._mean, max(fmean(seconds), 1e-6))

    def _run(self, calls: list[Call], *, again: bool) -> list[dict[str, Any]]:
        """Run one Spark job; return its answers in order. Raises whatever Spark raises."""
        spark = self._session()
        leases = [cloudpickle.dumps(call.job.leases) for call in calls]  # type: ignore[no-untyped-call]
        table = pa.table({"number": [*range(len(calls))], "leases": leases}, schema=JOB_SCHEMA)
        size = -(-len(calls) // (PARTITIONS_PER_CORE * self._cores))
        frame = spark.createDataFrame(pa.Table.from_batches(table.to_batches(size)))  # each batch becomes a partition
        function = partial(on_worker, environment=self._environment, places=self._places(calls), again=again)
        return sorted(frame.mapInArrow(function, ANSWER_DDL).toArrow().to_pylist(), key=lambda row: row["number"])

    def _places(self, calls: list[Call]) -> dict[str, Place]:
        aliases = {str(call.job.lease.port.alias) for call in calls}
        if new := aliases - self._known_places.keys():
            try:
                self._known_places |= {alias: place_of(alias) for alias in new}
            finally:
                connections.close_all()
        return {alias: self._known_places[alias] for alias in aliases}

    def _failed(self, calls: list[Call], error: Exception) -> None:
        """Handle a job that Spark gave up: run its unsettled tasks in halves, so that the one to blame fails alone."""
        lost = LOST_TASK_PATTERN.search(str(error))
        reason = masked_text(lost[1]) if lost else one_paragraph(error)
        logger.warning("Spark gave up a job of %s tasks: %s", len(calls), reason)
        try:
            unsettled = held(lease for call in calls for lease in call.job.leases) if self._runs() else set()
        except Exception as away:
            logger.warning("The database cannot be asked which of these tasks are settled: %s", away)
            unsettled = None
        finally:
            connections.close_all()
        if unsettled is None or not self._runs():
            self._ended.wait(REFUSED_PAUSE_S)
            for call in calls:
                call.future.set_exception(CancelledError())
            return
        left = [call for call in calls if any(lease in unsettled for lease in call.job.leases)]
        for call in calls:
            if call not in left:
                call.future.set_result([Answer(None, None, "")] * len(call.job.leases))
        if len(calls) == 1 and left:
            left[0].future.set_exception(PipelineError(f"The Spark worker that ran this task ended: {reason}"))
            return
        middle = (len(left) + 1) // 2
        for half in (left[:middle], left[middle:]):
            self._process(half, again=True)

    def _runs(self) -> bool:
        return not self._ended.is_set() and self._spark is not None and not _has_ended(self._spark)


def _has_ended(spark: SparkSession) -> bool:
    try:  # its master was gone for long, or its JVM died
        return bool(spark.sparkContext._jsc.sc().isStopped())
    except Exception:
        return True


def _stop(spark: SparkSession) -> None:
    """Stop a session, so that this process can start a new one."""
    try:
        spark.stop()
    except Exception:  # its JVM is gone, and PySpark would ask it again
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None


# -- on a worker: run tasks, settle them with their fence, report outcomes ---------------------------------------------

# Of a partition that Spark runs again, only tasks whose leases are still valid run: a settled task does not run twice.

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
    """Run and settle the jobs of a partition, as `on_worker` says; return a summary of each.

    Raises only before the first has begun: PipelineError if a database is another one here.
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
    unsettled = held(lease for leases in jobs.values() for lease in leases)
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
        check_connections()
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
                for lease, outcome in pairs:
                    self.answers[lease] = Answer(portable_outcome(lease, outcome), None, "")
        self._open.clear()
        self._settled_at = clock.monotonic()

    def _settle(self, pairs: list[Decided]) -> None:
        port: Any = pairs[0][0].port
        session = Session.on(port.alias, port.model)
        # The poller, which tries for longer, decides whether a task is to blame for an error of the database.
        settled = settle_surely(session, pairs, patience=math.inf)
        held_leases = find_out(session, pairs, settled) if len(settled) < len(pairs) else set()
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
