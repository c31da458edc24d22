"""Insert: rows become tasks, under all that the queue and the caller ask for. One row is many rows, but fewer.

Rows that differ in reference and payload alone are sent as two arrays. PostgreSQL takes many of them by COPY, which
costs less than an INSERT. COPY has no ON CONFLICT: it fails at a reference that is taken, and an INSERT of the same
rows then says which one it is. To ignore such references, a query looks first whether there are any.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import le
from typing import TYPE_CHECKING, Any, Self

from django.db import IntegrityError, NotSupportedError

from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core.columns import OWN_COLUMNS, InsertOptions
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import DuplicateTask, QueueFull
from django_dbtaskqueue.core.json import array
from django_dbtaskqueue.core.lease import note_own_end
from django_dbtaskqueue.core.sql.enqueue import ENQUEUED_TYPES, REPLACE, RETURNED, VARYING_COLUMNS, WRITE, WRITE_TIMED
from django_dbtaskqueue.core.states import CREATED
from django_dbtaskqueue.core.unique import UniqueRule
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import groups, placement, selection, usage
from django_dbtaskqueue.flow.placement import Row
from django_dbtaskqueue.signals import task_changed

if TYPE_CHECKING:
    from django_dbtaskqueue.flow.dependencies import Related

MAX_ROUNDS = 6  # of the statements of an insert, until another row in the way is given up
CAPACITY_POLL_INTERVAL_S = 0.05
MIN_ROWS_TO_COPY = 200  # fewer do not pay for the savepoint
# PostgreSQL keeps 64 savepoints of a transaction in shared memory. With more, each reader of a row looks on disk.
MAX_SAVEPOINTS = 50
CONSTANT_COLUMNS = tuple(name for name in ENQUEUED_TYPES if name not in VARYING_COLUMNS)
REFERENCE = RETURNED.index("reference_number")
COPY_NULL = "\\N"
COPY_SPECIAL = re.compile(r"[\\\t\n\r]").search
COPY_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})


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
        texts = (None if payload == b"null" else payload.decode() for payload in self.payloads)
        pairs = zip(self.references, texts, strict=True)
        return [{**self.same, "reference_number": reference, "payload": payload} for reference, payload in pairs]


def _copied(text: str) -> str:
    return text.translate(COPY_ESCAPES) if COPY_SPECIAL(text) else text


Batch = UniformRows | list[Row]


def as_rows(batch: Batch) -> list[Row]:
    """Return one row for each task."""
    return batch.rows() if isinstance(batch, UniformRows) else batch


@dataclass(slots=True)
class Written:
    """What statements wrote: how many tasks, and of these new ones."""

    number: int = 0
    new: int = 0
    ids: list[int] = field(default_factory=list)  # if they were asked for
    have_run: list[int] = field(default_factory=list)  # ids of replaced tasks, which begin anew
    rows: list[tuple[Any, ...]] = field(default_factory=list)  # of the columns ``RETURNED``, if these were asked for
    refused: bool = False  # some tasks could not be replaced
    spent: bool = False  # some references stay taken, by tasks that may have left the table

    @classmethod
    def of(cls, session: Session, answer: list[tuple[Any, ...]], *, whole: bool = False) -> Self:
        """Return what one statement answered."""
        if session.postgresql and not whole:
            number, new, ids, have_run = answer[0]
            return cls(number, new, ids or [], have_run or [])
        ids, have_run = [row[0] for row in answer], [row[0] for row in answer if row[-1]]
        return cls(len(answer), sum(row[-2] for row in answer), ids, have_run, answer if whole else [])

    def add(self, more: Written) -> None:
        self.number += more.number
        self.new += more.new
        self.ids += more.ids
        self.have_run += more.have_run
        self.rows += more.rows

    @property
    def references(self) -> set[str]:
        return {row[REFERENCE] for row in self.rows}


@dataclass(slots=True)
class Insert:
    """How one call inserts its tasks: what it asks for, and what the queue's settings say."""

    queue: str
    settings: QueueSettings
    how: InsertOptions
    related: Related | None = None
    one: bool = False  # whether the call is for one task: there is no transaction yet, and the caller wants its row
    savepoints: Counter[str] = field(default_factory=Counter)  # that COPY has used, by alias

    def by_reference(self, session: Session, batch: Batch) -> Written:
        """Insert tasks whose references the caller gave, or that have none."""
        spent, history = False, self.settings.unique_over == placement.UNIQUE_OVER_HISTORY
        with session.atomic() if self.one and (history or self.settings.capacity is None) else nullcontext():
            if history:
                rows = as_rows(batch)
                batch = placement.without_spent(session, self.queue, rows, self.how.on_duplicate)
                spent = len(batch) < len(rows)
            written = self._within_capacity(session, batch, partial(self._write, session, batch, self.how.on_duplicate))
        written.spent = spent
        return written

    def by_rule(self, session: Session, rows: list[Row], rule: UniqueRule) -> Written:
        """Insert tasks whose references a rule derived. If another producer began one's period first, begin again."""
        while True:
            taken = placement.in_period(session, self.queue, rule, [row["reference_number"] for row in rows])
            if not (fresh := [row for row in rows if row["reference_number"] not in taken] if taken else rows):
                return Written(spent=True)
            with suppress(placement.PeriodTaken), session.atomic():
                written = self._within_capacity(session, fresh, partial(self._write_where_free, session, fresh, rule))
                placement.claim_periods(session, self.queue, rule, sorted(written.references))
                written.spent = bool(taken)
                return written

    def _within_capacity(self, session: Session, batch: Batch, write: Callable[[], Written]) -> Written:
        """Write a batch, or raise ``QueueFull`` after the timeout. A duplicate takes no room: new tasks are counted.

        Inside a SQLite transaction no room can appear, so it is raised at once.
        """
        capacity, timeout = self.settings.capacity, self.how.timeout
        if capacity is None:
            return write()
        can_wait = session.postgresql or not session.connection.in_atomic_block
        deadline = clock.monotonic() + (timeout.total_seconds() if timeout is not None and can_wait else 0.0)
        while True:
            try:
                with session.atomic():
                    if placement.lock_live(session, self.queue, capacity, len(batch)) + len(batch) <= capacity:
                        return write()
                    if self._some_taken(session, [row["reference_number"] for row in as_rows(batch)]):
                        written = write()
                        if not written.new or placement.lock_live(session, self.queue, capacity) <= capacity:
                            return written
                    raise QueueFull(self.queue, capacity)
            except QueueFull:
                if clock.monotonic() >= deadline:
                    raise
            clock.wait(threading.Event(), CAPACITY_POLL_INTERVAL_S)  # without the lock, so that others can settle

    def _write_where_free(self, session: Session, rows: list[Row], rule: UniqueRule) -> Written:
        """Write rows but for those whose references the rule holds."""
        written = Written()
        for _ in range(MAX_ROUNDS):  # a task in the way may go, or start, between two statements
            written.add(self._write(session, rows, rule.on_duplicate, rule))
            there = written.references
            rows = [row for row in rows if row["reference_number"] not in there]
            references = [row["reference_number"] for row in rows]
            if rows and not placement.free_by_rule(session, self.queue, rule, references):
                # Until it starts: a task must not start without this call's values, before the call commits.
                rows = self._started(session, rows, rule) if rule.keeping == (CREATED,) else []
            if not rows:
                return written
        raise DuplicateTask(self.queue, rows[0]["reference_number"])

    def _started(self, session: Session, rows: list[Row], rule: UniqueRule) -> list[Row]:
        """Return the rows whose references the rule may hold no more, because a task has started meanwhile."""
        references = session.sql.dialect.array([row["reference_number"] for row in rows])
        selected = {"queue_name": self.queue, "location": session.location, "references": references}
        found = session.run(session.sql.lock_found, selected)
        if rule.on_duplicate not in REPLACE:
            waiting = {reference for _, reference, status, _ in found if status == CREATED or rule.period}
            return [row for row in rows if row["reference_number"] not in waiting]
        groups_of = {row["reference_number"]: row["group_key"] for row in rows}
        for task_id, reference, status, group in found:
            if group != groups_of[reference]:
                raise DuplicateTask(self.queue, reference, task_id=task_id, status=status, in_other_group=True)
        return rows

    def _write(self, session: Session, batch: Batch, on_duplicate: str, rule: UniqueRule | None = None) -> Written:
        """Write tasks where their references are free. Let them wait for their parents, and wake pollers."""
        alias = session.connection.alias
        if isinstance(batch, UniformRows) and session.postgresql and on_duplicate not in REPLACE and not self.waits:
            written = self._copy(session, batch) or self._write_uniform(session, batch)
        else:
            rows, written = as_rows(batch), Written()
            if on_duplicate in REPLACE:  # one statement may not touch a row twice: the last one wins
                rows = list({row["reference_number"] or id(row): row for row in rows}.values())
                note_own_end(alias, self.queue, references={row["reference_number"] for row in rows})
            # A statement sets the same columns in all of its rows.
            for shape in sorted({tuple(row[OWN_COLUMNS]) for row in rows}):
                part = [row for row in rows if tuple(row[OWN_COLUMNS]) == shape]
                written.add(self._write_rows(session, part, on_duplicate, rule))
            written.refused = written.number < len(rows)
        if written.have_run:
            selection.delete_steps(session.model, alias, written.have_run)
        if self.related is not None:
            ids = [row[0] for row in written.rows if row[-2]] if written.rows else written.ids
            self.related.relate(session, self.queue, ids)
        usage.count_calls(session.connection, {(self.queue, "put"): written.ids or written.number}, wake=notify.notify)
        if written.number and on_duplicate == "replace_running":
            notify.wake_after_commit(session.connection, self.queue, lost=True)
        return written

    @property
    def waits(self) -> bool:
        return self.related is not None and self.related.parents is not None

    def _write_rows(self, session: Session, rows: list[Row], on_duplicate: str, rule: UniqueRule | None) -> Written:
        """Write rows under the locks of their groups: of each group as many tasks are ready as may run."""
        timed = any(row["delay"] is not None or row["run_at"] is not None or row["ttl"] is not None for row in rows)
        grouped = {row["group_key"] for row in rows if row["group_key"] is not None}
        own = placement.own_types(session, rows[0][OWN_COLUMNS]) if rows[0][OWN_COLUMNS] else ()
        bound = None if rule is None else rule.bound
        whole = self.one or rule is not None or self.related is not None
        alone = len(rows) == 1 and not own
        sql = (session.sql.one if alone else session.sql).insert_many(
            on_duplicate, timed=timed, grouped=bool(grouped), keep_due=self.how.keep_due and rule is None,
            bounded=bound is not None, waits=self.waits, own=own, whole=whole,
        )  # fmt: skip
        if self.waits:
            grouped = set()  # they enter their groups later
        groups.lock(session, self.queue, grouped)
        params = {"queue_name": self.queue, "ids": bool(task_changed.receivers) or on_duplicate != "ignore"}
        params |= {"max_wait": bound and bound.total_seconds(), "location": session.location}
        time = session.time_text
        if alone:  # as parameters: to write and read JSON takes as long as the rest of the insert
            run_at = rows[0]["run_at"]
            params |= {**rows[0], OWN_COLUMNS: None, "run_at": run_at and time(run_at)}
        else:
            write = WRITE_TIMED if timed else WRITE
            items = [write(row, time) for row in rows]  # payloads are JSON text already
            if own:
                members = (row.get(placement.OWN_MEMBERS) or placement.own_members(session, row) for row in rows)
                items = [f"{text[:-1]},{more}" for text, more in zip(items, members, strict=True)]
            params["rows"] = f"[{','.join(items)}]"
        params["number"] = groups.settings_of(session, self.queue).max_running_per_group if grouped else 1
        run = session.repeat if self.one else session.run
        written = Written.of(session, run(sql, params), whole=whole)
        groups.regroup(session, self.queue, grouped)
        return written

    def _write_uniform(self, session: Session, batch: UniformRows) -> Written:
        referenced = any(batch.references)
        refuses = referenced and self.how.on_duplicate == "error"
        ids = self.related is not None or refuses or bool(task_changed.receivers)
        sql = session.sql.insert_uniform(referenced=referenced, ordered=referenced and batch.ordered, ids=ids)
        payloads = (b"[" + b",".join(batch.payloads) + b"]").decode()
        params = {**batch.same, "references": array(batch.references), "payloads": payloads, "queue_name": self.queue}
        if ids:
            return Written.of(session, session.run(sql, {**params, "ids": True}))
        number = session.count(sql, params)
        return Written(number, number)

    def _copy(self, session: Session, batch: UniformRows) -> Written | None:
        """Write rows by COPY. None: nothing was written, because COPY cannot or a reference is taken."""
        alias, used = session.connection.alias, self.savepoints
        if len(batch) < MIN_ROWS_TO_COPY or used[alias] >= MAX_SAVEPOINTS or self.related is not None:
            return None
        if session.logged() or task_changed.receivers:  # the signal names ids: COPY does not return any
            return None
        referenced = any(batch.references)
        if referenced and self.how.on_duplicate == "ignore" and self._some_taken(session, batch.references):
            return None
        risky = referenced or not used[alias]  # the first chunk shows whether COPY is allowed at all
        used[alias] += risky
        try:
            with session.atomic() if risky else nullcontext():
                ids = None
                if referenced and not batch.ordered:
                    ids = session.run(session.sql.reserve_ids, {"number": len(batch)})[0][0].split(",")
                names, rows = batch.copied(self.queue, ids)
                session.copy(session.sql.copy_uniform(names), rows)
        except (IntegrityError, NotSupportedError):  # the latter: COPY does not work under row-level security
            if not risky:
                raise
            used[alias] = MAX_SAVEPOINTS
            return None
        return Written(len(batch), len(batch))

    def _some_taken(self, session: Session, references: list[str | None]) -> bool:
        """Whether an item has the reference of another item or of a task."""
        named = [reference for reference in references if reference is not None]
        if len(set(named)) < len(named):
            return True
        params = {"queue_name": self.queue, "references": session.sql.dialect.array(named)}
        return bool(session.run(session.sql.some_taken, params)[0][0])
