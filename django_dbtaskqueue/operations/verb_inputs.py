"""What a verb asks for beside its tasks: read once, for forms, the command line and the API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.core.durations import parse_length
from django_dbtaskqueue.core.exceptions import OperationRefused, PayloadError
from django_dbtaskqueue.core.json import dumps
from django_dbtaskqueue.core.masking import MASKED, masked
from django_dbtaskqueue.db.session import aliases_of, model_for
from django_dbtaskqueue.models.tasks import MAX_NAME_CHARS

if TYPE_CHECKING:
    from django_dbtaskqueue.models import AbstractTask
    from django_dbtaskqueue.operations.permissions import Text


@dataclass(frozen=True, slots=True)
class VerbOptions:
    """What the verbs ask for beside the tasks; each verb reads its own (``TaskVerb.inputs``)."""

    older_than: timedelta = timedelta(days=14)  # housekeep: how long ago a task must have finished
    to: str = "history"  # housekeep: or "delete"
    delay: timedelta = timedelta(0)  # snooze
    priority: int = 0
    queue: str = ""  # move: the new queue
    payload: Any = None  # edit
    signal: str = ""  # signal: its name
    data: object = None  # and what it carries

    def to_json(self) -> dict[str, Any]:
        """Return what a bulk operation stores of them: all but the payload."""
        values: dict[str, Any] = {name: getattr(self, name) for name in STORED_OPTIONS}
        spans = {name: value.total_seconds() for name, value in values.items() if isinstance(value, timedelta)}
        return values | spans

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> VerbOptions:
        """Return the options that ``to_json`` stored, and defaults for those that it did not."""
        known: dict[str, Any] = {name: stored[name] for name in STORED_OPTIONS if name in stored}
        for name in {"older_than", "delay"} & known.keys():
            known[name] = timedelta(seconds=known[name])
        return cls(**known)


STORED_OPTIONS = tuple(field.name for field in fields(VerbOptions) if field.name != "payload")


@dataclass(frozen=True, slots=True)
class VerbInput:
    """An option of a verb as people give it: a field of its form, an option of its command, a key of the API."""

    name: str  # in the form and in the API; with dashes, the command line's option
    field: str  # of ``VerbOptions``
    label: Text
    help: Text
    read: Callable[[Any], Any]  # the value of what was given; ``ValueError`` says what is wrong
    initial: str | None = None  # None: it must be given
    choices: tuple[tuple[str, Text], ...] = ()
    is_json: bool = False  # the API sends the value itself, forms and commands its text


def _to(given: object) -> str:
    if given not in ("history", "delete"):
        raise ValueError(f'must be "history" or "delete", not {given!r}')
    return str(given)


def _delay(given: object) -> timedelta:
    if not (found := parse_length(given)):
        raise ValueError(f"{given!r} must be more than 0")
    return found


def _priority(given: object) -> int:
    text = str(given).strip()
    if isinstance(given, bool) or not text.removeprefix("-").isdecimal() or not -32768 <= int(text[:8]) <= 32767:
        raise ValueError(f"{given!r} must be a whole number from -32768 to 32767")
    return int(text)


def _queue(given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{given!r} must be the name of a queue")
    return given.strip()


def json_of(text: str) -> Any:
    """Return the value of a JSON text; ``ValueError`` says where it is wrong."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"not JSON: {error}") from None


def _name(given: object) -> str:
    if not isinstance(given, str) or not 0 < len(given.strip()) <= MAX_NAME_CHARS:
        raise ValueError(f"{given!r} must be a name of 1 to {MAX_NAME_CHARS} characters")
    return given.strip()


EXAMPLES = _("Such as 30m, 2h or 14d.")
OLDER_THAN = VerbInput(
    "older_than", "older_than", _("Finished at least this long ago"), EXAMPLES, parse_length, initial="14d"
)
TO = VerbInput(
    "to", "to", _("Where the tasks go"), "", _to, initial="history",
    choices=(("history", _("Into the history")), ("delete", _("Delete for good"))),
)  # fmt: skip
FOR = VerbInput("for", "delay", _("For how long"), EXAMPLES, _delay)
PRIORITY = VerbInput("priority", "priority", _("New priority"), _("A whole number; lower runs first."), _priority)
TO_QUEUE = VerbInput("to_queue", "queue", _("New queue"), _("Its tasks must be in the same table."), _queue)
PAYLOAD = VerbInput(
    "payload", "payload", _("New payload"),
    _("As JSON. A secret is shown as •••: leave it as it is. It keeps its value."), lambda given: given, is_json=True,
)  # fmt: skip
SIGNAL_NAME = VerbInput("signal", "signal", _("Name of the signal"), _("What the task waits for."), _name)
SIGNAL_DATA = VerbInput(
    "data", "data", _("Data"), _("As JSON. The processor receives it. Optional."), lambda given: given, initial="null",
    is_json=True,
)  # fmt: skip


def with_secrets_of(stored: Any, edited: Any) -> Any:
    """Return a payload that a person edited as it was shown, masked, with the secrets of the stored one.

    A secret keeps its value, also where its key was left out. Raises ``OperationRefused`` where a secret was changed
    or would be shown from now on, or where the mask stands in the place of none.
    """
    return _with_secrets(stored, masked(stored), edited, "")


def _with_secrets(stored: Any, shown: Any, edited: Any, path: str) -> Any:
    if shown == MASKED != stored:
        if edited != MASKED:  # told alike for the right value: each guess would be an answer
            raise _is_masked(path)
        return stored
    if isinstance(edited, dict):
        held, seen = (stored, shown) if isinstance(shown, dict) else ({}, {})
        secrets: dict[str, Any] = {key: value for key, value in held.items() if seen[key] == MASKED != value}
        ways = {key: f"{path}.{key}" if path else key for key in (*edited, *secrets)}
        merged = {key: _with_secrets(held.get(key), seen.get(key), value, ways[key]) for key, value in edited.items()}
        merged |= {key: value for key, value in secrets.items() if key not in edited}
        # The key beside a secret can say that it is one: {"name": "Authorization", "value": "•••"}.
        again: Any = masked(merged) if secrets else {}
        if bared := [key for key in secrets if again[key] != MASKED]:
            raise _is_masked(ways[bared[0]])
        return merged
    if isinstance(edited, list):
        was, parts = (stored, shown) if isinstance(shown, list) else ([], [])
        if len(was) != len(edited) and parts != was:
            raise OperationRefused(
                gettext("%(path)s holds secrets: its items can be changed only one by one.") % {"path": path}
            )
        trios = zip_longest(was[: len(edited)], parts[: len(edited)], edited)
        items = [_with_secrets(*trio, f"{path}[{at}]") for at, trio in enumerate(trios)]
        again = masked(items)
        if [at for at, one in enumerate(parts) if one == MASKED != was[at] and again[at] != MASKED]:
            raise _is_masked(path or "payload")
        return items
    if isinstance(edited, str) and edited == shown:
        return stored
    if isinstance(edited, str) and MASKED in edited:
        words = gettext("%(path)s holds ••• where the payload has no secret, or another text around it.")
        raise OperationRefused(words % {"path": path or "payload"})
    return edited


def _is_masked(path: str) -> OperationRefused:
    return OperationRefused(gettext("%(path)s is masked and cannot be changed here.") % {"path": path})


def check_options(options: VerbOptions, inputs: Sequence[VerbInput], model: type[AbstractTask], alias: str) -> None:
    """Raise ``UnknownQueue`` or ``OperationRefused`` for options that do not fit the table."""
    if TO_QUEUE in inputs:
        queue_settings(options.queue, alias)
        if model_for(options.queue) is not model or alias not in aliases_of(options.queue):
            words = gettext("Queue %(queue)s has another table or database: its tasks cannot move there.")
            raise OperationRefused(words % {"queue": options.queue})
    if PAYLOAD in inputs or SIGNAL_DATA in inputs:
        try:
            dumps(options.payload if PAYLOAD in inputs else options.data, limits=conf.payload_limits())
        except PayloadError as error:
            raise OperationRefused(str(error)) from None
