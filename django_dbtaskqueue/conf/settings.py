"""Settings: the ``DBTASKQUEUE`` dict of the project, read into frozen objects.

What a queue is set to is decided in this order: the settings file (``DBTASKQUEUE["FILE"]``), the project's
``DBTASKQUEUE["QUEUES"]``, then what its processor declares in code, then ``DBTASKQUEUE["DEFAULTS"]``, then the
defaults below. The ``Queue`` row's runtime overrides are laid over the result (``overrides``; pollers by themselves).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_dbtaskqueue.conf import queue as rules
from django_dbtaskqueue.conf.queue import (
    QueueSettings as QueueSettings,
    duration as duration,
    is_queue_name as is_queue_name,
    overlay as overlay,
    parse as parse,
    valid_name as valid_name,
)
from django_dbtaskqueue.core import masking, retry
from django_dbtaskqueue.core.exceptions import near_match
from django_dbtaskqueue.core.json import Limits

RELEASE_VARIABLES = ("RELEASE", "SENTRY_RELEASE", "GIT_SHA", "GIT_COMMIT", "HEROKU_SLUG_COMMIT", "SOURCE_VERSION")
MAX_RELEASE_CHARS = 100


@dataclass(frozen=True)
class Settings:
    """The whole ``DBTASKQUEUE`` dict."""

    queues: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    database: str = "default"
    threads: int = 4  # handler threads of one poller
    max_tasks_per_child: int = 1000  # calls that a process of executor="process" runs before another takes its place
    max_memory_per_child: int | None = None  # MiB that it may have after a call; None: without limit
    recycle_after: int | None = None  # tasks that a child of runtaskpoller --processes processes; then it is replaced
    recycle_memory: int | None = None  # MiB that it may have
    # A poller on threads of the web process: True, or a dict of its options.
    embedded_poller: bool | Mapping[str, Any] = False
    notify: bool = True  # LISTEN/NOTIFY wake-up on PostgreSQL
    listen: Mapping[str, str] = field(default_factory=dict)  # alias behind a transaction pooler -> direct alias
    prepare: bool = True  # prepared statements on the poller's own connections; False behind a transaction pooler
    heartbeat: timedelta = timedelta(seconds=5)
    payload_max_bytes: int = 1_048_576
    listeners: Sequence[str] = ()  # dotted paths of signals.Listener classes
    middleware: Sequence[str] = ()  # dotted paths of factories, called around each processor; the first is outermost
    objectives: Mapping[str, str] = field(default_factory=dict)  # of the pipeline's report: queue or "*" -> "99%/5m"
    can_operate: str | None = None  # dotted path of (user, verb, queue) -> bool: narrows permissions per queue
    read_alias: str | Mapping[str, str] | None = None  # a standby of the database, or standbys by alias: for pages
    can_view: str | None = None  # dotted path of (user, queue) -> bool: hides queues from users
    mask: Sequence[str] = masking.MASKED_KEYS  # parts of keys whose values no face shows
    api: bool = False  # whether the JSON API answers at all
    api_tokens: Mapping[str, str] = field(default_factory=dict)  # user name -> hash, of ``taskqueue token``
    release: str = field(  # of the project; by default what an environment variable says
        default_factory=lambda: next(filter(None, map(os.environ.get, RELEASE_VARIABLES)), "")[:MAX_RELEASE_CHARS]
    )
    operations_timeout: timedelta = timedelta(seconds=3)  # of one statement of a page, the API or the command line
    housekeeping: timedelta | None = None  # between two turns of the pollers' own; None: by housekeeptasks only
    keep_completed: timedelta | None = timedelta(days=7)  # in TASKS, then in the history; None in each: without limit
    keep_error: timedelta | None = None
    keep_poison: timedelta | None = timedelta(days=14)
    keep_history: timedelta | None = None  # in the history, then deleted
    keep_attempts: timedelta | None = timedelta(days=90)  # records of failed attempts, then deleted
    keep_audit: timedelta | None = timedelta(days=365)  # the audit and finished bulk operations, then deleted
    bridge: rules.Bridge = field(default_factory=rules.Bridge)  # the systems that tasks are exchanged with
    file: str | os.PathLike[str] | None = None  # TOML, laid over ``queues`` and followed; relative to BASE_DIR

    def __post_init__(self) -> None:
        rules.check_rules(self, TOP_RULES, lambda name: f"DBTASKQUEUE[{name.upper()!r}]")

    @cached_property
    def payload_limits(self) -> Limits:
        return Limits(size=self.payload_max_bytes)


def _is_text_by_name(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, str) for pair in value.items() for one in pair)


def _is_embedded_poller(value: object) -> bool:
    if not isinstance(value, Mapping):
        return isinstance(value, bool)
    lists = [value[name] for name in ("queues", "exclude", "tags") if name in value]
    numbers = [value[name] for name in ("threads", "coroutines") if name in value]
    right = [*map(rules.are_texts, lists), *map(rules.RULES_BY_TYPE["int"][0], numbers)]
    return len(right) == len(value) and all(right)


AGE_SETTINGS = ("housekeeping", *(field.name for field in fields(Settings) if field.name.startswith("keep_")))
TOP_RULES = {
    **rules.rules_by_type(Settings),
    "database": rules.ALIAS,
    "listen": (_is_text_by_name, 'a dict of alias to the alias past its pooler, such as {"default": "direct"}'),
    **dict.fromkeys(("listeners", "middleware"), (rules.are_texts, "a list of dotted paths")),
    "can_operate": (lambda v: v is None or isinstance(v, str), "the dotted path of (user, verb, queue) -> bool"),
    "can_view": (lambda v: v is None or isinstance(v, str), "the dotted path of (user, queue) -> bool"),
    "read_alias": (
        lambda v: v is None or isinstance(v, str) or _is_text_by_name(v),
        "None, an alias of DATABASES, or a dict of alias to the alias of its standby",
    ),
    "mask": (rules.are_texts, 'a list of parts of keys such as "password"'),
    "api_tokens": (_is_text_by_name, "a dict of user name to the hash that manage.py taskqueue token prints"),
    "objectives": (_is_text_by_name, 'a dict of queue (or "*") to text such as "99.9%/5m"'),
    "embedded_poller": (
        _is_embedded_poller,
        'True, False, or a dict with "queues", "exclude" and "tags" (lists), "threads" and "coroutines" (numbers)',
    ),
    "release": (lambda v: isinstance(v, str) and len(v) <= MAX_RELEASE_CHARS, "a text of at most 100 characters"),
    "file": (lambda v: v is None or isinstance(v, str | os.PathLike), "the path of a TOML file"),
}
TOP_KEYS = {field.name.upper(): field.name for field in fields(Settings)}
_declared: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class _State:
    """The settings in force, and the settings of queues that follow from them."""

    settings: Settings
    file: rules.SettingsFile[Settings] | None = None
    queues: dict[str, QueueSettings] = field(default_factory=dict)


_state: _State | None = None
_changing = threading.RLock()


def settings() -> Settings:
    """Return the settings in force; raise ``ImproperlyConfigured`` naming the key, the value and the fix.

    The settings file is checked once a second. A bad edit is logged, and the settings stay as they were.
    """
    state = _state
    return (_in_force() if state is None or state.file is not None else state).settings


def _in_force() -> _State:
    global _state
    state = _state
    if state is None:
        with _changing:
            _state = state = _state or _load()
    elif state.file is not None and (edited := state.file.reload()) is not None:
        with _changing:
            _state = state = _State(edited, state.file)
    return state


def _load() -> _State:
    plain = _from_dict(getattr(django_settings, "DBTASKQUEUE", {}))
    if plain.file is None:
        return _State(plain)
    file = rules.SettingsFile(Path(getattr(django_settings, "BASE_DIR", "")) / plain.file, partial(_laid_over, plain))
    return _State(file.value, file)


def _laid_over(plain: Settings, document: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Return the settings with the file's tables over those of the dict, and the file's faults."""
    found, faults = rules.settings_tables(document)
    faults += [f"[queues.{name}] {rules.QUEUE_NAME_RULE}" for name in found if not is_queue_name(name)]
    queues = {name: {**plain.queues.get(name, {}), **values} for name, values in found.items()}
    laid = replace(plain, queues={**plain.queues, **queues})
    if _state is not None:
        faults += _moved(_state.settings, laid)
    return laid, faults


def _moved(old: Settings, new: Settings) -> list[str]:
    """Return the changes that a running process cannot apply: tasks do not move when a queue's database changes."""
    return [
        f"[queues.{queue}] {key} = {getattr(after, key)!r} cannot change while processes run. Put "
        f"{getattr(before, key)!r} back, or start all processes anew with the file as it is."
        for queue in {**old.queues, **_declared}
        for before, after in [(_layered(old, queue), _layered(new, queue))]
        for key in rules.PLACE
        if getattr(before, key) != getattr(after, key)
    ]


def _from_dict(raw: Any) -> Settings:
    if not isinstance(raw, Mapping):
        raise ImproperlyConfigured(f"DBTASKQUEUE must be a dict, not {type(raw).__name__}.")
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in TOP_KEYS:
            raise ImproperlyConfigured(f"DBTASKQUEUE has no key {key!r}.{near_match(str(key), TOP_KEYS)}")
        values[TOP_KEYS[key]] = value
    values["defaults"] = rules.queue_values(values.get("defaults", {}), where='DBTASKQUEUE["DEFAULTS"]')
    queues = values.get("queues", {})
    if not isinstance(queues, Mapping):
        raise ImproperlyConfigured(f'DBTASKQUEUE["QUEUES"] must be a dict of name to settings, not {queues!r}.')
    values["queues"] = {
        valid_name(name): rules.queue_values(given, where=f'DBTASKQUEUE["QUEUES"][{name!r}]')
        for name, given in queues.items()
    }
    if "bridge" in values:
        values["bridge"] = rules.bridge_of(values["bridge"])
    for name in ("heartbeat", "operations_timeout", *AGE_SETTINGS):
        if values.get(name):
            values[name] = duration(values[name], where=f'DBTASKQUEUE["{name.upper()}"]')
    return Settings(**values)


def declare_queue(queue: str, **values: Any) -> None:
    """Make ``queue`` known with what its processor says in code; the project's settings still win."""
    _declared[valid_name(queue)] = rules.queue_values(values, where=f"@processor({queue!r})")
    _clear_queues()


def declarations() -> dict[str, dict[str, Any]]:
    """Return what processors say in code, for ``redeclare``."""
    return dict(_declared)


def redeclare(saved: Mapping[str, dict[str, Any]]) -> None:
    """Put back what ``declarations`` returned."""
    _declared.clear()
    _declared.update(saved)
    _clear_queues()


def settings_queues() -> Iterator[str]:
    """Return the queues known without asking the database."""
    return iter({**settings().queues, **_declared})


def is_known(queue: str) -> bool:
    """Whether ``queue`` is known without asking the database."""
    return queue in settings().queues or queue in _declared


def policy(name: str, queue: str, declared: Any) -> Any:
    """Return the "retry" or "reenqueue" policy of ``queue`` for a processor that declares ``declared``, or None."""
    conf = settings()
    given = conf.queues.get(queue, {})
    if name in given:
        return given[name]
    return declared or conf.defaults.get(name, retry.DEFAULT if name == "retry" else None)


def default_settings(queue: str) -> QueueSettings:
    """Return what ``queue`` is set to, known or not: for a queue that stands only in the ``Queue`` table."""
    state = _state
    if state is None or state.file is not None:
        state = _in_force()
    if (found := state.queues.get(queue)) is None:
        name = queue if queue in state.settings.queues or queue in _declared else ""  # all others share one value
        found = state.queues[name] = state.queues.get(name) or _layered(state.settings, name)
    return found


def _layered(conf: Settings, queue: str) -> QueueSettings:
    layers = {**conf.defaults, **_declared.get(queue, {}), **conf.queues.get(queue, {})}
    return replace(QueueSettings(database=conf.database), **layers)


def _clear_queues() -> None:
    """Drop the remembered settings of queues. A thread that works with the old state keeps that state."""
    global _state
    with _changing:
        if _state is not None:
            _state = _State(_state.settings, _state.file)


def _reset(*, setting: str, **_: Any) -> None:
    global _state
    if setting in ("DBTASKQUEUE", "BASE_DIR"):
        with _changing:
            _state = None


def on_change(call: Callable[[], object]) -> Callable[[], object]:
    """Have a function called when a test changes the settings: it forgets what was made of them."""
    setting_changed.connect(lambda setting, **_: setting == "DBTASKQUEUE" and call(), weak=False)
    return call


def imported(what: str, path: str) -> Any:
    """Return what a dotted path names. ``ImproperlyConfigured`` says that ``what`` cannot be imported or called."""
    try:
        found = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(f"{what} cannot be imported: {error}") from error
    if not callable(found) and not hasattr(found, "submit"):  # an executor is an object
        raise ImproperlyConfigured(f"{what} is {found!r:.80}, which cannot be called.")
    return found


setting_changed.connect(_reset)
masking.secret_keys = lambda: settings().mask
