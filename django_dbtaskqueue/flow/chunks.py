"""Items of ``enqueue_many`` on their way into statements: columns where they are alike, rows where they are not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from functools import lru_cache
from itertools import chain, islice
from operator import le
from types import NoneType
from typing import Any

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core.columns import OPTIONS, TIMING
from django_dbtaskqueue.core.exceptions import EnqueueError, PayloadError, near_match
from django_dbtaskqueue.core.json import array, dumps_many, short_repr
from django_dbtaskqueue.core.sql.enqueue import ENQUEUED_TYPES, VARYING_COLUMNS
from django_dbtaskqueue.core.unique import UniqueRule
from django_dbtaskqueue.flow.enqueue import MAX_KEY_LENGTH, Row, joined, row_of
from django_dbtaskqueue.flow.placement import apply_rule, route

DERIVED = "derived"  # a key of a row whose reference a rule has derived
MAX_ROWS_PER_STATEMENT = 5000  # this bounds the memory of an enqueue_many
MAX_PAYLOAD_BYTES_PER_STATEMENT = 16 * 2**20  # of payload in one statement, give or take a slice
CONSTANT_COLUMNS = tuple(name for name in ENQUEUED_TYPES if name not in VARYING_COLUMNS)
COPY_NULL = "\\N"
COPY_SPECIAL = re.compile(r"[\\\t\n\r]").search
COPY_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})
MAX_SLICE_ITEMS = 500  # items looked at together, fewer where payloads may be large:
MAX_SLICE_BYTES = 128 * 2**20  # PostgreSQL takes an array of 256 MiB


@dataclass(frozen=True, slots=True)
class Rejection:
    """One item that ``enqueue_many(..., on_invalid="reject")`` left out."""

    index: int
    reference: str | None
    error: EnqueueError


@dataclass(frozen=True, slots=True)
class UniformRows:
    """Tasks that differ in reference and payload alone; ``same`` are their other column values."""

    references: list[str | None]
    payloads: list[bytes]
    same: Row

    def __len__(self) -> int:
        return len(self.references)

    @property
    def ordered(self) -> bool:
        """Whether all have a reference, and these ascend."""
        after = islice(self.references, 1, None)
        return None not in self.references and all(map(le, self.references, after))  # type: ignore[arg-type]

    def columns(self) -> Row:
        """Return the parameters of ``insert_alike``."""
        written = (b"[" + b",".join(self.payloads) + b"]").decode()
        return {**self.same, "references": array(self.references), "payloads": written}

    def copied(self, queue: str, ids: list[str] | None) -> tuple[tuple[str, ...], str]:
        """Return the columns and the rows of a COPY, by reference if there are ``ids``: what ``ordered`` is for."""
        same = {"queue_name": queue, **{name: self.same[name] for name in CONSTANT_COLUMNS}}
        same = {name: _copied(str(value)) for name, value in same.items() if value is not None}
        texts = b"\n".join(self.payloads).replace(b"\\", b"\\\\").decode().split("\n")
        written = [COPY_NULL if text == "null" else text for text in texts]
        names = (*same, "payload")
        if any(self.references):
            references = [COPY_NULL if text is None else _copied(text) for text in self.references]
            names, columns = (*names, "reference_number"), [written, references]
            if ids is not None:
                order = sorted(range(len(ids)), key=[text or "" for text in self.references].__getitem__)
                names, columns = (*names, "id"), [[column[i] for i in order] for column in (*columns, ids)]
            written = list(map("\t".join, zip(*columns, strict=True)))
        before = "".join(f"{value}\t" for value in same.values())
        return names, f"{before}{f'{chr(10)}{before}'.join(written)}\n"

    def rows(self) -> list[Row]:
        """Return one row each."""
        texts = (None if payload == b"null" else payload.decode() for payload in self.payloads)
        pairs = zip(self.references, texts, strict=True)
        return [{**self.same, "reference_number": reference, "payload": payload} for reference, payload in pairs]


def _copied(text: str) -> str:
    return text.translate(COPY_ESCAPES) if COPY_SPECIAL(text) else text


Batch = UniformRows | list[Row]
Sliced = UniformRows | list[tuple[str, Row]]


class Chunks:
    """Reads items as needed; yields what each database gets with one statement. Bad items raise, or are rejections."""

    def __init__(
        self,
        queue: str,
        items: Iterable[Any],
        settings: QueueSettings,
        aliases: list[str],
        rejections: list[Rejection] | None,
        rule: UniqueRule | None = None,
    ) -> None:
        self._queue = queue
        self._items = iter(items)
        self._read = 0
        self._settings = settings
        self._aliases = aliases
        self._rejections = rejections
        self._limits = conf.payload_limits()
        self._step = max(1, min(MAX_SLICE_ITEMS, MAX_SLICE_BYTES // conf.settings().payload_max_bytes))
        self._rule = rule
        self._same = constants(settings) if len(aliases) == 1 and rule is None else None

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        while slices := self._chunk():
            yield self._shares(slices)

    def _chunk(self) -> list[Sliced]:
        slices: list[Sliced] = []
        rows = size = 0
        while (
            rows < MAX_ROWS_PER_STATEMENT
            and size < MAX_PAYLOAD_BYTES_PER_STATEMENT
            and (items := list(islice(self._items, min(self._step, MAX_ROWS_PER_STATEMENT - rows))))
        ):
            some = self._uniform(items) or list(self._rows(items))
            self._read += len(items)
            rows += len(items)
            size += _size(some)
            slices.append(some)
        return slices

    def _shares(self, slices: list[Sliced]) -> dict[str, Batch]:
        uniform = [one for one in slices if isinstance(one, UniformRows)]
        if len(uniform) == len(slices) and all(one.same == uniform[0].same for one in uniform):
            references = list(chain.from_iterable(one.references for one in uniform))
            written = list(chain.from_iterable(one.payloads for one in uniform))
            return {self._aliases[0]: UniformRows(references, written, uniform[0].same)}
        shares: dict[str, list[Row]] = {alias: [] for alias in self._aliases}
        for one in slices:
            if isinstance(one, UniformRows):
                shares[self._aliases[0]] += one.rows()
            else:
                for alias, row in one:
                    shares[alias].append(row)
        return {**shares}

    def _uniform(self, items: list[Any]) -> UniformRows | None:
        """Return items that are no more than references and payloads; None for others, and for those with a fault."""
        if self._same is None or (columns := _columns(items)) is None or not are_references(columns[0]):
            return None
        references, values = columns
        try:
            payload_type, plain = _encoded(values)
            if payload_type is not None:
                codecs.refuse_namesake(self._queue, payload_type, type(values[0]))
        except PayloadError:
            return None
        written = dumps_many(plain, limits=self._limits)
        if written is None:
            return None
        return UniformRows(references, written, {**self._same, "payload_type": payload_type})

    def _rows(self, items: list[Any]) -> Iterator[tuple[str, Row]]:
        """Check items one by one and yield (where to, row)."""
        for index, item in enumerate(items, self._read):
            options: Mapping[str, Any] = {}
            try:
                options = options_of(index, item)
                row = row_of(options, self._settings)
                if self._rule is not None and row["reference_number"] is None:
                    apply_rule(self._rule, row)
                    row[DERIVED] = True
                if row["payload_type"] is not None:
                    codecs.refuse_namesake(self._queue, row["payload_type"], type(options.get("payload")))
            except EnqueueError as error:
                named = _named(index, error)
                if self._rejections is None:
                    raise named from None
                self._rejections.append(Rejection(index, options.get("reference"), named))
                continue
            alias = self._aliases[0]
            if len(self._aliases) > 1:
                alias = route(self._settings, row["reference_number"], options.get("payload"))
            yield alias, row


def _columns(items: list[Any]) -> tuple[list[str | None], list[Any]] | None:
    kinds = set(map(type, items))
    if kinds == {dict}:
        if set().union(*items) <= {"reference", "payload"}:
            return [item.get("reference") for item in items], [item.get("payload") for item in items]
    elif kinds == {tuple}:
        if set(map(len, items)) == {2}:
            return [item[0] for item in items], [item[1] for item in items]
    elif len(kinds) == 1 and is_payload(items[0]):
        return [None] * len(items), items
    return None


def _encoded(values: list[Any]) -> tuple[str | None, list[Any]]:
    """Return the type's name and the JSON-ready values of payloads that are all plain, or all of one class."""
    kinds = set(map(type, values))
    if kinds <= codecs.JSON_TYPES:
        return None, values
    if len(kinds) > 1:
        raise PayloadError("payloads of several classes are looked at one by one")
    names, plain = zip(*map(codecs.encode, values), strict=True)
    return names[0], list(plain)


def _size(some: Sliced) -> int:
    if isinstance(some, UniformRows):
        return sum(map(len, some.payloads))
    return sum(len(row["payload"] or "") for _, row in some)


def _named(index: int, error: EnqueueError) -> EnqueueError:
    """Return the error with the item's place in it."""
    place = f"items[{index}]"
    if isinstance(error, PayloadError):
        return PayloadError(error.reason, path=joined(f"{place}.payload", error.path))
    return error if str(error).startswith(place) else EnqueueError(f"{place}: {error}")


def options_of(index: int, item: Any) -> Mapping[str, Any]:
    """Return one item of ``enqueue_many`` as ``enqueue``'s arguments."""
    if isinstance(item, Mapping):
        for key in item:
            if key not in OPTIONS:
                shown = short_repr(key)
                raise EnqueueError(
                    f"items[{index}] has no argument {shown}.{near_match(shown[1:-1], OPTIONS)} An item is a mapping "
                    f'of enqueue()\'s arguments: put a plain JSON payload under {{"payload": …}}.'
                )
        return item
    if isinstance(item, tuple) and len(item) == 2:
        return {"reference": item[0], "payload": item[1]}
    if is_payload(item):
        return {"payload": item}
    raise EnqueueError(
        f"items[{index}] is {short_repr(item)}: an item is a mapping of enqueue()'s arguments, a (reference, payload) "
        "pair, or a dataclass or pydantic payload."
    )


def is_payload(item: Any) -> bool:
    """Whether an item of ``enqueue_many`` is a payload of its own class."""
    return (is_dataclass(item) or hasattr(item, "model_dump")) and not isinstance(item, Mapping | tuple)


def constants(settings: QueueSettings) -> Row | None:
    """Return what all tasks with only a reference and a payload share; None if they must be checked one by one."""
    try:
        row = row_of({}, settings)
    except EnqueueError:
        return None
    return None if row["ttl"] is not None else row


def are_references(references: list[Any]) -> bool:
    """Return whether these can be stored; False also when ``row_of`` has to have a closer look."""
    kinds = set(map(type, references))
    if kinds == {NoneType}:
        return True
    if not kinds <= {str, NoneType}:
        return False
    texts = [text for text in references if text is not None] if NoneType in kinds else references
    together = "".join(texts)
    if not all(texts) or max(map(len, texts)) > MAX_KEY_LENGTH or "\0" in together:
        return False
    try:
        together.encode()
    except UnicodeEncodeError:
        return False
    return True


def _writer(types: Mapping[str, str]) -> Callable[[Row, Callable[[datetime], str]], str]:
    """Return the function that writes one row as JSON, compiled: a loop over the columns takes twice as long."""
    parts = ",".join(f'"{name}":{{{_VALUES.get(name, _VALUES[kind]).format(name)}}}' for name, kind in types.items())
    found: Callable[[Row, Callable[[datetime], str]], str]
    found = eval(f"lambda row, time: f'''{{{{{parts}}}}}'''", {"known": _known, "text": _text})  # noqa: S307 -- made of our own columns
    return found


_text = json.JSONEncoder(ensure_ascii=False).encode
_known = lru_cache(maxsize=1024)(_text)  # the same values come again and again
_VALUES = {  # by column or type; whole numbers are not cached, because 1 and 1.0 are one key to a cache
    "reference_number": "text(row['{0}'])",
    "jsonb": "row['{0}'] or 'null'",
    "int": "row['{0}']",
    "smallint": "row['{0}']",
    "text": "known(row['{0}'])",
    "float8": "known(row['{0}'])",
    "timestamptz": "known(row['{0}'] and time(row['{0}']))",
}
WRITE, WRITE_TIMED = _writer(ENQUEUED_TYPES), _writer({**ENQUEUED_TYPES, **TIMING})
