"""Pages of searches that no index answers: bounded, said to be so, and together they show every row once."""

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_dbtaskqueue.admin import list_pages
from django_dbtaskqueue.api import views
from django_dbtaskqueue.core.states import CREATED, ERROR, PROCESSING
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.operations import bounded_reads
from django_dbtaskqueue.operations.search import parse, query
from django_dbtaskqueue.operations.search.query import Page, id_range, page_of, select, whole_page, within
from tests.factories import QUEUE, make_task
from tests.operations.site import ADMIN, QUEUES, TASKS, command, data, text
from tests.support import sql

NO_TIME = timedelta(milliseconds=1)


def give_up(monkeypatch: pytest.MonkeyPatch, *, window: int, limit: str = "WHOLE_SEARCH_TIMEOUT") -> None:
    """Let no statement end within that time limit, as with a hundred million tasks; a window has so many rows."""
    real = bounded_reads.time_limit

    @contextmanager
    def time_limit(alias: str, within: timedelta) -> Iterator[None]:
        if within == NO_TIME:
            raise OperationalError("statement timeout") from psycopg.errors.QueryCanceled()
        with real(alias, within):
            yield

    monkeypatch.setattr(bounded_reads, "time_limit", time_limit)
    monkeypatch.setattr(query, limit, NO_TIME)
    monkeypatch.setattr(query, "WINDOW_ROWS", window)


def tasks(number: int) -> list[int]:
    """Make tasks; every fourth has the tag."""
    return [make_task(CREATED, reference=str(n), tag="rare" if n % 4 == 0 else None).pk for n in range(number)]


def ids(look: Page) -> list[int]:
    return [row.pk for row in look.rows]


def test_windows_lead_through_all_rows_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rare = tasks(10)[::4][::-1]
    rows = Task.objects.filter(tag="rare")
    quick = page_of(rows, Task.objects.all(), 2)
    assert (ids(quick), quick.window) == (rare[:2], 0)
    give_up(monkeypatch, window=3)
    look = page_of(rows, Task.objects.all(), 2)
    down = ids(look)
    while look.older is not None:
        assert look.window == 3
        look = page_of(rows, Task.objects.all(), 2, before=look.older)
        down += ids(look)
    assert down == rare and not look.window
    up = ids(look)
    while look.newer is not None:
        look = page_of(rows, Task.objects.all(), 2, after=look.newer)
        up = ids(look) + up
    assert up == rare and ids(whole_page(rows, 2)) == rare[:2]


@pytest.mark.parametrize(("step", "asked_as"), [(1, "BETWEEN"), (6, "bigint[]")])
def test_a_window_is_a_range_of_ids_unless_others_lie_between_them(step: int, asked_as: str, monkeypatch: Any) -> None:
    """Given tasks of which every sixth can match, then a window reads these; if all can, it reads from end to end."""
    give_up(monkeypatch, window=3)
    everything = tasks(19)
    among = Task.objects.filter(pk__in=everything[::step])
    with CaptureQueriesContext(connection) as captured:
        look = page_of(among.filter(queue=QUEUE), among, 2)
    assert (ids(look), look.window) == (everything[::-step][:2], 3)
    assert asked_as in [query["sql"] for query in captured if '"queue_name" = ' in query["sql"]][-1]


def test_the_page_says_how_far_it_looked_and_can_look_to_the_end(op: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    give_up(monkeypatch, window=500)
    found = make_task(CREATED, payload={"find": "UA-15"}, reference="the-one")
    built(2000)
    page = text(op.get(f"{TASKS}?q=payload.find:UA-15"))
    assert "Nothing in the newest 500 tasks (back to " in page and "the-one" not in page
    older = re.search(r'href="[^"]*before=(\d+)&amp;looked=500"', page)
    assert older is not None and int(older[1]) > found.pk
    whole = text(op.get(f"{TASKS}?q=payload.find:UA-15&whole=1"))
    assert "Nothing in the newest" not in whole and "the-one" in whole


def test_an_order_that_cannot_be_had_at_this_size_says_what_was_sorted(op: Client, monkeypatch: Any) -> None:
    give_up(monkeypatch, window=20, limit="SORT_TIMEOUT")
    for _ in range(30):
        make_task()
    page = text(op.get(TASKS, {"sort": "attempts"}))
    assert "This order has no index: the newest 20 tasks were sorted (back to " in page and "Narrow" in page


def test_what_is_in_hand_is_found_at_the_heads_of_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [make_task(PROCESSING, priority=priority).pk for priority in (0, 0, 5)]
    other = make_task(PROCESSING, queue="letters").pk
    make_task(ERROR)
    tasks(4)
    rows = select("status:PROCESSING", Task.objects.all())
    look = query.page_of_processing(rows, (), 50)
    assert (ids(look), look.first) == ([other, *held[::-1]], 0)
    assert ids(query.page_of_processing(rows, (QUEUE,), 50)) == held[::-1]
    assert ids(query.page_of_processing(rows, (QUEUE,), 2, before=held[-1])) == held[1::-1]
    # When a line is longer than what is looked at, then the page knows
    monkeypatch.setattr(query, "MIN_ROWS_PER_PRIORITY", 3)
    monkeypatch.setattr(query, "WINDOW_ROWS", 3)
    assert query.page_of_processing(rows, (QUEUE,), 50).first == 3
    for search in ("status:PROCESSING", "is:stale queue:claims", "is:held,stale error:Timeout"):
        assert query.finds_processing_only(parse(search)), search
    for search in ("-status:PROCESSING", "status:PROCESSING,CREATED", "is:due", "status:PROCESSING ref:UA-15", ""):
        assert not query.finds_processing_only(parse(search)), search


def test_windows_go_through_what_indexes_leave() -> None:
    make_task(CREATED)
    failed = make_task(ERROR, process_result="Timeout", reference="UA-1").pk
    make_task(ERROR, queue="letters")
    search = parse(f"status:ERROR queue:{QUEUE} ref:UA-* -tag:x error:nothing attempt:>=3 status:ERROR,CREATED")
    assert [row.pk for row in query.indexed_part(search, Task.objects.all())] == [failed]
    assert query.indexed_part(parse("error:nothing -queue:letters"), Task.objects.all()).count() == 3


SEARCHES = ("", "status:PROCESSING", "is:stale", "is:due", "error:Timeout", "attempt:>=3", "payload.a:1", "-queue:x")
NAMES = ("overview", "poisontask", "failuregroup", "queue", "doctor", "auditentry", "taskhistory")
PAGES = [
    *(f"{TASKS}?q={search}" for search in SEARCHES),
    *(f"{TASKS}?before=2", f"{ADMIN}poisontask/?q=is:stale", f"{QUEUES}{QUEUE}/change/"),
    *(f"{ADMIN}{name}/" for name in NAMES),
]


def test_no_page_reads_the_task_table_to_its_end(op: Client) -> None:
    """Every count has a bound inside, nothing is skipped by OFFSET or found by DISTINCT, no payload is read."""
    tasks(3)
    Queue.objects.create(name=QUEUE)
    unbound = re.compile(r"\bOFFSET\b|\bDISTINCT\b|\bcount\(\*\)(?:(?!\bLIMIT\b).)*$", re.IGNORECASE | re.DOTALL)
    for page in PAGES:
        with CaptureQueriesContext(connection) as queries:
            text(op.get(page))
        about = [query["sql"] for query in queries if Task._meta.db_table + '"' in query["sql"]]
        assert [one for one in about if unbound.search(one) or '"payload"' in one.split(" FROM ")[0]] == [], page
        assert len(queries) < 90, page


def built(rows: int) -> None:
    """Insert tasks at even distances over the last thirty days, the oldest first, and let the planner know."""
    sql(
        "INSERT INTO dbtaskqueue_task (queue_name, reference_number, create_time, payload)"
        " SELECT %s, 'b-' || n, now() - make_interval(secs => (%s - n) * %s::float8 / %s),"
        " jsonb_build_object('n', n) FROM generate_series(1, %s) AS n",
        [QUEUE, rows, 30 * 24 * 3600, rows, rows],
    )
    sql("ANALYZE dbtaskqueue_task")


def next_of(page: str) -> str:
    link = re.search(r'data-look-on="([^"]*)"', page)
    return html.unescape(link[1]) if link else ""


def test_what_a_page_of_a_large_table_finds(op: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    give_up(monkeypatch, window=20_000)
    built(60_000)

    def page_for(search: str) -> str:
        return text(op.get(TASKS, {"q": search}))

    # A search by date shows its tasks on the first page.
    for search in ("age:10d..11d", "created:>10d age:<11d", "age:10d..11d payload.n:>0"):
        page = page_for(search)
        assert "No task matches" not in page, search
        # The newest that fits: of 60,000 in 30 days, those of the last 10 days are newer.
        assert "parcels/b-399" in page or ">b-399" in page, search
    # An index finds how a reference begins. It does not find how one ends, nor a part of a queue's name.
    for search in ("ref:*x1", "ref:*x1 ref:b*", "queue:*x"):
        assert "Nothing in the newest 20,000 tasks" in page_for(search), search
    # A search without a match says how far it looked, and goes on to the end.
    address, seen = f"{TASKS}?q=payload.n:3", []
    while address:
        seen.append(text(op.get(address)))
        address = next_of(seen[-1])
    assert "Nothing in the newest 20,000 tasks" in seen[0] and ">b-3<" in seen[-1]
    assert not [page for page in seen[:-1] if "No task matches" in page]
    # Where there is none at all, it says so in the end, not before.
    page = page_for("payload.n:-5")
    last = text(op.get(next_of(page)))
    assert "No task matches" not in page and "No task matches" in last and "data-look-on" not in last
    # Without the time to count 10,000 tasks, the number of a search by date is about right.
    monkeypatch.setattr(list_pages, "COUNT_TIMEOUT", timedelta(milliseconds=1))
    found = re.search(r"≈\s(\d[\d,]*) tasks|(\d[\d,]*)\+? tasks", page_for("age:10d..15d"))
    assert found is not None and 5000 < int((found[1] or found[2]).replace(",", "")) < 20_000


@pytest.mark.parametrize("late", [timedelta(0), timedelta(minutes=50)])
def test_ids_of_a_time_hold_all_its_tasks_also_those_of_long_transactions(late: timedelta) -> None:
    built(30_000)
    start = Task.objects.order_by("pk").values_list("pk", flat=True)[15_000]
    Task.objects.filter(pk__range=(start, start + 500)).update(create_time=F("create_time") - late)
    for search in ("age:14d..15d", "created:<15d", "age:<15d", "created:<1h,>20d", "created:2026-01-01..2026-01-02"):
        wanted = select(search, Task.objects.all())
        assert within(id_range(parse(search), wanted), wanted).count() == wanted.count(), search
    found = id_range(parse("age:14d..15d"), Task.objects.all())
    assert found is not None and len(found) < 5000
    assert id_range(parse("-age:14d..15d status:CREATED"), Task.objects.all()) is None


def test_the_command_and_the_api_say_how_far_they_looked_and_look_on(op: Client, monkeypatch: Any, capsys: Any) -> None:
    give_up(monkeypatch, window=2000)
    monkeypatch.setattr(views, "LOOK_ON_TIME", timedelta(0))
    built(6000)
    assert "b-7 " in command("list", "--filter", "payload.n:7")
    assert re.search(r"Read 2,000 tasks, 33%, back to \d{4}-\d\d-\d\d \d\d:\d\d\.", capsys.readouterr().err)
    assert "No task matches payload.n:none." in command("list", "--filter", "payload.n:none")
    (row,) = data("list", "--filter", "age:10d..11d", "--limit", "1")
    assert row["reference"].startswith("b-399") or row["reference"] == "b-4000"
    first = answer = op.get("/api/tasks", {"q": "payload.n:7"}).json()
    while answer["before"] and not answer["tasks"]:
        answer = op.get("/api/tasks", {"q": "payload.n:7", "before": answer["before"]}).json()
    assert first["looked_at"] == 2000 and first["back_to"] is not None
    assert answer["tasks"][0]["reference"] == "b-7"
    everything = op.get("/api/tasks", {"q": "ref:b-7"}).json()
    assert (len(everything["tasks"]), everything["looked_at"], everything["before"]) == (1, None, None)


def test_a_task_whose_creation_time_was_written_by_hand_is_not_denied(op: Client, monkeypatch: Any) -> None:
    give_up(monkeypatch, window=2000)
    built(30_000)
    make_task(CREATED, reference="by-hand", create_time=timedelta(days=-1000))
    page = text(op.get(TASKS, {"q": "age:>999d"}))
    assert "No task matches" not in page
    assert "only these were searched" in page and "No task with such an id matches." in page
    assert ">by-hand<" in text(op.get(TASKS, {"q": "age:>999d", "whole": "1"}))
