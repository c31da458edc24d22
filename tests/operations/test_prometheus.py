"""The metrics view, read by the parsers of Prometheus' own client, and by ``promtool`` where there is one."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils import timezone
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed

from django_dbtaskqueue import enqueue_many, queue
from django_dbtaskqueue.api.prometheus import exposition, metrics
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.metrics.exposition import DATABASE_METRICS, POLLER_METRICS, Exposition, text_of
from django_dbtaskqueue.models import Metric, Poller, Queue, Schedule, UsageCount
from django_dbtaskqueue.operations.permissions import Actor
from tests.factories import QUEUE, make_task
from tests.operations.test_api import TOKEN, client, user

urlpatterns = [path("metrics", metrics)]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]
VIEWS = "view_queue", "view_schedule"
LABELS = "schedule", "queue", "database", "limit", "status", "outcome", "percentile", "le"  # in the order of our keys
Samples = dict[tuple[str, ...], float]


def only_claims(user: Any, queue: str) -> bool:
    return queue == QUEUE


@pytest.fixture(autouse=True)
def _queues(settings: Any) -> None:
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    limits = {"max_running": 2, "rate": "9/h", "burst": 9}
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}, "calls": limits}, "API_TOKENS": {"robot": digest}}


def scraped(text: str) -> Samples:
    """Return the value of each of our samples by its name and the values of its labels."""
    found: Samples = {}
    for family in parsed(text):
        for sample in family.samples if family.name.startswith("dbtaskqueue_") else ():  # not the process's own
            key = (sample.name, *(sample.labels[name] for name in LABELS if name in sample.labels))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def scrape(ada: Client, **headers: str) -> str:
    answer = ada.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.content
    return answer.content.decode()


def a_busy_site() -> None:
    now = timezone.now()
    late = make_task(Status.CREATED)
    type(late).objects.filter(pk=late.pk).update(ready_time=now - timedelta(minutes=5))
    make_task(Status.ERROR)
    make_task(Status.COMPLETED, queue="letters")
    Queue.objects.create(name="letters", paused_time=now)
    for number in (2, 3):  # as two pollers append them
        Metric.objects.create(
            queue=QUEUE, minute=now, outcome="completed", count=number, run_seconds=0.5, wait_seconds=2.0,
            runs={"16": number}, waits={"24": number},
        )  # fmt: skip
    Metric.objects.create(queue=QUEUE, minute=now - timedelta(days=1), outcome="completed", count=100)
    UsageCount.objects.create(queue=QUEUE, minute=now, call="put", count=7)
    Poller.objects.create(instance="one", state="RUNNING", queues=[QUEUE])
    times = {"next_time": now + timedelta(hours=1), "last_time": now}
    Schedule.objects.create(name="nightly", queue=QUEUE, cron="0 3 * * *", paused=True, **times)


def test_a_scrape_says_how_the_queues_are() -> None:
    a_busy_site()
    found = scraped(scrape(client(*VIEWS)))
    assert found["dbtaskqueue_tasks", QUEUE, "CREATED"] == found["dbtaskqueue_tasks", QUEUE, "ERROR"] == 1
    assert 300 <= found["dbtaskqueue_oldest_due_age_seconds", QUEUE] < 3000
    assert found["dbtaskqueue_oldest_due_age_seconds", "letters"] == 0
    assert found["dbtaskqueue_queue_paused", "letters"] == 1
    assert found[("dbtaskqueue_pollers",)] == found["dbtaskqueue_queue_pollers", QUEUE] == 1
    assert found["dbtaskqueue_attempts_total", QUEUE, "completed"] == 5  # of today
    assert found["dbtaskqueue_run_seconds_total", QUEUE] == 1
    assert found["dbtaskqueue_enqueued_tasks_total", QUEUE] == 7
    assert found["dbtaskqueue_recent_run_seconds", QUEUE, "50"] == pytest.approx(0.01, rel=0.3)
    assert found["dbtaskqueue_schedule_next_timestamp_seconds", "nightly", QUEUE] > timezone.now().timestamp()
    assert found["dbtaskqueue_schedule_paused", "nightly", QUEUE] == 1


def test_a_scrape_says_what_a_limit_holds_back() -> None:
    a_busy_site()
    enqueue_many("calls", [{"payload": number} for number in range(5)])
    place = "calls", "default"
    ada = client(*VIEWS)
    found = scraped(scrape(ada))
    assert found["dbtaskqueue_limit_max_running", *place] == 2
    assert found["dbtaskqueue_limited_running_tasks", *place] == 0
    assert found["dbtaskqueue_held_back_tasks", *place, "max_running"] == 0, "no limit is reached: a poller is missing"
    queue("calls").take()
    queue("calls").take()
    found = scraped(scrape(ada))
    assert found["dbtaskqueue_limited_running_tasks", *place] == 2
    assert found["dbtaskqueue_limit_rate_tokens", *place] == 7
    assert found["dbtaskqueue_held_back_tasks", *place, "max_running"] == 3
    assert found["dbtaskqueue_held_back_tasks", *place, "rate"] == 0


def test_every_metric_is_as_it_is_defined() -> None:
    a_busy_site()
    families = {family.name: family for family in parsed(scrape(client(*VIEWS)))}
    for one in DATABASE_METRICS:
        family = families[one.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (one.type, f"{one.help}.")
        assert {frozenset(sample.labels) for sample in family.samples} == {frozenset(one.labels)}


def test_openmetrics_for_a_client_that_asks_for_it() -> None:
    a_busy_site()
    text = scrape(client(*VIEWS), Accept="application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert {family.name for family in openmetrics.text_string_to_metric_families(text)} >= {"dbtaskqueue_attempts"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault() -> None:
    a_busy_site()
    text = scrape(client(*VIEWS))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_tasks_and_queues(settings: Any) -> None:
    settings.DBTASKQUEUE = {}
    assert scraped(scrape(client(*VIEWS)))[("dbtaskqueue_pollers",)] == 0


@pytest.mark.parametrize("model", [Metric, UsageCount])
def test_a_counter_never_falls_when_rows_are_rolled_up(model: type[Model]) -> None:
    """The day begins at midnight by UTC, where every roll-up has an edge."""
    midnight = timezone.now().replace(hour=0, minute=0, second=0, microsecond=0)
    more = {"outcome": "completed"} if model is Metric else {"call": "put"}
    for minute in (midnight - timedelta(minutes=1), midnight):
        model._default_manager.create(queue=QUEUE, minute=minute, count=4, **more)
    counted = [value for key, value in scraped(scrape(client(*VIEWS))).items() if key[0].endswith("s_total")]
    assert counted.count(4) == 1


# -- who may read ------------------------------------------------------------------------------------------------------


def test_nobody_in_particular_reads_nothing() -> None:
    assert Client().get("/metrics").status_code == 401
    assert client("view_task").get("/metrics").status_code == 403


def test_a_token_of_a_user_with_the_permission_reads_though_the_api_is_closed() -> None:
    user("view_queue", name="robot")
    found = scraped(scrape(Client(), Authorization=f"Bearer {TOKEN}"))
    assert ("dbtaskqueue_pollers",) in found
    assert Client().get("/metrics", headers={"Authorization": "Bearer other"}).status_code == 401


def test_nothing_can_be_posted() -> None:
    answer = client(*VIEWS).post("/metrics")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_hidden_queues_are_in_no_sample(settings: Any) -> None:
    a_busy_site()
    Schedule.objects.create(name="weekly", queue="letters", cron="0 3 * * 1")
    Metric.objects.create(queue="letters", minute=timezone.now(), outcome="completed", count=1)
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "CAN_VIEW": f"{__name__}.only_claims"}
    text = scrape(client(*VIEWS))
    assert QUEUE in text
    assert "letters" not in text
    assert "weekly" not in text


def test_schedules_need_their_own_permission() -> None:
    a_busy_site()
    assert "nightly" not in scrape(client("view_queue"))


def test_without_the_package_the_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = client(*VIEWS).get("/metrics")
    assert answer.status_code == 503
    assert 'pip install "django-dbtaskqueue[prometheus]"' in answer.json()["error"]


def test_the_number_of_queries_does_not_grow_with_the_queues(settings: Any) -> None:
    ada, numbers = client(*VIEWS), []
    for queues in (1, 30):
        settings.DBTASKQUEUE = {"QUEUES": {f"queue{number}": {} for number in range(queues)}}
        with CaptureQueriesContext(connection) as asked:
            scrape(ada)
        numbers.append(len(asked))
    assert numbers[0] == numbers[1]


# -- histograms --------------------------------------------------------------------------------------------------------


def test_a_histogram_is_cumulative_and_ends_with_all() -> None:
    found = Exposition(POLLER_METRICS)
    found.add_histogram("dbtaskqueue_poller_run_seconds", {0: 2, 8: 1, 9: 3, 96: 4}, 5.5, QUEUE)
    samples = scraped(text_of([found], "")[0].decode())
    name = "dbtaskqueue_poller_run_seconds"
    assert samples[f"{name}_bucket", QUEUE, "0.001"] == 3
    assert samples[f"{name}_bucket", QUEUE, "0.00316"] == 6
    assert samples[f"{name}_bucket", QUEUE, "+Inf"] == samples[f"{name}_count", QUEUE] == 10
    assert samples[f"{name}_sum", QUEUE] == 5.5


def test_the_command_line_s_actor_sees_all() -> None:
    a_busy_site()
    assert list(exposition(Actor()).collect())
