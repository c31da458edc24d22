"""What a poller does beside its work: it enforces timeouts, reports, and rescues what dead processes left behind.

Two threads. ``watch`` never waits for the database, so that a timeout is noticed on time; ``tend`` has the calling
thread's Django connections to itself and outlives every outage.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from os import getpid
from time import monotonic
from typing import Any

from django.db import connections
from django.db.models.functions import Now
from django.db.utils import Error

from django_dbtaskqueue import __version__, models, registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import move, observe
from django_dbtaskqueue.flow.rescue import rescue, seconds_until_exhausted, seconds_until_exhausted_by_queue
from django_dbtaskqueue.metrics.collector import Collector
from django_dbtaskqueue.poller.executors import Done
from django_dbtaskqueue.poller.executors.thread import tidy
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.periodic import Maintenance
from django_dbtaskqueue.poller.queue_state import Lane
from django_dbtaskqueue.poller.runtime import apply_overrides

logger = logging.getLogger("django_dbtaskqueue")

TICK = 0.25  # seconds between two looks for tasks whose time is over
UNPARK = 30.0  # seconds between two looks for parked tasks that have a handler here
SHOWN = 20  # running tasks that one heartbeat names
RESCUE = 5.0  # seconds, at most, between two looks for tasks to rescue
EARLY = 0.2  # of that time: how much before its time a queue is looked at along with others
TOGETHER = 50  # queues looked at in one statement
LOCKED = 1.0  # seconds before a second look at a lease that ran out but is locked
SHARE = 20  # looking for tasks to rescue may cost a twentieth of the time
MOST_PAUSE = 5.0  # seconds between two attempts while the database is away
KEPT = timedelta(days=1)  # how long the row of a poller that died stays
COMMANDS: dict[str, Callable[[Poller], None]] = {
    "pause": Poller.pause,
    "start": Poller.resume,
    "drain": Poller.stop,
    "stop": Poller.cancel,
}
REPORTED = (
    "host", "pid", "version", "queues", "state", "slots", "held", "finished", "failed", "running", "heartbeat_time",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Duty:
    """Something to do again and again on one database; ``run`` returns the seconds until the next time."""

    alias: str
    run: Callable[[], float]
    due: float = 0.0
    pause: float = 0.0  # seconds of the present back-off; 0 while it works


class Control:
    """Looks after one poller, from ``start`` to ``stop``. A database that is away never ends it."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        aliases = {lane.port.alias for lane in poller.lanes.values()}
        self._maintenance = Maintenance(aliases, poller.settler.metrics)
        self._ended = threading.Event()
        self._duties = list(self._all_duties())
        self._threads = [
            threading.Thread(target=work, name=f"dbtaskqueue-{work.__name__.strip('_')}", daemon=True)
            for work in (self._watch, self._tend)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()
        self._maintenance.start()

    def stop(self) -> None:
        """Report a last time, as STOPPED, and end."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=MOST_PAUSE)
        self._maintenance.stop()

    def _all_duties(self) -> Iterator[Duty]:
        lanes = self._poller.lanes.values()
        for alias in sorted({lane.port.alias for lane in lanes}):
            yield Duty(alias, partial(self._report, alias))
            yield Duty(alias, partial(_prune, alias))
            yield Duty(alias, partial(self._obey, alias))
        tables: dict[tuple[str, type], list[Lane]] = {}
        for lane in lanes:
            yield Duty(lane.port.alias, partial(self._unpark, lane))
            tables.setdefault((lane.port.alias, lane.port.model), []).append(lane)
        for (alias, _), those in tables.items():
            yield Duty(alias, Rescuer(those, self._poller.settler.metrics).look)

    def _watch(self) -> None:
        while not self._ended.wait(TICK):
            try:
                self._poller.overdue()
            except Exception:  # without this thread no timeout would ever be enforced again
                logger.exception("Timeouts could not be enforced, trying again")

    def _tend(self) -> None:
        while not self._ended.is_set():
            for duty in self._duties:
                if monotonic() >= duty.due and not self._ended.is_set():
                    duty.due = monotonic() + self._attempt(duty)
            tidy()
            self._ended.wait(max(0.0, min(duty.due for duty in self._duties) - monotonic()))
        for alias in {duty.alias for duty in self._duties}:
            self._attempt(Duty(alias, partial(self._report, alias, "STOPPED")))
        connections.close_all()

    def _attempt(self, duty: Duty) -> float:
        """Do a duty, whatever happens to the database; return the seconds until the next time."""
        try:
            seconds = duty.run()
        except Exception as error:
            connections[duty.alias].close()
            if not self._failing(duty.alias) and not self._ended.is_set():
                bug = not isinstance(error, Error)
                logger.warning("Heartbeat and rescue fail, trying again: %s", _said(error), exc_info=bug)
            duty.pause = min(MOST_PAUSE, 2 * duty.pause or 0.5)
            return duty.pause * random.uniform(0.5, 1.5)
        if duty.pause:
            duty.pause = 0.0
            if not self._failing(duty.alias):
                logger.info("Heartbeat and rescue work again")
        return seconds

    def _failing(self, alias: str) -> bool:
        return any(duty.pause for duty in self._duties if duty.alias == alias)

    # -- duties ------------------------------------------------------------------------------------------------------

    def _report(self, alias: str, state: str | None = None) -> float:
        """Write this poller's row, in one statement."""
        poller = self._poller
        row = models.Poller(
            instance=poller.instance,
            host=socket.gethostname()[:200],
            pid=getpid(),
            version=__version__,
            queues=[{"queue": lane.queue, "weight": lane.weight} for lane in poller.lanes.values()],
            state=state or poller.state,
            slots=poller.slots(),
            held=len(poller.settler.held),
            finished=poller.counts.finished,
            failed=poller.counts.failed,
            running=self._running(),
            heartbeat_time=Now(),
        )
        models.Poller.objects.using(alias).bulk_create(
            [row], update_conflicts=True, unique_fields=["instance"], update_fields=REPORTED
        )
        return conf.settings().heartbeat.total_seconds() * random.uniform(0.9, 1.0)

    def _obey(self, alias: str) -> float:
        """Apply what an operator changed on the queues' rows."""
        lanes = [lane for lane in self._poller.lanes.values() if lane.port.alias == alias]
        applied = apply_overrides(lanes, alias)
        if applied:
            models.Poller.objects.using(alias).filter(pk=self._poller.instance).update(applied="\n".join(applied))
            self._poller.wake("")
        self._follow(alias)
        return conf.settings().heartbeat.total_seconds() * random.uniform(0.8, 1.0)

    def _follow(self, alias: str) -> None:
        """Do what an operator told this poller, once."""
        rows = models.Poller.objects.using(alias).filter(pk=self._poller.instance).exclude(wanted="")
        wanted = rows.values_list("wanted", flat=True).first()
        if wanted in COMMANDS:
            logger.info("Told by an operator to %s", wanted)
            COMMANDS[wanted](self._poller)
            rows.filter(wanted=wanted).update(wanted="")
            self._report(alias)

    def _running(self) -> list[dict[str, Any]]:
        now = monotonic()
        longest = sorted(self._poller.running(), key=lambda run: run.started)[:SHOWN]
        return [{**observe.fields(run.job.lease), "seconds": round(now - run.started, 1)} for run in longest]

    def _unpark(self, lane: Lane) -> float:
        """Tasks that waited for a handler have one now."""
        session = Session.on(lane.port.alias, lane.port.model)
        untyped = registry.find(lane.queue, None) is not None
        back = move.unpark(session, lane.queue, registry.payload_types(lane.queue), untyped=untyped)
        if back:
            logger.info("%s parked tasks of %s have a handler here and are back in line", back, lane.queue)
            self._poller.wake(lane.queue)
        return UNPARK * random.uniform(0.9, 1.1)


class Rescuer:
    """Looks for tasks to rescue in the lanes of one table, in each when it is due."""

    def __init__(self, lanes: Iterable[Lane], metrics: Collector | None = None) -> None:
        self._due = dict.fromkeys(lanes, 0.0)
        self._metrics = metrics

    def look(self) -> float:
        """Look into the lanes that are due, and those that are soon; return the seconds until the next look."""
        began = monotonic()
        if min(self._due.values()) <= began:
            soon = began + EARLY * RESCUE
            lanes = sorted([lane for lane, due in self._due.items() if due <= soon], key=self._due.__getitem__)
            self._look_into(lanes[:TOGETHER])
        now = monotonic()
        return max(min(self._due.values()) - now, SHARE * (now - began))

    def _look_into(self, lanes: list[Lane]) -> None:
        session = Session.on(lanes[0].port.alias, lanes[0].port.model)
        left = seconds_until_exhausted_by_queue(session, [lane.queue for lane in lanes])
        waits = {lane: rescue_due(session, lane, left.get(lane.queue), self._metrics) for lane in lanes}
        now = monotonic()
        for lane, wait in waits.items():
            self._due[lane] = now + wait


def rescue_due(session: Session, lane: Lane, left: float | None, metrics: Collector | None) -> float:
    """Write ERROR for a lane's tasks whose process died on their last attempt; return when to look again.

    ``left`` is what ``seconds_until_exhausted`` says. It counts the leases that still run, too: an idle look every few
    seconds is enough to end an orphan within a tenth of its lease.
    """
    while left is not None and left <= 0 and (ended := rescue(session, lane.queue, lane.port, keep=lane.settings.keep)):
        if metrics is not None:
            dead = [Done(lease, outcome, 0.0) for lease, outcome in ended]
            metrics.add(lane.port.alias, lane.queue, dead)
        left = seconds_until_exhausted(session, lane.queue)
    lease = lane.settings.lease.total_seconds()
    wait = min(RESCUE, lease / 3) * random.uniform(0.8, 1.0)
    if left is not None:
        wait = min(wait, left + lease * random.uniform(0.02, 0.1) if left > 0 else LOCKED)
    return wait


def _prune(alias: str) -> float:
    """Forget pollers that have not reported for a day."""
    models.Poller.objects.using(alias).filter(heartbeat_time__lt=Now() - KEPT).delete()
    return float("inf")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ").strip()
