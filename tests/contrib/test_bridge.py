"""The HTTP bridge against forgers (S8), replays (S9), addresses that must not be opened (S10), and bold peers (S11)."""

import json
import socket
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from threading import Event
from time import time
from typing import Any
from uuid import uuid4

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from standardwebhooks import Webhook

from django_dbtaskqueue import enqueue, processor
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import bridge_of
from django_dbtaskqueue.contrib import bridge
from django_dbtaskqueue.contrib.bridge import send_to
from django_dbtaskqueue.models import Task, UsedReference
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.testing import drain
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.contrib.bridging.server import PEM, Handler, serving
from tests.support import at_once, sql

SECRET, OTHER, STRANGE = ("whsec_" + b64encode(bytes([number]) * 32).decode() for number in (1, 2, 3))
PATH = "/bridge/shop/"
ENVELOPE: dict[str, Any] = {"version": 1, "queue": "inbox", "reference": "r1", "priority": 7}
ENVELOPE |= dict.fromkeys(("transfer", "payload_type", "traceparent"))


def configure(settings: Any, **changes: Any) -> None:
    peer = {"secrets": [SECRET, OTHER], "queues": {"inbox": ["", "shop.Order"]}, **changes}
    queues: dict[str, Any] = {"inbox": {}, "private": {}}
    settings.DBTASKQUEUE = {"QUEUES": queues, "BRIDGE": {"peers": {"shop": peer}}, "PAYLOAD_MAX_BYTES": 2000}
    settings.ROOT_URLCONF = "tests.contrib.bridging.urls"


@pytest.fixture
def site(db: None, settings: Any) -> Callable[..., None]:
    """Call it with other settings of the peer that sends to this site."""
    bridge._counted_until.clear()
    configure(settings)
    return partial(configure, settings)


def body_of(text: str | None = '{"a":1}', /, **changes: Any) -> bytes:
    first = json.dumps({**ENVELOPE, **changes})
    return (first if text is None else f"{first}\n{text}").encode()


def signed(body: bytes, *, secret: str = SECRET, what: str = f"POST {PATH}", age: float = 0.0) -> dict[str, str]:
    moment, name = datetime.fromtimestamp(int(-age + time()), UTC), f"msg_{uuid4().hex}"
    signature = Webhook(secret).sign(name, moment, f"{what}\n{body.decode()}")
    return {"webhook-id": name, "webhook-timestamp": str(int(moment.timestamp())), "webhook-signature": signature}


def post(body: bytes, headers: dict[str, str] | None = None, path: str = PATH) -> Any:
    given = signed(body) if headers is None else headers
    return Client(enforce_csrf_checks=True).post(path, body, content_type="application/octet-stream", headers=given)


def transfers(using: str = "default") -> Any:
    """What is known of received tasks."""
    return UsedReference.objects.using(using).exclude(digest="")


def assert_genuine(answer: Any, secret: str = SECRET) -> None:
    told = f"ANSWER {answer.status_code} {PATH}\n{answer.content.decode()}"
    Webhook(secret).verify(told, dict(answer.headers), json_parse=False)


def is_refused(body: bytes, headers: dict[str, str], path: str = PATH) -> bool:
    answer = post(body, headers, path)
    return (answer.status_code, answer.content) == (401, b"")


# -- S8: forgery -------------------------------------------------------------------------------------------------------
def test_no_changed_byte_is_genuine(site: Callable[..., None]) -> None:
    body = body_of()
    genuine = signed(body)
    for name, value in genuine.items():
        for at in range(len(value)):
            forged = value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :]
            assert is_refused(body, {**genuine, name: forged}), (name, forged)
        for wrong in (value[:-1], "", f"{value},{value}", f"{value} {value} {value} {value} {value}"):
            assert is_refused(body, {**genuine, name: wrong}), (name, wrong)
        assert is_refused(body, {other: text for other, text in genuine.items() if other != name})
    for at in range(len(body)):
        assert is_refused(body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :], genuine), at
    assert is_refused(body + b"\xff", genuine) and is_refused(body, signed(body, secret=STRANGE))
    for what in ("PUT /bridge/shop/", "POST /bridge/other/", f"ANSWER 200 {PATH}"):
        assert is_refused(body, signed(body, what=what)), what
    assert is_refused(body, signed(body, what="POST /bridge/other/"), "/bridge/other/")
    assert (Task.objects.count(), UsedReference.objects.count()) == (0, 0)
    assert post(body, genuine).status_code == 200


def test_both_live_keys_are_accepted_and_the_answer_is_signed_with_both(site: Callable[..., None]) -> None:
    for number, secret in enumerate((SECRET, OTHER)):
        body = body_of(reference=f"r{number}")
        headers = signed(body, secret=secret)
        answer = post(body, headers)
        assert answer.json() == {"task": Task.objects.latest("pk").pk, "duplicate": False}
        assert answer.headers["webhook-id"] == headers["webhook-id"]
        for key in (SECRET, OTHER):
            assert_genuine(answer, key)


def test_a_misplaced_secret_is_refused_and_not_printed() -> None:
    for wrong in [{"rate": SECRET}, {"queues": [SECRET]}, {SECRET: 1}, {"url": f"https://x/?k={SECRET}"}]:
        for given in ({"peers": {"shop": {"secrets": [OTHER], **wrong}}}, {"remember": SECRET}):
            with pytest.raises(ImproperlyConfigured, match='secrets stand in "secrets" of a peer only') as error:
                bridge_of(given)
            assert SECRET not in str(error.value)


def test_it_is_closed_without_a_secret(site: Callable[..., None], settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"inbox": {}}}
    for answer in (post(body_of()), Client().get(PATH)):
        assert (answer.status_code, answer.content) == (404, b"")


# -- S9: replay --------------------------------------------------------------------------------------------------------
def test_a_message_is_valid_for_five_minutes_and_never_for_its_sender(site: Callable[..., None]) -> None:
    for age in [310, -310]:
        body = body_of()
        assert is_refused(body, signed(body, age=age))
        assert post(body, signed(body, age=age * 0.9)).status_code == 200
    site(url=f"https://shop.example{PATH}")
    body = body_of()
    assert is_refused(body, signed(body))


def test_a_replay_is_refused_and_a_resend_stores_nothing(settings: Any, process_database: ProcessDatabase) -> None:
    configure(settings)
    body = body_of()
    same = signed(body)

    # One message at once, then one transfer in several messages at once.
    assert sorted(at_once(6, lambda index: post(body, same).status_code)) == [200, *[401] * 5]
    body = body_of(reference="r2")
    fresh = [signed(body) for _ in range(6)]
    assert at_once(6, lambda index: post(body, fresh[index]).status_code) == [200] * 6
    assert sorted(Task.objects.values_list("reference", flat=True)) == ["r1", "r2"]


def test_a_resend_is_known_when_the_task_is_done_deleted_and_forgotten(site: Callable[..., None]) -> None:
    processor("inbox")(lambda task: None)
    body, nameless = body_of(), body_of(reference=None, transfer="ab" * 32)
    for one in (body, nameless):
        assert post(one).json()["duplicate"] is False
        assert post(one).json() == {"duplicate": True}
    drain("inbox")
    assert post(body).json() == {"duplicate": True}
    Task.objects.all().delete()
    assert [post(one).json() for one in (body, nameless)] == [{"duplicate": True}] * 2
    assert Task.objects.count() == 0
    answer = post(body_of('{"a":2}'))  # no resend: it is refused aloud, with a signature
    assert (answer.status_code, "another payload" in answer.json()["error"]) == (409, True)
    assert "webhook-signature" in answer.headers
    past = datetime.now(UTC) - timedelta(seconds=1)
    UsedReference.objects.exclude(reference__startswith="id:").update(expire_time=past)
    Housekeeper().turn(RetentionPolicy())
    assert [row.reference for row in UsedReference.objects.all()] == [f"id:{'ab' * 32}"]


# -- S10: addresses ----------------------------------------------------------------------------------------------------
@pytest.fixture
def outbox(db: None, settings: Any, taskqueue_registry: None) -> Callable[..., Any]:
    """Call it with an address to send one task there; it returns what drain reports."""
    processor("outbox")(send_to("there"))

    def send(url: str, payload: object = None, **changes: Any) -> Any:
        peer = {"url": url, "secrets": [SECRET], "queue_names": {"outbox": "inbox"}, **changes}
        queue = {"max_attempts": 2, "retry": "fixed:1h"}
        settings.DBTASKQUEUE = {"QUEUES": {"outbox": queue}, "BRIDGE": {"peers": {"there": peer}}}
        enqueue("outbox", payload=payload)
        return drain("outbox")

    return send


def test_a_peer_s_url_is_https_and_nothing_but_a_place(settings: Any) -> None:
    for url in (
        "http://shop.example/x", "https://user@shop.example/x", "https://shop.example\\@10.0.0.1/x",
        "https://shop.example/x?y=1", "https://shop.example/x#y", "https://shop.example", "//shop.example/x",
        "https://shop.example:port/x", "https://shop.example/x y", "file:///etc/passwd", "https://sh\nop.example/x",
    ):  # fmt: skip
        settings.DBTASKQUEUE = {"BRIDGE": {"peers": {"shop": {"secrets": [SECRET], "url": url}}}}
        with pytest.raises(ImproperlyConfigured, match=r'\["BRIDGE"\]\["peers"\]\[\'shop\'\]\[\'url\'\]'):
            conf.settings()


PRIVATE = ["127.0.0.1", "10.1.2.3", "192.168.0.1", "100.64.0.1", "::1", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"]
NEVER = ["169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "fe80::1%eth0",
         "fec0::1", "2001:0:4136:e378::5601:5601", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255"]  # noqa: S104 # fmt: skip


def test_addresses_that_are_not_public_are_never_opened(outbox: Callable[..., Any], monkeypatch: Any) -> None:
    opened: list[Any] = []

    def refuse(address: Any, *_: Any) -> Any:
        opened.append(address)
        raise ConnectionRefusedError("no network here")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for host in ("127.0.0.1", "2130706433", "0x7f000001", "0177.1", "[::1]", "localhost"):
        assert "is not a public one" in str(outbox(f"https://{host}/x").outcomes[0].error), host

    def resolving(*texts: str) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (text, 443)) for text in texts])

    for text, allowed in (*product((*PRIVATE, *NEVER), [False]), *product(NEVER, [True])):
        resolving(text)
        report = outbox("https://shop.example/x", allow_private=allowed)
        assert "is not a public one" in str(report.outcomes[0].error), text
    resolving("93.184.216.34", "10.0.0.1")
    assert "10.0.0.1" in str(outbox("https://shop.example/x").outcomes[0].error)
    assert opened == []
    for text in PRIVATE:
        resolving(text)
        outbox("https://shop.example/x", allow_private=True)
    resolving("93.184.216.34")
    outbox("https://shop.example/x")
    assert opened == [(text, 443) for text in (*PRIVATE, "93.184.216.34")]


Answering = Callable[[Callable[[Any], None]], tuple[str, list[str]]]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Call it with a function of a handler to have a server; it returns the address and the paths asked for."""

    def begin(answer: Callable[[Any], None]) -> tuple[str, list[str]]:
        paths: list[str] = []

        class Scripted(Handler):
            def do_POST(self) -> None:
                paths.append(self.path)
                self.close_connection = True
                answer(self)

        return f"https://localhost:{stack.enter_context(serving(Scripted)).port}{PATH}", paths

    with ExitStack() as stack:
        yield begin


def answered(handler: Any, status: int, body: bytes, headers: dict[str, str]) -> None:
    handler.body()
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def test_a_name_is_looked_up_once_and_no_redirect_followed(outbox: Any, answering: Answering, monkeypatch: Any) -> None:
    other, others = answering(lambda handler: answered(handler, 200, b"{}", {}))
    url, paths = answering(lambda handler: answered(handler, 302, b"", {"Location": other}))
    lookups = iter([[(0, 0, 0, "", ("127.0.0.1", 443))]])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: next(lookups))

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        opened = socket.socket()
        opened.settimeout(timeout)
        opened.connect(address)  # without another look-up
        return opened

    monkeypatch.setattr(socket, "create_connection", connect)
    report = outbox(url, allow_private=True, ca_file=PEM)
    assert "answered 302 without a valid signature" in str(report.outcomes[0].error)
    assert (paths, others) == ([PATH], [])


def test_slow_and_large_answers_are_cut(outbox: Callable[..., Any], answering: Answering) -> None:
    over = Event()

    def drip(handler: Any) -> None:
        handler.body()
        while not over.is_set():  # each read of the sender succeeds
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n" if not handler.headers.get("x") else b"")
            handler.headers["x"] = "y"
            handler.wfile.write(b"a")

    slow, _ = answering(drip)
    assert outbox(slow, allow_private=True, ca_file=PEM, timeout="400ms").retried == 1
    over.set()
    large, _ = answering(lambda handler: answered(handler, 200, b"x" * 70_000, {}))
    error = outbox(large, allow_private=True, ca_file=PEM).outcomes[0].error
    assert "The answer has more than 65,536 bytes" in str(error)
    # A certificate that nobody vouches for
    assert "CERTIFICATE_VERIFY_FAILED" in str(outbox(large, allow_private=True).outcomes[0].error)


def test_only_a_signed_answer_to_this_message_ends_a_task(outbox: Callable[..., Any], answering: Answering) -> None:
    def reply(status: int, secret: str = SECRET, *, what: str = "", sent: int = 0) -> Callable[[Any], None]:
        def answer(handler: Any) -> None:
            name, body = handler.headers["webhook-id"], b'{"task":5,"duplicate":false,"error":"no","retry_after":30}'
            moment = datetime.fromtimestamp(int(time()), UTC)
            signature = Webhook(secret).sign(name, moment, f"{what or f'ANSWER {status} {PATH}'}\n{body.decode()}")
            headers = {"webhook-id": name, "webhook-timestamp": str(int(moment.timestamp()))}
            answered(handler, sent or status, body, {**headers, "webhook-signature": signature})

        return answer

    trusted = {"allow_private": True, "ca_file": PEM}
    wrong = (reply(200, STRANGE), reply(503), reply(429, STRANGE), reply(403, what="x"), reply(403, sent=200))
    for answer in (*wrong, reply(200, what="POST")):
        assert outbox(answering(answer)[0], **trusted).completed == 0
    assert not Task.objects.exclude(status="CREATED").exists()
    before = timezone.now()
    assert outbox(answering(reply(429))[0], **trusted).reenqueued == 1
    (waits,) = Task.objects.filter(reenqueue_attempt=1)
    assert (waits.attempt, waits.status) == (0, "CREATED")
    assert timedelta(seconds=30) <= waits.next_process_time - before <= timedelta(seconds=120)
    assert outbox(answering(reply(403))[0], **trusted).failed == 1
    assert outbox(answering(reply(200))[0], **trusted).completed == 1
    assert Task.objects.get(status="COMPLETED").result["task"] == 5
    too_long = outbox(answering(reply(200))[0], "x" * 100, max_bytes=50, **trusted)
    assert (too_long.failed, "at most 50" in str(too_long.outcomes[0].error)) == (1, True)


# -- S11: what a peer may do -------------------------------------------------------------------------------------------
def test_a_peer_sets_no_more_than_a_task_s_content(site: Callable[..., None]) -> None:
    def status(text: str | None = "1", **changes: Any) -> int:
        return int(post(body_of(text, **changes)).status_code)

    names = {field.name for field in Task._meta.get_fields()} | {"delay", "run_at", "ttl", "timeout", "using", "after"}
    for name in sorted(names - set(ENVELOPE)):
        assert status(**{name: 1}) == 422, name
    for name in ENVELOPE:
        for wrong in (True, [], {}, "\0", "\ud800", "x" * 300, -40_000):
            assert status(**{name: wrong}) in (403, 422), (name, wrong)
        assert post(json.dumps({key: ENVELOPE[key] for key in ENVELOPE if key != name}).encode()).status_code == 422
    queues = product(["queue"], ("private", "nowhere", "inbox ", "INBOX", "bridge/shop"))
    for name, wrong in (*queues, *product(["payload_type"], ("os.system", "shop.Order2"))):
        assert status(**{name: wrong}) == 403, wrong
    for payload in ("", "{", "NaN", "1e999", '"\\u0000"', '"\\ud800"', "[" * 900 + "]" * 900, "1\n2"):
        assert status(payload) == 422, payload
    assert post(b"[]").status_code == 422
    assert (Task.objects.count(), transfers().count()) == (0, 0)
    assert status(payload_type="shop.Order") == 200
    task = Task.objects.get()
    assert (task.payload_type, task.priority, task.max_attempts, task.context) == ("shop.Order", 0, 5, None)
    site(accept_priority=True)
    assert (status(reference="r2"), Task.objects.get(reference="r2").priority) == (200, 7)


def test_a_peer_over_its_rate_waits_and_forgers_do_not_use_it_up(site: Callable[..., None]) -> None:
    site(rate="2/h")
    for _ in range(5):
        assert is_refused(body_of(), signed(body_of(), secret=STRANGE))
    assert post(body_of()).status_code == 200
    body = body_of(reference="r2")
    headers = signed(body)
    with CaptureQueriesContext(connection) as queries:
        answer = post(body, headers)
    assert (len(queries), answer.status_code) == (0, 429)
    assert 1790 <= int(answer.headers["Retry-After"]) == answer.json()["retry_after"] <= 1800
    assert_genuine(answer)
    site(rate="1000/s")  # the message was refused, not received: the same one is accepted later
    bridge._counted_until.clear()
    assert post(body, headers).status_code == 200
    assert {post(body).status_code for _ in range(20)} == {200}


def test_a_copy_of_a_message_uses_up_no_rate(site: Callable[..., None], clock: SteppedClock) -> None:
    site(rate="2/s")
    clock.stop()
    headers = signed(body_of())
    assert post(body_of(), headers).status_code == 200
    assert all(is_refused(body_of(), headers) for _ in range(5))
    assert post(body_of(reference="r2")).status_code == 200


def test_too_large_a_body_is_not_read_and_a_taken_reference_is_refused(site: Callable[..., None]) -> None:
    assert post(body_of('"' + "x" * 7000 + '"')).status_code == 413
    assert post(body_of('"' + "x" * 2500 + '"')).status_code == 422
    site()
    enqueue("inbox", "r1")
    assert (post(body_of()).status_code, transfers().count()) == (409, 0)
    assert UsedReference.objects.count() == 1  # the message cannot be replayed when the reference is free


def test_the_trace_goes_on_and_the_payload_is_not_touched(site: Callable[..., None]) -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    assert post(body_of('{"z":1.10,"a":123456789012345678901234567890}', traceparent=traceparent)).status_code == 200
    assert Task.objects.get().context == {"traceparent": traceparent}
    ((text,),) = sql("SELECT payload::text FROM dbtaskqueue_task")
    assert text.replace(" ", "") == '{"a":123456789012345678901234567890,"z":1.10}'  # as jsonb writes it


@pytest.mark.django_db(databases=["default", "sqlite"])
@pytest.mark.usefixtures("site")
def test_a_queue_with_shards_receives_in_its_first_and_sqlite_keeps_the_text(settings: Any) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "QUEUES": {"inbox": {"shards": ["sqlite", "default"]}}}
    for number in range(4):
        body = body_of('{"z": 1.10,"a":1E2}', reference=f"r{number}")
        assert [post(body).json()["duplicate"] for _ in range(2)] == [False, True]
    assert sql("SELECT payload FROM dbtaskqueue_task", alias="sqlite") == [('{"z": 1.10,"a":1E2}',)] * 4
    assert (Task.objects.count(), transfers("sqlite").count()) == (0, 4)


WRONG_PEERS: list[tuple[dict[str, Any], str]] = [
    ({"urls": ""}, "Did you mean 'url'"),
    *(({"secrets": wrong}, '"secrets"] is not valid') for wrong in ([SECRET, OTHER, STRANGE], ["whsec_c2hvcnQ="])),
    *(({name: "inbox"}, f"'{name}'") for name in ("queues", "queue_names")),
    *(({"timeout": "soon"}, '"timeout"'), ({"rate": "many"}, "\"rate\"]: 'many' is not a rate")),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"peers": {"shop": {"secrets": [SECRET], **peer}}}, named) for peer, named in WRONG_PEERS),
    ({"peer": {}}, "Did you mean 'peers'"),
    ({"peers": {"a/b": {"secrets": [SECRET]}}}, "a peer's name"),
    ({"peers": {"shop": {}}}, '"secrets"] is not valid'),
    ({"peers": {"shop": {"secrets": [OTHER, SECRET]}, "store": {"secrets": [SECRET]}}}, "and 'store' have a secret"),
    ({"remember": "-1d"}, "'remember'"),
]


def checked(settings: Any, bridge: dict[str, Any]) -> dict[str, str]:
    settings.DBTASKQUEUE = {"BRIDGE": bridge}
    return {str(error.id): str(error.msg) for error in checks.run_checks(tags=["dbtaskqueue"])}


def test_wrong_settings_are_named_and_no_secret_is_shown(settings: Any) -> None:
    for wrong, named in WRONG:
        found = checked(settings, wrong)["dbtaskqueue.E001"]
        assert named in found and "c2hvcnQ" not in found and SECRET.removeprefix("whsec_") not in found
    peer = {"secrets": [SECRET], "queues": ["nowhere"], "ca_file": "/nowhere.pem"}
    found = checked(settings, {"peers": {"shop": peer}})
    assert "'/nowhere.pem'" in found["dbtaskqueue.E012"] and "'nowhere'" in found["dbtaskqueue.W005"]
    assert SECRET not in repr(conf.settings())
