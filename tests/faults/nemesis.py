"""The faults, each with a record of what it did. ``Nemesis.script`` draws their order from the seed."""

import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import psycopg

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from tests.faults.sizes import LEASE_S, Size
from tests.faults.standby import TABLESPACE, Disk, Standby
from tests.proxy import Proxy

STALL_S = LEASE_S * 1.4, LEASE_S * 2  # of the wire
SHORT_S, LONG_S = 1.0, 4.0  # of a lock, a spell; of a black hole
# A fifth of the statements fail.
BREAK = """
CREATE OR REPLACE FUNCTION faults_break() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF random() < 0.2 THEN RAISE EXCEPTION 'broken on purpose' USING ERRCODE = 'XX000'; END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER faults_break AFTER UPDATE ON dbtaskqueue_task FOR EACH STATEMENT
    EXECUTE FUNCTION faults_break();
"""
CUT = """
SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()
    AND backend_type = 'client backend' AND datname = current_database() ORDER BY random() LIMIT %s) AS x
"""
FILL = f"CREATE TABLE faults_full TABLESPACE {TABLESPACE} AS SELECT generate_series(1, 10000)"
MEND = "DROP TRIGGER IF EXISTS faults_break ON dbtaskqueue_task"
Times = dict[int, list[float]]  # when it happened to the processes of these numbers


@dataclass
class Nemesis:
    random: random.Random
    server: EmbeddedPostgres
    database: str
    proxy: Proxy
    workers: Callable[[], Sequence[psutil.Process]]  # the processes that run tasks now
    families: Callable[[], Sequence[Sequence[psutil.Process]]]  # each poller with its children
    producers: Callable[[], Sequence[psutil.Process]]
    disk: Disk | None = None  # None: this machine does not let us mount one
    standby: Standby | None = None
    died: Times = field(default_factory=lambda: defaultdict(list))  # a number is used again
    stopped: Times = field(default_factory=lambda: defaultdict(list))
    asked: Times = field(default_factory=lambda: defaultdict(list))  # when they got a SIGTERM; monotonic
    outages: list[tuple[float, float]] = field(default_factory=list)  # times in which some could not reach it
    back: list[float] = field(default_factory=list)  # when the database was there again
    counts: Counter[str] = field(default_factory=Counter)

    def script(self, size: Size) -> list[Callable[[], None]]:
        times: dict[Callable[[], None], int] = {
            self.kill: size.kills + size.kills // 10,  # some find nobody
            self.pause: size.pauses + 1,
            self.terminate: size.terminations // 6,
            self.stall: size.stalls // 2,
            self.black_hole: size.stalls - size.stalls // 2,
            **dict.fromkeys((self.lose_commits, self.half_close), size.stalls),
            **dict.fromkeys((self.restart, self.read_only, self.lock, self.broken_statements, self.pin), size.restarts),
            **dict.fromkeys((self.kill_producer, self.ask), 2 * size.restarts),
            self.full_disk: size.restarts if self.disk else 0,
            self.promote: 1 if self.standby else 0,
        }
        strokes = [stroke for stroke, number in times.items() for _ in range(number)]
        self.random.shuffle(strokes)
        return strokes

    @property
    def _url(self) -> str:
        return self.server.url.rpartition("/")[0] + f"/{self.database}"

    @contextmanager
    def control(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """A connection past the faults."""
        options = "-c default_transaction_read_only=off -c lock_timeout=5s"  # behind a lock, all others wait for us
        with psycopg.connect(self._url, autocommit=True, options=options) as connection:
            yield connection

    def kill(self) -> None:
        for victim in self._one_of(self.workers()):
            with suppress(psutil.NoSuchProcess):
                victim.kill()
                self.died[victim.pid].append(time.time())
                self.counts["SIGKILL"] += 1

    def ask(self) -> None:
        """Ask one poller to end, some of them twice. It has to end, and is started again."""
        for victim, *_ in self._one_of(self.families()):
            self.asked[victim.pid].append(time.monotonic())
            self._send([victim], signal.SIGTERM)
            if twice := self.random.random() < 0.5:
                threading.Timer(SHORT_S, self._send, [[victim], signal.SIGTERM]).start()
            self.counts["SIGTERM twice" if twice else "SIGTERM"] += 1

    def kill_producer(self) -> None:
        for victim in self._one_of(self.producers()):
            victim.kill()
            self.counts["SIGKILL of a producer"] += 1

    def pause(self) -> None:
        """Stop one poller with all its children for longer than its lease, without waiting for it.

        A supervisor that runs would replace a child that is silent, and nobody would come back late.
        """
        for victims in self._one_of(self.families()):
            for victim in victims:
                self.stopped[victim.pid].append(time.time())
            self._send(victims, signal.SIGSTOP)
            self.counts["pause beyond the lease"] += 1
            threading.Timer(1.4 * LEASE_S, self._send, [victims, signal.SIGCONT]).start()

    def _one_of(self, candidates: Sequence[Any]) -> list[Any]:
        return [self.random.choice(candidates)] if candidates else []

    @staticmethod
    def _send(victims: Sequence[psutil.Process], number: signal.Signals) -> None:
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(number)

    @contextmanager
    def _spell(self, fault: str, *, of_all: bool = True) -> Iterator[None]:
        """A time in which some pollers, or all, cannot use the database."""
        began = time.time()
        try:
            yield
            self.counts[fault] += 1
        finally:
            self.outages.append((began, time.time()))
            if of_all:
                self.back.append(time.time())

    def restart(self) -> None:
        with self._spell("immediate restart"):
            self.server.stop("immediate")
            self._wait(SHORT_S)
            self.server.restart()

    def promote(self) -> None:
        """Let a standby take the place of PostgreSQL, which crashed."""
        if self.standby is not None:
            with self._spell("standby promoted"):
                self.server = self.standby.take_over(self.server)
            self.disk, self.standby = self.standby.disk, None

    def full_disk(self) -> None:
        if self.disk is not None:
            with self._spell("full disk"):
                self.disk.fill()
                with self.control() as control, suppress(psycopg.errors.DiskFull):
                    control.execute(FILL)
                    raise AssertionError("The disk is not full.")
                self._wait(SHORT_S)
                self.disk.free()

    def pin(self) -> None:
        """Hold a snapshot, so that no dead row can be removed meanwhile."""
        connection = psycopg.connect(self._url, options="-c default_transaction_isolation=repeatable\\ read")
        connection.execute("SELECT 1")  # no lock: the spells that lock the table would wait for it
        timer = threading.Timer(20, connection.close)  # while other faults go on
        timer.daemon = True
        timer.start()
        self.counts["snapshots pinned"] += 1

    def terminate(self) -> None:
        with self.control() as control:
            self.counts["backends terminated"] += self._cut(control, self.random.randint(1, 15))

    def stall(self) -> None:
        """Forward nothing for longer than a lease. What was said before arrives late, from a former holder."""
        with self._spell("stall or black hole", of_all=False):
            self.proxy.stall(on=True)
            self._wait(self.random.uniform(*STALL_S))
            self.proxy.stall(on=False)

    def black_hole(self) -> None:
        """Let the network swallow everything; what was connected never hears of it."""
        with self._spell("stall or black hole", of_all=False):
            self.proxy.black_hole(on=True)
            self._wait(LONG_S)
            self.proxy.black_hole(on=False)

    def lose_commits(self) -> None:
        self.proxy.lose_commits(3)
        self.counts["answers to COMMIT lost"] += 3

    def half_close(self) -> None:
        self.proxy.half_close(3)
        self.counts["half-closed connections"] += 3

    def read_only(self) -> None:
        with self.control() as control, self._spell("read-only spells"):
            control.execute(f'ALTER DATABASE "{self.database}" SET default_transaction_read_only = on')
            self._cut(control)
            self._wait(SHORT_S)
            control.execute(f'ALTER DATABASE "{self.database}" RESET default_transaction_read_only')
            self._cut(control)

    def lock(self) -> None:
        with self.control() as control, self._spell("lock blockers"), control.transaction():
            control.execute("LOCK TABLE dbtaskqueue_task IN ACCESS EXCLUSIVE MODE")
            self._wait(SHORT_S)

    def broken_statements(self) -> None:
        """Let changes of tasks fail at random with an error that is no OperationalError."""
        with self.control() as control, self._spell("spells of XX000", of_all=False):
            control.execute(BREAK)
            self._wait(SHORT_S)
            control.execute(MEND)

    def calm(self) -> None:
        """End every spell, also one whose end met another fault."""
        if self.disk is not None:
            self.disk.free()
        self.proxy.stall(on=False)
        self.proxy.black_hole(on=False)
        for _ in range(10):  # for five seconds each
            with suppress(psycopg.Error), self.control() as control:
                control.execute(MEND)
                break
        with self.control() as control:
            control.execute(f'ALTER DATABASE "{self.database}" RESET default_transaction_read_only')

    @staticmethod
    def _cut(control: psycopg.Connection[tuple[Any, ...]], most: int | None = None) -> int:
        """Cut connections on the server's side, all or some; return how many."""
        return control.execute(CUT, [most]).rowcount

    @staticmethod
    def _wait(seconds: float) -> None:
        """Let a fault last. The length is part of the fault; nothing is waited for."""
        threading.Event().wait(seconds)
