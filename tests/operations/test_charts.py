"""The charts of the overview, as their tables and texts say them; ``tests/browser`` draws them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now
from django.test import Client

from django_dbtaskqueue.models import Metric, Poller

pytestmark = pytest.mark.django_db
PAGE = "/admin/dbtaskqueue/overview/"


@pytest.fixture
def op(admin_user: Any) -> Client:
    client = Client()
    client.force_login(admin_user)
    return client


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
