"""Reading lists of tasks and queues: orders, durations, tabs, pickers, and what a row costs."""

from __future__ import annotations

import json
import re
import sys
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test import Client

from django_dbtaskqueue.admin import list_pages, task_search
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, PROCESSING
from django_dbtaskqueue.models import Attempt, Poller, Queue, Task
from tests.factories import QUEUE, make_task
from tests.operations.slow_searches import give_up

pytestmark = pytest.mark.django_db
TASKS, QUEUES = "/admin/dbtaskqueue/task/", "/admin/dbtaskqueue/queue/"
SECOND = timedelta(seconds=1)
MAX_CALLS_PER_ROW = 700  # of Python functions; with the library's cells it is above 1,500


@pytest.fixture(autouse=True)
def _known_queues(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}}}


def shown(client: Client, address: str, **query: str) -> str:
    return unescape(client.get(address, query).content.decode())


def references(page: str) -> list[str]:
    return re.findall(r'<td class="field-reference" [^>]*><a [^>]*>([^<]*)</a>', page)


def ran(seconds: float, reference: str, **columns: Any) -> Task:
    times = {"create_time": -60 * SECOND, "start_time": -30 * SECOND, "finish_time": (seconds - 30) * SECOND}
    return make_task(COMPLETED, reference=reference, **times, **columns)


def test_the_slowest_the_oldest_and_the_most_tried_come_first_when_asked(admin_client: Client) -> None:
    ran(0.345, "quick")
    ran(12, "slow")
    make_task(CREATED, reference="fresh")
    make_task(CREATED, reference="waits", ready_time=-600 * SECOND)
    make_task(ERROR, reference="tried", total_attempt=9)
    assert references(shown(admin_client, TASKS, sort="run"))[:2] == ["slow", "quick"]
    assert references(shown(admin_client, TASKS, sort="wait"))[:2] == ["waits", "fresh"]
    assert references(shown(admin_client, TASKS, sort="attempts"))[0] == "tried"
    assert references(shown(admin_client, TASKS, sort="oldest")) == ["quick", "slow", "fresh", "waits", "tried"]
    assert references(shown(admin_client, TASKS))[0] == "tried"
    assert '<option value="run" selected>' in shown(admin_client, TASKS, sort="run")


def test_an_order_that_cannot_be_had_at_this_size_says_what_was_sorted(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up(monkeypatch, "SORT_TIMEOUT", window=20)
    for _ in range(30):
        make_task()
    page = shown(admin_client, TASKS, sort="attempts")
    assert "This order has no index: the newest 20 tasks were sorted (back to " in page
    assert "Narrow the search." in page


def test_run_time_and_wait_are_shown_in_milliseconds_on_list_and_page(admin_client: Client) -> None:
    task = ran(0.345, "quick")
    row = shown(admin_client, TASKS)
    assert '<td class="field-took" data-label="Took">345ms</td>' in row
    assert '<td class="field-waited" data-label="Waited">30s</td>' in row
    page = shown(admin_client, f"{TASKS}{task.pk}/change/")
    assert "345ms" in page
    assert "after 345ms" in page


def test_the_timeline_says_once_how_long_an_attempt_took(admin_client: Client) -> None:
    times = {"create_time": -60 * SECOND, "start_time": -30 * SECOND}
    task = make_task(ERROR, finish_time=-29 * SECOND, **times)
    Attempt.objects.create(
        task_id=task.pk, queue=QUEUE, attempt=1, total_attempt=1, start_time=Now() - 30 * SECOND,
        finish_time=Now() - 29.5 * SECOND, error_type="desk.rules.PlaneUnknown", message="N14228 " + 200 * "x",
    )  # fmt: skip
    page = shown(admin_client, f"{TASKS}{task.pk}/change/")
    assert "after 500ms" in page and "after 1s" not in page
    assert f"PlaneUnknown: N14228 {200 * 'x'}" in page, "whole, without the module"
    assert "desk.rules" not in page


def test_a_pollers_numbers_are_of_attempts(admin_client: Client) -> None:
    Poller.objects.create(instance="a", state="RUNNING", queues=["q"], heartbeat_time=Now(), finished=10553, failed=7)
    page = shown(admin_client, "/admin/dbtaskqueue/poller/")
    assert '<td class="field-finished" data-label="Attempts ended">10,553</td>' in page


def test_tabs_count_each_status_and_lead_to_it(admin_client: Client) -> None:
    for number, status in enumerate((CREATED, ERROR, ERROR)):
        make_task(status, reference=str(number))
    make_task(ERROR, queue="letters")
    tabs = tabs_of(shown(admin_client, TASKS, q=f"queue:{QUEUE}"))
    assert (f"{TASKS}?q=status%3AERROR+queue%3A{QUEUE}", "", "ERROR", "2") in tabs
    assert (f"{TASKS}?q=queue%3A{QUEUE}", "true", "All", "") in tabs
    assert ("ERROR", "3") in {tab[2:] for tab in tabs_of(shown(admin_client, TASKS))}
    assert re.search(r'aria-current="true">ERROR', shown(admin_client, TASKS, q="status:ERROR"))


def tabs_of(page: str) -> list[tuple[str, str, str, str]]:
    """Return the address, whether it is open, the label and the number of each tab."""
    return re.findall(r'<a href="([^"]*)"(?: aria-current="(true)")?>(\w+)(?: <span class="quiet">([^<]+))?', page)


def test_a_tab_has_no_number_of_tasks_that_the_search_does_not_find(admin_client: Client) -> None:
    make_task(ERROR, reference="other")
    page = shown(admin_client, TASKS, q=f"queue:{QUEUE} tag:x")
    assert (f"{TASKS}?q=status%3AERROR+queue%3A{QUEUE}+tag%3Ax", "", "ERROR", "") in tabs_of(page)
    assert all(tab[3] == "" for tab in tabs_of(page))


def test_the_tab_and_the_list_say_the_same_number(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given more tasks than the tabs count, once where the list counts them and once where it has no time to."""
    monkeypatch.setattr(task_search, "MAX_ROWS_OF_TABS", 10)
    Task.objects.bulk_create([Task(queue=QUEUE, reference=str(number)) for number in range(70)])
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE dbtaskqueue_task")
    for timeout in (timedelta(minutes=1), timedelta(milliseconds=1)):
        monkeypatch.setattr(list_pages, "COUNT_TIMEOUT", timeout)
        page = shown(admin_client, TASKS, q="status:CREATED")
        (number,) = (tab[3] for tab in tabs_of(page) if tab[2] == "CREATED")
        assert f"{number} tasks" in page, number


def test_a_search_that_is_not_understood_does_not_say_that_no_task_matches(admin_client: Client) -> None:
    make_task(ERROR, reference="a")
    page = shown(admin_client, TASKS, q="status:ERROR OR status:POISON")
    assert "not an operator here" in page and "Nothing was searched" in page
    assert "No task matches" not in page and "0 tasks" not in page


def test_a_queue_is_picked_and_words_are_completed(admin_client: Client) -> None:
    make_task(ERROR, queue="letters", reference="L")
    make_task(ERROR, reference="P")
    page = shown(admin_client, TASKS, q="status:ERROR", queue="letters")
    assert references(page) == ["L"]
    assert '<option value="letters" selected>letters</option>' in page
    assert 'name="q" id="dbtq-q" value="status:ERROR"' in page
    words = json.loads(re.search(r'data-words="(.*?)"></datalist>', page)[1])  # type: ignore[index]
    assert {"letters", QUEUE} <= set(words["queue"])
    assert words["status"][0] == "CREATED"
    assert "payload." in words[""]


def test_the_queues_page_has_figures_and_every_queue_that_has_tasks_or_a_poller(admin_client: Client) -> None:
    make_task(ERROR, queue="fast")
    make_task(PROCESSING, queue="fast", next_process_time=-600 * SECOND)
    Poller.objects.create(instance="a", state="RUNNING", queues=["slow"], heartbeat_time=Now())
    page = shown(admin_client, QUEUES)
    assert all(f'value="{name}"' in page for name in ("fast", "slow", "letters", QUEUE))
    assert re.search(r'<td class="field-oldest" [^>]*>10m', page)
    assert admin_client.get(f"{QUEUES}slow/change/").status_code == 200
    data = {"action": "pause", "_selected_action": ["fast", "slow"], "confirm": "yes", "reason": "x"}
    admin_client.post(QUEUES, data)
    assert set(Queue.objects.filter(paused_time__isnull=False).values_list("name", flat=True)) == {"fast", "slow"}


def test_the_page_of_a_queue_compares_its_payload_types(admin_client: Client) -> None:
    ran(0.1, "a", payload_type="letter")
    ran(20, "b", payload_type="parcel")
    ran(20, "c", payload_type="parcel")
    page = shown(admin_client, f"{QUEUES}{QUEUE}/change/")
    found = re.findall(r'<th scope="row"><a [^>]*>(letter|parcel)</a></th><td class="number[^"]*">(\d)</td>', page)
    assert found == [("parcel", "2"), ("letter", "1")]
    assert "20s / 20s" in page and "100ms / 100ms" in page


def calls_of(client: Client) -> int:
    """Return how many Python functions one request for the list calls."""
    number = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal number
        number += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        assert client.get(TASKS).status_code == 200
    finally:
        sys.setprofile(before)
    return number


def test_a_row_costs_few_function_calls(admin_client: Client) -> None:
    """Time depends on the machine; the number of calls does not."""
    for number in range(10):
        make_task(ERROR, reference=str(number))
    calls_of(admin_client)  # templates are compiled, urls resolved
    few = calls_of(admin_client)
    for number in range(10, 50):
        make_task(ERROR, reference=str(number))
    assert (calls_of(admin_client) - few) / 40 < MAX_CALLS_PER_ROW
