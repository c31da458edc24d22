"""How many calls and modules of the package one ``enqueue()`` and one task take, on SQLite; printed as JSON.

``python -m tests.architecture.journeys`` runs both in a process of its own, because it sets Django up for itself.

What is counted: starts of functions and methods whose code lies in a file of the package, lambdas included. What is
not: comprehensions, generator expressions, generators that go on after a ``yield``, and code outside the package.
All caches are warm. A count is the least of several runs, and time stands still: no heartbeat falls into them.

The journey of a task begins when a real poller with two threads is woken for it, and ends when it is idle again. So it
holds the choice of the queue, the checkout, the run, the settle, the accounting, and any fetch of a second thread.
"""

import json
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.architecture.source import PACKAGE, REPOSITORY
from tests.patience import PATIENCE

RUNS, WARM_UP_RUNS = 15, 3
FOLDER = f"{REPOSITORY / PACKAGE}/"
NOT_COUNTED = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
GENERATOR_FLAGS = 0x20 | 0x80 | 0x200  # generator, coroutine, asynchronous generator


class CallCounter:
    """Counts calls by code object while it is switched on. Install ``profile`` in each thread to be counted."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[CodeType] = Counter()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(FOLDER) and _is_start(frame, code):
            self.calls[code] += 1

    def take(self) -> Counter[CodeType]:
        calls, self.calls = self.calls, Counter()
        return calls


def _is_start(frame: FrameType, code: CodeType) -> bool:
    if code.co_name in NOT_COUNTED:
        return False
    # A frame that goes on after a yield stands at a RESUME whose argument is not 0.
    return not code.co_flags & GENERATOR_FLAGS or code.co_code[frame.f_lasti + 1] == 0


def _least(journeys: list[Counter[CodeType]]) -> dict[str, Any]:
    calls = min(journeys, key=Counter.total)
    named = {f"{code.co_filename.removeprefix(FOLDER)}:{code.co_qualname}": count for code, count in calls.items()}
    return {"calls": calls.total(), "modules": len({code.co_filename for code in calls}), "functions": named}


@dataclass
class Order:
    number: int


def measure_enqueue(counter: CallCounter, **options: Any) -> dict[str, Any]:
    from django_dbtaskqueue import enqueue

    journeys = []
    for number in range(WARM_UP_RUNS + RUNS):
        sys.setprofile(counter.profile)
        counter.on = True
        enqueue("idle", f"{len(options)}-{number}", **options)
        counter.on = False
        sys.setprofile(None)
        journeys.append(counter.take())
    return _least(journeys[WARM_UP_RUNS:])


@contextmanager
def _event_at(signal: Any, condition: Callable[[], bool]) -> Iterator[threading.Event]:
    event = threading.Event()

    def receive(**_: object) -> None:
        if condition():
            event.set()

    signal.connect(receive)
    yield event
    signal.disconnect(receive)


def measure_task(counter: CallCounter) -> dict[str, Any]:
    """Return calls and modules of one task, from the choice of the queue to the idle poller."""
    from django_dbtaskqueue import enqueue, registry, signals
    from django_dbtaskqueue.core.durations import clock
    from django_dbtaskqueue.testing import run_poller

    real, now = clock.monotonic, clock.monotonic()
    clock.monotonic = lambda: now  # type: ignore[method-assign]
    ran: list[int] = []
    registry.register("work", lambda task: ran.append(task.id))
    journeys = []
    threading.setprofile(counter.profile)
    with run_poller("work") as poller:
        for number in range(WARM_UP_RUNS + RUNS):
            with _event_at(signals.poller_idle, lambda: True) as idle:
                poller.wake("work")
                assert idle.wait(PATIENCE)
            enqueue("work")  # on this thread, which is not counted
            with _event_at(signals.poller_idle, lambda before=number: len(ran) > before) as idle:
                counter.on = True
                poller.wake("work")
                assert idle.wait(PATIENCE)
                counter.on = False
            journeys.append(counter.take())
        clock.monotonic = real  # type: ignore[method-assign]  # a poller that drains waits for time to pass
    return _least(journeys[WARM_UP_RUNS:])


def main() -> None:
    import django
    from django.conf import settings
    from django.core.management import call_command

    with tempfile.TemporaryDirectory() as folder:
        file = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(Path(folder) / "journeys.sqlite3")}
        settings.configure(
            DATABASES={"default": {**file, "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20}}},
            USE_TZ=True,
            INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", PACKAGE],
            SECRET_KEY="journeys",
            DBTASKQUEUE={"QUEUES": {"idle": {}, "work": {"poll_interval": timedelta(hours=1)}}},
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        )
        django.setup()
        logging.disable()
        call_command("migrate", verbosity=0)
        counter = CallCounter()
        full = {"payload": Order(1), "delay": timedelta(days=1), "priority": 3, "context": {"request": "r1"}}
        calls = {"enqueue": full, "plain enqueue": {"payload": {"n": 1}}}
        found = {name: measure_enqueue(counter, **options) for name, options in calls.items()}
        print(json.dumps({**found, "task": measure_task(counter)}))


if __name__ == "__main__":
    main()
