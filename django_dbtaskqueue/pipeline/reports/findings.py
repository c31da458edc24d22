"""Where the findings of report, forecast and whatif go: a folder, and a row that the admin shows. Both or neither."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.pipeline.arguments import Argument
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.jobs import Context
from django_dbtaskqueue.pipeline.plain import as_json, plain
from django_dbtaskqueue.pipeline.reports.history import Period

ARGUMENTS = (
    Argument("out", "folder for the page (HTML), the figures (JSON) and the tables (Parquet)", metavar="FOLDER"),
    Argument("store", "keep the page in the database too, where the admin shows it", type=bool, default=True),
)
KINDS = ("report", "forecast", "whatif")
INSERT = (
    "INSERT INTO dbtaskqueue_pipelinereport (kind, since, until, summary, data, html, location)"
    " VALUES ({0}, {0}, {0}, {0}, {0}, {0}, {0}) RETURNING id"
)


@dataclass(frozen=True)
class Findings:
    """What a job found. ``summary`` is a sentence or two, ``data`` its figures, ``tables`` what Parquet gets."""

    kind: str
    period: Period
    summary: str
    data: Mapping[str, Any]
    html: str
    tables: Mapping[str, pa.Table] = field(default_factory=dict)

    def keep(self, context: Context) -> dict[str, Any]:
        """Write them where the options say, and return where they are. A dry run writes nothing.

        Raises PipelineError when a place cannot be written; then nothing was.
        """
        out = context.options["out"]
        database = context.database if context.options["store"] else None
        if context.dry_run:
            return {"written": None}
        context.progress("writing", 0, 0)
        places: dict[str, Any] = {}
        with _prepared(Path(out).absolute() if out else None, self) as folder:
            if database is not None:
                with _row(database, self, str(folder or "")) as number:
                    places["report_id"] = number
                    _publish(folder)
            else:
                _publish(folder)
        if folder is not None:
            places["folder"] = str(folder)
            places["page"] = str(folder / f"{self.kind}.html")
        return places


def check(options: Mapping[str, Any]) -> None:
    """Raise PipelineError for an ``out`` that cannot be written, before hours of work are lost on it."""
    if options["out"] is None:
        return
    folder = Path(options["out"]).absolute()
    if folder.exists() and not (folder.is_dir() and _is_ours(folder)):
        raise PipelineError(f"{folder} holds other data. Give --out a folder of its own.")
    there = next(parent for parent in folder.parents if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise PipelineError(f"{folder} cannot be written: {there} is no folder this user may write to.")


def _is_ours(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    return not names or bool(names & {f"{kind}.json" for kind in KINDS})


@contextmanager
def _prepared(folder: Path | None, found: Findings) -> Iterator[Path | None]:
    """Write everything beside its place; take that away again in the end, whatever happened."""
    if folder is None:
        yield None
        return
    part = _part(folder)
    try:
        part.mkdir(parents=True)
        (part / f"{found.kind}.html").write_text(found.html, encoding="utf-8")
        (part / f"{found.kind}.json").write_text(f"{as_json(found.data)}\n", encoding="utf-8")
        for name, rows in found.tables.items():
            pq.write_table(rows, part / f"{name}.parquet", compression="zstd")
        yield folder
    except OSError as error:
        raise PipelineError(f"{folder} cannot be written: {error.strerror or error}. Give another --out.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _part(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}.part")


def _publish(folder: Path | None) -> None:
    """Put the folder that was prepared in its place, and that of an earlier report away."""
    if folder is None:
        return
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    _part(folder).rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _row(database: Database, found: Findings, location: str) -> Iterator[int]:
    """Insert the row; it is committed when the block ends well."""
    connection = database.connect()
    text = database.vendor == "sqlite"
    since, until = (time and (f"{time:%Y-%m-%d %H:%M:%S}" if text else time) for time in _times(found.period))
    data = json.dumps(plain(found.data))
    values = (found.kind, since, until, found.summary, data, found.html, location)
    try:
        connection.execute("BEGIN")
        row = connection.execute(INSERT.format("?" if text else "%s"), values).fetchone()
        yield int(row[0])
        connection.execute("COMMIT")
    except (psycopg.Error, sqlite3.Error) as error:
        raise PipelineError(
            f"The report cannot be kept in {database!r}: {str(error).strip()}. Run migrate, or give --no-store."
        ) from error
    finally:
        connection.close()


def _times(period: Period) -> tuple[Any, Any]:
    return period.since, period.until
