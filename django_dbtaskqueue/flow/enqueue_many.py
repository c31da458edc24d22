"""Enqueue many: one statement per 5,000 rows, one transaction for all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import chain, islice
from operator import le
from typing import Any, NamedTuple, NoReturn, Self, Unpack

from asgiref.sync import sync_to_async
from django.db import transaction

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core.columns import OWN_COLUMNS, TIMING, EnqueueManyOptions
from django_dbtaskqueue.core.exceptions import DuplicateTask, EnqueueError, PayloadError
from django_dbtaskqueue.core.json import dumps_many, text_array
from django_dbtaskqueue.core.sql.enqueue import ENQUEUED_TYPES, REPLACE
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, aliases_of, model_for
from django_dbtaskqueue.flow import groups, usage
from django_dbtaskqueue.flow.enqueue import (
    ON_DUPLICATE,
    are_references,
    check_choice,
    constants,
    is_payload,
    joined,
    options_of,
    row_of,
)
from django_dbtaskqueue.flow.placement import (
    UNIQUE_OVER_HISTORY,
    check_timeout,
    free_capacity,
    own_columns,
    route,
    with_own_values,
    without_spent,
)

Row = dict[str, Any]

MAX_ROWS_PER_STATEMENT = 5000  # this bounds the memory of an enqueue_many
MAX_PAYLOAD_BYTES_PER_STATEMENT = 16 * 2**20  # of payload in one statement, give or take a slice
MAX_SLICE_ITEMS = 500  # items looked at together, fewer where payloads may be large:
MAX_SLICE_BYTES = 128 * 2**20  # PostgreSQL takes an array of 256 MiB


@dataclass(frozen=True, slots=True)
class EnqueueReport:
    """What ``enqueue_many`` did, in numbers; ``rejections`` says why items were left out."""

    enqueued: int = 0
    ignored: int = 0
    replaced: int = 0
    rejections: tuple[Rejection, ...] = ()

    @property
    def rejected(self) -> int:
        """The number of items left out."""
        return len(self.rejections)


def enqueue_many(
    queue: str,
    items: Iterable[Any],
    *,
    on_duplicate: str = "error",
    keep_due: bool = False,
    on_invalid: str = "error",
    timeout: timedelta | None = None,
    using: str | None = None,
) -> EnqueueReport:
    """Insert many tasks in one transaction (the caller's, if there is one): all of them or none.

    An item is a mapping of ``enqueue``'s arguments (``{"reference": …, "payload": …, "delay": …}``), a pair
    ``(reference, payload)``, or a payload object of its own class (dataclass or pydantic model). ``items`` may be an
    endless-looking iterator: it is read in chunks of 5,000 rows.

    On a queue with shards each shard has a transaction of its own: all or none per shard.

    A bad item raises ``EnqueueError``, for its payload ``PayloadError``, naming the item and the path, and nothing is
    written; ``on_invalid="reject"`` leaves it out and says so in the report instead. Of items with the same reference
    ``on_duplicate="replace"`` and ``"replace_running"`` keep the last one.
    """
    check_choice("on_duplicate", on_duplicate, ON_DUPLICATE)
    check_choice("on_invalid", on_invalid, ("error", "reject"))
    check_timeout(timeout)
    sessions = {alias: Session.on(alias, model_for(queue)) for alias in aliases_of(queue, using)}
    settings = queue_settings(queue, next(iter(sessions)))
    rejections: list[Rejection] = []
    chunks = Chunks(queue, items, settings, list(sessions), rejections if on_invalid == "reject" else None)
    done = Counter(enqueued=0, ignored=0, replaced=0)
    with ExitStack() as stack:
        for alias in sessions:
            stack.enter_context(transaction.atomic(using=alias))
        for shares in chunks:
            for alias, share in shares.items():
                if settings.unique_over == UNIQUE_OVER_HISTORY:
                    rows = share.rows() if isinstance(share, UniformRows) else share
                    share = without_spent(sessions[alias], queue, rows, on_duplicate)
                    done["ignored"] += len(rows) - len(share)
                with free_capacity(sessions[alias], queue, settings.capacity, len(share), timeout):
                    done.update(_insert(sessions[alias], queue, share, on_duplicate, keep_due=keep_due))
        if done["enqueued"] or done["replaced"]:
            for session in sessions.values():
                notify.after_commit(session.connection, queue, lost=on_duplicate == "replace_running")
    return EnqueueReport(**done, rejections=tuple(rejections))


async def aenqueue_many(queue: str, items: Iterable[Any], **options: Unpack[EnqueueManyOptions]) -> EnqueueReport:
    """The async twin of ``enqueue_many``, with the same arguments and promises."""
    return await sync_to_async(enqueue_many)(queue, items, **options)


class _Written(NamedTuple):
    """What one statement wrote, of these new ones, and the ids if they were asked for."""

    number: int
    new: int
    ids: list[int]

    @classmethod
    def of(cls, session: Session, answer: list[tuple[Any, ...]]) -> Self:
        if session.postgresql:
            number, new, ids = answer[0]
            return cls(number, new, ids or [])
        return cls(len(answer), sum(is_new for _, is_new in answer), [task_id for task_id, _ in answer])


def _insert(session: Session, queue: str, share: Batch, on_duplicate: str, *, keep_due: bool) -> Counter[str]:
    """Write one statement's tasks; return how many items were enqueued, ignored and replaced."""
    if not share:
        return Counter()
    if isinstance(share, UniformRows) and session.postgresql and on_duplicate not in REPLACE:
        references = share.references
        written = _insert_uniform(session, queue, share, on_duplicate)
    else:
        rows = share.rows() if isinstance(share, UniformRows) else share
        if on_duplicate in REPLACE:  # one statement may not touch a row twice: the last one wins
            rows = list({row["reference_number"] or id(row): row for row in rows}.values())
        shapes = {tuple(row[OWN_COLUMNS]) for row in rows}
        if len(shapes) > 1:  # a statement sets the same columns in all of its rows
            done: Counter[str] = Counter(replaced=len(share) - len(rows))
            for shape in sorted(shapes):
                part = [row for row in rows if tuple(row[OWN_COLUMNS]) == shape]
                done.update(_insert(session, queue, part, on_duplicate, keep_due=keep_due))
            return done
        references = [row["reference_number"] for row in rows]
        written = _insert_rows(session, queue, rows, on_duplicate, keep_due=keep_due)
    if written.number:
        usage.after_commit(session.connection, {(queue, "put"): written.ids or written.number})
    missing = len(references) - written.number
    if missing and on_duplicate != "ignore":
        _raise_duplicate(session, queue, share, set(written.ids), replace=on_duplicate in REPLACE)
    replaced = written.number - written.new + len(share) - len(references)
    return Counter(enqueued=written.new, ignored=missing, replaced=replaced)


def _insert_uniform(session: Session, queue: str, share: UniformRows, on_duplicate: str) -> _Written:
    referenced = any(share.references)
    ids = usage.watched() or (referenced and on_duplicate == "error")
    sql = session.sql.insert_uniform(referenced=referenced, ordered=referenced and share.ordered, ids=ids)
    params = {**share.columns(), "queue_name": queue, "ids": ids}
    if ids:
        return _Written.of(session, session.run(sql, params))
    number = session.count(sql, params)
    return _Written(number, number, [])


def _insert_rows(session: Session, queue: str, rows: list[Row], on_duplicate: str, *, keep_due: bool) -> _Written:
    timed = any(row["delay"] is not None or row["run_at"] is not None or row["ttl"] is not None for row in rows)
    grouped = {row["group_key"] for row in rows if row["group_key"] is not None}
    own, _ = own_columns(session, rows[0], as_json=True) if rows[0][OWN_COLUMNS] else ((), {})
    sql = session.sql.insert_many(on_duplicate, timed=timed, grouped=bool(grouped), keep_due=keep_due, own=own)
    ids = usage.watched() or on_duplicate != "ignore"
    groups.lock(session, queue, grouped)
    write, time = _WRITE_TIMED if timed else _WRITE, session.time_text
    items = [write(row, time) for row in rows]  # payloads are JSON text already
    text = f"[{','.join(with_own_values(session, rows, items) if own else items)}]"
    params = {"queue_name": queue, "rows": text, "ids": ids}
    written = _Written.of(session, session.run(sql, params))
    groups.regroup(session, queue, grouped)
    return written


def _raise_duplicate(session: Session, queue: str, share: Batch, written: set[int], *, replace: bool) -> NoReturn:
    """Name the first reference that was held by a task before, or that stands twice among the items."""
    rows = share.rows() if isinstance(share, UniformRows) else share
    named = [row["reference_number"] for row in rows if row["reference_number"] is not None]
    tasks = session.model._default_manager.using(session.connection.alias)
    holder = tasks.filter(queue=queue, reference__in=named).exclude(pk__in=written).first()
    if holder is not None:
        same = (holder.reference, holder.group_key)
        moves = replace and same not in ((row["reference_number"], row["group_key"]) for row in rows)
        raise DuplicateTask(queue, str(holder.reference), task_id=holder.pk, status=holder.status, in_other_group=moves)
    raise DuplicateTask(queue, Counter(named).most_common(1)[0][0])  # its holder went after the insert


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
_WRITE, _WRITE_TIMED = _writer(ENQUEUED_TYPES), _writer({**ENQUEUED_TYPES, **TIMING})


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
        return {**self.same, "references": text_array(self.references), "payloads": written}

    def rows(self) -> list[Row]:
        """Return one row each."""
        texts = (None if payload == b"null" else payload.decode() for payload in self.payloads)
        pairs = zip(self.references, texts, strict=True)
        return [{**self.same, "reference_number": reference, "payload": payload} for reference, payload in pairs]


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
    ) -> None:
        self._queue = queue
        self._items = iter(items)
        self._read = 0
        self._settings = settings
        self._aliases = aliases
        self._rejections = rejections
        self._limits = conf.payload_limits()
        self._step = max(1, min(MAX_SLICE_ITEMS, MAX_SLICE_BYTES // conf.settings().payload_max_bytes))
        self._same = constants(settings) if len(aliases) == 1 else None

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
