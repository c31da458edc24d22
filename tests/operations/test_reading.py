"""Reading lists of tasks and queues: orders, durations, tabs, pickers, and what a row costs."""

import json
import re
import sys
from cProfile import Profile
from datetime import timedelta
from typing import Any

import django
import pytest
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import connections
from django.db.models.functions import Now
from django.test import Client
from django.urls import reverse

from django_dbtaskqueue.admin import list_pages, task_pages
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, PROCESSING
from django_dbtaskqueue.models import Poller, Queue, Task
from tests.architecture.journeys import CallCounter
from tests.architecture.source import REPOSITORY
from tests.factories import QUEUE, make_task
from tests.operations.site import POLLERS, QUEUES, TASKS, attempt, page as shown, text
from tests.support import sql

SECOND = timedelta(seconds=1)
# Of the package's functions; ten of them so that the act can be undone. Django 6 reads two columns back.
MAX_CALLS_TO_CONFIRM = 120 if django.VERSION < (6,) else 122
MAX_CALLS_PER_ROW = 700  # of Python functions; with the library's cells it is above 1,500


def references(page: str) -> list[str]:
    return re.findall(r'<td class="field-reference" [^>]*><a [^>]*>([^<]*)</a>', page)


def ran(seconds: float, reference: str, **columns: Any) -> Task:
    times = {"create_time": -60 * SECOND, "start_time": -30 * SECOND, "finish_time": (seconds - 30) * SECOND}
    return make_task(COMPLETED, reference=reference, **times, **columns)


def test_the_slowest_the_oldest_and_the_most_tried_come_first_when_asked(op: Client) -> None:
    ran(0.345, "quick")
    ran(12, "slow")
    make_task(CREATED, reference="fresh")
    make_task(CREATED, reference="waits", ready_time=-600 * SECOND)
    make_task(ERROR, reference="tried", total_attempt=9)
    orders = {"run": ["slow", "quick"], "wait": ["waits", "fresh"], "attempts": ["tried"], "": ["tried"]}
    orders["oldest"] = ["quick", "slow", "fresh", "waits", "tried"]
    for sort, first in orders.items():
        assert references(shown(op, TASKS, sort=sort))[: len(first)] == first, sort
    assert '<option value="run" selected>' in shown(op, TASKS, sort="run")


def test_durations_are_shown_once_in_milliseconds_and_a_pollers_numbers_are_of_attempts(op: Client) -> None:
    task = ran(0.345, "quick")
    row = shown(op, TASKS)
    assert '<td class="field-took" data-label="Took">345ms</td>' in row
    assert '<td class="field-waited" data-label="Waited">30s</td>' in row
    assert "after 345ms" in shown(op, f"{TASKS}{task.pk}/change/")
    Poller.objects.create(instance="a", state="RUNNING", queues=["q"], heartbeat_time=Now(), finished=10553, failed=7)
    assert '<td class="field-finished" data-label="Attempts ended">10,553</td>' in shown(op, POLLERS)
    task = make_task(ERROR, create_time=-60 * SECOND, start_time=-30 * SECOND, finish_time=-29 * SECOND)
    times = {"start_time": Now() - 30 * SECOND, "finish_time": Now() - 29.5 * SECOND}
    attempt(task, error_type="desk.rules.PlaneUnknown", message="N14228 " + 200 * "x", **times)
    page = shown(op, f"{TASKS}{task.pk}/change/")
    assert "after 500ms" in page and "after 1s" not in page
    assert f"PlaneUnknown: N14228 {200 * 'x'}" in page and "desk.rules" not in page, "whole, without the module"


def test_tabs_count_each_status_and_lead_to_it(op: Client) -> None:
    for number, status in enumerate((CREATED, ERROR, ERROR)):
        make_task(status, reference=str(number))
    make_task(ERROR, queue="letters")
    tabs = tabs_of(shown(op, TASKS, q=f"queue:{QUEUE}"))
    assert (f"{TASKS}?q=status%3AERROR+queue%3A{QUEUE}", "", "ERROR", "2") in tabs
    assert (f"{TASKS}?q=queue%3A{QUEUE}", "true", "All", "") in tabs
    assert ("ERROR", "3") in {tab[2:] for tab in tabs_of(shown(op, TASKS))}
    assert re.search(r'aria-current="true">ERROR', shown(op, TASKS, q="status:ERROR"))
    make_task(ERROR, reference="other")
    page = shown(op, TASKS, q=f"queue:{QUEUE} tag:x")
    assert (f"{TASKS}?q=status%3AERROR+queue%3A{QUEUE}+tag%3Ax", "", "ERROR", "") in tabs_of(page)
    assert {tab[3] for tab in tabs_of(page)} == {""}, "no number of tasks that the search does not find"


def tabs_of(page: str) -> list[tuple[str, str, str, str]]:
    """Return the address, whether it is open, the label and the number of each tab."""
    return re.findall(r'<a href="([^"]*)"(?: aria-current="(true)")?>(\w+)(?: <span class="quiet">([^<]+))?', page)


def test_the_tab_and_the_list_say_the_same_number(op: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_pages, "MAX_ROWS_OF_TABS", 10)
    Task.objects.bulk_create([Task(queue=QUEUE, reference=str(number)) for number in range(70)])
    sql("ANALYZE dbtaskqueue_task")
    for timeout in (timedelta(minutes=1), timedelta(milliseconds=1)):
        monkeypatch.setattr(list_pages, "COUNT_TIMEOUT", timeout)
        page = shown(op, TASKS, q="status:CREATED")
        (number,) = (tab[3] for tab in tabs_of(page) if tab[2] == "CREATED")
        assert f"{number} tasks" in page, number


def test_a_search_that_is_not_understood_is_not_said_to_match_nothing_and_words_are_completed(op: Client) -> None:
    make_task(ERROR, reference="a")
    page = shown(op, TASKS, q="status:ERROR OR status:POISON")
    assert "not an operator here" in page and "Nothing was searched" in page
    assert 'value="status:ERROR OR status:POISON"' in page, "to be corrected"
    assert "No task matches" not in page and "0 tasks" not in page
    make_task(ERROR, queue="letters", reference="L")
    make_task(ERROR, reference="P")
    page = shown(op, TASKS, q="status:ERROR", queue="letters")
    assert references(page) == ["L"] and '<option value="letters" selected>letters</option>' in page
    assert 'name="q" id="dbtq-q" value="status:ERROR"' in page
    words = json.loads(re.search(r'data-words="(.*?)"></datalist>', page)[1])  # type: ignore[index]
    assert {"letters", QUEUE} <= set(words["queue"])
    assert words["status"][0] == "CREATED" and "payload." in words[""]


def test_the_queues_page_has_figures_and_every_queue_that_has_tasks_or_a_poller(op: Client) -> None:
    make_task(ERROR, queue="fast")
    make_task(PROCESSING, queue="fast", next_process_time=-600 * SECOND)
    Poller.objects.create(instance="a", state="RUNNING", queues=["slow"], heartbeat_time=Now())
    page = shown(op, QUEUES)
    names = re.findall(r'name="_selected_action" value="([^"]*)"', page)
    assert names == sorted({*names, "fast", "slow", "letters", QUEUE})
    assert re.search(r'<td class="field-oldest" [^>]*>10m', page)
    assert "running" in shown(op, f"{QUEUES}slow/change/")
    assert op.get(f"{QUEUES}nosuch/change/").status_code == 302
    assert not Queue.objects.exists(), "no row is made for them"
    op.post(QUEUES, {"action": "pause", "_selected_action": ["fast", "slow"], "confirm": "yes", "reason": "x"})
    assert set(Queue.objects.filter(paused_time__isnull=False).values_list("name", flat=True)) == {"fast", "slow"}


def test_the_page_of_a_queue_compares_its_payload_types(op: Client) -> None:
    for reference, seconds, kind in (("a", 0.1, "letter"), ("b", 20, "parcel"), ("c", 20, "parcel")):
        ran(seconds, reference, payload_type=kind)
    page = shown(op, f"{QUEUES}{QUEUE}/change/")
    found = re.findall(r'<th scope="row"><a [^>]*>(letter|parcel)</a></th><td class="number[^"]*">(\d)</td>', page)
    assert found == [("parcel", "2"), ("letter", "1")]
    assert "20s / 20s" in page and "100ms / 100ms" in page


def calls_of(client: Client) -> int:
    profile = Profile(builtins=False)
    text(profile.runcall(client.get, TASKS))
    return sum(function.callcount for function in profile.getstats())


def test_a_row_costs_few_function_calls(op: Client) -> None:
    """Time depends on the machine; the number of calls does not."""
    for number in range(10):
        make_task(ERROR, reference=str(number))
    calls_of(op)  # templates are compiled, urls resolved
    few = calls_of(op)
    for number in range(10, 50):
        make_task(ERROR, reference=str(number))
    assert (calls_of(op) - few) / 40 < MAX_CALLS_PER_ROW


def test_to_confirm_a_verb_takes_few_calls(op: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections["default"], "execute_wrappers", [])  # a poller's, if one ran on this thread
    counter, counts = CallCounter(), []
    for _ in range(3):  # the first fills caches
        task = make_task(ERROR)
        counter.take()
        sys.setprofile(counter.profile)
        counter.on = True
        op.post(TASKS, {"action": "reprocess", ACTION_CHECKBOX_NAME: task.pk, "confirm": "1", "reason": "why"})
        counter.on = False
        sys.setprofile(None)
        counts.append(counter.take().total())
        assert Task.objects.get(pk=task.pk).status == CREATED
    assert 50 < min(counts) <= MAX_CALLS_TO_CONFIRM


# Numbers for programs are written without a separator, whatever the site says of numbers for people.


def test_the_buttons_of_a_task_with_a_large_number_work_and_each_key_is_written_as_it_is(
    op: Client, settings: Any
) -> None:
    page = reverse("admin:dbtaskqueue_task_change", args=[make_task("ERROR", id=1_234_567).pk])
    for language in ("en", "de"):
        settings.USE_THOUSAND_SEPARATOR, settings.LANGUAGE_CODE = True, language
        html = text(op.get(page))
        assert re.findall(r'name="(_selected_action|again)" value="([^"]*)"', html)
        assert not re.findall(r'="[^"]*1[,.\s]234[,.\s]567[^"]*"', html)
    key = re.compile(r"{{ (?!finding)(?:[\w.]+\.)?(?:pk|id)(?!\|unlocalize)[ |][^}]*}}")  # that of a finding is a text
    files = (REPOSITORY / "django_dbtaskqueue/templates").rglob("*.html")
    assert [(file.name, found) for file in files for found in key.findall(file.read_text())] == []
