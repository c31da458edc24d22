"""What one queue, and a peer of the HTTP bridge, can be set to: the settings, their rules, and how they are read."""

from __future__ import annotations

import re
import threading
import tomllib
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from time import time
from typing import Any, Generic, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.core import durations, logger, retry, unique as uniqueness
from django_dbtaskqueue.core.columns import PRIORITIES
from django_dbtaskqueue.core.durations import Rate, clock
from django_dbtaskqueue.core.exceptions import near_match
from django_dbtaskqueue.core.masking import masked

QUEUE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,199}")
QUEUE_NAME_RULE = (
    "cannot be a queue's name: use 1 to 200 letters, digits, '_', '.', ':' or '-', "
    "beginning with a letter, a digit or '_'."
)
PLACE = ("database", "shards", "model", "temporary")  # where a queue's tasks live
PROJECT_ONLY = (*PLACE, "router", "extra")  # what no queue's row may say
# What no operator may change. A poller reads the strategy when it starts; a pause has its own verb.
FIXED_SETTINGS = (*PROJECT_ONLY, "strategy", "paused")


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What one queue is set to. Durations are ``timedelta``, or text that ``parse_duration`` reads."""

    lease: timedelta = timedelta(seconds=60)
    timeout: timedelta | None = None  # of one run of the processor; None: as long as it holds its lease
    retry: Any = retry.DEFAULT
    reenqueue: Any = None  # the policy of a reenqueue() without a delay; None or "manual": such a one is an error
    max_attempts: int = 5
    priority: int = 0  # of a task that is enqueued without one; lower first
    keep: str = "keep"  # COMPLETED rows: "keep" in TASKS, move to "history", or "delete"
    settle: str = "batch"  # "batch": many outcomes in one commit; "each": a commit per outcome
    settle_interval: timedelta = timedelta(milliseconds=50)  # the longest an outcome waits for its batch
    batch_size: int = 500  # the most tasks one checkout takes
    concurrency: int | None = None  # the most tasks of this queue that one poller holds; 0: none; None: by its slots
    max_running: int | None = None  # the most tasks of this queue that run at a time, over all pollers; None: any
    max_running_per_group: int = 1  # the most tasks of a group that run at a time; 1: one after the other, in order
    rate: Rate | None = None  # the most tasks that start in a time, over all pollers: text such as "100/s"
    burst: int | None = None  # the most tasks that start at once under a rate; None: as many as in a second
    rate_per_group: Rate | None = None  # the most tasks of each group that start in a time, over all pollers
    burst_per_group: int | None = None  # the most of a group that start at once; None: as many as in a second
    paused: bool = False  # a queue that no operator has paused or resumed yet starts paused
    poll_interval: timedelta = timedelta(seconds=1)  # of a poller that finds nothing, at first
    idle_interval: timedelta = timedelta(seconds=5)  # and at most; neither is ever over a tenth of the lease
    ttl: timedelta | None = None  # how long after it is due a task may still be started
    expired: str = "poison"  # what becomes of a task past its ttl: "poison" or "delete"
    capacity: int | None = None  # the most live (CREATED or PROCESSING) tasks
    group_retry: str = "hold"  # a retry keeps its group waiting ("hold") or lets the next task pass ("skip")
    unique: Any = None  # the rule of uniqueness for tasks that are enqueued without a reference; None: there is none
    unique_over: str = "table"  # a reference is taken while its task is in the table, or for ever: "history"
    max_wait: timedelta | None = None  # a priority whose head has waited longer goes first; None: strict priorities
    strategy: str = "auto"  # "skip_locked", "optimistic", or what the database does best
    database: str = "default"
    shards: Sequence[str] = ()  # aliases the queue is spread over
    router: Any = None  # (reference, payload, shards) -> alias, or its dotted path; None: by the reference's hash
    model: str = "dbtaskqueue.Task"  # the task table: an AbstractTask subclass, as "app.Model"
    log_level: str | None = None  # of the lines of each task's life; None: only what needs attention is logged
    temporary: bool = False  # an UNLOGGED table: fast, and emptied by a crash of the server
    extra: Mapping[str, Any] = field(default_factory=dict)  # the project's own settings: ``task.extra`` in a processor

    def __post_init__(self) -> None:
        check_rules(self, QUEUE_RULES, str)


Rule = tuple[Callable[[Any], bool], str]  # the test of a value, and what the value must be


def check_rules(settings: object, rules: Mapping[str, Rule], shown: Callable[[str], str]) -> None:
    """Raise ``ImproperlyConfigured`` for the first setting that breaks its rule; ``shown`` writes its name."""
    for name, (test, wanted) in rules.items():
        if not test(value := getattr(settings, name)):
            raise ImproperlyConfigured(f"{shown(name)}={value!r} is not valid: {wanted}.")


def _positive(value: Any) -> bool:
    return isinstance(value, timedelta) and value > timedelta(0)


def are_texts(value: object) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= 1_000_000_000


ALIAS: Rule = (lambda v: isinstance(v, str), "an alias of DATABASES")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
STRATEGIES = ("auto", "skip_locked", "optimistic")
RATES = ("rate", "rate_per_group")
RULES_BY_TYPE: dict[object, Rule] = {  # of settings that have no rule of their own
    "bool": (lambda v: isinstance(v, bool), "True or False"),
    "int": (lambda v: _whole(v, 1), "a whole number from 1 to 1,000,000,000"),
    "int | None": (lambda v: v is None or _whole(v, 1), "None or a whole number from 1 to 1,000,000,000"),
    "timedelta": (_positive, "a positive duration"),
    "timedelta | None": (lambda v: v is None or _positive(v), "None or a positive duration"),
    "Rate | None": (
        lambda v: v is None or (isinstance(v, Rate) and _whole(v.tasks, 1)),
        'None or a rate such as "100/s", "5/m" or "1/10s", of at most 1,000,000,000 tasks',
    ),
}


def rules_by_type(kind: type) -> dict[str, Rule]:
    """Return the rules that follow from the types of a dataclass's fields, by field."""
    return {one.name: RULES_BY_TYPE[one.type] for one in fields(kind) if one.type in RULES_BY_TYPE}


QUEUE_RULES = {
    **rules_by_type(QueueSettings),
    "lease": (lambda v: _positive(v) and v >= durations.MIN_LEASE, "a duration of at least 100 ms"),
    "retry": (callable, "a retry policy, e.g. Geometric(timedelta(seconds=10))"),
    "reenqueue": (lambda v: v is None or callable(v), 'a retry policy, or None or "manual" for none'),
    "max_attempts": (lambda v: type(v) is int and 1 <= v <= 32_767, "a whole number from 1 to 32767"),
    "priority": (lambda v: type(v) is int and PRIORITIES.least <= v <= PRIORITIES.most, PRIORITIES.words),
    "keep": (lambda v: v in ("keep", "history", "delete"), '"keep", "history" or "delete"'),
    "settle": (lambda v: v in ("batch", "each"), '"batch" or "each"'),
    "batch_size": (lambda v: type(v) is int and 1 <= v <= 5000, "a whole number from 1 to 5000"),
    "max_running_per_group": (lambda v: type(v) is int and 1 <= v <= 1000, "a whole number from 1 to 1000"),
    "concurrency": (lambda v: v is None or _whole(v, 0), "None or a whole number from 0 to 1,000,000,000"),
    "expired": (lambda v: v in ("poison", "delete"), '"poison" or "delete"'),
    "group_retry": (lambda v: v in ("hold", "skip"), '"hold" or "skip"'),
    "unique": (lambda v: v is None or isinstance(v, uniqueness.UniqueRule), f"None or a rule. {uniqueness.RULE_FORMS}"),
    "unique_over": (lambda v: v in ("table", "history"), '"table" or "history"'),
    "strategy": (
        lambda v: isinstance(v, str) and (v in STRATEGIES or "." in v),
        '"auto", "skip_locked", "optimistic", or the dotted path of a driver',
    ),
    "shards": (lambda v: are_texts(v) and len({*v}) == len(v), "a list of aliases, each once"),
    "log_level": (lambda v: v is None or v in LOG_LEVELS, f"None or one of {', '.join(LOG_LEVELS)}"),
    "router": (lambda v: v is None or callable(v) or isinstance(v, str), "a callable, or its dotted path"),
    "model": (lambda v: isinstance(v, str) and v.count(".") == 1, 'a model as "app.Model"'),
    "extra": (
        lambda v: isinstance(v, Mapping) and all(isinstance(name, str) for name in v),
        "a dict of the project's own settings by name",
    ),
    "database": ALIAS,
}
DURATIONS = ("lease", "timeout", "ttl", "max_wait", "settle_interval", "poll_interval", "idle_interval")
QUEUE_KEYS = tuple(f.name for f in fields(QueueSettings))


def queue_values(given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return one queue's settings checked and parsed; ``where`` names their place in an error."""
    if not isinstance(given, Mapping):
        raise ImproperlyConfigured(f"{where} must be a dict of settings, not {given!r}.")
    values: dict[str, Any] = {}
    for raw, value in given.items():
        key = check_name(raw, where=where)
        values[key] = parse(key, value, where=f"{where}[{raw!r}]")
    try:
        QueueSettings(**values)
    except ImproperlyConfigured as error:
        raise ImproperlyConfigured(f"{where}: {error}") from None
    return values


def check_name(name: object, *, where: str) -> str:
    """Return a setting's name in lower case; ``ImproperlyConfigured`` for an unknown one shows the nearest, or all."""
    key = str(name).lower()
    if key not in QUEUE_KEYS:
        known = near_match(key, QUEUE_KEYS) or f" Write one of {', '.join(QUEUE_KEYS)}."
        raise ImproperlyConfigured(f"{where} has no setting {name!r}.{known}")
    return key


def duration(value: Any, *, where: str) -> timedelta:
    """Return the duration of a setting; ``ImproperlyConfigured`` names the setting and shows the accepted forms."""
    try:
        found = durations.parse_duration(value)
        return found if found < timedelta(0) else durations.parse_length(value)  # its rule says what may be negative
    except ValueError as error:
        raise ImproperlyConfigured(f"{where}: {error}.") from None


def parse(key: str, value: Any, *, where: str) -> Any:
    """Return a setting of a queue or of the bridge in its proper type: text durations and retry policies parsed."""
    if key in (*DURATIONS, "remember") and value is not None:
        return duration(value, where=where)
    if key == "reenqueue" and value in (None, "manual"):
        return None
    try:
        if key == "unique" and isinstance(value, str):
            return uniqueness.parse_rule(value)
        if key in RATES and value is not None:
            return durations.parse_rate(value)
        return retry.normalise(value) if key in ("retry", "reenqueue") else value
    except (TypeError, ValueError) as error:
        raise ImproperlyConfigured(f"{where}: {error}") from None


def typed(key: str, text: str) -> object:
    """Return a value that a person typed as None, a bool, an int, or text."""
    if text.lower() in ("none", "null"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    whole = text.removeprefix("-").isdecimal() and len(text) <= durations.MAX_TEXT_LENGTH  # longer is refused as text
    return int(text) if whole and key not in DURATIONS else text


def setting_text(value: object) -> str:
    """Return a setting's value as people write it, secrets of the project's own settings masked."""
    if isinstance(value, timedelta):
        return durations.format_duration(value)
    if isinstance(value, Mapping):
        return str(masked(dict(value)))
    return retry.policy_text(value) if callable(value) else str(value)


def changed_settings(old: QueueSettings, new: QueueSettings) -> Iterator[tuple[str, str, str]]:
    """Yield each setting that is not the same: its name, and the two values as text."""
    for one in fields(QueueSettings):
        before, after = getattr(old, one.name), getattr(new, one.name)
        if before != after:
            yield one.name, setting_text(before), setting_text(after)


def is_queue_name(name: Any) -> bool:
    """Whether a queue can have this name."""
    return isinstance(name, str) and QUEUE_NAME.fullmatch(name) is not None


def valid_name(name: Any) -> str:
    """Return a queue's name, or raise ``ImproperlyConfigured`` for one no queue can have."""
    if not is_queue_name(name):
        raise ImproperlyConfigured(f"{name!r} {QUEUE_NAME_RULE}")
    return str.__str__(name)  # of an enum that is a text, too, its value, which str() is not


def overlay(base: QueueSettings, overrides: Mapping[str, Any]) -> QueueSettings:
    """Return ``base`` with runtime overrides (of a ``Queue`` row, so in JSON) laid over it; check them."""
    return replace(base, **_row_values(overrides, where="Queue.overrides"))


def stored(settings: Mapping[str, Any], *, where: str, fixed: Sequence[str] = ()) -> dict[str, Any]:
    """Return settings as a ``Queue`` row keeps them, in JSON; check them, and refuse those of ``fixed``."""
    values = _row_values(settings, where=where, fixed=fixed)
    return {name: _json(name, value, where=where) for name, value in values.items()}


def _row_values(given: Mapping[str, Any], *, where: str, fixed: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a ``Queue`` row may say. It names no code and no place: whoever enqueues may write it."""
    values = queue_values(given, where=where)
    for name, value in values.items():
        if name in PROJECT_ONLY or (name == "strategy" and value not in STRATEGIES):
            raise ImproperlyConfigured(
                f"{where}: {name}={value!r} cannot stand in a queue's row, which names neither code nor the place of "
                'tasks. Set it in DBTASKQUEUE["QUEUES"] or in the settings file.'
            )
        if name in fixed:
            more = " To stop the queue now, pause it." if name == "paused" else ""
            raise ImproperlyConfigured(
                f"{where}: {name} cannot change while the queue runs. Set it in DBTASKQUEUE['QUEUES'].{more}"
            )
    return values


def _json(name: str, value: Any, *, where: str) -> Any:
    if isinstance(value, timedelta):
        return durations.iso_duration(value)
    if name in ("unique", *RATES) and value is not None:
        return str(value)
    if name not in ("retry", "reenqueue") or value is None:
        return value
    text = retry.policy_text(value)
    with suppress(ValueError):
        if retry.parse_policy(text) == value:
            return text
    raise ImproperlyConfigured(
        f"{where}: {name}={text} can only be written in code. Give it to @processor, or use one with a text form: "
        '"geometric:10s,x2,max=1h".'
    )


MIN_SECRET_BYTES = 32
MAX_SECRETS = 2  # the old key and the new one, while a key is changed
SECRET_PREFIX = "whsec_"  # noqa: S105 -- how every secret of Standard Webhooks begins
PEER_NAME = re.compile(r"[A-Za-z0-9_-]{1,50}")
PEER_URL = re.compile(
    r"https://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(?P<path>/[A-Za-z0-9_.~/-]*)"
)
Allowed = Mapping[str, Sequence[str] | None]  # by queue the payload types; None: any


@dataclass(frozen=True, slots=True)
class Peer:
    """Another system: how tasks are sent to it, and what it may send here."""

    secrets: Sequence[str] = field(default=(), repr=False)  # the first one or two live keys; both sides have the same
    url: str = ""  # of its view; "": nothing is sent to it
    queues: Allowed = field(default_factory=dict)  # what it may send
    queue_names: Mapping[str, str] | str = "{queue}"  # what our queues are called there
    rate: Rate | None = None  # the most messages that each of our web processes takes from it in a time
    accept_priority: bool = False  # else a received task has the priority of its queue
    allow_private: bool = False  # whether its address may be a private one
    ca_file: str | None = None  # certificates that vouch for it; None: those of the system
    timeout: timedelta = timedelta(seconds=10)
    max_bytes: int | None = None  # of a payload; None: DBTASKQUEUE["PAYLOAD_MAX_BYTES"]

    @property
    def place(self) -> tuple[str, int, str]:
        if (found := PEER_URL.fullmatch(self.url)) is None:
            raise ImproperlyConfigured("This peer has no url, so nothing can be sent to it.")
        return found["host"].strip("[]"), int(found["port"] or 443), found["path"]

    def name_there(self, queue: str) -> str:
        """Return what our queue is called at the peer; raise ``ImproperlyConfigured`` if no name is set."""
        if isinstance(self.queue_names, str):
            return valid_name(self.queue_names.replace("{queue}", queue))
        if queue not in self.queue_names:
            raise ImproperlyConfigured(f"queue_names of the peer has no name for queue {queue!r}.")
        return self.queue_names[queue]


@dataclass(frozen=True, slots=True)
class Bridge:
    """Whom tasks are exchanged with. Without a secret the bridge is closed."""

    peers: Mapping[str, Peer] = field(default_factory=dict)
    remember: timedelta | None = timedelta(days=90)  # how long a received reference is known; None: for ever


def _is_secret(value: object) -> bool:
    with suppress(ValueError):
        known = isinstance(value, str) and value.startswith(SECRET_PREFIX)
        return known and len(b64decode(str(value)[len(SECRET_PREFIX) :], validate=True)) >= MIN_SECRET_BYTES
    return False


def _are_queue_names(value: object) -> bool:
    if isinstance(value, str):
        return is_queue_name(value.replace("{queue}", "q")) and "{queue}" in value
    return isinstance(value, Mapping) and all(map(is_queue_name, [*value, *value.values()]))


def _are_allowed(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(map(is_queue_name, value)) and all(one is None or are_texts(one) for one in value.values())


PEER_RULES = {
    **rules_by_type(Peer),
    "url": (
        lambda v: isinstance(v, str) and (not v or PEER_URL.fullmatch(v) is not None),
        "https://host/path or https://host:port/path, without user, query and fragment",
    ),
    "queues": (_are_allowed, "a list of queues, or a dict of queue to a list of payload types (None: any)"),
    "queue_names": (_are_queue_names, 'a dict of our queue to its name there, or text such as "shop-{queue}"'),
    "ca_file": (lambda v: v is None or isinstance(v, str), "None or the path of a file with certificates"),
}


def bridge_of(given: object) -> Bridge:
    """Return ``DBTASKQUEUE["BRIDGE"]`` checked; ``ImproperlyConfigured`` names the key. No error shows a secret."""
    where = 'DBTASKQUEUE["BRIDGE"]'
    values = _keys(given, Bridge, where)
    peers = values.get("peers", {})
    if not isinstance(peers, Mapping):
        raise ImproperlyConfigured(f'{where}["peers"] must be a dict of name to settings.')
    values["peers"] = {name: _peer_of(name, one, f'{where}["peers"][{name!r}]') for name, one in peers.items()}
    owners: dict[bytes, str] = {}
    for name, secret in [(name, secret) for name, peer in values["peers"].items() for secret in peer.secrets]:
        if (other := owners.setdefault(b64decode(secret.removeprefix(SECRET_PREFIX)), name)) != name:
            raise ImproperlyConfigured(
                f'{where}["peers"]: {other!r} and {name!r} have a secret in common, so a message of the one passes for '
                "one of the other. Give each peer a secret of its own."
            )
    found = Bridge(**values)
    check_rules(found, rules_by_type(Bridge), lambda name: f"{where}[{name!r}]")
    return found


def _peer_of(name: object, given: object, where: str) -> Peer:
    if not isinstance(name, str) or PEER_NAME.fullmatch(name) is None:
        raise ImproperlyConfigured(f"{where}: a peer's name has 1 to 50 letters, digits, '_' or '-'.")
    values = _keys(given, Peer, where)
    if are_texts(values.get("queues")):
        values["queues"] = dict.fromkeys(values["queues"])
    secrets = values.get("secrets")
    if not (isinstance(secrets, list | tuple) and 1 <= len(secrets) <= MAX_SECRETS and all(map(_is_secret, secrets))):
        raise ImproperlyConfigured(
            f'{where}["secrets"] is not valid: a list of one or two texts, each "{SECRET_PREFIX}" and the base64 of at '
            f'least {MIN_SECRET_BYTES} random bytes: python -c "import base64, secrets; '
            f"print('{SECRET_PREFIX}' + base64.b64encode(secrets.token_bytes({MIN_SECRET_BYTES})).decode())\""
        )
    peer = Peer(**values)
    check_rules(peer, PEER_RULES, lambda key: f"{where}[{key!r}]")
    return peer


def _keys(given: object, kind: type, where: str) -> dict[str, Any]:
    known = [one.name for one in fields(kind)]
    if not isinstance(given, Mapping):
        raise ImproperlyConfigured(f"{where} must be a dict of settings, not {type(given).__name__}.")
    for key, value in given.items():
        if SECRET_PREFIX in repr((key, None if key in ("secrets", "peers") else value)):
            raise ImproperlyConfigured(
                f'{where} has a secret in a wrong place: secrets stand in "secrets" of a peer only.'
            )
        if key not in known:
            raise ImproperlyConfigured(f"{where} has no setting {key!r}.{near_match(str(key), known)}")
    return {key: parse(key, value, where=f'{where}["{key}"]') for key, value in given.items()}


T = TypeVar("T")

CHECK_INTERVAL_S = 1.0  # between two checks whether the file changed
HALF_WRITTEN_S = 0.1  # a file that changed less than this time ago may be half written
NONE_TEXT = "none"  # how the file says None, which TOML lacks


class SettingsFile(Generic[T]):
    """``DBTASKQUEUE["FILE"]``, a TOML file that is followed while the process runs.

    ``check`` makes of its parsed text a value and a list of faults. At first, ``ImproperlyConfigured`` lists all faults
    with place, value and fix. Later a bad edit changes nothing and is logged once, and the next good edit is applied.
    """

    def __init__(self, path: Path, check: Callable[[Mapping[str, Any]], tuple[T, list[str]]]) -> None:
        self.path, self._check, self._checking = path, check, threading.Lock()
        self._seen, self._next_check = self._signature(), clock.monotonic() + CHECK_INTERVAL_S
        text = self._read()
        self._text: str | None = text  # as last read, good or bad
        self.value = self._checked(text)

    def reload(self) -> T | None:
        """Return the new value when the file changed and is good; None otherwise. Checks at most once a second."""
        if clock.monotonic() < self._next_check or not self._checking.acquire(blocking=False):
            return None
        try:
            self._next_check = clock.monotonic() + CHECK_INTERVAL_S
            seen = self._signature()
            if seen and 0 <= time() - seen[0] / 1e9 < HALF_WRITTEN_S:
                self._next_check = clock.monotonic() + HALF_WRITTEN_S
            elif seen != self._seen:
                self._seen, before, self._text = seen, self._text, None
                self._text = self._read()
                if self._text != before:
                    value = self._checked(self._text)
                    logger.info("Settings file %s applied", self.path)
                    return value
        except ImproperlyConfigured as error:
            logger.error("The settings stay as they were. %s", error)
        finally:
            self._checking.release()
        return None

    def _signature(self) -> tuple[int, ...] | None:
        with suppress(OSError):
            found = self.path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino
        return None

    def _read(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ImproperlyConfigured(
                f'DBTASKQUEUE["FILE"]: {self.path} cannot be read: {error}. It must be TOML with [queues.NAME] tables.'
            ) from None

    def _checked(self, text: str) -> T:
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ImproperlyConfigured(f"{self.path} is not valid TOML: {error}.") from None
        value, faults = self._check(document)
        if faults:
            number = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
            raise ImproperlyConfigured("\n  - ".join([f"{self.path} has {number}:", *faults]))
        return value


def settings_tables(document: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the settings of a file that are good, by queue, and the faults of the others."""
    faults = [
        f"{name!r} is not known here.{near_match(name, ['queues'])} Write settings in [queues.NAME] tables."
        for name in document
        if name != "queues"
    ]
    queues = document.get("queues", {})
    if not isinstance(queues, Mapping):
        return {}, [*faults, f"queues = {queues!r} must be tables: write [queues.NAME]."]
    found: dict[str, dict[str, Any]] = {}
    for name, table in queues.items():
        if not isinstance(table, Mapping):
            faults.append(f"queues.{name} = {table!r} must be a table: write [queues.{name}] above its settings.")
            continue
        where, found[name] = f"[queues.{name}]", {}
        for key, value in table.items():
            try:
                found[name] |= queue_values({key: None if value == NONE_TEXT else value}, where=where)
            except (ImproperlyConfigured, TypeError, ValueError) as error:
                why = str(error).removeprefix(where).removeprefix(f"[{key!r}]").lstrip(": ")
                faults.append(f"{where} {key} = {value!r}: {why}")
    return found, faults
