"""A site in operation: pollers and producers of several releases on one database, and what their work must leave."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.forks import Started
from tests.support import until
from tests.upgrade.project.load.queues import QUEUES
from tests.upgrade.releases import PROJECT, Release

ENOUGH = 20  # runs of one poller, of tasks of one producer in one queue
PATIENCE_S = 240.0
TABLES = """
CREATE TABLE effects (id bigserial, queue text, reference text, release text);
CREATE TABLE ordered (id bigserial, queue text, reference text);
"""
BROKEN = re.compile(r"IntegrityError|ProgrammingError|violates|does not exist|Polling failed")
RUNS = """\
SELECT queue, release, substring(reference FROM '^[a-z]+') AS producer, count(*)
FROM effects WHERE id > %s GROUP BY 1, 2, 3
"""
# Each task that was ordered, with its status, wherever it is; NULL where it is gone.
ENDS = """\
SELECT o.queue, o.reference, coalesce(t.status, h.status), (SELECT count(*) FROM effects e WHERE
    e.queue = o.queue AND e.reference = o.reference)
FROM ordered o
LEFT JOIN dbtaskqueue_task t ON t.queue_name = o.queue AND t.reference_number = o.reference
LEFT JOIN dbtaskqueue_taskhistory h ON h.queue_name = o.queue AND h.reference_number = o.reference
"""
OPEN = "SELECT count(*) FROM dbtaskqueue_task WHERE status IN ('CREATED', 'PROCESSING') AND queue_name = ANY(%s)"
OUT_OF_ORDER = """\
SELECT count(*) FROM (
    SELECT o.id, lag(o.id) OVER (PARTITION BY split_part(e.reference, '-', 1),
        split_part(e.reference, '-', 2)::int %% 3 ORDER BY e.id) AS before
    FROM effects e JOIN ordered o USING (queue, reference) WHERE queue = 'grouped'
) AS x WHERE before > id
"""


class BrokenError(Exception):
    """A poller or a producer met an error that an upgrade must not cause."""


class Site:
    """One database with the project's tables, and the processes that work on it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.programs: list[Started] = []

    def ask(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(sql, parameters)
            return cursor.fetchall() if cursor.description else []

    def start(self, release: Release, *command: str) -> Started:
        log = self.folder / f"{release.name}-{len(self.programs)}.log"
        self.programs.append(Started([str(release.python), *command], release.env(self.url), self.folder, log))
        return self.programs[-1]

    def poller(self, release: Release) -> Started:
        return self.start(release, "-m", "django", "runtaskpoller", "--threads", "2")

    def producer(self, release: Release) -> Started:
        return self.start(release, str(PROJECT / "produce.py"))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; raise BrokenError as soon as a log tells of an error."""

        def holds() -> object:
            for one in self.programs:
                if (found := BROKEN.search(one.log)) or one.code:
                    raise BrokenError(f"{one.log_file}: {found and found[0]}, exit {one.code}\n{one.log[-4000:]}")
            return condition()

        until(holds, timeout=PATIENCE_S)

    def all_have_run(self, *releases: Release, since: int = 0) -> bool:
        """Whether each release's poller has run, since an effect, enough tasks of each queue, of each producer."""
        runs = {(queue, poller, by): count for queue, poller, by, count in self.ask(RUNS, since)}
        names = [release.name for release in releases]
        return all(runs.get((queue, poller, by), 0) >= ENOUGH for queue in QUEUES for poller in names for by in names)

    def stop(self, producers: list[Started], pollers: list[Started]) -> None:
        (self.folder / "stop").touch()
        self.until(lambda: all(one.code == 0 for one in producers))
        self.until(lambda: self.ask(OPEN, [*QUEUES]) == [(0,)])
        for one in pollers:
            one.signal()
        self.until(lambda: all(one.code == 0 for one in pollers))

    def check_ends(self) -> int:
        ends = self.ask(ENDS)
        wrong = [(queue, *end) for queue, *end in ends if (end[2], end[1]) != QUEUES[queue]]
        assert not wrong, f"{len(wrong)} of {len(ends)} tasks ended otherwise: {wrong[:10]}"
        gone = sum(queue == "gone" for queue, *_ in ends)
        assert self.ask("SELECT sum(count) FROM dbtaskqueue_minutecount WHERE kind = 'deletion'") == [(gone,)]
        assert self.ask(OUT_OF_ORDER) == [(0,)], "tasks of a group ran in another order"
        return len(ends)


@contextmanager
def site(url: str, folder: Path, release: Release) -> Iterator[Site]:
    """A site whose database has the tables of a release. Every process ends with it."""
    release.manage(url, "migrate", "--verbosity", "0")
    made = Site(url, folder)
    made.ask(TABLES)
    try:
        yield made
    finally:
        for one in made.programs:
            one.kill()
