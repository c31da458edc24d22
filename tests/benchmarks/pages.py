"""How long pages, the API and commands take at size: ``python -m tests.benchmarks.pages --tasks 10000000``.

Builds the tasks with ``generatetasks`` in a PostgreSQL of its own, kept in ``--folder`` for the next time, and asks for
each page in turns, through Django's whole stack. Prints how many of the rows that match one page shows, the time that
95 % of the requests stayed within, the CPU time of Python, and the statements of one request, those that begin and end
transactions among them. A search that goes on by itself has also the time until its first row. Nobody else should use
the machine. ``--only TEXT`` measures the pages with this text in their name.
"""

import argparse
import gc
import os
import shlex
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from io import StringIO
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psycopg

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from tests.benchmarks.report import BEGIN, END, put_into, table

# What a server on such a machine would be set to; commits of the builder need not survive a crash.
SETTINGS = {"synchronous_commit": "off", "max_wal_size": "8GB", "shared_buffers": "2GB", "checkpoint_timeout": "30min"}
NAME = "pages"
GOAL = 300  # ms
TASKS = "/admin/dbtaskqueue/task/"
API = "/api/"
COMMAND = "taskqueue "  # what begins so is no address
PAGES = {
    "Overview": "/admin/dbtaskqueue/overview/",
    "Tasks": TASKS,
    "Tasks, an old page": f"{TASKS}?before={{middle}}",
    "Tasks: a status": f"{TASKS}?q=status:ERROR",
    "Tasks: a status of most": f"{TASKS}?q=status:COMPLETED",
    "Tasks: waiting": f"{TASKS}?q=status:CREATED",
    "Tasks: being processed": f"{TASKS}?q=status:PROCESSING",
    "Tasks: a large queue": f"{TASKS}?q=queue:built-00",
    "Tasks: a small queue": f"{TASKS}?q=queue:built-{{small:02}}",
    "Tasks: a small queue and a status": f"{TASKS}?q=queue:built-{{small:02}}+status:ERROR",
    "Tasks: a large queue and a status": f"{TASKS}?q=queue:built-00+status:ERROR",
    "Tasks: a reference": f"{TASKS}?q=ref:b-77777",
    "Tasks: a failure": f"{TASKS}?q=fingerprint:{{fingerprint}}",
    "Tasks: an age": f"{TASKS}?q=status:ERROR+age:>10d",
    "Tasks: leases that ran out": f"{TASKS}?q=is:stale",
    "Tasks: due": f"{TASKS}?q=is:due",
    "Tasks: scheduled": f"{TASKS}?q=is:scheduled",
    "Tasks: a part of an error": f"{TASKS}?q=error:quota",
    "Tasks: a part of no error": f"{TASKS}?q=error:Timeout",
    "Tasks: attempts made": f"{TASKS}?q=attempt:>=3",
    "Tasks: a value in payloads": f"{TASKS}?q=payload.number:77777",
    "Tasks: a value in a queue's payloads": f"{TASKS}?q=queue:built-00+payload.number:-1",
    "Tasks: a poller": f"{TASKS}?q=poller:nobody",
    "Tasks: old ones": f"{TASKS}?q=age:>25d",
    "Tasks: all but a queue's": f"{TASKS}?q=-queue:built-00",
    "Tasks: of three days": f"{TASKS}?q=created:{{day}}..{{later}}",
    "Tasks: created a while ago, in ERROR": f"{TASKS}?q=created:<{{day}}+status:ERROR",
    "Tasks: finished on a day": f"{TASKS}?q=finished:{{day}}",
    "Tasks: a value in the payloads of three days": f"{TASKS}?q=created:{{day}}..{{later}}+payload.number:-1",
    "Tasks: a part of a reference": f"{TASKS}?q=ref:*-77777",
    "Tasks: the begin of a reference": f"{TASKS}?q=b-7777",
    "Tasks: a carrier, an old page": f"{TASKS}?q=payload.carrier:DL&before={{middle}}",
    "Tasks: a large queue, an old page": f"{TASKS}?q=queue:built-00&before={{middle}}",
    "Tasks: the oldest first": f"{TASKS}?sort=oldest",
    "Tasks: the longest run first": f"{TASKS}?sort=run",
    "Tasks: the longest wait in a queue": f"{TASKS}?q=queue:built-05+status:CREATED&sort=wait",
    "Tasks: most attempts in ERROR": f"{TASKS}?q=status:ERROR&sort=attempts",
    "Task": f"{TASKS}{{middle}}/change/",
    "Failures": "/admin/dbtaskqueue/failuregroup/",
    "Failure": "/admin/dbtaskqueue/failuregroup/{fingerprint}/change/",
    "Poison": "/admin/dbtaskqueue/poisontask/",
    "Poison of a queue": "/admin/dbtaskqueue/poisontask/?q=queue:built-03",
    "Queues": "/admin/dbtaskqueue/queue/",
    "Queue": "/admin/dbtaskqueue/queue/built-00/change/",
    "Pollers": "/admin/dbtaskqueue/poller/",
    "Bulk operations": "/admin/dbtaskqueue/bulkoperation/",
    "Audit": "/admin/dbtaskqueue/auditentry/",
    "History": "/admin/dbtaskqueue/taskhistory/",
    "Attempts": "/admin/dbtaskqueue/attempt/",
    "Doctor": "/admin/dbtaskqueue/doctor/",
    "API: health": f"{API}health",
    "API: status": f"{API}status",
    "API: doctor": f"{API}doctor",
    "API: trends": f"{API}trends",
    "API: queues": f"{API}queues",
    "API: failures": f"{API}failures",
    "API: tasks": f"{API}tasks",
    "API: tasks, an old page": f"{API}tasks?before={{middle}}",
    "API: tasks of three days": f"{API}tasks?q=created:{{day}}..{{later}}",
    "API: a value in payloads": f"{API}tasks?q=payload.number:77777",
    "API: a count": f"{API}tasks/count?q=status:COMPLETED",
    "taskqueue status": f"{COMMAND}status",
    "taskqueue doctor": f"{COMMAND}doctor",
    "taskqueue list": f"{COMMAND}list",
    "taskqueue list, of three days": f"{COMMAND}list --filter created:{{day}}..{{later}}",
    "taskqueue list, a queue and a status": f"{COMMAND}list --filter 'queue:built-00 status:ERROR'",
    "taskqueue list, an old page": f"{COMMAND}list --before {{middle}}",
}


WARM = 3  # requests of each page that do not count


def main() -> None:
    options = _options()
    server = EmbeddedPostgres.start(options.folder, settings=SETTINGS)
    with psycopg.connect(server.url, autocommit=True) as connection:
        if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [NAME]).fetchone():
            connection.execute(f"CREATE DATABASE {NAME}")
    url = urlsplit(server.url)._replace(path=f"/{NAME}").geturl()
    os.environ |= {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    import django

    django.setup()
    _use_settings()
    _fill(options.tasks)
    pages = {name: page.format(**_places()) for name, page in PAGES.items() if options.only in name}
    report = _report(options, server.binaries.version, _measured(options.rounds, pages))
    print(report)
    if options.into:
        options.into.write_text(put_into(options.into.read_text(), report))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pages", description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000_000, help="How many tasks (%(default)s).")
    parser.add_argument("--rounds", type=int, default=40, help="Requests of each page (%(default)s).")
    parser.add_argument("--into", type=Path, metavar="PAGE", help=f"Put the table into it, between {BEGIN} and {END}.")
    parser.add_argument("--only", default="", metavar="TEXT", help="Only pages with this text in their names.")
    parser.add_argument("--note", default="", metavar="TEXT", help="What else used the machine: stands in the report.")
    default = Path(tempfile.gettempdir()) / f"dbtaskqueue-pages-{os.getuid()}"
    parser.add_argument("--folder", type=Path, default=default, help="Where the database lives (%(default)s).")
    return parser.parse_args()


def _use_settings() -> None:
    """Open the API beside the admin, to Django's test client."""
    from django.contrib import admin
    from django.test import override_settings
    from django.urls import include, path

    addresses = path("admin/", admin.site.urls), path("api/", include("django_dbtaskqueue.api.urls"))
    override_settings(ALLOWED_HOSTS=["testserver"], ROOT_URLCONF=addresses, DBTASKQUEUE={"API": True}).enable()


def _fill(tasks: int) -> None:
    from django.core.management import call_command
    from django.db import connection

    from django_dbtaskqueue.models import Queue

    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("SELECT reltuples FROM pg_class WHERE relname = 'dbtaskqueue_task'")
        there = cursor.fetchone()[0]
    if there < 0.9 * tasks:
        call_command("flush", verbosity=0, interactive=False)
        call_command("generatetasks", tasks=tasks, verbosity=2)
    Queue.objects.get_or_create(name="built-00")  # a queue that is known has a page


class Answer(NamedTuple):
    """What a list page shows of its search, once it has gone on to the first row or to the end."""

    shown: str = ""  # nothing: not a list
    pages: int = 1  # asked for until then
    took: float = 0.0  # ms


class Measured(NamedTuple):
    name: str
    code: int
    queries: int
    took: list[float]  # ms
    cpu: list[float]  # ms, of this process: without the database
    answer: Answer


def _measured(rounds: int, pages: dict[str, str]) -> Iterator[Measured]:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    client, asked = _client(), {}
    for name, page in pages.items():
        with CaptureQueriesContext(connection) as captured:
            asked[name] = Measured(name, _ask(client, page), len(captured.captured_queries), [], [], Answer())
    for turn in range(rounds + WARM):
        gc.freeze()  # otherwise some request pays for a collection that looks at all modules, whatever it does itself
        for name, page in pages.items():
            began, used = perf_counter(), process_time()
            _ask(client, page)
            if turn >= WARM:
                asked[name].took.append(1000 * (perf_counter() - began))
                asked[name].cpu.append(1000 * (process_time() - used))
    for name, measured in asked.items():
        yield measured._replace(answer=_answer(client, pages[name]))


def _client() -> Any:
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client()
    client.force_login(User.objects.filter(username=NAME).first() or User.objects.create_superuser(NAME))
    return client


def _ask(client: Any, page: str) -> int:
    from django.core.management import call_command

    if not page.startswith(COMMAND):
        return int(client.get(page).status_code)
    with suppress(SystemExit):  # the doctor has findings
        call_command(*shlex.split(page), stdout=StringIO(), stderr=StringIO())
    return 200


def _answer(client: Any, page: str) -> Answer:
    """Ask for a list until it shows a row or has looked at everything, as the browser and a script do."""
    api = page.startswith(f"{API}tasks") and "count" not in page
    if not api and page.startswith((COMMAND, API)):
        return Answer()
    began, asked, address, rows = perf_counter(), 0, page, 0
    while address:
        found, asked = client.get(address), asked + 1
        if api:
            rows, before = len(found.json()["tasks"]), found.json()["before"]
            more = before and f"{page}&before={before}"
        elif "slice" not in found.context_data:
            return Answer()
        else:
            rows, more = len(found.context_data["slice"].rows), found.context_data.get("look_on_url")
            more = more and f"{more}&_live=1"
        address = "" if rows else more
    took, filterset = 1000 * (perf_counter() - began), None if api else found.context_data["filterset"]
    counted = hasattr(filterset, "search") and "before=" not in page
    return Answer(f"{rows} of {filterset.qs.order_by().count():,}" if counted else f"{rows}", asked, took)


def _places() -> dict[str, Any]:
    from django_dbtaskqueue.models import FailureGroup, Task

    newest = Task.objects.order_by("-pk").values_list("pk", flat=True)[0]
    group = FailureGroup.objects.order_by("fingerprint").values_list("pk", flat=True)[0]
    day = Task.objects.filter(pk__lte=newest // 2).order_by("-pk")[0].create_time.date()
    days = {"day": day, "later": day + timedelta(days=2)}
    return {"middle": newest // 2, "small": 15, "fingerprint": group, **days}


def _report(options: argparse.Namespace, version: str, measured: Iterator[Measured]) -> str:
    words = f"PostgreSQL {version}, {options.tasks:,} tasks, {os.cpu_count()} cores, {options.rounds} requests of each"
    words += f", {options.note}." if options.note else "."
    rows = []
    for page in measured:
        most, cpu = (statistics.quantiles(times, n=20, method="inclusive")[-1] for times in (page.took, page.cpu))
        slow = "too slow" if most > GOAL and not options.note else ""  # beside other work only the CPU can be judged
        note = f"answers {page.code}" if page.code != 200 else slow
        if page.answer.pages > 1:
            note = f"first row or end after {page.answer.took / 1000:.1f} s"
        figures = (statistics.median(page.took), most, max(page.took), cpu)
        rows.append([page.name, page.answer.shown, *(f"{one:.0f}" for one in figures), str(page.queries), note])
    heads = ["page", "rows shown", "median ms", "p95 ms", "longest ms", "p95 CPU ms", "statements", ""]
    return f"{words}\n\n{table(heads, rows)}\n"


if __name__ == "__main__":
    main()
