"""Enqueue many: one statement per 5,000 rows, one transaction for all of them.

Items are read as they are needed. Those that are no more than references and payloads are checked together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import InitVar, dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from types import NoneType
from typing import Any, NoReturn

from django.db import DataError, IntegrityError, transaction

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core.columns import OPTIONS, OWN_COLUMNS, InsertOptions, TaskOptions
from django_dbtaskqueue.core.context import enqueue_hook
from django_dbtaskqueue.core.exceptions import DuplicateTask, EnqueueError, PayloadError, near_match
from django_dbtaskqueue.core.json import dumps_many, short_repr
from django_dbtaskqueue.core.sql.enqueue import REPLACE
from django_dbtaskqueue.core.unique import UniqueRule
from django_dbtaskqueue.db.session import Session, aliases_of, asynchronous, model_for, model_of
from django_dbtaskqueue.flow import placement, usage
from django_dbtaskqueue.flow.dependencies import related_of
from django_dbtaskqueue.flow.enqueue import MAX_KEY_LENGTH, ON_DUPLICATE, joined, row_of
from django_dbtaskqueue.flow.insert import Batch, Insert, UniformRows, Written, as_rows
from django_dbtaskqueue.flow.placement import LEFT_TABLE, Row, apply_rule, check_choice, check_timeout, route, rule_of

NO_OPTIONS = TaskOptions()
ITEM = "item"  # a key of a row: the place of its item
DERIVED = "derived"  # a key of a row whose reference a rule has derived
MAX_ROWS_PER_STATEMENT = 5000  # this bounds the memory of an enqueue_many
MAX_PAYLOAD_BYTES_PER_STATEMENT = 16 * 2**20  # of payload in one statement, give or take a slice
MAX_SLICE_ITEMS = 500  # items looked at together, fewer where payloads may be large:
MAX_SLICE_BYTES = 128 * 2**20  # PostgreSQL takes an array of 256 MiB
Sliced = UniformRows | list[tuple[str, Row]]


@dataclass(frozen=True, slots=True)
class Rejection:
    """One item that ``enqueue_many(..., on_invalid="reject")`` left out."""

    index: int
    reference: str | None
    error: EnqueueError


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
    unique: UniqueRule | str | None = None,
    on_duplicate: str = "error",
    keep_due: bool = False,
    on_invalid: str = "error",
    after: object = None,
    on_parent_failure: str = "hold",
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
    ``on_duplicate="replace"`` and ``"replace_running"`` keep the last one. ``unique``: the rule for items without a
    reference, as in ``enqueue``; ``on_duplicate`` is for those with one. ``after``: parents of each of the tasks.
    """
    how = InsertOptions(unique, on_duplicate, keep_due, after, on_parent_failure, timeout, using)
    return _enqueue_items(queue, items, how, on_invalid)


def _enqueue_items(queue: str, items: Iterable[Any], how: InsertOptions, on_invalid: str) -> EnqueueReport:
    if enqueue_hook.around is not None and enqueue_hook.applies():
        return enqueue_hook.surround(queue, partial(_enqueue_items, queue, items, how, on_invalid))
    queue = queue.value if isinstance(queue, Enum) else queue
    check_choice("on_duplicate", how.on_duplicate, ON_DUPLICATE)
    check_choice("on_invalid", on_invalid, ("error", "reject"))
    check_timeout(how.timeout)
    sessions = {alias: Session.on(alias, model_for(queue)) for alias in aliases_of(queue, how.using)}
    first, *others = sessions
    settings = overridden_settings(queue, first)
    rule = rule_of(how.unique, settings, None)
    if how.after is not None and (others or how.on_duplicate in REPLACE or rule is not None):
        raise EnqueueError(
            "enqueue_many(after=…) does not go with shards, a rule of uniqueness or on_duplicate='replace'. Call "
            "enqueue(after=…) for each task."
        )
    _, related = related_of(how._replace(using=first), settings, first)
    insert = Insert(queue, settings, how, related)
    rejections: list[Rejection] = []
    chunks = Chunks(queue, items, settings, list(sessions), rejections if on_invalid == "reject" else None, rule)
    done = Counter(enqueued=0, ignored=0, replaced=0)
    with ExitStack() as stack:
        for alias in sessions:
            stack.enter_context(transaction.atomic(using=alias))
        for shares in chunks:
            for alias, share in shares.items():
                if chunks.rejections is not None and isinstance(share, list) and any(row[OWN_COLUMNS] for row in share):
                    share = placement.without_orphans(sessions[alias], share, chunks.reject)
                    done.update(_insert_apart(insert, sessions[alias], share, chunks))
                else:
                    done.update(_insert(insert, sessions[alias], share, rule))
    return EnqueueReport(**done, rejections=tuple(sorted(rejections, key=attrgetter("index"))))


aenqueue_many = asynchronous(enqueue_many)


def _insert_apart(insert: Insert, session: Session, rows: list[Row], chunks: Chunks) -> Counter[str]:
    """Insert tasks but for those that the database refuses: it refuses a statement, so halves of it are tried."""
    try:
        with session.atomic():
            return _insert(insert, session, rows, chunks.rule)
    except (DataError, IntegrityError) as error:
        if len(rows) == 1:
            chunks.reject(rows[0], f"columns: the database refused them: {str(error).splitlines()[0]}")
            return Counter()
    middle = len(rows) // 2
    return sum((_insert_apart(insert, session, half, chunks) for half in (rows[:middle], rows[middle:])), Counter())


def _insert(insert: Insert, session: Session, share: Batch, rule: UniqueRule | None) -> Counter[str]:
    """Insert the tasks of one statement; return how many items were enqueued, ignored and replaced."""
    done: Counter[str] = Counter()
    if rule is not None:
        rows = as_rows(share)
        if derived := [row for row in rows if DERIVED in row]:
            share = [row for row in rows if DERIVED not in row]
            done = _counted(insert, session, derived, insert.by_rule(session, derived, rule), rule)
            usage.count_calls(session.connection, {(insert.queue, "ignored"): done["ignored"]})
    if share:
        done.update(_counted(insert, session, share, insert.by_reference(session, share)))
    return done


def _counted(
    insert: Insert, session: Session, share: Batch, written: Written, rule: UniqueRule | None = None
) -> Counter[str]:
    on_duplicate = insert.how.on_duplicate if rule is None else rule.on_duplicate
    rest = len(share) - written.new
    if on_duplicate == "ignore" or not rest:
        return Counter(enqueued=written.new, ignored=rest)
    if on_duplicate == "error" or written.refused:
        _raise_duplicate(insert, session, as_rows(share), written, rule)
    return Counter(enqueued=written.new, replaced=rest)


def _raise_duplicate(
    insert: Insert, session: Session, rows: list[Row], written: Written, rule: UniqueRule | None
) -> NoReturn:
    """Name the first reference that was held by a task before, or that stands twice among the items."""
    queue, words = insert.queue, "" if rule is None else rule.words
    named = Counter(row["reference_number"] for row in rows if row["reference_number"] is not None)
    tasks = session.model._default_manager.using(session.connection.alias)
    holder = tasks.filter(queue=queue, reference__in=named).exclude(pk__in=written.ids).first()
    if holder is None:  # its task has left the table, or went after the insert
        raise DuplicateTask(queue, named.most_common(1)[0][0], status=LEFT_TABLE if written.spent else None, rule=words)
    is_same = (holder.reference, holder.group_key) in ((row["reference_number"], row["group_key"]) for row in rows)
    moves = insert.how.on_duplicate in REPLACE and not is_same
    raise DuplicateTask(
        queue, str(holder.reference), task_id=holder.pk, status=holder.status, in_other_group=moves, rule=words
    )


@dataclass(eq=False)
class Chunks:
    """Reads items as needed; yields what each database gets with one statement. Bad items raise, or are rejections."""

    queue: str
    items: InitVar[Iterable[Any]]
    settings: QueueSettings
    aliases: list[str]
    rejections: list[Rejection] | None
    rule: UniqueRule | None = None

    def __post_init__(self, items: Iterable[Any]) -> None:
        self._items, self._read = iter(items), 0
        self._limits = conf.settings().payload_limits
        self._step = max(1, min(MAX_SLICE_ITEMS, MAX_SLICE_BYTES // conf.settings().payload_max_bytes))
        self._same: Row | None = None  # what tasks share that are a reference and a payload; None: each is checked
        if len(self.aliases) == 1 and self.rule is None:
            with suppress(EnqueueError):
                row = row_of(self.queue, NO_OPTIONS, self.settings)
                self._same = row if row["ttl"] is None else None

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
            return {self.aliases[0]: UniformRows(references, written, uniform[0].same)}
        shares: dict[str, list[Row]] = {alias: [] for alias in self.aliases}
        for one in slices:
            for alias, row in ((self.aliases[0], row) for row in one.rows()) if isinstance(one, UniformRows) else one:
                shares[alias].append(row)
        return {**shares}

    def _uniform(self, items: list[Any]) -> UniformRows | None:
        """Return items that are no more than references and payloads; None for others, and for those with a fault."""
        if self._same is None or (columns := _columns(items)) is None or not are_references(columns[0]):
            return None
        references, values = columns
        payload_type: str | None = None
        if not (kinds := set(map(type, values))) <= codecs.JSON_TYPES:
            if len(kinds) > 1:
                return None
            try:
                names, encoded = zip(*map(codecs.encode, values), strict=True)
                if (payload_type := names[0]) is not None:
                    codecs.refuse_namesake(self.queue, payload_type, *kinds)
            except PayloadError:
                return None
            values = list(encoded)
        if (written := dumps_many(values, limits=self._limits)) is None:
            return None
        return UniformRows(references, written, {**self._same, "payload_type": payload_type})

    def reject(self, row: Row, reason: str) -> None:
        """Leave a row out that the database would refuse."""
        if self.rejections is None or ITEM not in row:
            raise EnqueueError(reason)
        reference = None if DERIVED in row else row["reference_number"]
        self.rejections.append(Rejection(row[ITEM], reference, _named(row[ITEM], EnqueueError(reason))))

    def _rows(self, items: list[Any]) -> Iterator[tuple[str, Row]]:
        """Check items one by one and yield (where to, row)."""
        for index, item in enumerate(items, self._read):
            task = NO_OPTIONS
            try:
                task = options_of(index, item)
                row = row_of(self.queue, task, self.settings)
                row[ITEM] = index
                if self.rule is not None and row["reference_number"] is None:
                    apply_rule(self.rule, row)
                    row[DERIVED] = True
                alias = self.aliases[0]
                if len(self.aliases) > 1:
                    alias = route(self.settings, row["reference_number"], task.payload)
                if row[OWN_COLUMNS]:
                    row[placement.OWN_MEMBERS] = placement.own_members(Session.on(alias, model_of(self.settings)), row)
            except EnqueueError as error:
                named = _named(index, error)
                if self.rejections is None:
                    raise named from None
                self.rejections.append(Rejection(index, task.reference, named))
                continue
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


def _size(some: Sliced) -> int:
    return sum(map(len, some.payloads if isinstance(some, UniformRows) else [row["payload"] or "" for _, row in some]))


def _named(index: int, error: EnqueueError) -> EnqueueError:
    place = f"items[{index}]"
    if isinstance(error, PayloadError):
        return PayloadError(error.reason, path=joined(f"{place}.payload", error.path))
    return error if str(error).startswith(place) else EnqueueError(f"{place}: {error}")


def options_of(index: int, item: Any) -> TaskOptions:
    """Return what one item of ``enqueue_many`` says of its task."""
    if isinstance(item, Mapping):
        for key in item:
            if key not in OPTIONS:
                shown = short_repr(key)
                raise EnqueueError(
                    f"items[{index}] has no argument {shown}.{near_match(shown[1:-1], OPTIONS)} An item is a mapping "
                    f'of enqueue()\'s arguments: put a plain JSON payload under {{"payload": …}}.'
                )
        return TaskOptions(**item)
    if is_payload(item):
        return TaskOptions(payload=item)
    if isinstance(item, tuple) and len(item) == 2:
        return TaskOptions(*item)
    raise EnqueueError(
        f"items[{index}] is {short_repr(item)}: an item is a mapping of enqueue()'s arguments, a (reference, payload) "
        "pair, or a dataclass or pydantic payload."
    )


def is_payload(item: Any) -> bool:
    """Whether an item of ``enqueue_many`` is a payload of its own class, also a ``NamedTuple`` with types."""
    kind, is_pair = type(item), getattr(item, "_fields", None) == ("reference", "payload")
    return not isinstance(item, Mapping) and not is_pair and (codecs.is_record(kind) or codecs.is_model(kind))


def are_references(references: list[Any]) -> bool:
    """Return whether these can be stored; False also when ``row_of`` has to have a closer look."""
    if not set(map(type, references)) <= {str, NoneType}:
        return False
    texts = [text for text in references if text is not None]
    together = "".join(texts)
    with suppress(UnicodeEncodeError):
        together.encode()
        return all(texts) and max(map(len, texts), default=0) <= MAX_KEY_LENGTH and "\0" not in together
    return False
