"""One run: a PostgreSQL of its own, pollers, producers, faults from a seed; then the checkers."""

import contextlib
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import psutil
import psycopg

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres, free_port
from tests.faults.checkers import Needs
from tests.faults.nemesis import Nemesis
from tests.faults.processes import REPOSITORY, Process, clock_library, needs, shifted
from tests.faults.sizes import CAPACITY, CLOCK_S, LETHAL_ATTEMPTS, Size
from tests.faults.standby import Disk, Standby, mounted
from tests.kills import killing
from tests.mutations.seeded import VARIABLE
from tests.patience import Deadline, slowness
from tests.pgbouncer import HERE, pgbouncer, pgbouncer_program
from tests.proxy import Proxy, proxied

DATABASE, SECOND = "faults", "faults_second"
FIRST_ID = 10**9  # of a task in the second database, so that no id is in both
SPECIAL = 2  # tasks of each kind that kills or takes long, at the start and in the middle
BOOT_S, DRAIN_S, MUTATED_DRAIN_S = 60.0, 180.0, 40.0  # after which the runner says what it waits for (Deadline)
ASKED_S = 40.0  # within which a poller ends that was asked to, on a quiet machine
ASKED_CODES = (0, 1, -signal.SIGTERM)  # 1: something was left running; the signal: it came before the handlers
LAST, LAST_TIMES = 24, 8  # tasks with one attempt, and how often they come: at each kill some run, and one is orphaned
CHILDREN = 2  # of a supervisor
LOOK_S = 0.2
SHOWN = 5  # violations of one promise in the report


@dataclass
class Report:
    seed: int
    mutation: str | None
    counts: dict[str, int]
    figures: dict[str, float | None]
    violations: dict[str, list[str]]

    def table(self) -> str:
        lines = [f"seed {self.seed}" + (f", mutation {self.mutation}" if self.mutation else "")]
        lines += [f"  {name:<34}{number:>12,}" for name, number in self.counts.items()]
        figures = {name: "-" if value is None else f"{value:,.2f}" for name, value in self.figures.items()}
        lines += [f"  {name:<34}{value:>12}" for name, value in figures.items()]
        for promise, broken in self.violations.items():
            lines += [f"  {promise:<34}{len(broken):>12,}", *(f"      {one}" for one in broken[: 4 * SHOWN])]
        return "\n".join(lines)


class Run:
    def __init__(self, size: Size, seed: int, mutation: str | None = None, keep: Path | None = None) -> None:
        self.size, self.seed, self.mutation, self.keep = size, seed, mutation, keep
        self.folder = Path(tempfile.mkdtemp(prefix="dbtaskqueue-faults-"))
        self.folder.chmod(0o755)  # PostgreSQL runs under another account
        self.ledgers = self.folder / "ledgers"
        self.ledgers.mkdir()
        self.pollers: list[Process] = []
        self.producers: list[Process] = []
        self.site: Process | None = None
        self._port = free_port()
        self.problems: list[str] = []  # pollers that ended or stood still
        self._needs: list[Needs] = []
        self._slowness = 1.0
        self._clock = clock_library(self.folder)

    def environment(self, url: str, *, clock_s: float = 0.0) -> dict[str, str]:
        """Return the environment of a process that reaches the database by ``url``, and whose clock is wrong."""
        ours = {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.faults.settings", "PYTHONPATH": str(REPOSITORY)}
        ours |= {"PYTHONUNBUFFERED": "1", "FAULTS_LEDGER": str(self.ledgers), VARIABLE: self.mutation or ""}
        second = urlsplit(self._url if url == self._pooled else url)._replace(path=f"/{SECOND}").geturl()
        ours |= {"FAULTS_SECOND": second, "FAULTS_SITE_PORT": str(self._port)}
        return os.environ | ours | (shifted(self._clock, clock_s) if clock_s else {})

    def _start(self, name: str, command: Sequence[str], url: str, **others: str) -> Process:
        """Start a process. The clocks of the first and the second, and so on, are wrong in opposite directions."""
        clock_s = 0.0 if others else CLOCK_S * (-1) ** len(self.pollers + self.producers)
        env = self.environment(url, clock_s=clock_s) | others
        if url == self._pooled:
            env["FAULTS_PAST_POOLER"] = self._url
        return Process(name, command, env, self.folder / f"{name}.log")

    def run(self) -> Report:
        server = EmbeddedPostgres.start(self.folder / "postgres")
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            disks = [stack.enter_context(mounted(self.folder / f"disk{number}")) for number in range(2)]
            stack.callback(server.close)
            with psycopg.connect(server.url, autocommit=True) as control:
                control.execute(f"CREATE DATABASE {DATABASE}")
                for setting in ("max_connections = 300", "track_commit_timestamp = on"):
                    control.execute(f"ALTER SYSTEM SET {setting}")
            server.restart()
            self._pooled = None  # where there is no pooler
            self._url = url = server.url.rpartition("/")[0] + f"/{DATABASE}"
            proxy = stack.enter_context(proxied(url))
            self._prepare(server, url, disks[0])
            if program := pgbouncer_program():
                port = stack.enter_context(pgbouncer(program, urlsplit(url), connections=10))
                self._pooled = urlsplit(url)._replace(netloc=f"postgres:any@{HERE}:{port}").geturl()
            standby = None
            if self.size.promotions:
                standby = Standby(server, self.folder / "standby", disks[1])
                stack.callback(standby.close)
            stack.callback(lambda: [process.kill() for process in self._others() + self.pollers])
            chance = random.Random(self.seed)
            nemesis = Nemesis(chance, server, DATABASE, proxy, self._workers, self._families, self._producing)
            nemesis.disk, nemesis.standby = disks[0], standby
            return self._on(nemesis, url, proxy)

    def _prepare(self, server: EmbeddedPostgres, url: str, disk: Disk | None) -> None:
        os.environ.update(self.environment(url) | {VARIABLE: ""})
        import django
        from django.core.management import call_command

        django.setup()
        from django.db import connections

        from tests.faults import history

        call_command("migrate", run_syncdb=True, verbosity=0)
        history.install()
        connections.close_all()
        with psycopg.connect(server.url, autocommit=True) as control:
            control.execute(f"CREATE DATABASE {SECOND} TEMPLATE {DATABASE}")
        with connections["second"].cursor() as cursor:
            cursor.execute(f"ALTER SEQUENCE dbtaskqueue_task_id_seq RESTART {FIRST_ID}")
        if disk is not None:
            server.account.give(disk.folder)
            with psycopg.connect(url, autocommit=True) as control:
                disk.take(control)
        connections.close_all()

    def _on(self, nemesis: Nemesis, url: str, proxy: Proxy) -> Report:
        from tests.faults import operating

        self._begin(url, proxy)
        began, chance = time.time(), random.Random(f"{self.seed} moves")
        with contextlib.ExitStack() as stack:
            act = stack.enter_context(killing("tests.locations.killed_shard_move", env=self.environment(url)))
            stack.enter_context(operating.repeated(operating.answer))
            stack.enter_context(operating.repeated(partial(operating.cancel, random.Random(f"{self.seed} cancels"))))
            with operating.repeated(partial(operating.move, act, chance, nemesis.counts)):
                self._break(nemesis)
            return self._calm(nemesis, began, act)

    def _calm(self, nemesis: Nemesis, began: float, act: Callable[..., int]) -> Report:
        """End the faults, let the pollers finish, and judge."""
        from django_dbtaskqueue.models import Schedule
        from tests.faults import operating

        stopped = time.time()
        for producer in self.producers:
            producer.popen.send_signal(signal.SIGTERM)
        for producer in self.producers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                producer.popen.wait(5)
            producer.kill()  # it may wait for an answer that a black hole swallowed
        nemesis.calm()
        self._until(lambda: operating.finish_moves(act), BOOT_S, "the end of a move")
        self._until(lambda: Schedule.objects.update(paused=True) > 0, BOOT_S, "a pause of the schedule")
        drained = self._drain(nemesis, "queue_name <> 'lethal' AND", stopped)
        self._drain(nemesis, "", stopped)
        self._until(self._complete, BOOT_S, "a process in the place of each that died")
        return self._report(nemesis, stopped - began, drained)

    def _begin(self, url: str, proxy: Proxy) -> None:
        addresses = {"direct": url, "proxied": proxy.url, "alone": url, "alone-proxied": proxy.url}
        for name, address in (addresses | ({"alone-pooled": self._pooled} if self._pooled else {})).items():
            command = ["manage.py", "runtaskpoller", "--shutdown-timeout", "5s", "--name", name]
            command += [] if "alone" in name else ["--processes", str(CHILDREN)]
            self.pollers.append(self._start(name, command, address))
        site = ["-m", "tests.contrib.bridging.server", str(self._port)]
        self.site = self._start("site", site, url, FAULTS_IS_SITE="1")
        pace = self.size.tasks / self.size.seconds * 1.4
        for number, address in enumerate((url, proxy.url)):
            module = ["-m", "tests.faults.producing", f"p{number}", f"{self.seed}.{number}", str(pace / 2)]
            self.producers.append(self._start(f"producer{number}", module, address))
        self._special(0)
        self._until(lambda: self._count("dbtaskqueue_task", "status = 'COMPLETED'") > 0, BOOT_S, "the first task")

    def _special(self, turn: int) -> None:
        """Enqueue the tasks that kill, and some that take longer than their lease."""
        from tests.faults.tasks import DEADLY

        self._enqueue("lethal", f"lethal{turn}", [f"{kind}-{number}" for kind in DEADLY for number in range(SPECIAL)])
        self._enqueue("plain", f"long{turn}", [f"long-{number}" for number in range(SPECIAL)])
        for queue in ("stopped", "processes"):
            self._enqueue(queue, f"{queue}{turn}", [f"endless-{number}" for number in range(SPECIAL)])

    def _enqueue(self, queue: str, name: str, stems: Sequence[str]) -> None:
        from django.db import transaction

        from django_dbtaskqueue import enqueue_many
        from tests.faults.tasks import ledger
        from tests.testapp.models import Booking

        references = [f"{stem}-{name}" for stem in stems]
        ledger.write("invoked", transaction=name, queue=queue, references=references)
        with transaction.atomic():
            Booking.objects.create(reference=name)
            enqueue_many(queue, [{"reference": reference} for reference in references])
        ledger.write("ok", transaction=name)

    def _break(self, nemesis: Nemesis) -> None:
        script, began = nemesis.script(self.size), time.monotonic()
        enqueued = partial(self._count, "faults_history", "old_status IS NULL")
        for number, stroke in enumerate(script):
            Event().wait(max(0.0, began + number * self.size.seconds / len(script) - time.monotonic()))
            try:
                stroke()
            except (psycopg.Error, OSError) as error:  # two faults met
                nemesis.counts[f"{stroke.__name__} not possible: {type(error).__name__}"] += 1
            with contextlib.suppress(Exception):
                if number == len(script) // 2:
                    self._special(1)
                if number % (len(script) // LAST_TIMES) == 0:
                    self._enqueue("last", f"last{number}", [f"last-{index}" for index in range(LAST)])
            self._keep_alive(nemesis)
        # What is missing is made up for: tasks, where other programs had the CPU, by more strokes of any kind.
        while missing := [
            *[nemesis.kill] * (nemesis.counts["SIGKILL"] < self.size.kills),
            *[nemesis.terminate] * (nemesis.counts["backends terminated"] < self.size.terminations),
            *script * (time.monotonic() < began + 3 * self.size.seconds and enqueued() < self.size.tasks),
        ]:
            with contextlib.suppress(psycopg.Error, OSError):
                nemesis.random.choice(missing)()
            self._keep_alive(nemesis)
            Event().wait(self.size.seconds / len(script))

    def _keep_alive(self, nemesis: Nemesis, *, produce: bool = True) -> None:
        """Start again what was killed or asked to end; note what ended by itself, or did not end."""
        for poller in self.pollers:
            code, pid = poller.popen.poll(), poller.popen.pid
            asked = next((one for one in nemesis.asked.get(pid, ()) if one >= poller.began), None)
            died = any(one >= poller.began_at for one in nemesis.died.get(pid, ()))
            if code is None:
                waited = 0.0 if asked is None else time.monotonic() - asked
                if waited < ASKED_S or waited < ASKED_S * slowness():
                    continue
                self.problems.append(f"poller {poller.name} was asked to end, and did not ({poller.tail()})")
                poller.kill()
            elif asked is not None and code in ASKED_CODES:
                pass
            elif not died and "alone" not in poller.name:
                self.problems.append(f"poller {poller.name} ended with {code} ({poller.tail()})")
            poller.start()
        if not self._needs or time.time() > self._needs[-1].clock + 5:
            self._needs += needs(self.pollers, time.time())
            self._slowness = max(self._slowness, slowness())
        if self.site is not None and self.site.popen.poll() is not None:
            self.site.start()
        for producer in self.producers if produce else ():
            if producer.popen.poll() is not None:
                producer.command[2:3] = [f"{producer.name}x{producer.starts}"]
                producer.start()

    def _drain(self, nemesis: Nemesis, which: str, since: float) -> float:
        limit = MUTATED_DRAIN_S if self.mutation else DRAIN_S

        def none_left() -> bool:
            self._keep_alive(nemesis, produce=False)
            live = f"{which} queue_name <> 'incoming' AND status IN ('CREATED', 'PROCESSING')"
            return not any(self._count("dbtaskqueue_task", live, alias) for alias in ("default", "second"))

        if not self._until(none_left, limit, "the drain"):
            self.problems += self._left()
        return time.time() - since

    def _report(self, nemesis: Nemesis, seconds: float, drained: float) -> Report:
        from tests.faults import checkers

        evidence = self._evidence(nemesis, drained)
        tasks, waits = sum(evidence.inserted.values()), checkers.restarts(evidence)
        pooled = sum(one.is_checkout and "alone-pooled" in (one.new_poller or "") for one in evidence.history)
        counts = {"tasks": tasks, **dict(sorted(nemesis.counts.items())), "checkouts through a pooler": pooled}
        counts |= {f"tasks of {queue}": number for queue, number in sorted(evidence.by_queue.items())}
        figures = {
            "seconds of faults": seconds,
            "slowness of the machine": self._slowness,
            "tasks per second": tasks / seconds,
            "drained after, s": drained,
            "first checkout after restart, s": max(checkers.first_checkouts(evidence).values(), default=None),
            "orphans restarted": float(len(waits)),
            "orphan restart, median s": checkers.middle(waits),
            "orphan restart, longest s": max(waits, default=None),
            "orphan end, times the least, median": checkers.middle(checkers.end_ratios(evidence)),
        }
        violations = checkers.check(evidence) | {"poller that ended or stood still": self.problems}
        if self.keep is not None and any(violations.values()):
            shutil.copytree(self.folder, self.keep, ignore=shutil.ignore_patterns("postgres", "standby", "disk*"))
            (self.keep / "evidence.pickle").write_bytes(pickle.dumps(evidence))
        return Report(self.seed, self.mutation, counts, figures, violations)

    def _evidence(self, nemesis: Nemesis, drained: float) -> Any:
        from django_dbtaskqueue.models import Attempt, Task, TaskHistory
        from tests.faults import history, ledger, tasks
        from tests.faults.checkers import Evidence, Row
        from tests.support import minute_counts
        from tests.testapp.models import Booking

        names = ("queue", "reference", "status", "attempt", "result")
        hot = [Row(*values) for values in Task.objects.exclude(queue="spread").values_list("id", *names)]
        kept = [Row(*values, history=True) for values in TaskHistory.objects.values_list("task_id", *names)]
        second = [Row(*values) for values in Task.objects.using("second").values_list("id", *names)]
        spread = [Row(*values) for values in Task.objects.filter(queue="spread").values_list("id", *names)]
        changes = [*history.read(), *history.read("second")]
        bookings = [Booking.objects.using(alias).values_list("reference", "amount") for alias in ("default", "second")]
        failed = Attempt.objects.values_list("task_id", "total_attempt", "error_type", "message")
        of_run = {"died": nemesis.died, "stopped": nemesis.stopped, "outages": nemesis.outages, "back": nemesis.back}
        of_run |= {"expected": tasks.EXPECTED, "needs": self._needs, "slowness": self._slowness, "drained": drained}
        return Evidence(
            history=[change for change in changes if change.queue not in ("spread", "incoming")],
            moved=[change for change in changes if change.queue == "spread"],
            shards=spread + [row for row in second if row.queue == "spread"],
            received=[row.reference for row in second if row.queue == "incoming"],
            events=list(ledger.read(self.ledgers)),
            rows=hot + kept,
            bookings=dict(chain(*bookings)),
            attempts=[(task, fence, kind or message) for task, fence, kind, message in failed],
            deleted=sum(minute_counts("deletion").values_list("count", flat=True)),
            capacities={"small": CAPACITY},
            budgets={"lethal": LETHAL_ATTEMPTS},
            **of_run,
        )

    def _families(self) -> list[list[psutil.Process]]:
        return [family for poller in self.pollers if (family := poller.family)]

    def _workers(self) -> list[psutil.Process]:
        """Return the processes that run tasks: children of a supervisor, and pollers without children."""
        families = [poller.family[0 if "alone" in poller.name else 1 :] for poller in self.pollers]
        return [member for family in families for member in family]

    def _complete(self) -> bool:
        return all(poller.children == CHILDREN for poller in self.pollers if "alone" not in poller.name)

    def _others(self) -> list[Process]:
        return self.producers + ([] if self.site is None else [self.site])

    def _producing(self) -> list[psutil.Process]:
        return [member for other in self._others() for member in other.family]

    def _count(self, table: str, condition: str, alias: str = "default") -> int:
        from django.db import connections
        from django.db.utils import Error

        try:
            with connections[alias].cursor() as cursor:
                cursor.execute(f"SELECT count(*) FROM {table} WHERE {condition}")
                return int(cursor.fetchone()[0])
        except Error:
            connections[alias].close()
            return -1

    @staticmethod
    def _left() -> list[str]:
        from django_dbtaskqueue.models import Poller, Task

        names = ("pk", "queue", "reference", "status", "attempt", "next_process_time", "ready_time", "parked_by")
        left = Task.objects.filter(status__in=("CREATED", "PROCESSING")).exclude(queue="incoming").order_by("pk")
        shown = chain(*(left.using(alias).values_list(*names)[:SHOWN] for alias in ("default", "second")))
        return [str(values) for values in (*shown, *Poller.objects.values_list("instance", "state", "heartbeat_time"))]

    @staticmethod
    def _holds(condition: Callable[[], bool]) -> bool:
        """Whether a condition holds. It does not as long as the database is away, as after the last restart."""
        from django.db import connections
        from django.db.utils import Error

        try:
            return condition()
        except Error:
            connections.close_all()
            return False

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> bool:
        deadline = Deadline(seconds)
        while not self._holds(condition):
            if deadline.passed:
                logs = "\n".join(f"--- {poller.name}\n{poller.tail(1500)}" for poller in self.pollers)
                self.problems.append(f"{what} did not come within {seconds:.0f} s")
                print(logs, file=sys.stderr)
                return False
            Event().wait(LOOK_S)
        return True
