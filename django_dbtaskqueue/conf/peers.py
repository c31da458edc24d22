"""The peers of the HTTP bridge: ``DBTASKQUEUE["BRIDGE"]``, checked and read into frozen objects."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.conf import queue as rules
from django_dbtaskqueue.core.durations import Rate
from django_dbtaskqueue.core.exceptions import near_match

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
        """Return host, port and path of its view."""
        found = PEER_URL.fullmatch(self.url)
        if found is None:
            raise ImproperlyConfigured("This peer has no url, so nothing can be sent to it.")
        return found["host"].strip("[]"), int(found["port"] or 443), found["path"]

    def name_there(self, queue: str) -> str:
        """Return what our queue is called at the peer; raise ``ImproperlyConfigured`` if no name is set."""
        if isinstance(self.queue_names, str):
            return rules.valid_name(self.queue_names.replace("{queue}", queue))
        if queue not in self.queue_names:
            raise ImproperlyConfigured(f"queue_names of the peer has no name for queue {queue!r}.")
        return self.queue_names[queue]


@dataclass(frozen=True, slots=True)
class Bridge:
    """Whom tasks are exchanged with. Without a secret the bridge is closed."""

    peers: Mapping[str, Peer] = field(default_factory=dict)
    remember: timedelta | None = timedelta(days=90)  # how long a received reference is known; None: for ever


def _are_secrets(value: object) -> bool:
    return isinstance(value, list | tuple) and 1 <= len(value) <= MAX_SECRETS and all(map(_is_secret, value))


def _is_secret(value: object) -> bool:
    if not isinstance(value, str) or not value.startswith(SECRET_PREFIX):
        return False
    try:
        return len(b64decode(value.removeprefix(SECRET_PREFIX), validate=True)) >= MIN_SECRET_BYTES
    except ValueError:
        return False


def _are_queue_names(value: object) -> bool:
    if isinstance(value, str):
        return rules.is_name(value.replace("{queue}", "q")) and "{queue}" in value
    return isinstance(value, Mapping) and all(map(rules.is_name, [*value, *value.values()]))


def _are_allowed(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and all(map(rules.is_name, value))
        and all(types is None or _are_types(types) for types in value.values())
    )


def _are_types(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


PEER_RULES: dict[str, rules.Rule] = {
    "url": (
        lambda v: isinstance(v, str) and (not v or PEER_URL.fullmatch(v) is not None),
        "https://host/path or https://host:port/path, without user, query and fragment",
    ),
    "queues": (_are_allowed, "a list of queues, or a dict of queue to a list of payload types (None: any)"),
    "queue_names": (_are_queue_names, 'a dict of our queue to its name there, or text such as "shop-{queue}"'),
    "rate": (lambda v: v is None or isinstance(v, Rate), 'None or a rate such as "100/s"'),
    **dict.fromkeys(("accept_priority", "allow_private"), rules.SWITCH),
    "ca_file": (lambda v: v is None or isinstance(v, str), "None or the path of a file with certificates"),
    "timeout": rules.POSITIVE,
    "max_bytes": (lambda v: v is None or (type(v) is int and v >= 1), "None or a whole number of at least 1"),
}
BRIDGE_KEYS = tuple(one.name for one in fields(Bridge))
PEER_KEYS = tuple(one.name for one in fields(Peer))


def bridge_of(given: object) -> Bridge:
    """Return ``DBTASKQUEUE["BRIDGE"]`` checked; ``ImproperlyConfigured`` names the key. No error shows a secret."""
    where = 'DBTASKQUEUE["BRIDGE"]'
    values = _keys(given, BRIDGE_KEYS, where)
    if (remember := values.get("remember")) is not None:
        values["remember"] = rules.duration(remember, where=f'{where}["remember"]')
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
    rules.check(found, {"remember": rules.POSITIVE_OR_NONE}, lambda name: f"{where}[{name!r}]")
    return found


def _peer_of(name: object, given: object, where: str) -> Peer:
    if not isinstance(name, str) or PEER_NAME.fullmatch(name) is None:
        raise ImproperlyConfigured(f"{where}: a peer's name has 1 to 50 letters, digits, '_' or '-'.")
    values = _keys(given, PEER_KEYS, where)
    if "timeout" in values:
        values["timeout"] = rules.duration(values["timeout"], where=f'{where}["timeout"]')
    if "rate" in values:
        values["rate"] = rules.parse("rate", values["rate"], where=f'{where}["rate"]')
    if _are_types(values.get("queues")):
        values["queues"] = dict.fromkeys(values["queues"])
    if not _are_secrets(values.get("secrets")):
        raise ImproperlyConfigured(
            f'{where}["secrets"] is not valid: a list of one or two texts, each "{SECRET_PREFIX}" and the base64 of at '
            f'least {MIN_SECRET_BYTES} random bytes: python -c "import base64, secrets; '
            f"print('{SECRET_PREFIX}' + base64.b64encode(secrets.token_bytes({MIN_SECRET_BYTES})).decode())\""
        )
    peer = Peer(**values)
    rules.check(peer, PEER_RULES, lambda key: f"{where}[{key!r}]")
    return peer


def _keys(given: object, known: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ImproperlyConfigured(f"{where} must be a dict of settings, not {type(given).__name__}.")
    for key, value in given.items():
        if SECRET_PREFIX in repr((key, None if key in ("secrets", "peers") else value)):
            raise ImproperlyConfigured(
                f'{where} has a secret in a wrong place: secrets stand in "secrets" of a peer only.'
            )
        if key not in known:
            raise ImproperlyConfigured(f"{where} has no setting {key!r}.{near_match(str(key), known)}")
    return dict(given)
