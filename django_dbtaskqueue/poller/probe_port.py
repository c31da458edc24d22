"""The port of ``runtaskpoller --metrics-port``: probes for a service manager, and the metrics of this process.

``/healthz/startup``: a poll has worked since the start. ``/healthz/ready``: the process fetches tasks now, and its
heartbeat is up to date. ``/healthz/live``: no thread has ended or is stuck; a database that is away does not change
that, because a new process would not help. ``/metrics`` needs the extra ``prometheus``.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from time import time
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, urlsplit

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import __version__, logger
from django_dbtaskqueue.core.durations import clock, format_seconds
from django_dbtaskqueue.db.liveness import MAX_ANSWER_TIMEOUT_S
from django_dbtaskqueue.flow.usage import CountKey
from django_dbtaskqueue.metrics import Exposition, Sums, client, exposed, metric
from django_dbtaskqueue.models.control import MISSED_HEARTBEATS
from django_dbtaskqueue.poller.lifetime import PollerSnapshot, ended_threads

if TYPE_CHECKING:
    from django_dbtaskqueue.poller.heartbeat import Heartbeat
    from django_dbtaskqueue.poller.loop import Poller
    from django_dbtaskqueue.poller.supervisor import Supervisor

LOOPBACK = "127.0.0.1"
REQUEST_TIMEOUT_S = 5.0  # for a caller that sends or reads nothing
STUCK_S = MAX_ANSWER_TIMEOUT_S + 15.0  # a slow database may keep a thread for nearly as long
FETCHING_STATES = ("RUNNING", "PAUSED")  # a paused poller could fetch: an operator wants it to wait
PROCESS_METRICS = (
    metric("dbtaskqueue_poller_info", "1 for the state that the process is in", "state", "version"),
    metric("dbtaskqueue_poller_slots", "Tasks that can run at the same time"),
    metric("dbtaskqueue_poller_running_tasks", "Calls of processors that run now"),
    metric("dbtaskqueue_poller_finished_total", "Attempts that ended"),
    metric("dbtaskqueue_poller_failed_total", "Attempts that failed"),
)
POLLER_METRICS = (
    *PROCESS_METRICS,
    metric("dbtaskqueue_poller_leases", "Leases without a stored outcome"),
    metric("dbtaskqueue_poller_last_poll_timestamp_seconds", "When a poll last worked"),
    metric("dbtaskqueue_poller_last_heartbeat_timestamp_seconds", "When the poller last reported"),
    metric("dbtaskqueue_poller_attempts_total", "Attempts by outcome", "queue", "outcome"),
    metric("dbtaskqueue_poller_run_seconds", "Run time of attempts", "queue", type="histogram"),
    metric("dbtaskqueue_poller_wait_seconds", "Time from due to checkout", "queue", type="histogram"),
)


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    def of_child(self, number: int) -> str:
        """Return the address of a supervisor's child, counted from 1."""
        return f"{self.host}:{self.port + number if self.port else 0}"


def address(text: str) -> Address:
    """Return what ``PORT`` or ``HOST:PORT`` says; raise ``ValueError``."""
    host, colon, port = text.rpartition(":")
    if not 0 <= int(port) < 65536:
        raise ValueError(text)
    return Address(host.strip("[]") if colon else LOOPBACK, int(port))


class PollerProbes:
    """The probes and metrics of one poller. A probe returns what is wrong, or nothing."""

    def __init__(self, poller: Poller, heartbeat: Heartbeat) -> None:
        self._poller = poller
        self._heartbeat = heartbeat
        self._totals: dict[tuple[str, str], Sums] = {}  # by queue and outcome, since the start
        self._lock = threading.Lock()
        poller.settler.metrics.also = self._count

    def _count(self, key: CountKey, sums: Sums) -> None:
        with self._lock:
            self._totals.setdefault((key.queue, key.name), Sums()).update(sums)

    def startup(self) -> str:
        return "" if self._poller.polled_at else "No poll has worked yet."

    def ready(self) -> str:
        poller, heartbeat = self._poller, conf.settings().heartbeat.total_seconds()
        if not poller.polled_at or poller.state not in FETCHING_STATES:
            return f"The poller is {poller.state}."
        silence = clock.monotonic() - self._heartbeat.reported_at
        late = not self._heartbeat.reported_at or silence > MISSED_HEARTBEATS * heartbeat
        return f"The last heartbeat was {format_seconds(silence)} ago." if late else ""

    def live(self, stuck_s: float) -> str:
        """Return why the process should be replaced: a thread has ended, or has been busy for longer than this."""
        poller, now = self._poller, clock.monotonic()
        if ended := ended_threads(poller, self._heartbeat):
            return f"Threads ended: {', '.join(ended)}."
        busy = {**poller.busy_since, "heartbeat": self._heartbeat.jobs.busy_since}
        stuck = [name for name, since in busy.items() if since is not None and now - since > stuck_s]
        return f"Threads are busy for longer than {format_seconds(stuck_s)}: {', '.join(stuck)}." if stuck else ""

    def exposition(self) -> Exposition:
        poller, wall = self._poller, time() - clock.monotonic()
        found = Exposition(POLLER_METRICS)
        _add_snapshot(found, PollerSnapshot.of(poller))
        found.add("dbtaskqueue_poller_leases", len(poller.settler.held))
        for name, moment in (("poll", poller.polled_at), ("heartbeat", self._heartbeat.reported_at)):
            if moment:
                found.add(f"dbtaskqueue_poller_last_{name}_timestamp_seconds", wall + moment)
        by_queue: dict[str, Sums] = {}
        with self._lock:
            for (queue, outcome), sums in self._totals.items():
                found.add("dbtaskqueue_poller_attempts_total", sums.count, queue, outcome)
                by_queue.setdefault(queue, Sums()).update(sums)
        for queue, sums in by_queue.items():
            found.add_histogram("dbtaskqueue_poller_run_seconds", sums.runs, sums.run_seconds, queue)
            found.add_histogram("dbtaskqueue_poller_wait_seconds", sums.waits, sums.wait_seconds, queue)
        return found


class SupervisorProbes:
    """The probes and metrics of a supervisor: those of its children are at their own ports."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def startup(self) -> str:
        waiting = sum(one.latest.state in ("INIT", "STARTUP") for one in self._supervisor.children)
        return f"{waiting} child processes have not polled yet." if waiting else ""

    def ready(self) -> str:
        fetching = any(one.latest.state in FETCHING_STATES for one in self._supervisor.children)
        return "" if fetching else "No child process fetches tasks."

    def live(self, stuck_s: float) -> str:
        return ""  # it answers; a child that is stuck is replaced by the supervisor itself

    def exposition(self) -> Exposition:
        found = Exposition(PROCESS_METRICS)
        _add_snapshot(found, self._supervisor.snapshot())
        return found


def _add_snapshot(found: Exposition, now: PollerSnapshot) -> None:
    found.add("dbtaskqueue_poller_info", 1, now.state, __version__)
    found.add("dbtaskqueue_poller_slots", now.slots)
    found.add("dbtaskqueue_poller_running_tasks", now.running)
    found.add("dbtaskqueue_poller_finished_total", now.finished)
    found.add("dbtaskqueue_poller_failed_total", now.failed)


Probes = PollerProbes | SupervisorProbes


@contextmanager
def served(where: Address | None, probes: Probes | None) -> Iterator[None]:
    """Answer there inside the block; without an address do nothing."""
    if where is None or probes is None:
        yield
        return
    try:
        server = _server(where, probes)
    except OSError as error:
        text = f"--metrics-port {where.host}:{where.port} cannot be opened: {error.strerror or error}."
        raise ImproperlyConfigured(f"{text} Choose another port, or one of this host's addresses.") from None
    threading.Thread(target=server.serve_forever, name="dbtaskqueue-metrics-port", daemon=True).start()
    logger.info("Probes and metrics: http://%s:%s/metrics", *server.server_address[:2])
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _server(where: Address, probes: Probes) -> ThreadingHTTPServer:
    class Handler(_Handler):
        probes_of_port = probes

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        server_bind = TCPServer.server_bind  # HTTPServer's asks the name server, too

    return Server(where, Handler)


class _Handler(BaseHTTPRequestHandler):
    probes_of_port: Probes
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "django-dbtaskqueue", ""

    def do_GET(self) -> None:
        status, text, content_type = self._answer()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)

    do_HEAD = do_GET

    def _answer(self) -> tuple[int, bytes, str]:
        asked = urlsplit(self.path)
        plain = "text/plain; charset=utf-8"
        try:
            if asked.path == "/metrics":
                collectors = self.probes_of_port.exposition(), client().REGISTRY  # the library's has the project's own
                return 200, *exposed(collectors, self.headers.get("Accept", ""))
            checks: Mapping[str, Callable[[], str]] = {
                "/healthz/startup": self.probes_of_port.startup,
                "/healthz/ready": self.probes_of_port.ready,
                "/healthz/live": lambda: self.probes_of_port.live(_stuck_s(asked.query)),
            }
            if asked.path not in checks:
                return 404, f"Not here. There is /metrics, {', '.join(checks)}.\n".encode(), plain
            wrong = checks[asked.path]()
        except ImproperlyConfigured as error:
            return 503, f"{error}\n".encode(), plain
        except ValueError:
            return 400, b"within: a number of seconds, such as ?within=60\n", plain
        return (503 if wrong else 200), f"{wrong or 'ok'}\n".encode(), plain

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("Metrics port: " + format, *args)


def _stuck_s(query: str) -> float:
    (text,) = parse_qs(query).get("within", [str(STUCK_S)])
    if not float(text) > 0:  # nor is NaN, with which no thread would ever be stuck
        raise ValueError(text)
    return float(text)


# -- the service manager -----------------------------------------------------------------------------------------------

# systemd with ``Type=notify``: what a process tells its service manager, by the protocol of ``sd_notify``.
#
# ``READY=1``: a poll has worked. ``WATCHDOG=1``: no thread has ended, and none has been busy for longer than
# ``WatchdogSec``. A process that only exists does not send it. ``STOPPING=1``: the process drains.

STATUS_INTERVAL_S = 5.0
SEND_TIMEOUT_S = 1.0  # the main thread may wait this long for a service manager that reads nothing


class ServiceManager:
    """The service manager that started this process, or none: then nothing is sent."""

    def __init__(self) -> None:
        """Read its address, and take it out of the environment: programs that we start must not speak for us."""
        address, pid = (os.environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_PID"))
        self._watchdog_s = int(os.environ.pop("WATCHDOG_USEC", "") or 0) / 1_000_000
        if pid and int(pid) != os.getpid():
            self._watchdog_s = 0.0
        self.present = bool(address)
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval_s = min(STATUS_INTERVAL_S, self._watchdog_s / 3 or STATUS_INTERVAL_S)
        self._next_time = 0.0
        self._ready = self._stopping = False

    def tell(self, probes: Probes, now: PollerSnapshot, *, stopping: bool) -> None:
        """Send what is new. Call it several times in each ``WatchdogSec``."""
        if not self.present or self._stopping:
            return
        moment, lines = clock.monotonic(), []
        wrong = probes.live(self._watchdog_s) if self._watchdog_s else ""
        ready = self._ready or not probes.startup()
        if ready and not self._ready:
            lines.append("READY=1")
        if stopping:
            lines.append("STOPPING=1")
        if (lines or moment >= self._next_time) and not wrong and self._watchdog_s:
            lines.append("WATCHDOG=1")
        if lines or moment >= self._next_time:
            counts = f"{now.running} of {now.slots} slots run, {now.finished} finished, {now.failed} failed"
            if self._send([*lines, f"STATUS={now.state}: {wrong or counts}"]):
                self._ready, self._stopping, self._next_time = ready, stopping, moment + self._interval_s

    def stopped(self) -> None:
        """Say that the process ends, if nothing said so yet."""
        if self.present and not self._stopping:
            self._send(["STOPPING=1"])

    def _send(self, lines: list[str]) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_TIMEOUT_S)
            sender.sendto("\n".join(lines).encode(), self._address)
            return True
        return False
