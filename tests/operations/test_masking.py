"""Secrets do not leave: not by a key of JSON, not by a line of a traceback, however they are written."""

import json
import re
from dataclasses import dataclass, make_dataclass
from datetime import date
from typing import Annotated, Any, NewType

import pytest
from django.contrib.auth.models import User
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, Field

from django_dbtaskqueue import Sensitive, enqueue, processor
from django_dbtaskqueue.core import masking
from django_dbtaskqueue.core.codecs import build_codec, decode
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
KEYS: Any = {"https://ada:s3cr3t@db/": 1, "https://ada:other@db/": {"n": 2}}
Hidden = Annotated[str, Sensitive]
HINTS: Any = (Hidden | None, list[Hidden], dict[str, Hidden], tuple[Hidden, int], "Hidden | None")
HOSTILE = (
    *("token=f(", "token=f(x ", "token=f('", "v=f()token", '"token",a="b" ', "token=<", "token=a'", "token='a' '"),
    *("token[a]", "token:\n  ", "token: |\n ", "token:\n - a", "token=[\n", "token=a(\n", '"value":"x",token'),
    *("token=(", "token=a'b\"", "token]", "pin',x.", "token' ", "token(a='", "token(a=(1) ", "token(a='x' "),
)
# What is masked is in «»; ¦ ends a text.
TEXTS = r"""
    password=«hunter2» x¦password = «hunter2» x¦PGPASSWORD=«hunter2» x¦{"api_key": "«hunter2»", "n": 1}¦"token", old¦
    {'token': '«hunter2»', 'n': 1}¦{'token': b'«hunter2»'}¦{'token': «42», 'n': 1}¦"{\"token\": \"«hunter2»\"}"¦
    f(secret='«hun\'ter2»', n=1)¦Authorization: «Bearer hunter2»\nHost: x¦Cookie: «a=hunter2; b=hunter2»¦token='«hunter¦
    GET /x?token=«hunter2»&n=1¦postgres://ada:«hunter2»@db/x¦sent bearer «hunter2» and Basic «aHVudGVyMg==»¦
    password\t«hunter2»\tada¦<password>«hunter2»</password>¦Password(value='«hunter2»')¦('password', '«hunter2»')¦
    {"value": "«hunt, er2»", "name": "token"}¦{"value": "seen", "name": "colour"}¦Key (token)=(«hunter2») exists¦
    no basic concepts, no (token) > x¦keys ["password"]: x y¦the token(s) of x¦the token:\n  it was refused¦
    Login(user='ada', token=«UUID('h')», pin=«Decimal('4')», n=1) x¦{'pin': «Decimal('4')»}¦password=«Path('/h')» x¦
    ('token', «UUID('h')») x¦password == '«h»' x¦token != "«h»" x¦token=«Some("h")» x¦token=«Some(Secret("h"))» x¦
    token=«Some(Secret(a("h"))) x¦token=«Q[A(\n  'h',\n)]»\nx¦password = f"«h»" x¦token='«a' 'h»' x¦token='«it''s h»'¦
    token='«''h''»' x¦token=«<Token: a h>» x¦token=«<Q [<Token: h>]> x¦Pin(value=«Decimal('4')») x¦Pin(«4821») x¦
    Token(value=«['h'])¦environ["TOKEN"] = "«h»" x¦user[password]=«h»&x¦user%5Bpin%5D=«h»&x¦password[]=«h» x¦
    user[password][]=«h» x¦token['x'] = '«h»' x¦<input name="password" value="«h»"> x¦<input value="«h»" name="pwd">¦
    <input type="password" name="p" value="«h»"> x¦Header(value='«h»', name='token') x¦(value=«U('h')», name='token') x¦
    {"Name":"Authorization","Value":"«h»"} x¦{"Value":"«h»","Key":"db_password"} x¦(name='token', value=«U('h')») x¦
    {"id": "token", "value": "«h»"} x¦<meta name="csrf-token" content="«h»">¦token="«a" + "h»" x¦q%3Ftoken%3D«h»¦
    token%253D«h» x¦%22token%22%3A«%22h%22»,x¦{"name": "token", "type": "x", "value": "«h»"} x¦
    {"value": "«h»", "on": true, "name": "token"} x¦password:\n  «h»\nx: 1¦password: «|-\n  a b\n  h»\nx¦
    tokens:«\n  - a\n  - h»\nx¦password:\n  '«h»'\nx¦password=b64:"«h»" x¦password=x'«h»' x¦password=$'«h»' x¦
    U&'x', password=U&'«h»' x¦Token(\n  value='«h»')\nx¦Token«(id=1, value='h') x¦Token«(1, 'h') x¦
    Token«(\n  a=f(1),\n  b='h')»\nx¦get_password«('ada', 'h')¦token(a, b) x
"""


def test_keys_and_texts_with_secrets_and_others() -> None:
    for key in SECRET_KEYS:
        assert masked({key: SECRET, "n": 1}) == {key: MASKED, "n": 1}
        assert masked([{"deep": [{key: {"a": SECRET}}]}]) == [{"deep": [{key: MASKED}]}]
        assert SECRET not in masked_text(f"{key}={SECRET} {{'{key}': '{SECRET}'}}")
    long = ("password " * 20_000 + "a" * 100_000 + 'token="' * 5_000, "://a:" * 100_000, "token>" * 100_000)
    for text in (*long, "token" + "\\" * 90_000, *(one * 20_000 for one in HOSTILE)):
        assert masked_text(text), "in one pass: a second one per key would take hours"
    for key in ("name", "passenger", "shipping", "apikind", "keys", "author", "carrier"):
        assert masked({key: "x"}) == {key: "x"}
    for form in TEXTS.strip().replace("¦\n    ", "¦").replace(r"\n", "\n").replace(r"\t", "\t").split("¦"):
        text, shown = form.replace("«", "").replace("»", ""), re.sub("«[^»]*(»|$)", MASKED, form)
        assert (masked_text(text), masked({"note": text})) == (shown, {"note": shown})


def test_secrets_beside_their_name() -> None:
    for value in (
        *(["password", SECRET], ["password", SECRET, 1]),
        *({"Key": "pin", "VALUE": SECRET}, {f"https://ada:{SECRET}@db/": 1}),
        *({name: "password", "value": SECRET} for name in ("name", "type", "field", "k", "header")),
        *(f"curl --password {SECRET} x", f"sent Bearer {SECRET}", f"postgres://ada:{SECRET}/@{SECRET}@db/x"),
        # A result that is shown as text, or an error that shows its argument.
        *map(str, ({"password": [SECRET]}, {"token": {"a": SECRET}}, ["token", {"a": SECRET}], {"pin": (SECRET, 1)})),
        *map(str, ({"name": "token", "value": SECRET}, {"k": "token", "values": [1, SECRET]})),
        *map(json.dumps, ({"name": "token", "value": SECRET}, json.dumps({"key": "token", "v": SECRET}))),
        json.dumps({"password": [{"a": 1}, SECRET]}, indent=2),
    ):
        assert SECRET not in str(masked(value))


@dataclass(frozen=True)
class Account:
    number_at_bank: Annotated[str, Sensitive]


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
    signed_on: Annotated[date, Sensitive]
    sealed: Hidden | None = Field(default=None, alias="waxed", serialization_alias="stamped")


def test_a_mark_is_found_wherever_a_hint_has_it_and_a_misfit_is_told_without_the_value() -> None:
    marked = {f"marked_{n}": hint for n, hint in enumerate(HINTS)}
    inner: Any = make_dataclass("Inner", [("inside", Hidden)])
    kind = make_dataclass("Marked", [*marked.items(), ("n", NewType("N", inner))], namespace={"__module__": __name__})
    assert build_codec(kind) and build_codec(Signed)
    for name in (*marked, "inside", "sealed", "waxed", "stamped"):
        assert masked({name: SECRET}) == {name: MASKED}
    for cls, payload in ((list[Card], [{"digits": {SECRET: 1}}]), (dict[str, list[date]], {"tokens": [SECRET]}),
                         (Signed, {"signed_on": SECRET})):  # fmt: skip
        with pytest.raises(PayloadError) as error:
            decode(cls, payload)
        assert SECRET not in str(describe(error.value, QUEUE))


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


def test_no_edit_of_a_payload_bares_or_changes_a_secret_or_tells_a_guess_right() -> None:
    header, pair, item = {"name": "Authorization", "value": "s3cr3t"}, ["password", "s3cr3t"], {"password": "s3cr3t"}
    edits: list[tuple[Any, Any]] = [
        *((header, {"name": "Accept", "value": MASKED}), (header, {"name": "Accept"}), (pair, ["word", MASKED])),
        *((KEYS, masked(KEYS) | KEYS), ({}, masked(KEYS)), (KEYS, masked(KEYS) | {"token=x": 1})),
        *((pair, ["password", "other"]), (item, {"password": "other"}), ([item], [{"word": MASKED}])),
    ]
    for stored, edited in edits:
        refused(None, with_secrets_of, stored, edited, error=OperationRefused)
    # Each answer would be a guess less; so the true value is refused as a wrong one is
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
    stored |= KEYS
    edited: Any = masked(stored)
    assert [*masked(KEYS)] == ["https://ada:•••@db/", "https://ada:•••@db/•••1"] == [*masked(masked(KEYS))]
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
