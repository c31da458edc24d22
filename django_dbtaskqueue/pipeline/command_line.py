"""The command line of the pipeline's jobs, for ``manage.py runtaskpipeline`` and ``python -m``."""

import argparse
import atexit
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

from django_dbtaskqueue.core.durations import parse_length
from django_dbtaskqueue.core.exceptions import CheckFailed, JobOptionError, PipelineError
from django_dbtaskqueue.pipeline import jobs, spark
from django_dbtaskqueue.pipeline.database import Database

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

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

METAVARS = {jobs.whole: "N", jobs.count: "N", jobs.above_zero: "N", jobs.pair: "NAME=VALUE", parse_length: "TIME"}
COMMON = (
    jobs.Argument("lake", "the folder of the archive's tables: a path, or s3://BUCKET/FOLDER", metavar="PATH"),
    jobs.Argument("master", "Spark's, as local[4] or spark://HOST:7077. Default: spark-submit's, else this machine"),
    jobs.Argument("memory", "memory of the Spark driver, such as 2g", metavar="SIZE"),
    jobs.Argument("conf", "a Spark setting", jobs.pair, many=True),
    jobs.Argument("explain", "say what would be done, and do nothing", bool, False),
    jobs.Argument("dry_run", "do everything but write", bool, False),
    jobs.Argument("json", "write the result as JSON to a file, or to the output with -", jobs.writable, metavar="FILE"),
    jobs.Argument("quiet", "no progress", bool, False),
)


class Face(NamedTuple):
    """How a command line was started: its name, its streams, and how it names a database."""

    program: str
    place: tuple[jobs.Argument, ...]
    find_database: Callable[..., Database | None]  # takes the text of each argument of ``place``, or None
    out: "SupportsWrite[str]"
    err: TextIO
    defaults: Callable[[str, jobs.Options], jobs.Options] = lambda name, given: {}
    render_page: jobs.RenderPage | None = None


class Parser(argparse.ArgumentParser):
    """A parser that raises JobOptionError, so that the caller decides how the process ends."""

    def error(self, message: str) -> NoReturn:
        raise JobOptionError(self.prog, f"{message}. {self.prog} --help shows the options")


def main(argv: Sequence[str]) -> int:
    """Run one command line of ``python -m django_dbtaskqueue.pipeline`` and return its exit code."""
    url = jobs.Argument("database_url", "the tasks' database, without a password. Default: DATABASE_URL", metavar="URL")
    return perform(argv, Face("python -m django_dbtaskqueue.pipeline", (url,), database_of_url, sys.stdout, sys.stderr))


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
    word, *rest = argv or ["--help"]
    if word in ("-h", "--help", "help"):
        face.out.write(f"usage: {face.program} ...\n{USAGE}\n")
        return EXIT_DONE
    if word == "list":
        for name in jobs.JOBS:
            try:
                face.out.write(f"{name:<10} {jobs.job(name).summary}\n")
            except PipelineError as error:
                face.out.write(f"{name:<10} {error}\n")
        return EXIT_DONE
    if word == "explain":
        if not rest:
            raise JobOptionError("explain", f"which job? Jobs: {', '.join(jobs.JOBS)}")
        word, *rest = [*rest, "--explain"]
    return _run(jobs.job(word), rest, face)


def _run(found: jobs.Job, words: list[str], face: Face) -> int:
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
    except jobs.NoTasks as nothing:
        result, text = {"kind": found.name, "summary": str(nothing)}, str(nothing)
    except CheckFailed as error:
        damaged = [*dict.fromkeys(context.damaged)]
        result = {**error.result, **({"damaged_files": damaged} if damaged else {})}
        text, faults = found.as_text(result), "\n".join([str(error), *damaged, ""])
    if asked["json"] and asked["json"] != "-":
        jobs.write_whole(Path(asked["json"]), f"{jobs.result_json(result)}\n")
    face.out.write(f"{jobs.result_json(result) if asked['json'] == '-' else text}\n")
    face.err.write(faults)
    return EXIT_CHECK_FAILED if faults else EXIT_DONE


def parser(found: jobs.Job, face: Face) -> Parser:
    """Return the parser of one job's command line."""
    program = f"{face.program} {found.name}"
    made = Parser(program, description=found.summary, epilog=EXIT_CODES_HELP, add_help=False, allow_abbrev=False)
    for argument in found.arguments:
        _add(made, argument)
    common = made.add_argument_group("every job")
    common.add_argument("-h", "--help", action="store_true", help="show this")
    for argument in (*face.place, *COMMON):
        _add(common, argument)
    return made


def _add(group: argparse._ActionsContainer, argument: jobs.Argument) -> None:
    # Values stay text here; the job reads them, so that every way to start it reports the same errors.
    choices = f": {', '.join(argument.choices)}" if argument.choices else ""
    again = "; may be given again" if argument.many else ""
    options: dict[str, Any] = {"help": f"{argument.help}{choices}{again}".replace("%", "%%"), "dest": argument.name}
    if argument.type is bool:
        options |= {"action": argparse.BooleanOptionalAction if argument.default else "store_true", "default": None}
    else:
        options["metavar"] = argument.metavar or METAVARS.get(argument.type, argument.name.upper())
        options["action"] = "append" if argument.many else "store"
    group.add_argument(argument.flag, **options)


def _context_of(found: jobs.Job, given: jobs.Options, face: Face) -> jobs.Context:
    asked = jobs.complete((*found.arguments, *face.place, *COMMON), {**face.defaults(found.name, given), **given})
    return jobs.Context(
        options=asked, database=face.find_database(*(asked[one.name] for one in face.place)),
        lake=asked["lake"], dry_run=asked["dry_run"], render_page=face.render_page, alone=True,
        session={name: asked[name] for name in ("master", "memory") if asked[name]} | {"conf": dict(asked["conf"])},
    )  # fmt: skip
