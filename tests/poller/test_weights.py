"""Which queues, and how often: the words of ``--queue`` and ``--exclude``."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import UnknownQueue, processor, registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.models import Queue
from django_dbtaskqueue.poller.process import queue_selection


def test_what_they_mean() -> None:
    for texts, excluded, wanted in (
        (["work"], [], {"work": 1}),
        (["work:3", "other"], [], {"work": 3, "other": 1}),
        (["work:3,other:2, aio"], ["aio"], {"work": 3, "other": 2}),
        (["work,work:2"], [], {"work": 2}),
        ([], [], dict.fromkeys(registry.queues(), 1)),  # every queue that has a processor
        ([], ["work", "other"], dict.fromkeys(set(registry.queues()) - {"work", "other"}, 1)),
    ):
        assert queue_selection.parse(texts, excluded) == wanted


def test_a_queue_may_have_a_colon_in_its_name(taskqueue_registry: None) -> None:
    processor("mail:8")(print)
    assert queue_selection.parse(["mail:8"]) == {"mail:8": 1}
    assert queue_selection.parse(["mail:8:2"]) == {"mail:8": 2}


def test_a_weight_is_a_whole_number() -> None:
    for weight in ("0", "-1", "x", "1.5", ""):
        with pytest.raises(ImproperlyConfigured, match="whole number of at least 1, as in work:2"):
            queue_selection.parse([f"work:{weight}"])


@pytest.mark.django_db
def test_an_unknown_queue_is_named_with_the_nearest_of_all_that_are_known(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"letters": {}}}
    Queue.objects.create(name="made-at-night")
    for wrong, right in (("mad-at-night", "made-at-night"), ("wrok", "work"), ("leters", "letters")):
        with pytest.raises(UnknownQueue, match=rf"Unknown queue '{wrong}'\. Did you mean '{right}'\?"):
            queue_selection.parse([wrong])
    with pytest.raises(ImproperlyConfigured, match="Queue 'made-at-night' has no processor in this project"):
        queue_selection.parse(["made-at-night"])


@pytest.mark.django_db
def test_a_queue_nobody_processes_is_refused(taskqueue_registry: None) -> None:
    registry.restore(({}, {}, {}))
    assert "claims" in conf.known_queues()  # it stands in the settings
    with pytest.raises(ImproperlyConfigured, match="Queue 'claims' has no processor in this project"):
        queue_selection.parse(["claims"])


def test_nothing_to_poll_is_said(taskqueue_registry: None) -> None:
    with pytest.raises(ImproperlyConfigured, match="--exclude leaves none of work"):
        queue_selection.parse(["work"], ["work"])
    registry.restore(({}, {}, {}))
    with pytest.raises(ImproperlyConfigured, match="no processor is registered"):
        queue_selection.parse([])
