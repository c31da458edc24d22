"""The demo's road: flights are loaded, claims filed and decided, what happened reported and archived."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from django.conf import settings

from example_project.flights import data
from example_project.flights.demo import figures, filing, loading, pollers, setup
from example_project.flights.demo.screen import Screen

if TYPE_CHECKING:
    from example_project.flights.demo.pipeline import Engineer

MOST_SINGLES = 200  # claims filed one by one, and as many that roll back


def travel(screen: Screen, tasks: int, poller_count: int, engineer: Engineer | None) -> figures.Run:
    """Go the road with ``tasks`` claims. Without an engineer Django files in bulk, and nothing is archived."""
    singles = min(MOST_SINGLES, max(1, tasks // 100))
    picked = data.sample(tasks, others=singles)
    screen.say("Flights", f"loading {len(picked.flights) + len(picked.others):,} of 2013")
    with screen.step("Flights", "writing"):
        loading.load(picked.flights + picked.others)
    references = [flight.reference for flight in picked.flights]
    bulk = references[singles:]
    if engineer is not None:
        with screen.step("Spark", "reading the flights of the year"):
            flights = engineer.clean()
        screen.say("Spark", "read {:,} flights, of which {:,} are sound".format(*flights))
        bulk = filing.unfiled(bulk)
        engineer.select(bulk, filing.PASSENGER)
    # All flights of the year are wanted: then these are withdrawn first, and filed for good after that.
    changing_minds = [flight.reference for flight in picked.others] or references[:singles]
    before, start = figures.finished(), time.monotonic()
    rolled_back = filing.withdraw(changing_minds)
    with screen.progress("Filing", len(bulk)) as progress:
        filing.file_each(references[:singles])
        if engineer is None:
            filing.file_in_bulk(bulk, progress)
        else:
            filing.file_by_pipeline(bulk, engineer, progress)
    filed = time.monotonic()
    with screen.progress("Deciding", figures.kept()) as progress:
        pollers.drain(poller_count, lambda: progress(figures.finished()))
    drained = time.monotonic()
    run = figures.Run(
        rolled_back=rolled_back,
        rolled_back_present=filing.still_present(changing_minds),
        finished=figures.finished() - before,
        enqueue_seconds=filed - start,
        drain_seconds=drained - filed,
        retried=figures.retried(),
        wait_ms=figures.waits(),
    )
    if engineer is None:  # an earlier demo may have had one
        return replace(run, archived={"COMPLETED": setup.archived()})
    return archived(screen, run, engineer)


def archived(screen: Screen, run: figures.Run, engineer: Engineer) -> figures.Run:
    """Report on the queue, move the older completed tasks to the lake, and return the run with what the jobs found."""
    with screen.step("Report", "counting attempts, waits and run times"):
        summary = engineer.report(settings.DATA_ROOT / "report")
    screen.say("Report", summary)
    with screen.step("Archive", "moving the older completed tasks"):
        moved = engineer.archive()
    screen.say("Archive", f"{moved:,} older completed tasks moved to {engineer.lake}; newer ones stay to look at")
    return replace(run, archived=engineer.archived(), pipeline=engineer.found)
