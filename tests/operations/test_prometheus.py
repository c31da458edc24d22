"""The metrics view, read by the parsers of Prometheus' own client."""

import sys
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed

from django_dbtaskqueue import enqueue_many, queue
from django_dbtaskqueue.api.prometheus import DATABASE_METRICS, exposition
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.metrics import Exposition, exposed
from django_dbtaskqueue.models import MinuteCount, Poller, Queue, Schedule
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.poller.probe_port import POLLER_METRICS
from tests.factories import QUEUE, make_task
from tests.operations.site import ONLY_PARCELS, client, logged_in, text, user
from tests.operations.test_api import BEARER, DIGEST
from tests.support import with_settings

VIEWS = "view_queue", "view_schedule"
LABELS = "schedule", "queue", "database", "limit", "status", "outcome", "percentile", "le"  # in the order of our keys
Samples = dict[tuple[str, ...], float]
LIMITS = {"max_running": 2, "rate": "9/h", "burst": 9}
_settings = with_settings(QUEUES={QUEUE: {}, "letters": {}, "calls": LIMITS}, API=False, API_TOKENS={"robot": DIGEST})


def scraped(text: str) -> Samples:
    found: Samples = {}
    for family in parsed(text):
        for sample in family.samples if family.name.startswith("dbtaskqueue_") else ():  # not the process's own
            key = (sample.name, *(sample.labels[name] for name in LABELS if name in sample.labels))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def scrape(ada: Client | None = None, **headers: str) -> str:
    return text((ada or client(*VIEWS)).get("/metrics", headers=headers))


@pytest.fixture
def busy() -> None:
    now = timezone.now()
    make_task(ready_time=-timedelta(minutes=5))
    make_task(Status.ERROR)
    make_task(Status.COMPLETED, queue="letters")
    Queue.objects.create(name="letters", paused_time=now)
    for number in (2, 3):  # as two pollers append them
        took = {"run_seconds": 0.5, "wait_seconds": 2.0, "runs": {"16": number}, "waits": {"24": number}}
        MinuteCount.objects.create(kind="outcome", queue=QUEUE, minute=now, name="completed", count=number, **took)
    MinuteCount.objects.create(kind="outcome", queue=QUEUE, minute=now - timedelta(days=1), name="completed", count=100)
    MinuteCount.objects.create(kind="call", queue=QUEUE, minute=now, name="put", count=7)
    Poller.objects.create(instance="one", state="RUNNING", queues=[QUEUE])
    times = {"next_time": now + timedelta(hours=1), "last_time": now}
    Schedule.objects.create(name="nightly", queue=QUEUE, cron="0 3 * * *", paused=True, **times)


def test_a_scrape_says_how_the_queues_are(busy: None) -> None:
    found = scraped(scrape())
    assert found["dbtaskqueue_tasks", QUEUE, "CREATED"] == found["dbtaskqueue_tasks", QUEUE, "ERROR"] == 1
    assert 300 <= found["dbtaskqueue_oldest_due_age_seconds", QUEUE] < 3000
    assert found["dbtaskqueue_oldest_due_age_seconds", "letters"] == 0
    assert found[("dbtaskqueue_pollers",)] == found["dbtaskqueue_queue_pollers", QUEUE] == 1
    assert found["dbtaskqueue_queue_paused", "letters"] == found["dbtaskqueue_schedule_paused", "nightly", QUEUE] == 1
    assert found["dbtaskqueue_attempts_total", QUEUE, "completed"] == 5  # of today
    totals = (found["dbtaskqueue_run_seconds_total", QUEUE], found["dbtaskqueue_enqueued_tasks_total", QUEUE])
    assert totals == (1, 7) and found["dbtaskqueue_recent_run_seconds", QUEUE, "50"] == pytest.approx(0.01, rel=0.3)
    assert found["dbtaskqueue_schedule_next_timestamp_seconds", "nightly", QUEUE] > timezone.now().timestamp()
    assert list(exposition(Actor()).collect()), "the command line's actor sees all"


def test_a_scrape_says_what_a_limit_holds_back(busy: None) -> None:
    enqueue_many("calls", [{"payload": number} for number in range(5)])
    place, ada = ("calls", "default"), client(*VIEWS)
    shown = [scraped(scrape(ada))]
    assert shown[0]["dbtaskqueue_limit_max_running", *place] == 2
    assert queue("calls").take() and queue("calls").take()
    shown.append(scraped(scrape(ada)))
    assert [one["dbtaskqueue_limited_running_tasks", *place] for one in shown] == [0, 2]
    # Before, no limit is reached: a poller is missing
    assert [one["dbtaskqueue_held_back_tasks", *place, "max_running"] for one in shown] == [0, 3]
    assert shown[1]["dbtaskqueue_limit_rate_tokens", *place] == 7
    assert shown[1]["dbtaskqueue_held_back_tasks", *place, "rate"] == 0


def test_every_metric_is_as_it_is_defined(busy: None) -> None:
    families = {family.name: family for family in parsed(scrape())}
    for one in DATABASE_METRICS:
        family = families[one.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (one.type, f"{one.help}.")
        assert {frozenset(sample.labels) for sample in family.samples} == {frozenset(one.labels)}
    found = scrape(logged_in(User.objects.get()), Accept="application/openmetrics-text; version=1.0.0")
    assert found.endswith("# EOF\n")
    assert {family.name for family in openmetrics.text_string_to_metric_families(found)} >= {"dbtaskqueue_attempts"}


@pytest.mark.parametrize(("kind", "name"), [("outcome", "completed"), ("call", "put")])
def test_a_counter_never_falls_when_rows_are_rolled_up(kind: str, name: str) -> None:
    midnight = timezone.now().replace(hour=0, minute=0, second=0, microsecond=0)
    for minute in (midnight - timedelta(minutes=1), midnight):
        MinuteCount.objects.create(kind=kind, queue=QUEUE, name=name, minute=minute, count=4)
    assert [value for key, value in scraped(scrape()).items() if key[0].endswith("s_total")].count(4) == 1


def test_nobody_in_particular_reads_nothing() -> None:
    assert Client().get("/metrics").status_code == 401
    assert client("view_task", name="bob").get("/metrics").status_code == 403
    posted = client(*VIEWS).post("/metrics")
    assert (posted.status_code, posted.headers["Allow"]) == (405, "GET, HEAD")
    # A token of a user with the permission reads though the API is closed.
    user("view_queue", name="robot")
    assert ("dbtaskqueue_pollers",) in scraped(scrape(Client(headers=BEARER)))
    assert Client().get("/metrics", headers={"Authorization": "Bearer other"}).status_code == 401


def test_hidden_queues_are_in_no_sample(busy: None, settings: Any) -> None:
    Schedule.objects.create(name="weekly", queue="letters", cron="0 3 * * 1")
    MinuteCount.objects.create(kind="outcome", queue="letters", minute=timezone.now(), name="completed", count=1)
    settings.DBTASKQUEUE |= {"CAN_VIEW": ONLY_PARCELS}
    assert "nightly" not in scrape(client("view_queue", name="bob")), "schedules need their own permission"
    shown = scrape()
    assert QUEUE in shown and "letters" not in shown and "weekly" not in shown


def test_without_the_package_the_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = client(*VIEWS).get("/metrics")
    assert answer.status_code == 503
    assert 'pip install "django-dbtaskqueue[prometheus]"' in answer.json()["error"]


def test_the_number_of_queries_does_not_grow_with_the_queues(settings: Any) -> None:
    ada, numbers = client(*VIEWS), []
    for queues in (0, 30):
        settings.DBTASKQUEUE = {"QUEUES": {f"queue{number}": {} for number in range(queues)}}
        with CaptureQueriesContext(connection) as asked:
            assert scraped(scrape(ada))[("dbtaskqueue_pollers",)] == 0
        numbers.append(len(asked))
    assert numbers[0] == numbers[1]


def test_a_histogram_is_cumulative_and_ends_with_all() -> None:
    found = Exposition(POLLER_METRICS)
    found.add_histogram("dbtaskqueue_poller_run_seconds", {0: 2, 8: 1, 9: 3, 96: 4}, 5.5, QUEUE)
    samples = scraped(exposed([found], "")[0].decode())
    name = "dbtaskqueue_poller_run_seconds"
    assert [samples[f"{name}_bucket", QUEUE, end] for end in ("0.001", "0.00316", "+Inf")] == [3, 6, 10]
    assert (samples[f"{name}_count", QUEUE], samples[f"{name}_sum", QUEUE]) == (10, 5.5)
