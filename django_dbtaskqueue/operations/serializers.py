"""Tasks, attempts and bulk operations as data, for the command line's JSON and for the API, with secrets masked.

A document is a value, whose class names its keys, a row, whose columns a ``RowDocument`` names, or a mapping that a
``TypedDict`` describes. Each key stands once, and the API describes itself by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, get_type_hints

from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import (
    BooleanField,
    CharField,
    DateTimeField,
    ForeignKey,
    IntegerField,
    Model,
    QuerySet,
    TextField,
)
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.columns import LISTED, LONG
from django_dbtaskqueue.core.durations import Rate
from django_dbtaskqueue.core.masking import masked, masked_text
from django_dbtaskqueue.core.states import COMPLETED
from django_dbtaskqueue.core.unique import is_freed, kind_of
from django_dbtaskqueue.models import AbstractTask, Attempt, BulkOperation, FailureGroup, Task, TaskHistory
from django_dbtaskqueue.models.readable import JsonField

MESSAGE_WIDTH = 160  # characters of a message in one line
MAX_ERROR_WIDTH = 80  # characters
FINGERPRINT = re.compile(r"\bfingerprint:([0-9a-f]{8,40})")
FRAME = '  File "'  # how a line of a traceback begins
Document = dict[str, Any]
COLUMN_TYPES: Mapping[type, type] = {
    BooleanField: bool,
    CharField: str,
    DateTimeField: datetime,
    ForeignKey: int,
    IntegerField: int,
    TextField: str,
}


class DocumentEncoder(DjangoJSONEncoder):
    """Writes values, too: a length of time in seconds, a rate as text, another value by ``as_document``."""

    def default(self, o: object) -> object:
        if isinstance(o, timedelta):
            return o.total_seconds()
        if isinstance(o, Rate):
            return str(o)
        return as_document(o) if is_dataclass(o) else super().default(o)


def as_document(value: object) -> Document:
    """Return a value of a dataclass as data."""
    return {key: getattr(value, key) for key in _keys(type(value))}


def document_types(kind: Any) -> Mapping[str, object]:
    """Return the keys of the document of a dataclass or ``TypedDict``, each with its type."""
    hints, keys = get_type_hints(kind, include_extras=True), _keys(kind) if is_dataclass(kind) else ()
    own = {key: hints[key] if key in hints else get_type_hints(getattr(kind, key).fget)["return"] for key in keys}
    return own or hints


def _keys(kind: Any) -> Sequence[str]:
    """Return the fields and properties that a dataclass names in ``DOCUMENT``; otherwise all fields."""
    return getattr(kind, "DOCUMENT", None) or [one.name for one in fields(kind)]


@dataclass(frozen=True, eq=False, slots=True)
class RowDocument:
    """A row as data: columns under their own names, and further keys with their types."""

    name: str  # in the OpenAPI document
    text: str  # its description there
    model: type[Model]
    columns: Sequence[str]
    more: Mapping[str, object] = field(default_factory=dict)
    optional: Sequence[str] = ()  # columns that not every reader sees

    @property
    def types(self) -> Mapping[str, object]:
        """The keys, each with its type."""
        columns = {name: _type_of(self.model._meta.get_field(name)) for name in (*self.columns, *self.optional)}
        return {**columns, **self.more}

    def of(self, row: Model, **given: object) -> Document:
        """Return a row as data; a key that is not given is the row's, and None if the row has no such column."""
        keys = (*self.columns, *self.more)
        return {name: given.pop(name) if name in given else getattr(row, name, None) for name in keys} | given


def _type_of(column: Any) -> Any:
    if isinstance(column, JsonField):
        kind: type = list[column.of] if column.shape is list else dict[str, column.of] if column.shape else object
    else:
        kind = next(kind for known, kind in COLUMN_TYPES.items() if isinstance(column, known))
    return kind | None if column.null else kind


SUMMARY = RowDocument(
    "TaskSummary", "A task in a list. Message: its result or error in one line, secrets masked.", Task, LISTED,
    {"message": str},
)  # fmt: skip
ATTEMPT = RowDocument(
    "Attempt", "A failed attempt. Its traceback needs the permission to see payloads.", Attempt,
    ("task_id", "queue", "attempt", "poller_instance", "finish_time"), {"error": str}, optional=("traceback",),
)  # fmt: skip
OPERATION = RowDocument(
    "Operation", "A bulk operation. The estimate is null where counting took too long.", BulkOperation,
    (
        "id", "verb", "query", "actor", "reason", "state", "estimate", "estimate_more", "changed", "skipped", "skips",
        "note", "create_time", "start_time", "finish_time",
    ),
    {"progress": float},
)  # fmt: skip
TaskSummary = Annotated[Document, SUMMARY]
AttemptDocument = Annotated[Document, ATTEMPT]
OperationDocument = Annotated[Document, OPERATION]


def summary(task: AbstractTask | TaskHistory, *, payload: bool = True) -> TaskSummary:
    """Return what a list shows of a task; without ``payload`` no result, but the one line of an error."""
    return SUMMARY.of(task, message=message_of(task.process_result) if payload or task.status != COMPLETED else "")


def detail(task: AbstractTask | TaskHistory, *, payload: bool) -> Document:
    """Return all of a task, secrets masked; what was enqueued and what came of it only with ``payload``."""
    found = summary(task, payload=payload)
    if payload:
        found |= {name: masked(getattr(task, name)) for name in LONG}
        found["process_result"] = masked_text(task.process_result or "")
    return found


def detail_of_history(row: TaskHistory, *, payload: bool) -> Document:
    """Return the same of a task that left its table, and when it did; what only a table knows is None."""
    return detail(row, payload=payload) | {"id": row.task_id, "moved_time": row.moved_time}


def attempt_of(row: Attempt, *, payload: bool = True) -> AttemptDocument:
    """Return a failed attempt, secrets masked; without ``payload`` the one line of its error only."""
    error = masked_text(error_of(row)) if payload else message_of(error_of(row))
    return ATTEMPT.of(row, error=error, **({"traceback": masked_text(row.traceback)} if payload else {}))


def error_of(row: Attempt) -> str:
    """Return the error of a failed attempt, not masked."""
    return f"{row.error_type}: {row.message}" if row.error_type else row.message


def message_of(text: str | None, width: int = MESSAGE_WIDTH) -> str:
    """Return a result or error as one line of at most ``width`` characters, with secrets masked.

    Of a traceback it is the error, without the module of its class. Of any other text it is the first line. A stored
    traceback can lack its beginning, so the frames tell what it is.
    """
    lines = [line for line in masked_text(text or "").splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[0]
    frames = [place for place, one in enumerate(lines) if one.startswith((FRAME, "Traceback ("))]
    if frames:
        after = lines[frames[-1] + 1 :] or lines
        line = short_error(next((one for one in after if not one[0].isspace()), after[-1]))
    line = line.strip()
    return line if len(line) <= width else line[: width - 1] + "…"


def short_error(line: str) -> str:
    """Return "PlaneUnknown: N14228" for "flights.rules.PlaneUnknown: N14228", and any other text as it is."""
    kind, colon, message = line.partition(":")
    return kind.rpartition(".")[2] + colon + message if re.fullmatch(r"[\w.]+", kind) else line


def pause_note(by: str, reason: str, until: datetime | None) -> str:
    """Return what is known of a pause, as in "by ada: provider is down, until 2026-11-22 14:00"."""
    who = _("by %(who)s") % {"who": by} if by else ""
    end = until and _("until %(time)s") % {"time": f"{localtime(until) if until.tzinfo else until:%Y-%m-%d %H:%M}"}
    return ", ".join(part for part in (": ".join(one for one in (who, reason) if one), end) if part)


def with_errors(queries: Sequence[str], groups: QuerySet[FailureGroup]) -> list[str]:
    """Return searches with the error in the place of the fingerprint of each of these failure groups."""
    prints = {found for query in queries for found in FINGERPRINT.findall(query)}
    words = {
        group.pk: message_of(short_error(f"{group.error_type}: {group.message}".removeprefix(": ")), MAX_ERROR_WIDTH)
        for group in (groups.filter(pk__in=prints) if prints else ())
    }

    def error(found: re.Match[str]) -> str:
        return words.get(found[1]) or found[0]

    return [FINGERPRINT.sub(error, query) for query in queries]


def uniqueness_note(reference: str | None) -> str:
    """Return what the rule of uniqueness does that derived a task's reference; "" if no rule did."""
    kind = kind_of(reference)
    if kind and is_freed(reference):
        return _("A rule of uniqueness (%(kind)s) does not hold it any more: a later call has inserted a new task.") % {
            "kind": kind
        }
    words = {
        "unique": _("By the rule unique, a further call with an equal payload inserts no task: it returns this one."),
        "throttle": _("By the rule throttle, a call with an equal payload returns this task until the period is over."),
        "debounce": _("By the rule debounce, a call with an equal payload replaces this task until a poller takes it."),
    }
    return words.get(kind, "")
