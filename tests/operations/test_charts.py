"""The charts of the overview, as their tables and texts say them; ``tests/browser`` draws them."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now
from django.test import Client

from django_dbtaskqueue.metrics import class_of
from django_dbtaskqueue.models import Metric, Poller

pytestmark = pytest.mark.django_db
PAGE = "/admin/dbtaskqueue/overview/"


@pytest.fixture(autouse=True)
def _known_queue(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"q": {}}}


def poller(name: str, version: str, started: timedelta) -> None:
    Poller.objects.create(instance=name, version=version, start_time=Now() - started)


def test_the_start_of_a_new_version_is_marked_and_an_old_one_is_not(op: Client) -> None:
    Metric.objects.create(queue="q", minute=Now() - timedelta(minutes=2), outcome="completed", count=5)
    poller("a", "0.1.0", timedelta(days=2))
    poller("b", "0.1.0", timedelta(minutes=9))
    assert "first poller of version" not in op.get(PAGE).content.decode()
    poller("c", "0.2.0", timedelta(minutes=5))
    poller("d", "0.2.0", timedelta(minutes=4))
    shown = op.get(PAGE).content.decode()
    assert shown.count("first poller of version 0.2.0") == 2, "in both charts, once"
    assert 'data-marks="dbtq-throughput-marks"' in shown


def test_outcomes_stand_on_each_other(op: Client) -> None:
    Metric.objects.create(queue="q", minute=Now() - timedelta(minutes=2), outcome="completed", count=5)
    shown = op.get(PAGE).content.decode()
    chart = shown.split('id="dbtq-throughput-chart"', 1)[1].split(">", 1)[0]
    assert "data-bars" in chart and "requeued" in shown


def test_a_queue_has_its_rate_of_the_last_hour_as_bars_that_say_their_numbers(op: Client) -> None:
    for minutes, count in ((2, 50), (58, 500)):
        Metric.objects.create(
            queue="q", minute=Now() - timedelta(minutes=minutes), outcome="completed", count=count, run_seconds=1
        )
    Metric.objects.create(queue="q", minute=Now() - timedelta(minutes=2), outcome="retried", count=7)
    numbers = f"100, {'0, ' * 10}10</title>"
    for page in (PAGE, "/admin/dbtaskqueue/queue/", "/admin/dbtaskqueue/queue/q/change/"):
        shown = op.get(page).content.decode()
        assert f"out per min in the last hour, by 5 minutes: {numbers}" in shown, page
        assert 'd="M2 16v-15M57 16v-2"' in shown, "each bar as high as its rate"


def test_a_queue_without_a_finished_task_has_no_bars(op: Client) -> None:
    shown = op.get(PAGE).content.decode()
    assert ">q</a>" in shown and "dbtq-spark" not in shown


def test_run_times_and_waits_are_mapped_by_time(op: Client) -> None:
    quick, slow = class_of(0.004), class_of(2.0)
    Metric.objects.create(
        queue="q", minute=Now() - timedelta(minutes=2), outcome="completed", count=4, runs={quick: 3, slow: 1}
    )
    shown = op.get(PAGE).content.decode()
    body = shown.split('id="dbtq-runs-map"', 1)[1].split("</table>", 1)[0].split("<tbody>", 1)[1]
    rows = re.findall(r'<th scope="row">([^<]*)</th>(.*?)</tr>', body, re.S)
    assert [head for head, _cells in rows] == ["up to 10s", "up to 1s", "up to 100ms", "up to 10ms"]
    assert [re.findall(r'dbtq-heat-([1-9])">(\d+)<', cells) for _head, cells in rows] == [
        [("3", "1")],
        [],
        [],
        [("7", "3")],
    ]
    assert "dbtq-waits-map" not in shown, "no wait was measured"
