"""What hardbyte's harness starts: one process that enqueues what it is told, polls, and prints its figures as JSON.

A task sleeps on the event loop, and its time of pick-up counts from before its enqueue.
"""

import asyncio
import json
import os
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import django
from django.core.management import call_command
from django.db import DatabaseError, close_old_connections

ENV, QUEUE, WINDOW_S = os.environ, "neutral", 30.0
EVERY_S, INSTANCE = int(ENV.get("SAMPLE_EVERY_S", "5")), int(ENV.get("BENCH_INSTANCE_ID", "0"))
enqueued, completed, never = 0, 0, Event()
waits = deque[tuple[float, float]](maxlen=32_768)  # when a task began, and after how many milliseconds


async def work(task: Any) -> None:
    global completed
    waits.append((time.time(), (time.time() - task.payload["at"]) * 1000))
    await asyncio.sleep(float(ENV["JOB_WORK_MS"]) / 1000)
    completed += 1


def produce(number: int) -> None:
    global enqueued
    payload = {"at": time.time(), "padding": "x" * int(ENV["JOB_PAYLOAD_BYTES"])}
    with suppress(DatabaseError):  # the harness stops the server, too
        close_old_connections()
        enqueue_many(QUEUE, [{"payload": payload}] * number)
        enqueued += number


def producing() -> None:
    while ENV["PRODUCER_MODE"] == "depth-target":
        missing = int(ENV["TARGET_DEPTH"]) - enqueued + completed  # of this replica
        produce(min(missing, int(ENV.get("PRODUCER_BATCH_MAX", "128")))) if missing > 0 else never.wait(0.005)
    now = time.time()
    while ENV["PRODUCER_PACING"] == "adapter":  # for phases of high load: the harness's own pacer keeps one rate
        never.wait(0.025)
        now, before = time.time(), now
        produce(round(float(Path(ENV["PRODUCER_RATE_CONTROL_FILE"]).read_text() or 0) * (now - before)))
    for line in sys.stdin:  # ENQUEUE 128
        produce(int(line.split()[1]))


def sampling() -> None:
    while True:
        before, began = (enqueued, completed), time.time()
        never.wait(EVERY_S - began % EVERY_S)
        now = time.time()
        values = sorted(wait for at, wait in waits.copy() if at > now - WINDOW_S) or [0.0]
        figures = {f"claim_p{share}_ms": (values[len(values) * share // 100], WINDOW_S) for share in (50, 95, 99)}
        for name, one, earlier in zip(("enqueue_rate", "completion_rate"), (enqueued, completed), before, strict=True):
            figures[name] = (one - earlier) / (now - began), EVERY_S
        with suppress(DatabaseError):
            close_old_connections()
            if INSTANCE == 0:
                figures["queue_depth"] = Task.objects.filter(queue=QUEUE, status="CREATED").count(), 0.0
        for metric, (value, window_s) in figures.items():
            tell(kind="adapter", subject_kind="adapter", subject="", metric=metric, value=value, window_s=window_s)


def tell(**line: object) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line |= {"system": "dbtaskqueue", "instance_id": INSTANCE, "t": at, "started_at": at}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    ENV["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    django.setup()
    from django_dbtaskqueue import enqueue_many, registry
    from django_dbtaskqueue.models import Task

    registry.register(QUEUE, work)
    call_command("migrate", verbosity=0)
    tell(kind="descriptor", **json.loads(Path(__file__).with_name("adapter.json").read_text()))
    for target in (producing, sampling):
        Thread(target=target, daemon=True).start()
    call_command("runtaskpoller", f"--queue={QUEUE}", f"--async={ENV['WORKER_COUNT']}", stdout=sys.stderr)
