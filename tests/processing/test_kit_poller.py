"""The test kit's poller does what ``runtaskpoller`` does, and ``drain`` obeys what operators set."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from django_dbtaskqueue import processor, queue
from django_dbtaskqueue.models import Poller, Queue
from tests.factories import make_task
from tests.processing.conftest import QUEUE, Site, both, on_real_connections
from tests.support import until, with_settings

pytestmark = on_real_connections
_settings = with_settings("_registrations", HEARTBEAT=timedelta(milliseconds=100))


def override(site: Site, **overrides: Any) -> None:
    row, _ = Queue.objects.using(site.alias).get_or_create(name=QUEUE)
    row.overrides = {**row.overrides, **overrides}
    row.save()


@both
def test_the_kits_poller_reports_obeys_rescues_and_unparks(site: Site) -> None:
    processor(QUEUE)(lambda task: None)
    pollers = Poller.objects.using(site.alias)

    def tell(command: str, shows: Callable[[], bool]) -> None:
        pollers.update(requested_command=command)
        until(shows)

    with site.poller() as poller:
        until(pollers.filter(pk=poller.instance, state="RUNNING").exists)
        override(site, batch_size=7)
        until(lambda: poller.queues[QUEUE].settings.batch_size == 7)
        tell("pause", lambda: poller.paused)
        until(pollers.filter(state="PAUSED").exists)
        tell("start", lambda: not poller.paused)
        orphan: dict[str, Any] = {"attempt": 5, "max_attempts": 5, "next_process_time": -timedelta(hours=1)}
        dead = make_task("PROCESSING", queue=QUEUE, using=site.alias, **orphan)
        reason = f"no handler for payload type plain JSON on queue {QUEUE}"
        parked = make_task("CREATED", queue=QUEUE, parked_by=reason, using=site.alias)
        site.until(dead, "ERROR")
        site.until(parked)
        tell("drain", lambda: poller.wait(0))
    assert pollers.values_list("state", "requested_command").get() == ("STOPPED", "")


def test_a_processor_reads_the_project_s_own_settings_of_its_queue(site: Site, settings: Any) -> None:
    seen: list[Any] = []

    @processor(QUEUE)
    def process(task: Any) -> None:
        with pytest.raises(TypeError):
            task.extra["url"] = "changed"
        seen.append(task.extra.get("url"))

    def say(**extra: Any) -> None:
        settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "QUEUES": {QUEUE: {"extra": extra}}}

    def applied(poller: Any) -> str:
        return str(Poller.objects.using(site.alias).values_list("applied_settings", flat=True).get(pk=poller.instance))

    say(url="https://one.example", api_key="hunter2")
    site.drained()
    handle = queue(QUEUE, using=site.alias)
    handle.put()
    lease = handle.take()
    assert lease is not None and lease.extra["url"] == "https://one.example"
    lease.complete()
    # A running poller follows a change, and shows no secret of it
    with site.poller() as poller:
        site.enqueue()
        until(lambda: len(seen) == 2 and Poller.objects.using(site.alias).filter(pk=poller.instance).exists())
        say(url="https://two.example", api_key="hunter3")
        until(lambda: "two.example" in applied(poller))
        assert "hunter" not in applied(poller)
        site.enqueue()
    # A queue's row cannot set it, because every login that enqueues may write the row
    override(site, extra={"url": "https://evil.example"})
    site.drained()
    assert seen == ["https://one.example"] * 2 + ["https://two.example"] * 2
