"""The pipeline's jobs: what a job is, its options and context, and the list of jobs.

A job can be started by ``manage.py runtaskpipeline JOB``, by ``python -m django_dbtaskqueue.pipeline JOB`` (which
``spark-submit`` can run), and in a notebook: ``Report().run(Report.context(lake="lake", since="30d"))``.
"""

from __future__ import annotations

import argparse
import atexit
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TextIO, TypeVar

from django_dbtaskqueue.core.durations import format_duration, parse_length
from django_dbtaskqueue.core.exceptions import CheckFailed, JobOptionError, PipelineError, near_match
from django_dbtaskqueue.pipeline import spark
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.spark import INSTALL_COMMAND, Progress, put, silent, spark_session

if TYPE_CHECKING:
    from _typeshed import SupportsWrite
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
    """One option of a job: ``on_duplicate`` here and in Python is ``--on-duplicate`` on the command line.

    ``type`` reads text and raises ValueError with a reason; ``bool`` makes a flag. ``many`` values are a tuple.
    """

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
        """Return the value of what Python code gives; text is read as on the command line. Raises JobOptionError."""
        if self.many:
            return tuple(map(self._one, (given,) if isinstance(given, str) else given or ()))
        return self._one(given)

    def _one(self, given: object) -> Any:
        try:
            value = self.type(given) if isinstance(given, str) and self.type is not bool else given
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


def parsed(
    parse: Callable[[str], Parsed], text: str, expected: str, holds: Callable[[Parsed], bool] = lambda _value: True
) -> Parsed:
    """Return ``parse(text)``, a value that ``holds``. Raises ValueError, which says what is expected instead."""
    with suppress(ValueError, LookupError, ArithmeticError, OSError):
        if holds(value := parse(text)):
            return value
    raise ValueError(f"{text!r} is not {expected}")


def moment(text: str) -> datetime:
    """Return the time of ISO 8601 text; without an offset it is in UTC."""
    found = parsed(datetime.fromisoformat, text, "a time. Write it as 2026-01-31 or 2026-01-31T08:00+01:00")
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def day(text: str) -> date:
    """Return the day of ISO 8601 text."""
    return parsed(date.fromisoformat, text, "a day. Write it as 2026-01-31")


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    return parsed(int, text, "a whole number of at least 1", lambda number: number >= 1)


def share(text: str) -> float:
    """Return the number between 0 and 1 of text such as "99.9%" or "0.999"."""

    def parse(text: str) -> float:
        return float(Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1))

    expected = 'a share. Write a percentage, as in "99.9%", or a number between 0 and 1'
    return parsed(parse, text, expected, lambda number: 0 <= number <= 1)


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
DEFAULT_OBJECTIVE = Objective(EVERY_QUEUE, 0.99)


def objective(text: str) -> Objective:
    """Return the objective of "claims=99.9%/5m", or of "*=99%" for every queue. Raises ValueError with a reason."""
    queue, rest = parsed(pair, text, 'an objective. Write it as "claims=99.9%/5m" or "*=99%"')
    wanted, _, within = rest.partition("/")
    return Objective(queue, share(wanted), parse_length(within) if within else None)


def by_queue(objectives: Iterable[Objective]) -> dict[str, Objective]:
    """Return the objectives by queue, with one for ``*`` always among them. A later one wins."""
    return {EVERY_QUEUE: DEFAULT_OBJECTIVE, **{one.queue: one for one in objectives}}


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
    started: SparkSession | None = None
    state: State | None = None  # of database and lake, for all that the job reads
    damaged: list[str] = field(default_factory=list)  # what is wrong with each file of the lake that was left out

    @property
    def spark(self) -> SparkSession:
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
        spark: SparkSession | None = None, dry_run: bool = False,
        progress: Progress = silent, render_page: RenderPage | None = None, **options: Any,
    ) -> Context:  # fmt: skip
        """Return a context for this job, with defaults for the options not given. Raises JobOptionError."""
        return Context(
            options=complete(cls.arguments, options),
            database=Database.from_url(database) if isinstance(database, str) else database,
            lake=os.fspath(lake) if lake is not None else None,
            dry_run=dry_run,
            progress=progress,
            render_page=render_page,
            started=spark,
        )

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
    """Return the job of this name. Raises JobOptionError for an unknown name."""
    if name not in JOBS:
        raise JobOptionError(name, f"there is no such job.{near_match(name, JOBS)} Jobs: {', '.join(JOBS)}")
    try:
        found: type[Job] = pkgutil.resolve_name(f"{__package__}.{JOBS[name]}")
    except ModuleNotFoundError as error:
        reason = f"The job {name} needs {error.name}, which is not installed: {INSTALL_COMMAND}."
        raise PipelineError(reason) from error
    return found()


def as_json(result: object) -> str:
    """Return what `plain` returns, as JSON."""
    return json.dumps(plain(result), indent=2)


def plain(value: object) -> Any:
    """Return the value as JSON holds it: times in ISO 8601, durations in seconds, infinities and NaN as null."""

    def text(one: Any) -> object:
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


# -- the command line --------------------------------------------------------------------------------------------------

EXIT_DONE, EXIT_FAILED, EXIT_WRONG_OPTIONS, EXIT_CHECK_FAILED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 the job failed; 2 wrong options; 3 a check found faults; 130 interrupted (Ctrl-C, SIGTERM)."
)
INTERRUPTED_MESSAGE = "Interrupted. Finished work stays, nothing is half-written: run it again to continue."
USAGE = f"""\
list                 the jobs
explain JOB          what a job does and would do
JOB [options]        run it; JOB --help shows its options

{EXIT_CODES_HELP}"""
PROCESS_LIST_REASON = (
    "every user of this machine can read a password in the process list. Put the URL into the environment variable "
    "DATABASE_URL, or leave the password out of it and use PGPASSWORD or a ~/.pgpass file"
)

METAVARS = {int: "N", count: "N", pair: "NAME=VALUE", parse_length: "TIME"}
COMMON = (
    Argument("lake", "the folder of the archive's tables: a path, or s3://BUCKET/FOLDER", metavar="PATH"),
    Argument("master", "Spark's, as local[4] or spark://HOST:7077. Default: spark-submit's, else this machine"),
    Argument("memory", "memory of the Spark driver, such as 2g", metavar="SIZE"),
    Argument("conf", "a Spark setting", pair, many=True),
    Argument("explain", "say what would be done, and do nothing", bool, False),
    Argument("dry_run", "do everything but write", bool, False),
    Argument("json", "write the result as JSON to a file, or to the output with -", metavar="FILE"),
    Argument("quiet", "no progress", bool, False),
)


class Face(NamedTuple):
    """How a command line was started: its name, its streams, and how it names a database."""

    program: str
    place: tuple[Argument, ...]
    find_database: Callable[..., Database | None]  # takes the text of each argument of ``place``, or None
    out: SupportsWrite[str]
    err: TextIO
    defaults: Callable[[str, Options], Options] = lambda name, given: {}
    render_page: RenderPage | None = None


class Parser(argparse.ArgumentParser):
    """A parser that raises JobOptionError, so that the caller decides how the process ends."""

    def error(self, message: str) -> NoReturn:
        raise JobOptionError(self.prog, f"{message}. {self.prog} --help shows the options")


def main(argv: Sequence[str]) -> int:
    """Run one command line of ``python -m django_dbtaskqueue.pipeline`` and return its exit code."""
    url = Argument("database_url", "the tasks' database, without a password. Default: DATABASE_URL", metavar="URL")
    program = "python -m django_dbtaskqueue.pipeline"
    return perform(argv, Face(program, (url,), database_of_url, sys.stdout, sys.stderr))


def database_of_url(url: str | None) -> Database | None:
    """Return the database of ``--database-url``, else of DATABASE_URL. Raises JobOptionError for a password in it."""
    if url is None:
        found = os.environ.get("DATABASE_URL")
        return Database.from_url(found) if found else None
    user, at, _ = url.partition("://")[2].rpartition("@")
    if (at and ":" in user) or "password=" in url:
        raise JobOptionError("--database-url", PROCESS_LIST_REASON)
    return Database.from_url(url)


def perform(argv: Sequence[str], face: Face) -> int:
    """Run one command line and return its exit code. An error is one paragraph on ``face.err``, not a stack trace."""
    try:
        with spark.py4j_silenced(), spark.sigterm_interrupts():
            return _perform(list(argv), face)
    except (Exception, KeyboardInterrupt) as error:
        if spark.is_interrupt(error):
            atexit.register(spark.silence_spark)
            face.err.write(f"\n{INTERRUPTED_MESSAGE}\n")
            return EXIT_INTERRUPTED
        face.err.write(f"{spark.one_paragraph(error)}\n")
        return EXIT_WRONG_OPTIONS if isinstance(error, JobOptionError) else EXIT_FAILED


def _perform(argv: list[str], face: Face) -> int:
    word, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if word in ("-h", "--help", "help"):
        face.out.write(f"usage: {face.program} ...\n{USAGE}\n")
        return EXIT_DONE
    if word == "list":
        for name in JOBS:
            try:
                summary = job(name).summary
            except PipelineError as error:
                summary = str(error)
            face.out.write(f"{name:<10} {summary}\n")
        return EXIT_DONE
    if word == "explain":
        if not rest:
            raise JobOptionError("explain", f"which job? Jobs: {', '.join(JOBS)}")
        word, rest = rest[0], [*rest[1:], "--explain"]
    return _run(job(word), rest, face)


def _run(found: Job, words: list[str], face: Face) -> int:
    made = parser(found, face)
    given = {name: value for name, value in vars(made.parse_args(words)).items() if value is not None}
    if given.pop("help"):
        face.out.write(made.format_help())
        return EXIT_DONE
    context = _context_of(found, given, face)
    asked, faults = context.options, ""
    if asked["explain"]:
        face.out.write(f"{found.explain(asked)}\n")
        return EXIT_DONE
    try:
        with spark.shown_on(face.err, quiet=asked["quiet"]) as context.progress:
            result = found.run(context)
        if context.damaged:
            raise CheckFailed("Damaged files of the lake were left out:", result)
        text = found.as_text(result)
    except NoTasks as nothing:
        result, text = {"kind": found.name, "summary": str(nothing)}, str(nothing)
    except CheckFailed as error:
        damaged = [*dict.fromkeys(context.damaged)]
        result = {**error.result, **({"damaged_files": damaged} if damaged else {})}
        text, faults = found.as_text(result), "\n".join([str(error), *damaged, ""])
    if asked["json"] and asked["json"] != "-":
        write_whole(Path(asked["json"]), f"{as_json(result)}\n")
    face.out.write(f"{as_json(result) if asked['json'] == '-' else text}\n")
    face.err.write(faults)
    return EXIT_CHECK_FAILED if faults else EXIT_DONE


def parser(found: Job, face: Face) -> Parser:
    """Return the parser of one job's command line."""
    made = Parser(
        prog=f"{face.program} {found.name}", description=found.summary, epilog=EXIT_CODES_HELP,
        add_help=False, allow_abbrev=False, argument_default=None,
    )  # fmt: skip
    for argument in found.arguments:
        _add(made, argument)
    common = made.add_argument_group("every job")
    common.add_argument("-h", "--help", action="store_true", help="show this")
    for argument in (*face.place, *COMMON):
        _add(common, argument)
    return made


def _add(group: argparse._ActionsContainer, argument: Argument) -> None:
    # Values stay text here; the job reads them, so that every way to start it reports the same errors.
    choices = f": {', '.join(argument.choices)}" if argument.choices else ""
    again = "; may be given again" if argument.many else ""
    text = f"{argument.help}{choices}{again}".replace("%", "%%")
    options: dict[str, Any] = {"help": text, "dest": argument.name}
    if argument.type is bool:
        options |= {"action": argparse.BooleanOptionalAction if argument.default else "store_true", "default": None}
    else:
        options["metavar"] = argument.metavar or METAVARS.get(argument.type, argument.name.upper())
        options["action"] = "append" if argument.many else "store"
    group.add_argument(argument.flag, **options)


def _context_of(found: Job, given: Options, face: Face) -> Context:
    arguments = (*found.arguments, *face.place, *COMMON)
    asked = complete(arguments, {**face.defaults(found.name, given), **given})
    session = {"master": asked["master"], "memory": asked["memory"], "conf": dict(asked["conf"])}
    return Context(
        options=asked,
        database=face.find_database(*(asked[one.name] for one in face.place)),
        lake=asked["lake"],
        dry_run=asked["dry_run"],
        render_page=face.render_page,
        session={name: value for name, value in session.items() if value},
    )
