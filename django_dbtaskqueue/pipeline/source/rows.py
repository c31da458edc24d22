"""Rows that become tasks: those of files are read, and all are checked by the rules of ``enqueue()``.

Python and Arrow read a file in a Spark task, and make a JSON object of each row, with its place. Spark's own readers
change values: a backslash escapes quotes, all lines of JSON get one type, bytes that are no text become U+FFFD. They
end at the first bad row, and know no line numbers. Here a row that cannot be read has a ``fault``.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import islice
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from pyarrow import dataset, fs
from pyspark.sql import DataFrame, SparkSession, types

from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import BY_NAME, ENQUEUED, TIMING
from django_dbtaskqueue.core.durations import MAX_DELAY, MIN_LEASE
from django_dbtaskqueue.core.exceptions import JobOptionError, PayloadError, PipelineError, near_match
from django_dbtaskqueue.core.masking import Rules as MaskRules, current_rules, masked_text

TEXT_OPTIONS = {"encoding": "utf-8"}
FORMATS: dict[str, dict[str, str]] = {  # with the options of each, and their defaults
    "csv": {"sep": ",", "quote": '"', "escape": "", "header": "true", **TEXT_OPTIONS},
    "json": TEXT_OPTIONS,
    "parquet": {},
    "orc": {},
    "text": TEXT_OPTIONS,
}
FORMAT_ENDINGS = {**{name: name for name in FORMATS}, "jsonl": "json", "ndjson": "json", "tsv": "csv", "txt": "text"}
ROW = "_row"  # the column of a frame that says where a row was, what it is, and why it cannot be a task
ROW_DDL = "file string, line long, text string, fault struct<column: string, value: string, reason: string>"
FAULT = pa.struct([(name, pa.string()) for name in ("column", "value", "reason")])
ROW_TYPE = pa.struct([("file", pa.string()), ("line", pa.int64()), ("text", pa.string()), ("fault", FAULT)])
BATCH_ROWS = 10_000
PREVIEW_CHARS = 200  # of a value that was rejected
READ_ERRORS = (OSError, TypeError, LookupError, StopIteration, UnicodeError, csv.Error, pa.ArrowException)
NOT_DECODED = "is not in {}. Give its encoding, as in --option encoding=latin-1"
Line = tuple[int, str, str, str]  # its number, the JSON of its row, what it says, and why it cannot be read


@dataclass(frozen=True)
class Files:
    """Files of one format. ``columns`` are those of CSV and text, which are text; other rows have keys of their own."""

    names: tuple[str, ...]
    kind: str
    options: Mapping[str, str]
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, paths: Sequence[str], kind: str | None, options: Mapping[str, str]) -> Files:
        """Return what these paths, folders and patterns name. Raises JobOptionError for what cannot be read."""
        names = tuple(name for path in paths for name in found(path))
        kind = kind or guessed(names)
        for name in sorted(options.keys() - FORMATS[kind].keys()):
            known, near = ", ".join(FORMATS[kind]) or "none", near_match(name, FORMATS[kind])
            raise JobOptionError("--option", f"{kind} has no option {name!r}.{near} It has: {known}")
        tabs = {"sep": "\t"} if kind == "csv" and ".tsv" in names[0].lower() else {}
        options = {**FORMATS[kind], **tabs, **options}
        try:
            return cls(names, kind, options, cls(names, kind, options)._columns())
        except READ_ERRORS as error:
            raise JobOptionError("--input", f"{names[0]} is no {kind} that can be read: {error}") from None

    def _columns(self) -> tuple[str, ...]:
        if self.kind != "csv":
            return ("value",) if self.kind == "text" else ()
        with self._text(self.names[0]) as lines:
            names = self._named(next(self._csv(lines)))
        if json_payload.clean_text(text := "".join(names)) != text:
            raise JobOptionError("--input", f"{self.names[0]} {NOT_DECODED.format(self.options['encoding'])}")
        if len({*names} - {ROW}) < len(names):
            reason = f"a column {ROW}, a name of the loader's own" if ROW in names else "two columns of one name"
            raise JobOptionError("--input", f"{self.names[0]} has {reason}: {', '.join(names)}")
        return names

    def _named(self, first: Sequence[str]) -> tuple[str, ...]:
        """Return the names of columns by the first line; a column without one has its number, from 0."""
        return tuple(name * self._has_header or f"_c{number}" for number, name in enumerate(first))

    @property
    def _has_header(self) -> bool:
        return self.options["header"].lower() == "true"

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the rows, in the column ``_row``; each file is a partition."""
        numbers = spark.range(0, len(self.names), 1, len(self.names))
        return numbers.mapInArrow(self, f"{ROW} struct<{ROW_DDL}>")

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for name in (self.names[number] for batch in numbers for number in batch.column(0).to_pylist()):
            rows = self.rows(name)
            while some := list(islice(rows, BATCH_ROWS)):
                yield pa.RecordBatch.from_arrays([pa.array(some, ROW_TYPE)], [ROW])

    def rows(self, name: str) -> Iterator[dict[str, object]]:
        parse: Callable[[str], Iterator[Line]] = getattr(self, f"_{self.kind}_lines", self._arrow_lines)
        for line, text, said, reason in parse(name):
            clean = said if said.isascii() else json_payload.clean_text(said)
            if clean != said:
                reason = NOT_DECODED.format(self.options["encoding"])
            fault = {"value": clean[:PREVIEW_CHARS], "reason": reason} if reason else None
            yield {"file": name, "line": line, "text": None if reason else text, "fault": fault}

    # -- the formats ---------------------------------------------------------------------------------------------------

    def _text(self, name: str) -> io.TextIOWrapper:
        encoding = self.options["encoding"].lower()
        encoding = "utf-8-sig" if encoding in ("utf-8", "utf8") else encoding
        system, place = _file_system(name)
        content = system.open_input_stream(place)  # unpacked, as its name says
        return io.TextIOWrapper(content, encoding, errors="surrogateescape", newline="" if self.kind == "csv" else "\n")

    def _csv(self, lines: Iterable[str]) -> Iterator[list[str]]:
        csv.field_size_limit(2**31 - 1)
        sep, quote, escape = (self.options[name] for name in ("sep", "quote", "escape"))
        return csv.reader(lines, delimiter=sep, quotechar=quote, escapechar=escape or None, strict=True)

    def _csv_lines(self, name: str) -> Iterator[Line]:
        seen: list[str] = []  # lines of the row that is being read
        with self._text(name) as lines:
            reader = self._csv(seen.append(line) or line for line in lines)  # type: ignore[func-returns-value]
            if self._has_header and (names := self._named(next(reader, ()))) != self.columns:
                raise PipelineError(f"{name} has the columns {names}, and {self.names[0]} has {self.columns}.")
            line = 1
            while True:
                line, text, reason = line + len(seen), "", ""
                seen.clear()
                try:
                    values = next(reader, None)
                except csv.Error as error:
                    values, reason = [], f"is not CSV: {error}"
                if values is None:
                    return
                if values and len(values) != len(self.columns):
                    reason = f"has {len(values)} columns, and the header {len(self.columns)}"
                elif values:
                    text = as_json(dict(zip(self.columns, (value or None for value in values), strict=True)))
                if text or reason:  # an empty line is no row
                    yield line, text, "".join(seen), reason

    def _json_lines(self, name: str) -> Iterator[Line]:
        with self._text(name) as lines:
            for number, line in enumerate(lines, 1):
                if text := line.strip():
                    try:
                        is_object = isinstance(json_payload.loads(text), dict)
                        reason = "" if is_object else "is not a JSON object. Write one in each line"
                    except PayloadError as error:
                        reason = error.reason
                    yield number, text, text, reason

    def _text_lines(self, name: str) -> Iterator[Line]:
        with self._text(name) as lines:
            for number, line in enumerate(lines, 1):
                yield number, as_json({"value": line.rstrip("\r\n")}), line, ""

    def _arrow_lines(self, name: str) -> Iterator[Line]:
        system, place = _file_system(name)
        batches = dataset.dataset(place, format=self.kind, filesystem=system).to_batches(batch_size=BATCH_ROWS)
        for number, row in enumerate((row for batch in batches for row in batch.to_struct_array()), 1):
            text, reason = in_json(row)
            yield number, text or "", "", reason


def in_json(value: pa.Scalar) -> tuple[str | None, str]:
    """Return a value as JSON, and why it cannot be: a date beyond Python's, a key twice."""
    try:
        return as_json(value.as_py(maps_as_pydicts="strict")) if value.is_valid else None, ""
    except (ValueError, OverflowError, KeyError, TypeError) as error:
        return None, str(error)


def as_json(value: object) -> str:
    """Return JSON with times in ISO 8601, durations in seconds, bytes in base64; NaN stays, and guards refuse it."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Decimal):
        number = int(value) if value == value.to_integral_value() else float(value)
        return number if Decimal(str(number)) == value else str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"is {value!r} of type {type(value).__name__}, which JSON does not have")


# -- which files -------------------------------------------------------------------------------------------------------


def _file_system(path: str) -> tuple[fs.FileSystem, str]:
    if "://" not in path:
        return fs.LocalFileSystem(), os.path.abspath(path)
    system, place = fs.FileSystem.from_uri(path.replace("s3a://", "s3://", 1))
    return system, place


def found(path: str) -> list[str]:
    """Return the files of a path, a folder or, if there is neither, a pattern. Raises JobOptionError without any."""
    scheme = path.partition("://")[0] if "://" in path and not path.startswith("file:") else ""
    try:
        system, place = _file_system(path)
        info = system.get_file_info(place)
        if info.is_file:
            return [path]
        names = [one for one in glob.glob(path, recursive=True) if os.path.isfile(one)]
        if info.type == fs.FileType.Directory:
            inside = system.get_file_info(fs.FileSelector(place, recursive=True))
            names = [one.path for one in inside if one.is_file and not one.base_name.startswith(("_", "."))]
    except (OSError, ValueError) as error:
        raise JobOptionError("--input", f"{path} cannot be read: {error}") from None
    if not names:
        raise JobOptionError("--input", f"there is no file {path}. Check the path")
    return sorted(f"{scheme}://{name}" if scheme else name for name in names)


def guessed(names: Sequence[str]) -> str:
    """Return the format by the files' names. Raises JobOptionError if no name has a known ending."""
    endings = (ending for name in names for ending in os.path.basename(name).lower().split(".")[1:])
    if known := next((FORMAT_ENDINGS[one] for one in endings if one in FORMAT_ENDINGS), None):
        return known
    reason = f"no name says the format of {', '.join(names)}: give one of {', '.join(FORMATS)}"
    raise JobOptionError("--format", reason)


# -- the rules of rows -------------------------------------------------------------------------------------------------

# `stage` applies the rules of ``enqueue()``. A DataFrame's columns are named like its arguments.

GIVEN = (BY_NAME["queue"], *ENQUEUED)
COLUMNS = {column.argument: column.db for column in GIVEN} | {name: name for name in TIMING}  # DataFrame's -> staging's
STAGED_TEXTS = tuple(column.argument for column in GIVEN if column.type == "text")
JSONS = tuple(column.argument for column in GIVEN if column.type == "jsonb")
STAGED_DURATIONS = (*(column.argument for column in GIVEN if column.type == "float8"), "delay", "ttl")
WHOLE = ("priority", "max_attempts")
# Of each column with an order: its least and its greatest value, and what they are
BOUNDS: dict[str, tuple[object, object, str]] = {
    **dict.fromkeys(STAGED_DURATIONS, (timedelta(0), MAX_DELAY, "between zero and a hundred years")),
    "lease": (MIN_LEASE, MAX_DELAY, "between 100 ms and a hundred years"),
    "priority": (-32768, 32767, "a whole number from -32768 to 32767"),
    "max_attempts": (1, 2**31 - 1, "a whole number from 1 to 2147483647"),
    "run_at": (datetime(2, 1, 1, tzinfo=UTC), datetime(9000, 12, 31, tzinfo=UTC), "a time of the years 2 to 9000"),
}
DURATION_REMEDY = "make_dt_interval(secs=col), or lit(timedelta(minutes=5))"
NESTED = (types.StructType, types.ArrayType, types.MapType)
# Column -> (the types it may have, how to make one)
ACCEPTED: dict[str, tuple[tuple[type[types.DataType], ...], str]] = {
    **dict.fromkeys(STAGED_TEXTS, ((types.StringType,), 'col.cast("string")')),
    **dict.fromkeys(JSONS, ((types.StringType, *NESTED), "to_json(col)")),
    **dict.fromkeys(STAGED_DURATIONS, ((types.DayTimeIntervalType,), DURATION_REMEDY)),
    **dict.fromkeys(WHOLE, ((types.ByteType, types.ShortType, types.IntegerType, types.LongType), 'col.cast("int")')),
    "run_at": ((types.TimestampType,), 'col.cast("timestamp")'),
}


class Reject(NamedTuple):
    """A row that was not enqueued, and why: the ``value`` of a ``column``. Values are masked and cut."""

    queue: str | None
    reference: str | None
    reason: str
    payload: str | None
    file: str | None = None
    line: int | None = None
    column: str | None = None
    value: str | None = None


@dataclass(frozen=True)
class Rules:
    """What rows are checked against, and the values for columns that are missing or null."""

    queue: str | None = None
    queues: frozenset[str] | None = None  # the known ones; None: any name
    require_reference: bool = False
    max_attempts: int = 5
    priority: int = 0
    ttl: float | None = None  # seconds
    limits: json_payload.Limits = json_payload.DEFAULT_LIMITS
    secrets: MaskRules = field(default_factory=current_rules)  # of the driver: executors have no settings


def check_schema(schema: types.StructType, queue: str | None) -> None:
    """Refuse columns that are unknown or of a wrong type, and rows without a queue."""
    for column in (one for one in schema if one.name != ROW):
        if column.name not in COLUMNS:
            arguments = {stored: name for name, stored in COLUMNS.items()}
            near = near_match(arguments.get(column.name, column.name), COLUMNS)
            raise PipelineError(
                f"The DataFrame has a column {column.name!r}, which is no argument of enqueue().{near} "
                f"Known: {', '.join(COLUMNS)}. Put other values into the payload, "
                f'as in struct("{column.name}").alias("payload"), or drop them.'
            )
        types, remedy = ACCEPTED[column.name]
        if not isinstance(column.dataType, types):
            raise PipelineError(
                f"The column {column.name!r} is of type {column.dataType.simpleString()}, and must be "
                f"{' or '.join(kind.typeName() for kind in types)}: use {remedy}."
            )
    if queue is None and "queue" not in schema.names:
        raise PipelineError("Which queue? Give queue=, or a column named queue.")


def stage(batch: pa.RecordBatch, rules: Rules) -> tuple[dict[str, pa.Array], list[Reject]]:
    """Return the good rows as the staging table's columns, and the bad ones."""
    count, names = batch.num_rows, batch.schema.names
    given = _filled({name: batch.column(name) for name in names if name in COLUMNS}, rules, count)
    places = batch.column(ROW) if ROW in names else pa.nulls(count, pa.struct([("fault", pa.null())]))
    unread = pc.indices_nonzero(places.field("fault").is_valid()).to_pylist()
    faults = {row: places[row]["fault"].as_py() for row in unread}
    for name, column in [*given.items()]:
        unmade: list[tuple[int, str]] = []
        if pa.types.is_nested(column.type):
            texts, reasons = zip(*map(in_json, column), strict=True) if count else ((), ())
            given[name] = pa.array(texts, pa.string())
            unmade = [(row, reason) for row, reason in enumerate(reasons) if reason]
        for row, reason in (*unmade, *_faults(name, given[name], rules)):
            faults.setdefault(row, {"column": name, "value": _preview(given[name], row), "reason": f"{name}: {reason}"})
    where = [name for name in ("file", "line") if places.type.get_field_index(name) >= 0]  # tables have none
    rejects = [
        _reject(given, row, faults[row], rules.secrets)._replace(**{name: places[row][name].as_py() for name in where})
        for row in sorted(faults)
    ]
    if faults:
        good = pa.array([row for row in range(count) if row not in faults], pa.int64())
        given = {name: column.take(good) for name, column in given.items()}
    for name in given.keys() & {*STAGED_DURATIONS}:
        given[name] = pc.divide(given[name].cast(pa.duration("us")).cast(pa.int64()).cast(pa.float64()), 1e6)
    return {COLUMNS[name]: column for name, column in given.items()}, rejects


def _filled(given: dict[str, pa.Array], rules: Rules, count: int) -> dict[str, pa.Array]:
    """Return the columns with the values of the rules where there is none; the queue only if it is no column."""
    values = {name: pa.scalar(getattr(rules, name), pa.int64()) for name in WHOLE}
    if rules.ttl is not None:
        values["ttl"] = pa.scalar(timedelta(seconds=rules.ttl), pa.duration("us"))
    columns = {name: given.get(name, pa.nulls(count, value.type)).cast(value.type) for name, value in values.items()}
    queue = {"queue": pa.array([rules.queue] * count, pa.string())}
    return {**queue, **given, **{name: pc.fill_null(column, values[name]) for name, column in columns.items()}}


def _faults(name: str, column: pa.Array, rules: Rules) -> Iterable[tuple[int, str]]:
    if name in JSONS:
        texts = ((row, text) for row, text in enumerate(column.to_pylist()) if text is not None)
        reasons = ((row, json_fault(text, rules.limits, mapping=name == "context")) for row, text in texts)
        return [(row, reason) for row, reason in reasons if reason]
    if name in STAGED_TEXTS:
        return _text_faults(name, column, rules)
    least, most, kind = BOUNDS[name]
    bad = pc.or_(pc.less(column, pa.scalar(least, column.type)), pc.greater(column, pa.scalar(most, column.type)))
    return _said(bad, lambda row: f"{_preview(column, row)} is not {kind}")


def _said(bad: pa.Array, reason: Callable[[int], str]) -> list[tuple[int, str]]:
    return [(row, reason(row)) for row in pc.indices_nonzero(bad.fill_null(False)).to_pylist()]


def _text_faults(name: str, column: pa.Array, rules: Rules) -> list[tuple[int, str]]:
    length = pc.utf8_length(column)
    bad = pc.or_(pc.or_(pc.less(length, 1), pc.greater(length, 200)), pc.match_substring(column, "\0"))
    faults = _said(bad, lambda row: f"{column[row].as_py()!r:.80} is not text of 1 to 200 characters")
    if name == "queue" or (name == "reference" and rules.require_reference):
        faults += _said(column.is_null(), lambda row: "is null, and each row must have one")
    if name == "queue" and rules.queues is not None:
        known = pc.or_kleene(pc.is_in(column, pa.array(sorted(rules.queues), pa.string())), column.is_null())
        names = ", ".join(sorted(rules.queues))
        faults += _said(pc.invert(known), lambda row: f"{column[row].as_py()!r} is unknown. Known: {names}")
    return faults


def json_fault(text: str, limits: json_payload.Limits, *, mapping: bool = False) -> str | None:
    """Return why a database cannot hold this JSON text, or None."""
    try:
        value = json_payload.loads(text)
        plain = len(text) <= min(json_payload.INT_DIGITS, limits.size // 4) and "\\u" not in text
        if not plain or text.count("[") + text.count("{") > limits.depth:
            json_payload.dumps(value, limits=limits)
    except PayloadError as error:
        return f"{error.path}: {error.reason}" if error.path else error.reason
    return f"is {text:.40}, and must be a JSON object" if mapping and not isinstance(value, dict) else None


def _preview(column: pa.Array, row: int) -> str | None:
    try:
        value = column[row].as_py()
    except (OverflowError, ValueError):  # a time beyond Python's
        value = column.slice(row, 1).cast(pa.string())[0].as_py()
    return None if value is None else str(value)[: 2 * PREVIEW_CHARS]  # the name of a value may come after it


def _reject(given: dict[str, pa.Array], row: int, fault: Mapping[str, str], secrets: MaskRules) -> Reject:
    queue, reference = (given[name][row].as_py() if name in given else None for name in ("queue", "reference"))
    payload = _preview(given["payload"], row) if "payload" in given else None
    payload, value = (text and masked_text(text, secrets)[:PREVIEW_CHARS] for text in (payload, fault["value"]))
    return Reject(queue, reference, masked_text(fault["reason"], secrets), payload, column=fault["column"], value=value)
