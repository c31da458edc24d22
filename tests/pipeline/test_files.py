"""Files as rows: what Python's libraries wrote is what the payloads say; a bad row has its line, value and reason."""

import csv
import gzip
import io
import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from pyarrow import orc, parquet

from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError
from django_dbtaskqueue.pipeline.source import ROW
from django_dbtaskqueue.pipeline.source.files import Files, found
from django_dbtaskqueue.pipeline.source.staging import Reject, Rules, stage

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
CELLS = TEXTS | st.sampled_from(['"', '""', "a\r\nb", "\\", ",", "NaN", "null", "\ufeff", " x ", "\u2028", "1" * 20])
NUMBERS = st.integers(-(10**43), 10**43) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | CELLS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CELLS, inner, max_size=3),
    max_leaves=8,
)


def loaded(path: Path, **options: str) -> tuple[list[Any], list[Reject]]:
    payloads, rejects = list[Any](), list[Reject]()
    files = Files.of([str(path), str(path)], None, options)  # no file is read twice
    for batch in files([pa.record_batch({"id": [*range(len(files.names))]})]):
        row = batch.column(ROW)
        staged, bad = stage(pa.record_batch({"payload": row.field("text"), ROW: row}), Rules(queue="q"))
        payloads += map(json.loads, staged["payload"].to_pylist())
        rejects += bad
    return payloads, rejects


@given(rows=st.lists(st.tuples(CELLS, CELLS)), sep=st.sampled_from(",;\t|"), end=st.sampled_from(["\n", "\r\n", "\r"]))
def test_csv_comes_back_as_it_was_written(tmp_path: Path, rows: list[tuple[str, str]], sep: str, end: str) -> None:
    out = io.StringIO()
    quoting = csv.QUOTE_MINIMAL if end == "\r\n" else csv.QUOTE_ALL  # Python leaves a lone \r or \n as it is
    csv.writer(out, delimiter=sep, lineterminator=end, quoting=quoting).writerows([("a", "b c"), *rows])
    text = out.getvalue()
    for name, content in (("x.csv", text.encode("utf-8-sig")), ("y.csv.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(content)
        assert loaded(tmp_path / name, sep=sep) == ([{"a": a or None, "b c": b or None} for a, b in rows], [])


@given(objects=st.lists(st.dictionaries(CELLS, VALUES, max_size=4)), ascii=st.booleans())
def test_a_line_of_json_is_its_payload(tmp_path: Path, objects: list[Any], ascii: bool) -> None:
    lines = [json.dumps(one, ensure_ascii=ascii) for one in objects]
    (tmp_path / "x.jsonl").write_bytes("\n\r\n".join(lines).encode("utf-8-sig"))
    assert loaded(tmp_path / "x.jsonl") == ([json.loads(line) for line in lines], [])


COLUMNS: dict[str, tuple[pa.Array, Any]] = {
    "nanoseconds": (pa.array([1704164645123456789], pa.timestamp("ns")), "2024-01-02T03:04:05.123456789"),
    "pandas": (pa.array([1704164645123456000], pa.timestamp("ns")), "2024-01-02T03:04:05.123456"),
    "zone": (pa.array([datetime(2024, 1, 2, 3, 4, 5, 6, UTC)]), "2024-01-02T03:04:05.000006+00:00"),
    "time": (pa.array([time(3, 4, 5, 6)]), "03:04:05.000006"),
    "times": (pa.array([[1]], pa.list_(pa.time64("ns"))), ["00:00:00.000000001"]),
    "uuid": (pa.array([b"0" * 16], pa.uuid()), "30303030-3030-3030-3030-303030303030"),
    "duration": (pa.array([1001], pa.duration("ns")), 1.001e-6),
    "day": (pa.array([date(2024, 1, 2)]).cast(pa.date64()), "2024-01-02"),
    "money": (pa.array([Decimal("1.10")]), 1.1),
    "unsigned": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    "category": (pa.array(["a"]).dictionary_encode(), "a"),
    "nested": (pa.array([{"at": [datetime(2024, 1, 2)], "half": 1.5}]), {"at": ["2024-01-02T00:00:00"], "half": 1.5}),
    "back`tick": (pa.array([True]), True),
    "map": (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())), {"k": 1}),
}


def test_arrow_s_types_come_back(tmp_path: Path) -> None:
    rows = pa.table({name: column for name, (column, _) in COLUMNS.items()})
    wanted = {name: value for name, (_, value) in COLUMNS.items()}
    parquet.write_table(rows, tmp_path / "x.parquet", row_group_size=1)
    assert loaded(tmp_path / "x.parquet") == ([wanted], [])
    times = pa.table({"at": [datetime(1600, 1, 1), datetime(9999, 12, 31)]})
    parquet.write_table(times, tmp_path / "spark.parquet", use_deprecated_int96_timestamps=True)
    assert [one["at"][:4] for one in loaded(tmp_path / "spark.parquet")[0]] == ["1600", "9999"]
    orc.write_table(rows.select(names := ["nanoseconds", "zone", "nested", "map"]), tmp_path / "x.orc")
    assert loaded(tmp_path / "x.orc") == ([{name: wanted[name] for name in names}], [])


BAD: dict[str, tuple[bytes, int, str, str]] = {  # file: content, line, value, reason
    "long.csv": (b'a,b\n"x\ny",\n\n1,2,3\n', 5, "1,2,3", "has 3 columns, and the header 2"),
    "quote.csv": (b'a\n"q"r\nx\n', 2, '"q"r', "is not CSV: ',' expected"),
    "open.csv": (b'a\nx\n"q\nr\n', 3, '"q', "is not CSV: unexpected end"),
    "latin.csv": ("a\né\n".encode("latin-1"), 2, "\ufffd", "is not in utf-8. Give its encoding"),
    "latin.jsonl": ('{"a": "é"}\n'.encode("latin-1"), 1, '{"a": "\ufffd"}', "is not in utf-8"),
    "cut.jsonl": (b'\n{"a": \n{}\n', 2, '{"a":', "not JSON"),
    "list.jsonl": (b"{}\n[1]\n", 2, "[1]", "is not a JSON object. Write one in each line"),
    "nan.jsonl": (b'{"a": NaN}\n', 1, '{"a": NaN}', "not JSON"),
    "twice.jsonl": (b'{"b": {"a": 1, "a": 2}}\n', 1, '{"b": {"a": 1, "a": 2}}', "the key 'a' occurs twice"),
    "half.jsonl": (b'{"a": "\\ud800"}\n', 1, '{"a": "\\ud800"}', "surrogates not allowed"),
    "nul.jsonl": (b'{"a": "\\u0000"}\n', 1, '{"a": "\\u0000"}', "the NUL character"),
}


@pytest.mark.parametrize(("name", "bad"), BAD.items(), ids=BAD)
def test_a_bad_row_is_a_reject_with_its_place(tmp_path: Path, name: str, bad: tuple[bytes, int, str, str]) -> None:
    content, line, value, reason = bad
    (tmp_path / name).write_bytes(content)
    _, (reject,) = loaded(tmp_path / name)
    assert (reject.file, reject.line) == (str(tmp_path / name), line)
    assert str(reject.value).startswith(value) and reason in reject.reason


def test_a_default_that_no_task_can_have_and_nan_are_rejects_and_bytes_are_base64(tmp_path: Path) -> None:
    assert "40000 is not a whole" in stage(pa.record_batch({"payload": ["1"]}), Rules("q", priority=40000))[1][0].reason
    parquet.write_table(pa.table({"a": [1.5, float("nan")], "b": [b"x", None]}), tmp_path / "x.parquet")
    payloads, (reject,) = loaded(tmp_path / "x.parquet")
    assert payloads == [{"a": 1.5, "b": "eA=="}]
    assert (reject.line, reject.column) == (2, "payload") and "NaN" in reject.reason


def test_large_rows_come_in_small_batches(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"a": "{"x" * 10 * 2**20}"}}\n' * 3)
    batches = Files.of([str(tmp_path)], None, {})([pa.record_batch({"id": [0]})])
    assert [batch.num_rows for batch in batches] == [2, 1]


def test_a_path_is_a_name_first_then_a_pattern_and_what_is_cut_off_is_named(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a[1]{b}*?%20 ü.csv", "b.csv", "c.csv")]
    for name in names:
        Path(name).write_text("a\n" * (name != names[0]))
    (tmp_path / "_SUCCESS").touch()
    assert found(names[0]) == names[:1] and found(str(tmp_path)) == found(str(tmp_path / "*.csv")) == names
    (tmp_path / "empty.parquet").touch()
    assert loaded(tmp_path / "*.csv") == loaded(tmp_path / "empty.parquet") == ([], [])
    with pytest.raises(JobOptionError, match=r"there is no file .*nowhere"):
        found(str(tmp_path / "nowhere"))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 999)[:-9])
    with pytest.raises(PipelineError, match=r"x\.jsonl\.gz cannot be read to its end"):
        loaded(tmp_path / "x.jsonl.gz")


def test_folders_are_read_as_spark_reads_them(tmp_path: Path) -> None:
    for name in ("day=2026-01-31/x%20y.jsonl", "_temporary/0/x.jsonl", ".ipynb_checkpoints/x.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text('{"a": 1.0}\n{}')
    assert loaded(tmp_path) == ([{"day": "2026-01-31", "a": 1.0}, {"day": "2026-01-31"}], [])


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "a,b\n": ({"seb": ";"}, r"csv has no option 'seb'\. Did you mean 'sep'"),
    "a,a\n": ({}, "two columns of one name: a, a"),
    "a,_row\n": ({}, "a column _row, a name of the loader's own"),
    "_c0,b,\n": ({"header": "false", "sep": ";;"}, "must be a 1-character string"),
    "a\n": ({"encoding": "utf-9"}, "unknown encoding"),
    "": ({}, "is no csv that can be read"),
}


def test_what_no_file_can_be_is_refused(tmp_path: Path) -> None:
    for content, (options, reason) in WRONG.items():
        (tmp_path / "x.csv").write_text(content)
        with pytest.raises(JobOptionError, match=reason):
            loaded(tmp_path / "x.csv", **options)
