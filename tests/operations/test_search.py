"""The search language: what is written is read back, what is wrong is explained, and what is asked for is found."""

from datetime import date, datetime, timedelta
from typing import Any, cast

import pytest
from django.http import QueryDict
from django.utils import timezone
from hypothesis import given, strategies as st

from django_dbtaskqueue.core.columns import LONG
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations.search import QUALIFIERS, Search, Term, from_url, parse, to_text, to_url
from django_dbtaskqueue.operations.search.query import TaskFilter, select, tasks_for
from django_dbtaskqueue.operations.search.values import STATE_NAMES, Match
from tests.factories import make_task
from tests.operations.site import refused
from tests.support import sql

COMPARED = st.sampled_from([">", ">=", "<", "<="])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
FULL = TEXT.filter(bool)
INTEGERS = st.integers(-(2**63 - 1), 2**63 - 1).map(str)
SPANS = st.builds("{}{}".format, st.integers(0, 5000), st.sampled_from(["ms", "s", "m", "h", "d"]))
MOMENTS = st.datetimes(datetime(1970, 1, 1), datetime(2200, 12, 31)).map(lambda time: time.isoformat()) | SPANS
DAYS = st.dates(date(1970, 1, 1), date(2200, 12, 31)).map(str)
MATCHES: dict[str, st.SearchStrategy[Match]] = {
    "text": st.builds(Match, st.sampled_from("=^$~"), TEXT),
    "word": st.builds(Match, st.just("^"), FULL),
    "part": st.builds(Match, st.just("="), FULL),
    "json": st.builds(Match, COMPARED | st.sampled_from("=^$~"), TEXT)
    | st.builds(Match, st.just(".."), st.integers(-99, 99).map(str), st.floats(0, 9).map(lambda n: f"{n:.3f}")),
    "status": st.builds(Match, st.just("="), st.sampled_from([str(status) for status in Status])),
    "state": st.builds(Match, st.just("="), st.sampled_from(STATE_NAMES)),
    "number": st.builds(Match, COMPARED | st.just("="), INTEGERS) | st.builds(Match, st.just(".."), INTEGERS, INTEGERS),
    "span": st.builds(Match, COMPARED, SPANS) | st.builds(Match, st.just(".."), SPANS, SPANS),
    "time": st.builds(Match, COMPARED, MOMENTS | DAYS)
    | st.builds(Match, st.just("="), DAYS)
    | st.builds(Match, st.just(".."), MOMENTS, MOMENTS),
}
PATHS = st.builds("{}.{}".format, st.sampled_from(LONG), st.from_regex(r"\w[\w/-]{0,8}(\.\w{1,5})?", fullmatch=True))


def terms_of(name: str, kind: str) -> st.SearchStrategy[Term]:
    return st.builds(Term, st.just(name), st.lists(MATCHES[kind], min_size=1, max_size=3).map(tuple), st.booleans())


TERMS = st.one_of(
    terms_of("", "word"),
    PATHS.flatmap(lambda path: terms_of(path, "json")),
    *(terms_of(qualifier.name, qualifier.kind) for qualifier in QUALIFIERS.values()),
)


@given(st.lists(TERMS, max_size=4).map(tuple))
def test_a_search_is_read_back_from_its_text_and_from_its_address(terms: tuple[Term, ...]) -> None:
    search = Search(terms)
    assert parse(to_text(search)) == search and from_url(to_url(search)) == search


@given(st.text(max_size=40))
def test_any_text_is_a_search_or_explained_and_a_search_never_changes_when_written_again(text: str) -> None:
    try:
        search = parse(text)
    except SearchError as error:
        assert str(error).endswith((".", "?", ")")), error
    else:
        assert parse(to_text(search)) == search


def test_what_an_operator_types() -> None:
    search = parse('status:error  queue:claims ref:UA-15 age:>10m payload.carrier:UA -queue:bulk,"x y" UA')
    assert to_text(search) == 'status:ERROR queue:claims ref:UA-15 age:>10m payload.carrier:UA -queue:bulk,"x y" UA'
    assert search.queues() == ("claims",)
    assert parse("-queue:bulk").queues() == parse("queue:b*").queues() == ()
    assert parse("status:ERROR") & parse("status:ERROR queue:q") == parse("status:ERROR queue:q")
    assert not parse("   ")


def test_a_wrong_search_says_what_was_meant() -> None:
    for text, words in (
        ("stauts:ERROR", r"'stauts' is not a qualifier. Did you mean 'status'\?"),
        ("status:EROR", r"'EROR' is not one of CREATED, .* Did you mean 'ERROR'\?"),
        ("age:10m", "say older, age:>10m, or younger, age:<10m"),
        ("age:>ten", "'ten' is not a length of time. Write >10m"),
        ("attempt:many", "'many' is not a whole number. Write 3, >=3, or 1..5"),
        ("id:99999999999999999999", "is not a whole number"),
        ("finished:yesterday", "'yesterday' is not a time. Write <1h"),
        *((time, "is too early or too late. Write a time") for time in ("finished:9999-12-31", "created:>1969-12-31")),
        ("finished:>=25:00", "'25:00' is not a time"),
        *((f"finished:{time}", f"say before or after: <{time} or >{time}") for time in ("10:00", "1h")),
        ("queue:", "there is no value after the :. Write it as in queue:something"),
        *(("-", "there is no value after the -"), ('ref:"UA', "a quote is not closed")),
        *(("queue:a,,b", "a comma separates two values"), ("payload.n:1..x", "a range is of two numbers")),
        ("payload:UA", "say which key: payload.carrier:UA"),
        ("http://x", "Put a reference with a colon in quotes"),
        *(("error:*", "say which words to look for"), ('""', "say how the reference begins")),
        ("*EWR*", r"a plain word is how a reference begins. Write ref:\*EWR\* for one that contains it"),
        ("OR status:POISON", "not an operator here. Values of one qualifier are joined by commas, as in status:"),
        *(("AND x", "Leave it out: all terms must match"), ("NOT x", "A minus negates a term")),
        ("(status:ERROR)", "there are no brackets. Join values by commas, as in status:ERROR,POISON"),
    ):
        refused(words, parse, f"queue:claims {text}")


H, ADA, UA = timedelta(hours=1), {"who": "ada"}, {"carrier": "UA", "n": 5, "deep": {"x": True}}
ROWS: dict[str, dict[str, Any]] = {
    "UA-15": {"payload": UA, "create_time": -2 * H, "priority": 2, "batch": 7},
    "UA-16": {"status": "PROCESSING", "payload": {"carrier": "DL", "n": 50}, "tag": "gpu", "total_attempt": 9},
    "stale": {"status": "PROCESSING", "next_process_time": -H, "poller_instance": "p2", "payload": {"carrier": None}},
    "parked": {"parked_by": "group", "group_key": "g1", "payload": [1]},
    "later": {"ready_time": H, "payload_type": "letter", "payload": {"n": "5"}},
    "done": {"status": "COMPLETED", "process_result": "Timeout was fine", "finish_time": -3 * H, "context": ADA},
    "failed": {"status": "ERROR", "process_result": "TimeoutError: 100% slow_", "attempt": 3, "fingerprint": "abc"},
    'a "b*': {"status": "POISON", "queue": "bulk", "create_time": -timedelta(days=3), "result": {"n": 1.5}},
}
B = 'a "b*'
# What finds these tasks. With a minus, one term finds all others.
FOUND: dict[tuple[str, ...], list[str]] = {
    (): [
        *('ref:"UA*"', "ua", "ref:ua*,*LED,*a-1*,Ua-15", '"OR"', "tag:G*", "error:100_", "finished:1h..2000-01-01"),
        *("created:>2099-12-31", "payload.deep.x:>0", "payload.contains:5", "payload.deep.x__gt:5"),
    ],
    ("UA-15",): [
        *("ref:UA-15", "batch:7", "age:1h..1d", "priority:2", "payload.carrier:UA", "payload.carrier:U*"),
        *("payload.carrier:*A", "payload.carrier:>=E", "payload.deep.x:true"),
    ],
    ("UA-15", "UA-16"): ["UA", "ref:UA*", "ref:*A-1*", "payload.n:5..60", "payload.n:>=5"],
    ("UA-15", "UA-16", "stale"): ["is:due,held", "payload.carrier:*"],
    ("UA-15", "later"): ["payload.n:5"],
    ("UA-15", "parked", "later"): ["status:created"],
    ("UA-15", "stale"): ["is:due"],
    ("UA-15", B): ["age:>1h"],
    ("UA-16",): ["is:held", "total:>5", "tag:gpu", "tag:g*", "payload.n:>5"],
    ("UA-16", "failed"): ["ref:*-16,*led"],
    ("UA-16", "stale", "failed"): ["status:ERROR,PROCESSING"],
    ("UA-16", "stale", "done", B): ["attempt:1..2"],
    ("UA-16", "stale", "done", "failed", B): ["started:<1h"],
    ("UA-16", "stale", "parked", "later", "done", "failed"): ["age:<=1h"],
    ("UA-16", "stale", "parked", "later", "done", "failed", B): ["priority:<=0"],
    ("stale",): ["is:stale", "poller:p2"],
    ("stale", "parked", "later", "done", "failed"): ["ref:*e*"],
    ("parked",): ["is:parked", "group:g1", "parked:gr*"],
    ("later",): ["is:scheduled", "type:letter"],
    ("done",): ["finished:>2h"],
    ("failed",): [
        *("error:*timeoute*", "error:timeout", 'error:"100% slow_"', "fingerprint:abc", "attempt:>=3"),
        "status:ERROR,POISON -queue:bulk attempt:>=3",
    ],
    ("failed", B): ["finished:<2h"],
    (B,): ['"a \\""', 'ref:*"b*"', 'ref:"a \\"b*"', "queue:bulk", "queue:b*", "created:>1d", "result.n:1.5"],
    tuple(ROWS): ["", "created:2000-01-01..2099-01-01", "created:>=2000-01-01T08:00+20:00 created:<=2099-12-31"],
}


def fill(using: str) -> None:
    for reference, columns in ROWS.items():
        make_task(**{"status": "CREATED", **columns}, using=using, reference=reference)


def test_what_each_search_finds(alias: str) -> None:
    fill(alias)
    tasks: Any = Task.objects.using(alias)
    wanted: dict[str, set[str]] = {}
    for names, searches in FOUND.items():
        wanted |= {text: set(names) for text in searches}
        wanted |= {f"-{text}": set(ROWS) - set(names) for text in searches if len(parse(text).terms) == 1}
    assert {text: set(select(text, tasks).values_list("reference", flat=True)) for text in wanted} == wanted
    assert {term.name for text in wanted for term in parse(text).terms} >= {*QUALIFIERS, ""} - {"id", "signal"}
    (number,) = tasks.filter(reference="failed").values_list("pk", flat=True)
    assert [task.pk for task in select(f"id:{number}", tasks)] == [number]


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Auckland"])
def test_a_day_is_the_site_s_day(settings: Any, zone: str) -> None:
    settings.TIME_ZONE = zone
    make_task(reference="now")
    today, tasks = timezone.localdate(), cast(Any, Task.objects.all())
    searches = (f"created:{today}", f"created:<={today} created:>={today}", f"created:>{today}", f"created:<{today}")
    assert [select(search, tasks).count() for search in searches] == [1, 1, 0, 0]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])  # their clocks are never changed
def test_a_time_of_day_is_the_last_one_that_a_clock_of_the_site_showed(alias: str, settings: Any, zone: str) -> None:
    settings.TIME_ZONE = zone
    now = timezone.localtime()
    make_task(reference="now", using=alias)
    make_task(reference="before", create_time=timedelta(hours=-2), using=alias)
    before, later = (f"{now + timedelta(hours=hours):%H:%M}" for hours in (-1, 1))
    tasks: Any = Task.objects.using(alias)
    wanted = {f">={before}": {"now"}, f"<{before}": {"before"}, f">={later}": {"now", "before"}}
    wanted |= {f"{before}..{later}": {"now"}, f"{later}..{before}": {"before"}}
    for search, names in ((f"created:{time}", names) for time, names in wanted.items()):
        assert {*select(search, tasks).values_list("reference", flat=True)} == names, search
        assert to_text(parse(search)) == search, "a saved search is of the day on which it is used"


def test_indexes_answer_for_statuses_and_for_how_a_reference_begins() -> None:
    # Given a table full of other tasks, as the planner sees it: without statistics it may walk the primary key
    sql(
        "INSERT INTO dbtaskqueue_task (queue_name, status, final_status, ready_time, finish_time)"
        " SELECT CASE WHEN s % 2000 = 0 THEN 'claims' ELSE 'bulk' END, 'COMPLETED', 'COMPLETED', NULL, now()"
        " FROM generate_series(1, 20000) AS s"
    )
    sql("ANALYZE dbtaskqueue_task")

    def plan(text: str) -> str:
        return str(select(text, Task.objects.all()).order_by("-pk")[:50].explain())

    for text in ("status:ERROR", "status:COMPLETED queue:claims", "fingerprint:abc", "is:parked", "error:x"):
        assert "Seq Scan" not in plan(text) and "_pkey" not in plan(text), f"{text}: {plan(text)}"
    # LIKE 'UA%' goes by an index in the C collation, or by one of this operator class in any.
    ((definition,),) = sql("SELECT indexdef FROM pg_indexes WHERE indexname = 'dbtaskqueue_task_reference'")
    assert definition.startswith("CREATE UNIQUE INDEX") and "reference_number varchar_pattern_ops" in definition


def test_a_search_of_one_queue_looks_where_its_tasks_live(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"far": {"database": "sqlite"}, "own": {"model": "testapp.Letter"}, "q": {}}}
    assert tasks_for(parse("queue:far status:ERROR")).db == "sqlite"
    assert tasks_for(parse("queue:q")).db == tasks_for(parse("queue:far,q")).db == "default"


def test_the_filter_takes_a_search_and_each_qualifier_as_a_field() -> None:
    fill("default")
    given = QueryDict("q=status:ERROR,POISON&queue=-bulk&attempt=>%3D3&page=7&age=")
    found = TaskFilter(given, queryset=Task.objects.all())
    assert [task.reference for task in found.qs] == ["failed"]
    assert to_text(found.checked().search) == "status:ERROR,POISON -queue:bulk attempt:>=3"
    assert TaskFilter(QueryDict(""), queryset=Task.objects.all()).qs.count() == len(ROWS)
    assert TaskFilter(None, queryset=Task.objects.all()).checked().qs.count() == len(ROWS)
    assert set(found.filters) == {"q", *QUALIFIERS} > set(found.form.fields) == {"q", "queue", "attempt", "age"}
    for fault in ({"q": "stauts:ERROR"}, {"status": "EROR"}, {"q": "status:ERROR", "age": "old"}):
        wrong = TaskFilter(fault, queryset=Task.objects.all())
        assert list(wrong.qs) == [] and wrong.errors
        refused(None, wrong.checked, error=SearchError)
