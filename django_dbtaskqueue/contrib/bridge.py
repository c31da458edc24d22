"""HTTP bridge: a processor that sends tasks to another system, and the view that receives them there.

The sender completes a task only when the peer has acknowledged it, signed with a shared key. The receiver stores a task
and the memory of it in one transaction, so a resend makes no second task. Signatures have the form of Standard
Webhooks; what is signed begins with the method and the path. The first line of a body is a JSON object, and the rest is
the payload, byte for byte as the database of the sender has it.
"""

import ipaddress
import json
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from http.client import HTTPException, HTTPSConnection
from math import ceil
from threading import Lock, Timer
from time import time
from typing import Any, NamedTuple
from uuid import uuid4

from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, Error, transaction
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.views.decorators.csrf import csrf_exempt
from standardwebhooks import Webhook, WebhookVerificationError

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import Peer
from django_dbtaskqueue.core import exceptions, json as json_payload, logger
from django_dbtaskqueue.core.codecs import MAX_TYPE_NAME
from django_dbtaskqueue.core.columns import InsertOptions, TaskOptions
from django_dbtaskqueue.core.context import TRACEPARENT, restored
from django_dbtaskqueue.core.durations import clock, jittered
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Fail, Outcome, Reenqueue
from django_dbtaskqueue.db.session import aliases_of
from django_dbtaskqueue.flow.enqueue import MAX_KEY_LENGTH, enqueue_task
from django_dbtaskqueue.models import UsedReference
from django_dbtaskqueue.operations import serializers
from django_dbtaskqueue.operations.bounded_reads import time_limit

# -- a checked request -------------------------------------------------------------------------------------------------

MAX_ANSWER_BYTES = 65_536
_tls = lru_cache(maxsize=64)(ssl.create_default_context)
NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(exceptions.TaskQueueError):
    """The name of a peer leads to an address that may not be opened."""


def post(peer: Peer, body: bytes, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
    """Send a message, to no redirect and through no proxy; return status, headers (in lower case) and body."""
    connection = _CheckedConnection(peer)
    more = {"Content-Type": "application/octet-stream", "Connection": "close"}
    timer = Timer(peer.timeout.total_seconds(), connection.cut)  # because a peer can keep each single read short
    timer.daemon = True
    try:
        connection.connect()
        timer.start()
        connection.request("POST", peer.place[2], body, {**headers, **more})
        with connection.getresponse() as answer:
            found = answer.read(MAX_ANSWER_BYTES + 1)
        if len(found) > MAX_ANSWER_BYTES:
            raise HTTPException(f"The answer has more than {MAX_ANSWER_BYTES:,} bytes.")
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, found
    finally:
        timer.cancel()
        connection.close()


class _CheckedConnection(HTTPSConnection):
    """A connection to an address that was checked. The name is not looked up again; the certificate must be of it."""

    def __init__(self, peer: Peer) -> None:
        host, port, _ = peer.place
        self.tls = _tls(cafile=peer.ca_file)
        super().__init__(host, port, timeout=peer.timeout.total_seconds(), context=self.tls)
        self.address = checked_address(host, port, allow_private=peer.allow_private)

    def connect(self) -> None:
        self.sock = socket.create_connection((self.address, self.port), self.timeout)  # which `close` closes
        self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.host)

    def cut(self) -> None:
        with suppress(OSError, TypeError):  # TypeError: it is closed already
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def checked_address(host: str, port: int, *, allow_private: bool) -> str:
    """Look a name up once, and return one of its addresses, or raise ``AddressRefused`` if one of them is forbidden."""
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for text in found:
        if not _may_open(ipaddress.ip_address(text), allow_private=allow_private):
            raise AddressRefused(
                f"{host} has the address {text}, which is not a public one. Nothing was sent. If the peer is in your "
                'own network, set "allow_private": True for it; link-local addresses are never opened.'
            )
    return found[0]


def _may_open(address: Address, *, allow_private: bool) -> bool:
    if isinstance(address, ipaddress.IPv6Address):  # it can lead to an IPv4 address
        inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if address in NAT64 else None
        inner = inner or address.ipv4_mapped or address.sixtofour or (address.teredo or [None, None])[1]
        if inner is not None:
            return _may_open(inner, allow_private=allow_private)
        if address.is_site_local:
            return False
    if address.is_loopback:  # ::1 counts as reserved
        return allow_private
    if address.is_multicast or address.is_link_local or address.is_unspecified or address.is_reserved:
        return False
    return address.is_global or allow_private


# -- bridge ------------------------------------------------------------------------------------------------------------

__all__ = ["receive", "send_to"]

FORMAT_VERSION = 1
FINAL_REFUSALS = (403, 409, 422)  # statuses; with a signature
TOO_MANY = 429  # a status; with a signature the task waits, and its attempts begin again
MAX_PEER_WAIT_S = 3600  # a peer cannot let a task wait longer
MAX_ENVELOPE_BYTES = 4096
NONCE_LIFETIME = timedelta(minutes=15)  # a message is valid for 5 minutes before and after its time
MESSAGE_ID = re.compile(r"msg_[0-9a-f]{32}")
TIMESTAMP = re.compile(r"[0-9]{1,12}")
CONTENT_LENGTH = re.compile(r"[0-9]{1,10}")
# At most four signatures. The last character before "=" has two unused bits, which must be zero.
ONE_SIGNATURE = r"v1,[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]="
SIGNATURES = re.compile(rf"{ONE_SIGNATURE}( {ONE_SIGNATURE}){{0,3}}")
TEXT_LENGTHS = {  # of the texts of an envelope; each but the queue may be null
    "queue": MAX_KEY_LENGTH, "reference": MAX_KEY_LENGTH, "transfer": MAX_KEY_LENGTH, "payload_type": MAX_TYPE_NAME,
    "traceparent": 100,
}  # fmt: skip
ENVELOPE_KEYS = ("version", "queue", "reference", "transfer", "payload_type", "priority", "traceparent")


class _Replayed(Exception):
    """The same message, with the same id, was received before."""


class Refused(Exception):
    """A genuine message that can never be accepted: the status of the answer, and why. The sender gives up."""


# -- signatures --------------------------------------------------------------------------------------------------------


def _signed(peer: Peer, message_id: str, what: str, body: bytes) -> dict[str, str]:
    """Return the headers of a message: a signature with each live key."""
    moment = datetime.fromtimestamp(int(time()), UTC)
    data = f"{what}\n{body.decode()}"
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(moment.timestamp())),
        "webhook-signature": " ".join(Webhook(secret).sign(message_id, moment, data) for secret in peer.secrets),
    }


def _is_genuine(peer: Peer, headers: Mapping[str, str], what: str, body: bytes) -> bool:
    """Whether a live key signed this at most five minutes ago. The library compares in constant time."""
    forms = {"webhook-id": MESSAGE_ID, "webhook-timestamp": TIMESTAMP, "webhook-signature": SIGNATURES}
    given = {name: headers.get(name, "") for name in forms}
    for secret in peer.secrets if all(form.fullmatch(given[name]) for name, form in forms.items()) else ():
        with suppress(WebhookVerificationError, ValueError):  # ValueError: the body is not UTF-8
            Webhook(secret).verify(f"{what}\n".encode() + body, given, json_parse=False)
            return True
    return False


# -- sending -----------------------------------------------------------------------------------------------------------


def send_to(peer: str) -> Callable[[Lease], Outcome]:
    """Return a processor that sends each task to a peer of ``DBTASKQUEUE["BRIDGE"]``.

    Register it: ``processor("invoices", max_attempts=20)(send_to("billing"))``. A task is completed when the peer has
    acknowledged it with a valid signature. A signed refusal ends it in ERROR. After a signed 429 it waits, and its
    attempts begin again. Every other answer, and none, is a failed attempt, which the queue's retry policy repeats.
    """

    def send(task: Lease) -> Outcome:
        return _send(task, peer)

    send.__qualname__ = f"send_to({peer!r})"
    return send


def _send(task: Lease, name: str) -> Outcome:
    known = conf.settings().bridge.peers
    if name not in known:
        raise ImproperlyConfigured(f'DBTASKQUEUE["BRIDGE"]["peers"] has no peer {name!r}; it has {sorted(known)}.')
    peer = known[name]
    path, message_id = peer.place[2], f"msg_{uuid4().hex}"
    body = json.dumps(_envelope_of(task, peer), ensure_ascii=False, separators=(",", ":")).encode()
    if task.payload_text is not None:
        payload = task.payload_text.encode()
        if len(payload) > _max_bytes(peer):
            return Fail(f"The payload has {len(payload):,} bytes; at most {_max_bytes(peer):,} are sent.", retry=False)
        body += b"\n" + payload
    try:
        status, headers, answer = post(peer, body, _signed(peer, message_id, f"POST {path}", body))
    except (OSError, HTTPException, AddressRefused) as error:
        return Fail(error)
    same = headers.get("webhook-id") == message_id
    if not same or not _is_genuine(peer, headers, f"ANSWER {status} {path}", answer):
        return Fail(f"Peer {name!r} answered {status} without a valid signature, which acknowledges nothing.")
    document = json.loads(answer)
    if status == 200:
        return Complete({"peer": name, **document})
    if status == TOO_MANY:
        wait_s = min(document["retry_after"], MAX_PEER_WAIT_S)
        return Reenqueue(timedelta(seconds=jittered(2 * wait_s)))  # not all at once
    text = f"Peer {name!r} refused the task ({status}): {document.get('error')}"
    return Fail(text, retry=status not in FINAL_REFUSALS)


def _envelope_of(task: Lease, peer: Peer) -> dict[str, object]:
    made = task.create_time
    moment = (made.astimezone(UTC) if timezone.is_aware(made) else made).isoformat()
    # The identity of a task without a reference. Its time is part of it, because a new database counts from 1 again.
    identity = f"{task.port.alias}/{task.port.key}/{task.id}/{moment}"
    return {
        "version": FORMAT_VERSION,
        "queue": peer.name_there(task.queue),
        "reference": task.reference,
        "transfer": None if task.reference is not None else sha256(identity.encode()).hexdigest(),
        "payload_type": task.payload_type,
        "priority": task.priority,
        "traceparent": task.context.get("traceparent"),
    }


def _max_bytes(peer: Peer) -> int:
    return peer.max_bytes or conf.settings().payload_max_bytes


# -- receiving ---------------------------------------------------------------------------------------------------------


@csrf_exempt
@transaction.non_atomic_requests
def receive(request: HttpRequest, source: str) -> HttpResponse:
    """Receive a task of a peer: ``path("bridge/<str:source>/", receive)``. Closed until a peer has a secret.

    The answer to a message that is not genuine says nothing. A genuine message is answered with a signature: 200 when
    the task is stored, also if it was before; 403, 409 or 422 when it can never be.
    """
    if not (peers := conf.settings().bridge.peers):
        return HttpResponse(status=404)
    if request.method != "POST":
        return HttpResponse(status=405, headers={"Allow": "POST"})
    if (peer := peers.get(source)) is None:
        return _not_genuine(source, "there is no such peer")
    if peer.url and peer.place[2] == request.path:
        return _not_genuine(source, "its url has the path of this view, so a message could come back to its sender")
    limit = _max_bytes(peer) + MAX_ENVELOPE_BYTES + 1
    length = request.META.get("CONTENT_LENGTH") or "0"
    if not CONTENT_LENGTH.fullmatch(length) or int(length) > limit:
        return HttpResponse(status=413)
    body, what = request.read(int(length)), f"POST {request.path}"
    if not _is_genuine(peer, {name.lower(): value for name, value in request.headers.items()}, what, body):
        return _not_genuine(source, "its signature or its time is wrong")
    return _answered(peer, source, request, body)


def _not_genuine(source: str, reason: str) -> HttpResponse:
    logger.warning("The bridge refused a message of %.100r: %s", source, reason)
    return HttpResponse(status=401)


def _answered(peer: Peer, source: str, request: HttpRequest, body: bytes) -> HttpResponse:
    message_id = request.headers["webhook-id"]
    status, document, headers = 200, {}, {"Cache-Control": "no-store"}
    try:
        if wait_s := _seconds_over_rate(peer, source):
            status, headers["Retry-After"] = TOO_MANY, str(wait_s)
            document = {"error": f"This peer may send {peer.rate}.", "retry_after": wait_s}
            logger.info("The bridge lets a task of %s wait %d s: its rate is %s", source, wait_s, peer.rate)
        else:
            document = _receive(peer, source, message_id, body)
    except _Replayed:
        if peer.rate is not None:  # who recorded it must not use up the rate of the peer
            with _counting:
                _counted_until[source] -= 1 / peer.rate.per_second
        return _not_genuine(source, "it was received before")
    except Refused as refusal:
        status, reason = refusal.args
        document = {"error": reason}
        logger.warning("The bridge refused a task of %s (%s): %s", source, status, reason)
    except (Error, exceptions.QueueFull, exceptions.UnknownQueue, ImproperlyConfigured) as error:
        logger.warning("The bridge could not store a task of %s: %s", source, error)
        return HttpResponse(status=503, headers={"Retry-After": "10"})
    answer = json.dumps(document).encode()
    headers |= _signed(peer, message_id, f"ANSWER {status} {request.path}", answer)
    return HttpResponse(answer, "application/json", status, headers=headers)


_counted_until: dict[str, float] = {}  # by peer: the monotonic time that its messages so far fill at its rate
_counting = Lock()


def _seconds_over_rate(peer: Peer, source: str) -> int:
    """Return how long a peer must wait; 0: the message is counted. As many as in a second may come at once."""
    if peer.rate is None:
        return 0
    now, gap_s = clock.monotonic(), 1 / peer.rate.per_second
    with _counting:
        until = max(_counted_until.get(source, 0.0), now) + gap_s
        over_s = until - now - max(1.0, gap_s)
        if over_s > 1e-9:  # a rounding error is not a message
            return ceil(over_s)
        _counted_until[source] = until
    return 0


class _Transfer(NamedTuple):
    """One task on its way, checked: what its envelope says, and its payload as JSON text."""

    queue: str
    reference: str | None
    transfer: str | None  # instead of a reference
    payload_type: str | None
    priority: int
    traceparent: str | None
    payload: str | None

    @property
    def digest(self) -> str:
        """A hash of what a resend must have in common; the trace differs from attempt to attempt."""
        return sha256(json.dumps([self.payload, self.payload_type]).encode()).hexdigest()


def _receive(peer: Peer, source: str, message_id: str, body: bytes) -> dict[str, object]:
    """Store the task of a genuine message, unless it is stored; raise ``Refused`` if it can never be."""
    try:
        sent = _transfer_of(body, _max_bytes(peer))
    except (serializers.BadInput, exceptions.PayloadError, UnicodeDecodeError) as error:
        raise Refused(422, str(error)) from None
    types = peer.queues.get(sent.queue, ())
    if types is not None and (sent.payload_type or "") not in types:
        raise Refused(403, f"Queue {sent.queue!r} takes no task of this payload type from this peer.")
    alias = aliases_of(sent.queue)[0]
    with time_limit(alias, peer.timeout), transaction.atomic(using=alias):
        nonce = {"queue": f"bridge/{source}", "reference": message_id}  # no queue has a name with "/"
        expires = {"expire_time": timezone.now() + NONCE_LIFETIME}
        if not UsedReference.objects.using(alias).get_or_create(expires, **nonce)[1]:
            raise _Replayed
        try:
            return _store(peer, source, sent, alias)
        except Refused as error:  # the nonce stays stored
            refusal = error
    raise refusal


def _store(peer: Peer, source: str, sent: _Transfer, alias: str) -> dict[str, object]:
    """Store the memory of a transfer and its task together, or find that both were stored before."""
    remember = conf.settings().bridge.remember
    expires = None if remember is None else timezone.now() + remember
    transfers = UsedReference.objects.using(alias)
    key = f"id:{sent.transfer}" if sent.reference is None else f"ref:{sent.reference}"
    identity = {"queue": f"bridge/{source}/{sent.queue}", "reference": key}
    try:
        with transaction.atomic(using=alias):
            stored, is_new = transfers.get_or_create({"digest": sent.digest, "expire_time": expires}, **identity)
            if is_new:
                return {"task": _enqueue(peer, sent, alias), "duplicate": False}
    except exceptions.DuplicateTask:
        raise Refused(409, "The reference is taken in the queue by a task that this peer did not send.") from None
    except (exceptions.QueueFull, exceptions.UnknownQueue):
        raise
    except (exceptions.EnqueueError, DataError) as error:  # DataError: a number that the database cannot store
        raise Refused(422, str(error)) from None
    if stored.digest != sent.digest:
        raise Refused(409, "This reference was received before with another payload or payload type.")
    return {"duplicate": True}


def _enqueue(peer: Peer, sent: _Transfer, alias: str) -> int:
    stored = {"payload": sent.payload, "payload_type": sent.payload_type}
    options = TaskOptions(reference=sent.reference, priority=sent.priority if peer.accept_priority else None)
    with restored({} if sent.traceparent is None else {"traceparent": sent.traceparent}):
        task = enqueue_task(sent.queue, options, InsertOptions(using=alias), stored)
    return task.pk


def _transfer_of(body: bytes, max_bytes: int) -> _Transfer:
    """Read a body; every value is checked, and an unknown one is refused."""
    first, newline, payload = body.partition(b"\n")
    if len(first) > MAX_ENVELOPE_BYTES or len(payload) > max_bytes:
        raise serializers.BadInput("body", "is too long.")
    given: dict[str, Any] = serializers.json_object(first)
    if set(given) != set(ENVELOPE_KEYS):
        raise serializers.BadInput("body", f"must begin with an object of the keys {', '.join(ENVELOPE_KEYS)}.")
    serializers.whole("version", given.pop("version"), FORMAT_VERSION, FORMAT_VERSION)
    given["priority"] = serializers.whole("priority", given["priority"], -32_768, 32_767)
    for name, max_length in TEXT_LENGTHS.items():
        is_text = given[name] is not None or name == "queue"
        if is_text and not serializers.text(name, given[name], max_length):
            raise serializers.BadInput(name, "must not be empty.")
    if (given["reference"] is None) == (given["transfer"] is None):
        raise serializers.BadInput("transfer", "must be there if there is no reference, and only then.")
    if given["traceparent"] is not None and not TRACEPARENT.fullmatch(given["traceparent"]):
        raise serializers.BadInput("traceparent", "is not a trace context.")
    text = payload.decode() if newline else None
    if text is not None:
        fault = json_payload.find_fault(json_payload.loads(text), conf.settings().payload_limits)
        if fault is not None:
            raise exceptions.PayloadError(fault[1], path=fault[0])
    return _Transfer(**given, payload=text)
