"""The pipeline's jobs: what a job is, its options and context, and the list of jobs.

A command starts a job, or a notebook: ``Report().run(Report.context(lake="lake", since="30d"))``.
"""

import inspect
import json
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django_dbtaskqueue.core.durations import format_duration, parse_length
from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError, near_match
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.spark import INSTALL_COMMAND, Progress, put, silent, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from django_dbtaskqueue.pipeline.lake import State

__all__ = ["Argument", "Context", "Job"]

Options = Mapping[str, Any]  # values are as the types of the arguments return them
Result = Mapping[str, Any]  # numbers, texts, times, durations, and lists and mappings of these
RenderPage = Callable[[str, Result], str]
Parsed = TypeVar("Parsed")

# Name -> "module:Class" inside this package. A job's module is imported when the job is asked for.
JOBS: dict[str, str] = {
    "enqueue": "source.enqueue_job:Enqueue",
    "report": "reports.report:Report",
    "forecast": "reports.forecast:Forecast",
    "whatif": "reports.whatif:WhatIf",
    "archive": "lake.archive_jobs:Archive",
    "replay": "lake.archive_jobs:Replay",
    "stream": "lake.archive_jobs:Stream",
    "check": "reports.quality:Check",
    "erase": "lake.erase_job:Erase",
}


# -- options -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """One option. ``type`` reads text, or raises ValueError with a reason; ``bool`` is a flag, ``many`` a tuple."""

    name: str
    help: str
    type: Callable[[str], Any] = str
    default: Any = None
    many: bool = False
    choices: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def value(self, given: Any) -> Any:
        """Return the value of what Python code gives; text and numbers are read as in shells. Raises JobOptionError."""
        if not self.many:
            return self._one(given)
        values = tuple(map(self._one, (given,) if isinstance(given, str | float | int) else given or ()))
        names = [value[0] for value in values if isinstance(value, tuple)]
        if len({*names}) < len(names):
            raise JobOptionError(self.flag, f"one of {', '.join(names)} is given twice")
        return values

    def _one(self, given: object) -> Any:
        try:
            if self.type is bool and not isinstance(given, bool):
                raise ValueError(f"{given!r} is not True or False")
            value = self.type(str(given)) if isinstance(given, str | float | int) and self.type is not bool else given
        except ValueError as error:
            raise JobOptionError(self.flag, str(error)) from None
        if self.choices and value is not None and value not in self.choices:
            raise JobOptionError(self.flag, f"{value!r} is not one of {', '.join(self.choices)}")
        return value


def complete(arguments: Sequence[Argument], given: Options) -> Options:
    """Return the values of all ``arguments``, given or default. Raises JobOptionError."""
    known = {argument.name: argument for argument in arguments}
    for name in given:
        if name not in known:
            raise JobOptionError(name, f"there is no such option.{near_match(name, known)}")
    return {name: argument.value(given.get(name, argument.default)) for name, argument in known.items()}


def reader(
    parse: Callable[[str], Parsed], expected: str, holds: Callable[[Parsed], bool] = lambda _value: True
) -> Callable[[str], Parsed]:
    """Return a function that parses text to a value that ``holds``. Its ValueError says what is expected instead."""

    def reading(text: str) -> Parsed:
        with suppress(ValueError, TypeError, LookupError, ArithmeticError, OSError):
            if holds(value := parse(text)):
                return value
        raise ValueError(f"{text!r} is not {expected}")

    return reading


day = reader(date.fromisoformat, "a day. Write it as 2026-01-31")
utc_moment = reader(  # without an offset it is in UTC
    lambda text: (found := datetime.fromisoformat(text)).replace(tzinfo=found.tzinfo or UTC),
    "a time. Write it as 2026-01-31 or 2026-01-31T08:00+01:00",
)
whole = reader(int, "a whole number")
count = reader(int, "a whole number of at least 1", lambda number: number >= 1)
above_zero = reader(float, "a number above 0", lambda number: 0 < number < float("inf"))
share = reader(
    lambda text: float(Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1)),
    'a share. Write a percentage, as in "99.9%", or a number between 0 and 1',
    lambda number: 0 <= number <= 1,
)


def writable(name: str) -> str:
    """Return the name of a file. Raises ValueError if it cannot be written, which the end of a job is too late for."""
    folder = next(one for one in Path(name).absolute().parents if one.exists())
    if name != "-" and (not folder.is_dir() or not os.access(folder, os.W_OK) or Path(name).is_dir()):
        raise ValueError(f"{name!r} is not a file that can be written. Give another place")
    return name


def pair(text: str) -> tuple[str, str]:
    """Return (NAME, VALUE) of text such as "reference=flight_id"."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value


@dataclass(frozen=True)
class Objective:
    """At least ``share`` (0 to 1) of the ended tasks of ``queue`` complete, ``within`` a time of their creation."""

    queue: str
    share: float
    within: timedelta | None = None

    def __str__(self) -> str:
        text = f"{self.share * 100:g}%"
        return text if self.within is None else f"{text} within {format_duration(self.within)}"


EVERY_QUEUE = "*"


def objective(text: str) -> Objective:
    """Return the objective of "claims=99.9%/5m", or of "*=99%" for every queue. Raises ValueError with a reason."""
    queue, rest = reader(pair, 'an objective. Write it as "claims=99.9%/5m" or "*=99%"')(text)
    wanted, _, within = rest.partition("/")
    return Objective(queue, share(wanted), parse_length(within) if within else None)


def by_queue(objectives: Iterable[Objective]) -> dict[str, Objective]:
    """Return the objectives by queue, with one for ``*`` always among them. A later one wins."""
    return {EVERY_QUEUE: Objective(EVERY_QUEUE, 0.99), **{one.queue: one for one in objectives}}


# -- what a job is -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Context:
    """What a job works with. ``options`` holds a value for every argument of the job.

    A job may call ``progress(stage, done, total)`` at any time; a total of 0 is an unknown one.
    ``render_page(job, figures)`` returns the HTML page of a report; it needs Django, which the pipeline does not have.
    """

    options: Options = field(default_factory=dict)
    database: Database | None = None
    lake: str | None = None
    dry_run: bool = False
    progress: Progress = silent
    render_page: RenderPage | None = None
    session: Mapping[str, Any] = field(default_factory=dict)  # arguments of spark_session()
    alone: bool = False  # whether the session that this job starts ends with it
    started: "SparkSession | None" = None
    state: "State | None" = None  # of database and lake, for all that the job reads
    damaged: list[str] = field(default_factory=list)  # what is wrong with each file of the lake that was left out

    @property
    def spark(self) -> "SparkSession":
        """The Spark session. The first use starts it."""
        if self.started is None:
            self.progress("starting Spark", 0, 0)
            self.started = spark_session(**self.session)
        return self.started

    def need_database(self) -> Database:
        """Return the database. Raises JobOptionError when there is none."""
        if self.database is None:
            raise JobOptionError("database", "this job needs one: set DATABASE_URL, or give --database-url")
        return self.database

    def need_lake(self) -> str:
        """Return the lake's path. Raises JobOptionError when there is none."""
        if not self.lake:
            raise JobOptionError("--lake", "this job needs the folder or URL of the lake: --lake PATH")
        return self.lake


class NoTasks(PipelineError):
    """A job found no task to compute from. Nothing was written; for a command it is a result, with exit code 0."""


class Job:
    """One job. A subclass has a name, summary and arguments, and implements ``run``; its docstring explains it.

    ``run`` returns what can be written as JSON. It raises PipelineError if it fails, and CheckFailed if its work is to
    find faults and it found some. It writes each result whole, and writes nothing if ``context.dry_run`` is set.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    arguments: ClassVar[tuple[Argument, ...]] = ()

    @classmethod
    def context(
        cls, *, database: Database | str | None = None, lake: str | os.PathLike[str] | None = None,
        spark: "SparkSession | None" = None, dry_run: bool = False,
        progress: Progress = silent, render_page: RenderPage | None = None, **options: Any,
    ) -> Context:  # fmt: skip
        """Return a context for this job, with defaults for the options not given. Raises JobOptionError."""
        return Context(
            options=complete(cls.arguments, options), lake=os.fspath(lake) if lake is not None else None,
            database=Database.from_url(database) if isinstance(database, str) else database,
            dry_run=dry_run, progress=progress, render_page=render_page, started=spark,
        )  # fmt: skip

    def explain(self, options: Options) -> str:
        """Return what the job would do with these options, in a few sentences."""
        lines = [f"{self.name}: {self.summary}", "", inspect.getdoc(self) or "", "", "With these options:"]
        return "\n".join([*lines, *(f"  {one.flag} {shown(options.get(one.name))}" for one in self.arguments)])

    def run(self, context: Context) -> Result:
        """Do the work and return its result."""
        raise PipelineError(f"The job {type(self).__name__} has no run().")

    def as_text(self, result: Result) -> str:
        """Return the result as lines of text."""
        return "\n".join(f"{name.replace('_', ' ')}: {shown(value)}" for name, value in result.items())


def shown(value: object) -> str:
    """Return a value as text for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or "-"
    return "-" if value is None else str(value)


def job(name: str) -> Job:
    """Return the job of this name. Raises JobOptionError for an unknown name."""
    if name not in JOBS:
        raise JobOptionError(name, f"there is no such job.{near_match(name, JOBS)} Jobs: {', '.join(JOBS)}")
    try:
        made: Job = pkgutil.resolve_name(f"{__package__}.{JOBS[name]}")()
    except ModuleNotFoundError as error:
        raise PipelineError(f"The job {name} needs {error.name}, which is not installed: {INSTALL_COMMAND}.") from error
    return made


def result_json(result: object) -> str:
    """Return what `plain` returns, as JSON."""
    return json.dumps(plain(result), indent=2)


def plain(value: object) -> Any:
    """Return the value as JSON holds it: times in ISO 8601, durations in seconds, infinities and NaN as null."""

    def text(one: object) -> object:
        if isinstance(one, timedelta):
            return one.total_seconds()
        return one.isoformat() if isinstance(one, date) else str(one)

    return json.loads(json.dumps(value, default=text), parse_constant=lambda _name: None)


def write_whole(file: Path, text: str) -> None:
    """Write a file so that no reader ever sees a part of it. Raises PipelineError if it cannot be written."""
    try:
        put(file, text)
    except OSError as error:
        raise PipelineError(f"{file} cannot be written: {error.strerror}. Give another place.") from error
