"""Files as rows: Python and Arrow read a file in a Spark task, and make a JSON object of each row, with its place.

Spark's own readers change values: a backslash escapes quotes, all lines of JSON get one type, bytes that are no text
become U+FFFD. They end at the first bad row, and know no line numbers. Here a row that cannot be read has a ``fault``.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import dataset, fs

from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.exceptions import JobOptionError, PayloadError, PipelineError, near_match

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
        for name in options:
            if name not in FORMATS[kind]:
                known = ", ".join(FORMATS[kind]) or "none"
                reason = f"{kind} has no option {name!r}.{near_match(name, FORMATS[kind])} It has: {known}"
                raise JobOptionError("--option", reason)
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
        """For ``mapInArrow`` over numbers of files."""
        for name in (self.names[number] for batch in numbers for number in batch.column(0).to_pylist()):
            rows = self.rows(name)
            while some := list(islice(rows, BATCH_ROWS)):
                yield pa.RecordBatch.from_arrays([pa.array(some, ROW_TYPE)], [ROW])

    def rows(self, name: str) -> Iterator[dict[str, object]]:
        """Yield the rows of a file, as `ROW_TYPE`."""
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
            try:
                yield number, as_json(row.as_py(maps_as_pydicts="strict")), "", ""
            except (ValueError, OverflowError, KeyError, TypeError) as error:  # a date beyond Python's, a key twice
                yield number, "", "", str(error)


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
    for name in names:
        for ending in os.path.basename(name).lower().split(".")[1:]:
            if ending in FORMAT_ENDINGS:
                return FORMAT_ENDINGS[ending]
    reason = f"no name says the format of {', '.join(names)}: give one of {', '.join(FORMATS)}"
    raise JobOptionError("--format", reason)
