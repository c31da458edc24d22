"""Searches in payloads: a term means the same on both databases, for values of each type, and sees them masked."""

from typing import Any, cast

import pytest
from hypothesis import example, given, settings, strategies as st

from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.masking import MASKED, masked_text
from django_dbtaskqueue.models import BulkOperation, Task
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.operations.search import Search, Term, parse
from django_dbtaskqueue.operations.search.query import TaskFilter, select
from django_dbtaskqueue.operations.search.values import Match
from tests.factories import make_task
from tests.operations.site import TASKS, client, command, data, page, post, refused, work

BOTH = ("default", "sqlite")
on_both = pytest.mark.django_db(databases=BOTH)
PIECES = (
    *("password", "Token", "pin", "apiKey", "api key", "_", "x", "S3cr3t", "Ä", "7", " ", "\t", "\n", "\\", '"', "'"),
    *["=", ":", "=>", ",", ";", "&", "(", ")", "<", ">", "</", "--", "-", ".", "://", "@", "/", "b", "abcdef0="],
    *("Bearer ", "basic ", "Key (", MASKED, "U('x'", "[", "]", "%5B", "Name", "value", "|", ", ", 'name="', "''"),
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
BIG = 1970670598291982290
NUMBERS = (
    st.sampled_from([0, -0.0, 1.0, 1.5, 1e-7, 1e22, 1e300, 0.1, BIG, BIG + 9, -BIG, 2**53 + 1, 2**63, 10**30, -5])
    | st.integers(-12, 12)
    | st.floats(allow_nan=False, allow_infinity=False)
)
ODD_TEXTS = st.sampled_from(["5", "1e-7", "true", "null", "", "Authorization"])
SCALARS = TEXTS | NUMBERS | st.booleans() | st.none() | ODD_TEXTS
KEYS = st.sampled_from(["v", "value", "VALUE", "name", "Name", "type", "1", "n"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
PATHS = st.lists(KEYS | st.sampled_from(["0", "01"]), min_size=1, max_size=3).map(tuple)
WRITTEN = NUMBERS.map(repr) | TEXTS | st.sampled_from(["", "true", "null", "1.50", "007", "1E3", "-0", f"{BIG}.0"])
DECIMALS = NUMBERS.map(repr) | st.sampled_from(["1.50", "007", "1E3", "-0"])
MATCHES = (
    st.builds(Match, st.sampled_from(["=", "^", "$", "~", ">", ">=", "<", "<="]), WRITTEN)
    | st.builds(Match, st.just(".."), DECIMALS, DECIMALS)
)  # fmt: skip


def at(value: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        value = {step: value}
    return value


def found(payload: Any, *terms: Term) -> list[list[bool]]:
    """Return for each database which of the terms find a task with the payload."""
    answers = []
    for using in BOTH:
        tasks: Any = Task.objects.using(using)
        if not tasks.filter(reference="one").update(payload=payload):
            make_task(using=using, reference="one", payload=payload)
        answers.append([select(Search((term,)), tasks).exists() for term in terms])
    return answers


@on_both
@settings(max_examples=50)  # of three payloads each, by two terms, on two databases
@given(VALUES, PATHS, st.lists(MATCHES, min_size=1, max_size=3).map(tuple))
def test_a_term_means_the_same_on_both_databases(value: Any, path: tuple[str, ...], matches: tuple[Match, ...]) -> None:
    terms = [Term(".".join(("payload", *path)), matches, negated) for negated in (False, True)]
    for payload in (value, {path[0]: value}, at(value, path[::-1])):
        on_postgresql, on_sqlite = found(payload, *terms)
        assert on_postgresql == on_sqlite and sum(on_sqlite) == 1, (payload, matches)


@on_both
@given(TEXTS)
@example('{"name": "token", "value": "S3cr3t", "n": 1}')
@example('{"Value": "S3cr3t", "KEY": "api_token"}, {"value": "S3cr3t"}')
@example('{"password": ["S3cr3t", {"a": 1}], "n": 1}\nand more')
@example("{'pin': Decimal('S3cr3t'), 'n': 1}, f(token=Some(Secret('S3cr3t')), x=1), token='a' 'S3cr3t'")
@example('{"pin": [\n {\n  "a": 1\n },\n "S3cr3t"\n ],\n "n": 1\n}')
@example("Header(name='token', value=5) in ['token', 4711, (1)], ('token', 'S3cr3t')")
def test_a_text_is_found_as_it_is_shown_and_not_as_it_is(text: str) -> None:
    shown = masked_text(text)
    terms = [Term("payload.v", (Match("=", one),)) for one in (shown, text)]
    assert found({"v": text}, *terms) == [[True, shown == text]] * 2


SECRETS: dict[str, Any] = {
    "login": {"user": "ada", "password": "S3cr3t"}, "cmd": "curl --password S3cr3t -v",
    "headers": [{"Name": "Authorization", "Value": "S3cr3t"}, {"type": "token", "values": ["S3cr3t"]}],
    "pair": ["password", "S3cr3t"], "triple": ["password", "S3cr3t", 1], "address": "postgres://ada:S3cr3t@db/x",
    "note": "password=S3cr3t and more",
}  # fmt: skip
GUESSES = (
    *("payload.login:*S3*", "payload.login:{*", "payload.headers:*S3*", "payload.headers.0:*S3*", "payload.pair:*S3*"),
    *("payload.headers.0.Value:*S3*", "payload.headers.0.Value:S3cr3t", "payload.headers.0.Value:<=T"),
    *("payload.headers.1.values:*S3*", "payload.headers.1.values.0:S*", "payload.pair.1:S*", "payload.pair.1:S3cr3t"),
    *("payload.triple.1:*3t", "payload.cmd:*S3*", "payload.address:*S3*"),
    *("payload.note:*S3*", "payload.note:password=S*", "payload.note:<password=Z", "result.note:*S3*", "error:S3cr3t"),
)
SEEN = (
    *("payload.login:*", "payload.login.user:ada", "payload.headers.0.Name:Auth*", "payload.pair.0:password"),
    *("payload.triple.2:1", "payload.cmd:curl*", "payload.cmd:*-v", "payload.address:*@db/x", "error:more"),
    *('payload.note:*"and more"', f'payload.cmd:"curl --password {MASKED} -v"', f"payload.headers.0.Value:{MASKED}"),
)


def test_no_guess_of_a_masked_value_is_told_right(alias: str) -> None:
    error = {"process_result": "password=S3cr3t and more", "result": SECRETS}
    make_task("ERROR", using=alias, payload=SECRETS, **error)
    tasks: Any = Task.objects.using(alias)
    found = (*(f"-{text}" for text in GUESSES), *SEEN)
    assert [text for text in (*GUESSES, *found) if select(text, tasks).exists()] == [*found]


@pytest.mark.parametrize("guess", ["payload.login:*S3*", "payload.headers.0.Value:S*", "payload.cmd:*S3*", "error:S3"])
def test_no_road_tells_a_guess_right(guess: str, op: Any) -> None:
    task = make_task("ERROR", payload=SECRETS, process_result="password=S3cr3t")
    ada = client("view_task", "view_payload", "reprocess_task")
    assert str(task) not in page(op, TASKS, q=guess) and "No task matches" in page(op, TASKS, q=guess)
    assert ada.get("/api/tasks", {"q": guess}).json()["tasks"] == []
    assert ada.get("/api/tasks/count", {"q": guess}).json()["count"]["number"] == 0
    assert post(ada, "tasks/reprocess/preview", q=guess).json()["selected"]["number"] == 0
    assert data("list", "--filter", guess) == []
    assert data("reprocess", "--filter", guess, "--dry-run")["selected"]["number"] == 0
    assert post(ada, "tasks/reprocess/search", q=guess, reason="x").status_code == 202 and work()
    assert BulkOperation.objects.get().changed == 0


def test_no_road_searches_a_masked_key_or_what_is_nearly_a_number() -> None:
    make_task(payload={"password": "S3cr3t"})
    q, words, tasks = "payload.password:S*", "the values are masked", cast(Any, Task.objects.all())
    by_filter = TaskFilter({"q": q}, queryset=tasks)
    for call in (lambda: select(q, tasks), lambda: by_filter.qs, lambda: bulk.preview("delete", q)):
        refused(words, call, error=SearchError)
    for asked in (("list", "--filter", q), ("delete", "--filter", q, "--yes", "--reason", "x")):
        refused(words, command, *asked, error=Exception)
    assert Task.objects.exists()
    for text in (">.5", ">=5.", "<+5", ">1e99999", "<=٣"):
        refused("is not a number as JSON has it. Write 0.5 or 1e-7", parse, f"payload.n:{text}", error=SearchError)
    assert parse('payload.n:>"+5"').terms[0].text == 'payload.n:>"+5"'


@on_both
def test_a_search_runs_beside_rows_that_are_still_read() -> None:
    for number in range(3):
        make_task(using="sqlite", payload={"n": number})
    tasks: Any = Task.objects.using("sqlite")
    assert [select("payload.n:2", tasks).count() for _row in select("payload.n:>0", tasks).iterator(1)] == [1, 1]
