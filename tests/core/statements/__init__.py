"""Every statement as each database gets it, in ``postgresql.sql`` and ``sqlite.sql`` beside this file.

Write them again after a change with ``python -m tests.core.statements --write``, and read the diff.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from django_dbtaskqueue.core.sql import Statements, pipeline
from django_dbtaskqueue.core.sql.dialects import DIALECTS, Dialect, Group, Tables
from django_dbtaskqueue.core.sql.pipeline import ArchiveOfHistory, ArchiveStatements, StagingStatements
from django_dbtaskqueue.core.sql.retention import EraseStatements
from django_dbtaskqueue.core.sql.stats import StatsStatements
from tests.core.statements.layout import laid_out

FOLDER = Path(__file__).parent
TABLES = Tables('"dbtaskqueue_task"')
TABLE = '"dbtaskqueue_stg_20260131000000_x"'
FLAG = (False, True)
Variants = list[dict[str, Any]]


def _all(**values: Any) -> Variants:
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


# Of each statement that takes arguments: those it is shown with.
VARIANTS: dict[str, Variants] = {
    "Statements.insert": _all(timed=FLAG, referenced=FLAG, bare=[False])
    + _all(timed=[False], referenced=[True], bare=[True]),
    "Statements.insert_uniform": _all(referenced=[True], ordered=FLAG, ids=FLAG)
    + _all(referenced=[False], ordered=[False], ids=[False]),
    "Statements.copy_uniform": _all(names=[("queue_name", "payload", "reference_number", "id")]),
    "Statements.insert_many": [
        *_all(on_duplicate=["error"], timed=FLAG, grouped=FLAG),
        *_all(on_duplicate=["replace", "replace_running"], timed=[True], grouped=[False], keep_due=FLAG),
        *_all(on_duplicate=["replace"], timed=[True], grouped=[False], bounded=[True]),
        *_all(on_duplicate=["error"], timed=[False], grouped=[False], waits=FLAG, whole=[True]),
    ],
    "Statements.checkout_single_writer": _all(aged=FLAG),
    "StagingStatements.insert": _all(ignore=FLAG, timed=[True], grouped=FLAG),
    "FinishEventStatements.drop_trigger": _all(schema=["public"]),
}
PARTS = {
    "fenced", "skipping", "distinct", "claim_set", "due_now", "leased", "one", "narrowed", "seconds_left",
    "tables_of_people", "finished_in", "create_trigger", "minute_step",
}  # fmt: skip
ONLY_POSTGRESQL = {
    "checkout_skip_locked", "checkout_beside_others", "checkout_of_many", "candidates", "priorities",
    "priorities_of_many", "insert_uniform", "copy_uniform", "reserve_ids", "some_taken", "counts", "first_tasks",
    "estimate", "remove_old", "lock_table", "lock_groups_of", "ArchiveStatements.lock",
}  # fmt: skip
ONLY_SQLITE = {"checkout_single_writer", "counts_exact"}


def statements_of(vendor: str) -> dict[str, str]:
    dialect = DIALECTS[vendor]
    found = Statements(TABLES, dialect)
    named: dict[str, str] = {}
    before, after = (StatsStatements,), (ArchiveStatements, EraseStatements)
    staging = StagingStatements(TABLES, dialect, TABLE)
    first, last = ([kind(TABLES, dialect) for kind in kinds] for kinds in (before, after))
    for group in (found, *first, staging, *last):
        named.update(_of(group, type(group).__name__))
    history = ArchiveOfHistory(TABLES, dialect)
    for title, other in (("one row", found.one), ("without some payload types", found.narrowed), ("history", history)):
        for name, sql in _of(other, "ArchiveStatements" if other is history else "Statements"):
            if sql != named[name]:
                named[f"{name} ({title})"] = sql
    named.update(_others(dialect))
    return named


def _of(group: Group, title: str) -> Iterator[tuple[str, str]]:
    for name in sorted(name for name in dir(type(group)) if not name.startswith("_") and name not in PARTS):
        full = f"{title}.{name}"
        if {name, full} & (ONLY_SQLITE if group.dialect.vendor == "postgresql" else ONLY_POSTGRESQL):
            continue
        if isinstance(getattr(type(group), name), str | cached_property | property):
            yield from _texts(full, getattr(group, name))
            continue
        for arguments in VARIANTS[full]:
            said = ", ".join(str(value) for value in arguments.values() if isinstance(value, str))
            flags = ", ".join(name for name, value in arguments.items() if value is True)
            words = ", ".join(filter(None, (said, flags)))
            yield from _texts(f"{full} ({words})" if words else full, getattr(group, name)(**arguments))


def _texts(name: str, found: Any) -> Iterator[tuple[str, str]]:
    if isinstance(found, str):
        yield name, found
    elif isinstance(found, dict):
        for place, pair in found.items():
            yield from _texts(f"{name}, {place}", pair)
    else:
        yield from ((f"{name} [{number}]", sql) for number, sql in enumerate(found, 1))


def _others(dialect: Dialect) -> Iterator[tuple[str, str]]:
    for name in ("OPEN_BATCHES", "CREATE_BATCH"):
        yield f"pipeline.{name}", getattr(pipeline, name)
    if dialect.vendor == "postgresql":
        yield "pipeline.HORIZON_SQL", pipeline.HORIZON_SQL
        yield "pipeline.window", pipeline.window(1000, 2000, finished=True)
        yield "pipeline.window (from the beginning)", pipeline.window(0, 2000, finished=False)
        for name in ("RESET_ABSENT_SQL", "ABSENT_LOCATIONS_SQL", "ABSENT_STREAMS_SQL", "EVENT_SCHEMA_SQL"):
            yield f"pipeline.{name}", getattr(pipeline, name)
        events = pipeline.FinishEventStatements(TABLES, dialect)
        yield from _of(events, "FinishEventStatements")
        for case, since, whole in (("by events", 1000, 900), ("a scan", 1000, 1500), ("the first scan", 0, 1500)):
            sql = events.finished_in(since, 2000, "dbtaskqueue.task", whole)
            yield f"FinishEventStatements.finished_in ({case})", sql
        yield "pipeline.older", pipeline.older(1000)


def text_of(vendor: str) -> str:
    head = "-- Made by `python -m tests.core.statements --write`; do not edit. %(name)s is a parameter, %% is %.\n"
    return head + "".join(f"\n-- {name}\n{laid_out(sql)};\n" for name, sql in statements_of(vendor).items())


def file_of(vendor: str) -> Path:
    return FOLDER / f"{vendor}.sql"
