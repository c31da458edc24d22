"""Secrets do not leave: not by a key of JSON, not by a line of a traceback, however they are written."""

import json
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any

import pytest
from django.contrib.auth.models import User
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, Field

from django_dbtaskqueue import Sensitive, enqueue, processor
from django_dbtaskqueue.core import masking
from django_dbtaskqueue.core.codecs import decode
from django_dbtaskqueue.core.exceptions import OperationRefused, PayloadError
from django_dbtaskqueue.core.failure_signature import describe
from django_dbtaskqueue.core.masking import MASKED, masked, masked_text
from django_dbtaskqueue.models import Attempt, FailureGroup, Queue, Task
from django_dbtaskqueue.operations.permissions import search_fault
from django_dbtaskqueue.operations.search import parse
from django_dbtaskqueue.operations.verbs import with_secrets_of
from django_dbtaskqueue.testing import drain
from tests.factories import QUEUE, make_task
from tests.operations.site import refused

SECRET = "hunter2"
SECRET_KEYS = [
    "password", "Password", "db_password", "passwordHash", "X-Api-Key", "apiKey", "API KEY", "client.secret",
    "csrfToken", "Authorization", "Set-Cookie", "private-key", "aws_credentials", "PASSWD",
    # These Django and Sentry hide, too.
    "pwd", "pass", "sessionid", "sig", "signature", "access_key", "auth", "jwt", "otp", "card_pin", "cvv",
    "passphrase", "iban", "cardNumber", "X-CSRF-Token", "userAuth",
    "passcode", "AccountKey", "ssh_key", "cvv2", "pan", "dsn", "pwd1", "dbpwd", "passwort",
]  # fmt: skip


SECRET_ASSIGNED = "token", "token =", "user[password]", "user%5Bpassword%5D", "password[]", "{'token'"
SECRET_CALLS = (
    f"UUID('{SECRET}')",
    f'Some("{SECRET}")',
    f"a.B(1, '{SECRET}')",
    f"date({SECRET})",
    f'f"{SECRET}"',
    SECRET,
)


def test_keys_with_secrets_and_others() -> None:
    for key in SECRET_KEYS:
        assert masked({key: SECRET, "n": 1}) == {key: MASKED, "n": 1}
        assert masked([{"deep": [{key: {"a": SECRET}}]}]) == [{"deep": [{key: MASKED}]}]
        assert SECRET not in masked_text(f"{key}={SECRET} {{'{key}': '{SECRET}'}}")
    hostile = "://a:", "token>", "token=(", "token=a'", "token=a'b\"", "token]", "pin',x.", "token' "
    for text in ("password " * 20_000 + "a" * 100_000 + 'token="' * 5_000, *(one * 100_000 for one in hostile)):
        assert masked_text(text), "in one pass: a second one per key would take hours"
    for key in ("name", "passenger", "shipping", "apikind", "keys", "author", "carrier"):
        assert masked({key: "x"}) == {key: "x"}


def test_texts() -> None:
    for text, shown in (
        *((f"{key}hunter2 x", f"{key}{MASKED} x") for key in ("password=", "password = ", "PGPASSWORD=")),
        ('{"api_key": "hunter2", "n": 1}', f'{{"api_key": "{MASKED}", "n": 1}}'),
        ("{'token': 'hunter2', 'n': 1}", f"{{'token': '{MASKED}', 'n': 1}}"),
        ("{'token': b'hunter2'}", f"{{'token': b'{MASKED}'}}"),
        ("{'token': 42, 'n': 1}", f"{{'token': {MASKED}, 'n': 1}}"),
        (r'"{\"token\": \"hunter2\"}"', rf'"{{\"token\": \"{MASKED}\"}}"'),
        ("f(secret='hun\\'ter2', n=1)", f"f(secret='{MASKED}', n=1)"),
        ("Authorization: Bearer hunter2\nHost: x", f"Authorization: {MASKED}\nHost: x"),
        ("Cookie: a=hunter2; b=hunter2", f"Cookie: {MASKED}"),
        ("GET /x?token=hunter2&n=1", f"GET /x?token={MASKED}&n=1"),
        ("postgres://ada:hunter2@db/x", f"postgres://ada:{MASKED}@db/x"),
        ("token='hunter2 without an end", f"token='{MASKED}"),
        ("sent bearer hunter2 and Basic aHVudGVyMg==", f"sent bearer {MASKED} and Basic {MASKED}"),
        ("password\thunter2\tada", f"password\t{MASKED}\tada"),
        ("<password>hunter2</password>", f"<password>{MASKED}</password>"),
        ("Password(value='hunter2')", f"Password(value='{MASKED}')"),
        ("('password', 'hunter2')", f"('password', '{MASKED}')"),
        ('{"value": "hunt, er2", "name": "token"}', f'{{"value": "{MASKED}", "name": "token"}}'),
        ("Key (token)=(hunter2) exists", f"Key (token)=({MASKED}) exists"),
        *((plain, plain) for plain in ('{"value": "seen", "name": "colour"}', "no basic concepts, no (token) > x", "")),
    ):
        assert (masked_text(text), masked({"note": text})) == (shown, {"note": shown})


def test_secrets_beside_their_name() -> None:
    for value in (
        ["password", SECRET],
        ["password", SECRET, 1],
        {"name": "Authorization", "value": SECRET},
        *({name: "password", "value": SECRET} for name in ("type", "field", "k", "header")),
        {"Name": "Authorization", "VALUE": SECRET},
        *(f"x {key}={value}, n=1" for key in SECRET_ASSIGNED for value in SECRET_CALLS),
        *(f"('pin', {call})" for call in SECRET_CALLS[:4]),
        f'<input name="token" value="{SECRET}">',
        f"curl --password {SECRET} x",
        f"sent Bearer {SECRET}",
        f"postgres://ada:{SECRET}/@{SECRET}@db/x",
        # A result that is shown as text, or an error that shows its argument.
        *map(str, ({"password": [SECRET]}, {"token": {"a": SECRET}}, ["token", {"a": SECRET}], {"pin": (SECRET, 1)})),
        *map(str, ({"name": "token", "value": SECRET}, {"k": "token", "values": [1, SECRET]})),
        *map(json.dumps, ({"name": "token", "value": SECRET}, json.dumps({"key": "token", "v": SECRET}))),
        json.dumps({"password": [{"a": 1}, SECRET]}, indent=2),
        f"Header(name='token', value='{SECRET}')",
    ):
        assert SECRET not in str(masked(value))


@dataclass(frozen=True)
class Account:
    number_at_bank: "Annotated[str, Sensitive] | None"


@dataclass(frozen=True)
class Transfer:
    to: list[Account]
    amount: int


@dataclass(frozen=True)
class Card:
    digits: Annotated[str, Sensitive]


@pytest.mark.usefixtures("taskqueue_registry")
def test_a_field_marked_as_sensitive_is_masked_and_cannot_be_searched(caplog: Any) -> None:
    @processor("transfers", payload=Transfer, max_attempts=1)
    def send(task: Any) -> None:
        raise ValueError(f"refused: {task.payload} password={SECRET}")

    with caplog.at_level("WARNING"):
        enqueue("transfers", "T1", Transfer([Account(SECRET)], 5))
        drain("transfers")
    task, attempt, group = Task.objects.get(), Attempt.objects.get(), FailureGroup.objects.first()
    assert task.status == "ERROR" and SECRET in str(task.payload)
    written = [task.process_result, attempt.message, attempt.traceback, caplog.text, group and group.message]
    assert MASKED in str(task.process_result) and SECRET not in str(written)
    assert masked(task.payload) == {"to": [{"number_at_bank": MASKED}], "amount": 5}
    assert masked(enqueue(QUEUE, payload=Card(SECRET)).payload) == {"digits": MASKED}, "who only enqueues masks, too"
    user = User.objects.create_superuser("root")
    assert "cannot be searched" in search_fault(user, parse(f"payload.to.0.number_at_bank:{SECRET[:2]}*"))


class Signed(BaseModel):
    signed_on: list[Annotated[date, Sensitive]] = Field(serialization_alias="onWhichDay")


def test_what_does_not_fit_a_class_is_told_without_masked_values() -> None:
    for cls, payload in ((list[Card], [{"digits": {SECRET: 1}}]), (dict[str, list[date]], {"tokens": [SECRET]}),
                         (Signed, {"signed_on": SECRET})):  # fmt: skip
        with pytest.raises(PayloadError) as error:
            decode(cls, payload)
        assert SECRET not in str(describe(error.value, QUEUE))
    assert masked({"onWhichDay": [SECRET]}) == {"onWhichDay": MASKED}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(JSON)
def test_what_is_masked_keeps_its_shape_and_masking_again_changes_nothing(value: Any) -> None:
    once = masked(value)
    assert masked(once) == once and type(once) is type(value)


@given(st.text(max_size=30), st.text(alphabet="abcXYZ019", min_size=4, max_size=12))
def test_a_secret_between_quotes_never_shows(before: str, secret: str) -> None:
    assert f"§{secret}" not in masked_text(f"{before}\n'password': '§{secret}§'")


def test_a_project_says_what_its_secrets_are(settings: Any) -> None:
    settings.DBTASKQUEUE = {"MASK": ["iban"]}
    assert masked({"IBAN": "DE1", "password": "x"}) == {"IBAN": MASKED, "password": "x"}
    settings.DBTASKQUEUE = {"MASK": [*masking.MASKED_KEYS, "iban"]}
    assert masked_text("iban=DE1 password=x") == f"iban={MASKED} password={MASKED}"
    settings.DBTASKQUEUE = {"MASK": []}
    assert masked_text("password=x") == "password=x"


def test_a_masked_value_cannot_be_found_by_searching() -> None:
    """Each match would tell whether a guess is right, so a secret could be read sign by sign."""
    user = User.objects.create_superuser("ada")
    guesses = ('payload.password:"h"*', "payload.db.api_key:>a", "-result.token:x", "context.auth.Secret:x")
    for text in (*guesses, "payload.n:1 payload.password:x"):
        assert "cannot be searched: the values are masked" in search_fault(user, parse(text)), text
        assert search_fault(None, parse(text)) == ""  # the command line has the database's own login
    assert search_fault(user, parse("payload.carrier:UA result.n:3")) == ""


def test_no_edit_of_a_payload_bares_or_changes_a_secret() -> None:
    header, pair, item = {"name": "Authorization", "value": "s3cr3t"}, ["password", "s3cr3t"], {"password": "s3cr3t"}
    edits: list[tuple[Any, Any]] = [
        *((header, {"name": "Accept", "value": MASKED}), (header, {"name": "Accept"}), (pair, ["word", MASKED])),
        *((pair, ["password", "other"]), (item, {"password": "other"}), ([item], [{"word": MASKED}])),
    ]
    for stored, edited in edits:
        refused(None, with_secrets_of, stored, edited, error=OperationRefused)


def test_no_edit_tells_whether_a_guess_of_a_secret_is_right() -> None:
    """Each answer would be a guess less; so the true value is refused as a wrong one is."""
    for one in [{"pin": 4821}, ["password", "4821"], {"name": "token", "value": "4821"}, {"a": [{"pin": "4821"}]}]:
        told = set()
        for guess in ("4821", "4822", 4821, 4822, None):
            edited = json.loads(json.dumps(masked(one)).replace(json.dumps(MASKED), json.dumps(guess)))
            with pytest.raises(OperationRefused) as error:
                with_secrets_of(one, edited)
            told.add(str(error.value))
        assert len(told) == 1 and "is masked and cannot be changed here" in told.pop()


def test_an_edit_of_a_payload_keeps_what_was_masked() -> None:
    stored = {"n": 1, "headers": [{"name": "Cookie", "value": "s3cr3t"}, ["token", 7]], "note": "password=s3cr3t"}
    edited: Any = masked(stored)
    assert with_secrets_of(stored, edited | {"n": True}) == stored | {"n": True}
    assert with_secrets_of({"password": "s3cr3t", "n": 1}, {"n": 2}) == {"password": "s3cr3t", "n": 2}


def test_a_search_in_all_queues_looks_also_in_those_made_at_runtime(settings: Any) -> None:
    settings.DBTASKQUEUE |= {"CAN_OPERATE": f"{__name__}.not_made_at_runtime"}
    user = User.objects.create_superuser("ada")
    assert search_fault(user, parse("error:x")) == ""
    for made in (Queue.objects.create(name="made-at-runtime"), make_task(queue="made-at-runtime")):
        assert "You may not see the payloads of all queues" in search_fault(user, parse("error:x"))
        assert search_fault(user, parse(f"queue:{QUEUE} error:x")) == ""
        made.delete()


def not_made_at_runtime(user: Any, verb: str, queue: str) -> bool:
    return queue != "made-at-runtime"
