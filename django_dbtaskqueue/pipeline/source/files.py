"""Files of rows, read by Python and Arrow in a Spark task: a JSON object of each row, with its place.

Spark's readers change values: a backslash escapes quotes, all lines of JSON get one type, wrong bytes become U+FFFD.
"""

import csv
import glob
import io
import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from itertools import chain
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa
from pyarrow import dataset, fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError, near_match
from django_dbtaskqueue.pipeline.source import PREVIEW_CHARS, ROW, chunked, kept_type

TEXT_OPTIONS = {"encoding": "utf-8"}
FORMATS: dict[str, dict[str, str]] = {  # with the options of each, and their defaults
    "csv": {"sep": ",", "quote": '"', "escape": "", "header": "true", **TEXT_OPTIONS},
    "json": TEXT_OPTIONS,
    "parquet": {},
    "orc": {},
    "text": TEXT_OPTIONS,
}
FORMAT_ENDINGS = {**{name: name for name in FORMATS}, "jsonl": "json", "ndjson": "json", "tsv": "csv", "txt": "text"}
FAULT = pa.struct([(name, pa.string()) for name in ("column", "value", "reason")])
ROW_TYPE = pa.struct([("file", pa.string()), ("line", pa.int64()), ("text", pa.string()), ("fault", FAULT)])
BATCH_ROWS, BATCH_CHARS = 10_000, 16 * 2**20
MIN_ROW_CHARS = BATCH_CHARS // BATCH_ROWS
HIDDEN = re.compile(r"(^|/)(\.|_[^/=]*(/|$))")  # as Spark hides folders and files
READ_ERRORS = (OSError, TypeError, LookupError, StopIteration, UnicodeError, csv.Error, pa.ArrowException)
NOT_DECODED = "is not in {}. Give its encoding, as in --option encoding=latin-1"
Line = tuple[int, str, str, str]  # its number, the JSON of its row, what it says, and why it cannot be read


@dataclass(frozen=True)
class Files:
    """Files of one format. ``columns`` are those of CSV and text, which are text; other rows have keys of their own."""

    names: tuple[str, ...]
    kind: str
    options: Mapping[str, str]
    folders: Mapping[str, Mapping[str, str | None]]  # of each file: the values that its folders' names have
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, paths: Sequence[str], kind: str | None, options: Mapping[str, str]) -> "Files":
        """Return what these paths, folders and patterns name. Raises JobOptionError for what cannot be read."""
        given = [(name, path) for path in paths for name in found(path)]
        ways = {os.path.realpath(name): (name, path) for name, path in reversed(given)}  # to no file two
        folders = {name: in_folders(path, name) for name, path in reversed(ways.values())}
        names = tuple(folders)
        kind = kind or guessed(names)
        for name in sorted(options.keys() - FORMATS[kind].keys()):
            known, near = ", ".join(FORMATS[kind]) or "none", near_match(name, FORMATS[kind])
            raise JobOptionError("--option", f"{kind} has no option {name!r}.{near} It has: {known}")
        options = {**FORMATS[kind], **({"sep": "\t"} if ".tsv" in names[0].lower() else {}), **options}
        try:
            return cls(names, kind, options, folders, cls(names, kind, options, folders)._columns())
        except READ_ERRORS as error:
            raise JobOptionError("--input", f"{names[0]} is no {kind} that can be read: {error}") from None

    def _columns(self) -> tuple[str, ...]:
        if self.kind != "csv":
            return ("value",) if self.kind == "text" else ()
        names = self._named(next(self._csv(chain.from_iterable(map(self._text, self.names)))))  # files may be empty
        if json_payload.clean_text(text := "".join(names)) != text:
            raise JobOptionError("--input", f"{self.names[0]} {NOT_DECODED.format(self.options['encoding'])}")
        if len({*names} - {ROW}) < len(names):
            reason = f"a column {ROW}, a name of the loader's own" if ROW in names else "two columns of one name"
            raise JobOptionError("--input", f"{self.names[0]} has {reason}: {', '.join(names)}")
        return names

    def _named(self, first: Sequence[str]) -> tuple[str, ...]:
        """Return the names of columns by the first line; a column without one has its number, from 0."""
        has_header = self.options["header"].lower() == "true"
        return tuple(name * has_header or f"_c{number}" for number, name in enumerate(first))

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the rows, in the column ``_row``; each file is a partition."""
        numbers = spark.range(0, len(self.names), 1, len(self.names))
        return numbers.mapInArrow(self, from_arrow_schema(pa.schema([(ROW, ROW_TYPE)])))

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for name in (self.names[number] for batch in numbers for number in batch.column(0).to_pylist()):
            for some in chunked(self.rows(name), lambda row: max(len(str(row["text"])), MIN_ROW_CHARS), BATCH_CHARS):
                yield pa.RecordBatch.from_arrays([pa.array(some, ROW_TYPE)], [ROW])

    def rows(self, name: str) -> Iterator[dict[str, object]]:
        for line, text, said, reason in self._lines(name):
            clean = said if said.isascii() else json_payload.clean_text(said)
            if clean != said:
                reason = NOT_DECODED.format(self.options["encoding"])
            fault = {"value": clean[:PREVIEW_CHARS], "reason": reason} if reason else None
            yield {"file": name, "line": line, "text": None if reason else self._whole(name, text), "fault": fault}

    def _lines(self, name: str) -> Iterator[Line]:
        try:
            yield from getattr(self, f"_{self.kind}_lines", self._arrow_lines)(name)
        except READ_ERRORS as error:
            raise PipelineError(f"{name} cannot be read to its end: {error}. Write it again.") from None

    def _whole(self, name: str, text: str) -> str:
        """Return the JSON of a row with the values of its folders, as of ``day=2026-01-31``. The row's own win."""
        if not (folders := self.folders[name]):
            return text
        own = json.loads(text).keys()
        more = as_json({key: value for key, value in folders.items() if key not in own})
        return f"{{{', '.join(filter(None, (more[1:-1], text[1:-1].strip())))}}}"

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
            names = self.options["header"].lower() == "true" and self._named(next(reader, self.columns))
            if names and names != self.columns:
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
                        value = json_payload.loads_exactly(text)
                        if "\\u" in text:
                            as_json(value).encode()  # raises for a lone surrogate; Spark would make it a question mark
                        reason = "" if isinstance(value, dict) else "is not a JSON object. Write one in each line"
                    except (ValueError, RecursionError) as error:
                        reason = f"is not JSON: {error}"
                    yield number, text, text, reason

    def _text_lines(self, name: str) -> Iterator[Line]:
        with self._text(name) as lines:
            for number, line in enumerate(lines, 1):
                yield number, as_json({"value": line.rstrip("\r\n")}), line, ""

    def _arrow_lines(self, name: str) -> Iterator[Line]:
        system, place = _file_system(name)
        if not system.get_file_info(place).size:
            return
        # Spark's times have microseconds. As nanoseconds, Arrow's default, those before 1677 and after 2262 wrap.
        kind = dataset.ParquetFileFormat(coerce_int96_timestamp_unit="us") if self.kind == "parquet" else self.kind
        source = dataset.dataset(place, format=kind, filesystem=system)
        schema = pa.schema([one.with_type(kept_type(one.type)) for one in source.schema])
        batches = (batch.cast(schema).to_struct_array() for batch in source.to_batches(batch_size=BATCH_ROWS))
        for number, row in enumerate(chain.from_iterable(batches), 1):
            text, reason = in_json(row)
            yield number, text or "", "", reason


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
        base, names = re.split(r"[*?[]", path)[0], [*filter(os.path.isfile, glob.glob(path, recursive=True))]
        if info.type == fs.FileType.Directory:
            inside = system.get_file_info(fs.FileSelector(place, recursive=True))
            base, names = place, [one.path for one in inside if one.is_file]
    except (OSError, ValueError) as error:
        raise JobOptionError("--input", f"{path} cannot be read: {error}") from None
    names = [name for name in names if not HIDDEN.search(name[len(base) :])]
    if not names:
        raise JobOptionError("--input", f"there is no file {path}. Check the path")
    return sorted(f"{scheme}://{name}" if scheme else name for name in names)


def in_folders(path: str, name: str) -> dict[str, str | None]:
    """Return the values in the names of the folders of a file that a path does not name."""
    given, folders = (os.path.abspath(one).split("/") for one in (path, os.path.dirname(name)))
    pairs = (one.split("=", 1) for one in folders if "=" in one and one not in given)
    return {unquote(key): None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value) for key, value in pairs}


def guessed(names: Sequence[str]) -> str:
    """Return the format by the files' names. Raises JobOptionError if no name has a known ending."""
    endings = (ending for name in names for ending in os.path.basename(name).lower().split(".")[1:])
    if known := next((FORMAT_ENDINGS[one] for one in endings if one in FORMAT_ENDINGS), None):
        return known
    raise JobOptionError("--format", f"no name says the format of {', '.join(names)}: give one of {', '.join(FORMATS)}")


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
    if isinstance(value, timedelta) and (rest := getattr(value, "nanoseconds", 0)):  # as pandas has them
        value = Decimal(value // timedelta(microseconds=1) * 1000 + rest).scaleb(-9)
    if isinstance(value, Decimal):
        number = int(value) if value == value.to_integral_value() else float(value)
        return number if Decimal(str(number)) == value else str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"is {value!r} of type {type(value).__name__}, which JSON does not have")
