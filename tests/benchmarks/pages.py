"""How long pages, the API and commands take at size: ``python -m tests.benchmarks.pages --tasks 10000000``.

Builds the tasks with ``generatetasks`` in a PostgreSQL of its own, kept in ``--folder`` for the next time, and asks for
each page in turns, through Django's whole stack. Prints how many of the rows that match one page shows, the time that
95 % of the requests stayed within, the CPU time of Python, and the statements of one request, those that begin and end
transactions among them. A search that goes on by itself has also the time until its first row. Nobody else should use
the machine. ``--only TEXT`` measures the pages with this text in their address.
"""

import argparse
import gc
import os
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from urllib.parse import urlsplit

import psycopg

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from tests.benchmarks.report import BEGIN, END, put_into, table

# What a server on such a machine would be set to; commits of the builder need not survive a crash.
SETTINGS = {"synchronous_commit": "off", "max_wal_size": "8GB", "shared_buffers": "2GB", "checkpoint_timeout": "30min"}
NAME = "pages"
GOAL = 300  # ms
WARM = 3  # requests of each page that do not count
ADMIN, API = "/admin/dbtaskqueue/", "/api/"
COMMAND = "taskqueue "  # what begins so is no address
SEARCHES = (
    *("", "before={middle}", "q=status:ERROR", "q=status:COMPLETED", "q=status:CREATED", "q=status:PROCESSING"),
    *("q=queue:built-00", "q=queue:built-15", "q=queue:built-15+status:ERROR", "q=queue:built-00+status:ERROR"),
    *("q=ref:b-77777", "q=fingerprint:{fingerprint}", "q=status:ERROR+age:>10d", "q=is:stale", "q=is:due"),
    *("q=is:scheduled", "q=error:quota", "q=error:Timeout", "q=attempt:>=3", "q=payload.number:77777"),
    *("q=queue:built-00+payload.number:-1", "q=poller:nobody", "q=age:>25d", "q=-queue:built-00"),
    *("q=created:{day}..{later}", "q=created:<{day}+status:ERROR", "q=finished:{day}"),
    *("q=created:{day}..{later}+payload.number:-1", "q=ref:*-77777", "q=b-7777"),
    *("q=payload.carrier:DL&before={middle}", "q=queue:built-00&before={middle}", "sort=oldest", "sort=run"),
    *("q=queue:built-05+status:CREATED&sort=wait", "q=status:ERROR&sort=attempts"),
)
MODELS = (
    *("task/{middle}/change", "failuregroup", "failuregroup/{fingerprint}/change", "poisontask"),
    *("poisontask/?q=queue:built-03", "queue", "queue/built-00/change", "poller", "bulkoperation", "auditentry"),
    *("taskhistory", "attempt", "doctor"),
)
ROUTES = ("health", "status", "doctor", "trends", "queues", "failures", "tasks", "tasks?before={middle}")
ROUTES += ("tasks?q=created:{day}..{later}", "tasks?q=payload.number:77777", "tasks/count?q=status:COMPLETED")
COMMANDS = ("status", "doctor", "list", "list --filter created:{day}..{later}")
COMMANDS += ("list --filter 'queue:built-00 status:ERROR'", "list --before {middle}")
ADDRESSES = (
    *(f"{ADMIN}overview/", *(f"{ADMIN}task/?{search}" for search in SEARCHES)),
    *(f"{ADMIN}{page}" if "?" in page else f"{ADMIN}{page}/" for page in MODELS),
    *(f"{API}{route}" for route in ROUTES),
    *(f"{COMMAND}{command}" for command in COMMANDS),
)


@dataclass
class Page:
    name: str
    address: str
    code: int = 0
    statements: int = 0
    took: list[float] = field(default_factory=list)  # ms
    cpu: list[float] = field(default_factory=list)  # ms, of this process: without the database
    rows: str = ""  # that a list shows of its search, once it has gone on to the first row or to the end
    pages: int = 1  # asked for until then
    looked: float = 0.0  # seconds until then


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
    places = _places()
    pages = [Page(address, address.format(**places)) for address in ADDRESSES if options.only in address]
    _measure(pages, options.rounds)
    report = _report(options, server.version, pages)
    print(report)
    if options.into:
        options.into.write_text(put_into(options.into.read_text(), report))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pages", description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000_000, help="How many tasks (%(default)s).")
    parser.add_argument("--rounds", type=int, default=40, help="Requests of each page (%(default)s).")
    parser.add_argument("--into", type=Path, metavar="PAGE", help=f"Put the table into it, between {BEGIN} and {END}.")
    parser.add_argument("--only", default="", metavar="TEXT", help="Only pages with this text in their addresses.")
    parser.add_argument("--note", default="", metavar="TEXT", help="What else used the machine: stands in the report.")
    default = Path(tempfile.gettempdir()) / f"dbtaskqueue-pages-{os.getuid()}"
    parser.add_argument("--folder", type=Path, default=default, help="Where the database lives (%(default)s).")
    return parser.parse_args()


def _use_settings() -> None:
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


def _places() -> dict[str, Any]:
    from django_dbtaskqueue.models import FailureGroup, Task

    middle = Task.objects.latest("pk").pk // 2
    day = Task.objects.filter(pk__lte=middle).latest("pk").create_time.date()
    group = FailureGroup.objects.earliest("fingerprint").pk
    return {"middle": middle, "fingerprint": group, "day": day, "later": day + timedelta(days=2)}


def _measure(pages: Sequence[Page], rounds: int) -> None:
    from django.contrib.auth.models import User
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    client = Client()
    client.force_login(User.objects.filter(username=NAME).first() or User.objects.create_superuser(NAME))
    for page in pages:
        with CaptureQueriesContext(connection) as captured:
            page.code = _ask(client, page.address)
        page.statements = len(captured)
    for turn in range(rounds + WARM):
        gc.freeze()  # otherwise some request pays for a collection that looks at all modules, whatever it does itself
        for page in pages:
            began, used = perf_counter(), process_time()
            _ask(client, page.address)
            if turn >= WARM:
                page.took.append(1000 * (perf_counter() - began))
                page.cpu.append(1000 * (process_time() - used))
    for page in pages:
        _look_on(client, page)


def _ask(client: Any, address: str) -> int:
    from django.core.management import call_command

    if not address.startswith(COMMAND):
        return int(client.get(address).status_code)
    with suppress(SystemExit):  # the doctor has findings
        call_command(*shlex.split(address), stdout=StringIO(), stderr=StringIO())
    return 200


def _look_on(client: Any, page: Page) -> None:
    """Ask for a list until it shows a row or has looked at everything, as the browser and a script do."""
    api = page.address.startswith(f"{API}tasks") and "count" not in page.address
    if not api and page.address.startswith((COMMAND, API)):
        return
    began, address, page.pages = perf_counter(), page.address, 0
    while address:
        found = client.get(address)
        if api:
            rows, before = len(found.json()["tasks"]), found.json()["before"]
            more = before and f"{page.address}&before={before}"
        elif "slice" not in found.context_data:
            page.pages = 1
            return
        else:
            rows, more = len(found.context_data["slice"].rows), found.context_data.get("look_on_url")
            more = more and f"{more}&_live=1"
        page.pages += 1
        address = "" if rows else more
    page.rows, page.looked = str(rows), perf_counter() - began
    filterset = None if api else found.context_data["filterset"]
    if hasattr(filterset, "search") and "before=" not in page.address:
        page.rows += f" of {filterset.qs.order_by().count():,}"


def _report(options: argparse.Namespace, version: str, pages: Sequence[Page]) -> str:
    words = f"PostgreSQL {version}, {options.tasks:,} tasks, {os.cpu_count()} cores, {options.rounds} requests of each"
    words += f", {options.note}." if options.note else "."
    rows = []
    for page in pages:
        most, cpu = (statistics.quantiles(times, n=20, method="inclusive")[-1] for times in (page.took, page.cpu))
        note = "too slow" if most > GOAL and not options.note else ""  # beside other work only the CPU can be judged
        if page.code != 200:
            note = f"answers {page.code}"
        if page.pages > 1:
            note = f"first row or end after {page.looked:.1f} s"
        figures = (statistics.median(page.took), most, max(page.took), cpu)
        rows.append([f"`{page.name}`", page.rows, *(f"{one:.0f}" for one in figures), str(page.statements), note])
    heads = ["page", "rows shown", "median ms", "p95 ms", "longest ms", "p95 CPU ms", "statements", ""]
    return f"{words}\n\n{table(heads, rows)}\n"


if __name__ == "__main__":
    main()
