"""The frame of the pipeline's jobs: what a job is, what it is given, and the list of them.

A job is one object with three ways in: ``manage.py runtaskpipeline JOB``, ``python -m django_dbtaskqueue.pipeline JOB``
(which ``spark-submit`` can run), and a notebook: ``Report().run(Report.context(lake="lake", since="30d"))``.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError, near_match
from django_dbtaskqueue.pipeline.arguments import Argument, complete
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.spark.session import DEFAULTS, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress = Callable[[str, int, int], None]
RenderPage = Callable[[str, Mapping[str, Any]], str]

# Name -> "module:Class" inside this package. A job's module is imported when the job is asked for.
JOBS: dict[str, str] = {
    "enqueue": "source.enqueue_job:Enqueue",
    "report": "reports.report:Report",
    "forecast": "reports.forecast:Forecast",
    "whatif": "reports.whatif:WhatIf",
    "archive": "lake.archive:Archive",
    "replay": "lake.replay:Replay",
    "stream": "source.stream:Stream",
    "check": "reports.quality:Check",
}


def silent(stage: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass(kw_only=True)
class Context:
    """What a job works with. ``options`` holds a value for every argument of the job.

    ``progress(stage, done, total)`` may be called as often as one likes; a total of 0 means that nobody knows it.
    ``render_page(job, figures)`` returns the HTML page of a report; it needs Django, which the pipeline does not have.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    database: Database | None = None
    lake: str | None = None
    dry_run: bool = False
    progress: Progress = silent
    render_page: RenderPage | None = None
    session: Mapping[str, Any] = field(default_factory=dict)  # arguments of spark_session()
    started: SparkSession | None = None

    @property
    def spark(self) -> SparkSession:
        """The Spark session, started when it is first asked for."""
        if self.started is None:
            self.progress("starting Spark", 0, 0)
            self.started = _submitted() if _is_submitted() and not self.session else spark_session(**self.session)
        return self.started

    def need_database(self) -> Database:
        """Return the database. Raises JobOptionError when there is none."""
        if self.database is None:
            raise JobOptionError("database", "this job needs one: set DATABASE_URL, or give --database-url")
        return self.database

    def need_lake(self) -> str:
        """Return the lake's path. Raises JobOptionError when there is none."""
        if not self.lake:
            raise JobOptionError("--lake", "this job needs the folder (or URL) of the lake: --lake PATH")
        return self.lake


def _is_submitted() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _submitted() -> SparkSession:
    """Return the session that ``spark-submit`` was told of: its master and its settings hold, not ours."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("dbtaskqueue")
    for name, value in DEFAULTS.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


class Job:
    """One job. A subclass says its name, summary and arguments, and implements ``run``; its docstring explains it.

    ``run`` returns what can be written as JSON. It raises PipelineError when it cannot do its work, CheckFailed when
    its work is to find faults and it found some; it leaves nothing half-written, and it writes nothing at all when
    ``context.dry_run`` is set.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    arguments: ClassVar[tuple[Argument, ...]] = ()

    @classmethod
    def context(
        cls,
        *,
        database: Database | str | None = None,
        lake: str | os.PathLike[str] | None = None,
        spark: SparkSession | None = None,
        dry_run: bool = False,
        progress: Progress = silent,
        render_page: RenderPage | None = None,
        session: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Context:
        """Return a context for this job, with defaults for the options not given. Raises JobOptionError."""
        return Context(
            options=complete(cls.arguments, options),
            database=Database.from_url(database) if isinstance(database, str) else database,
            lake=os.fspath(lake) if lake is not None else None,
            dry_run=dry_run,
            progress=progress,
            render_page=render_page,
            session=session or {},
            started=spark,
        )

    def explain(self, options: Mapping[str, Any]) -> str:
        """Return what the job would do with these options, in a few sentences."""
        chosen = [f"  {one.flag} {shown(options.get(one.name))}" for one in self.arguments]
        about = inspect.cleandoc(type(self).__doc__ or "")
        return "\n".join(
            [f"{self.name}: {self.summary}", "", about, *(["", "With these options:", *chosen] * bool(chosen))]
        )

    def run(self, context: Context) -> Mapping[str, Any]:
        """Do the work and return its result."""
        raise PipelineError(f"The job {type(self).__name__} has no run().")

    def describe(self, result: Mapping[str, Any]) -> str:
        """Return the result as lines for people."""
        return "\n".join(f"{name.replace('_', ' ')}: {shown(value)}" for name, value in result.items())


def shown(value: object) -> str:
    """Return a value as people write it."""
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return str(value)


def job(name: str) -> Job:
    """Return the job of this name. Raises JobOptionError for a name that is no job's."""
    if name not in JOBS:
        raise JobOptionError(name, f"there is no such job.{near_match(name, JOBS)} Jobs: {', '.join(JOBS)}")
    module, _, attribute = JOBS[name].partition(":")
    try:
        found: type[Job] = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    except ModuleNotFoundError as error:
        raise PipelineError(
            f"The job {name} needs {error.name}, which is not installed: pip install 'django-dbtaskqueue[spark]'."
        ) from error
    return found()
