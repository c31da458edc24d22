"""``manage.py runtaskpoller``: check tasks out, process and settle them, until a signal requests the end."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections
from django.utils.autoreload import get_child_arguments

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.management import FAILED_CODE, AddArgument, duration, exit_codes, positive, wrong_usage
from django_dbtaskqueue.poller import lifetime, logs, probe_port, supervisor
from django_dbtaskqueue.poller.executors.pool import named_executor
from django_dbtaskqueue.poller.executors.process import Wear
from django_dbtaskqueue.poller.heartbeat import Heartbeat, ScheduleJob
from django_dbtaskqueue.poller.lifetime import RUN, PollerSnapshot, ShutdownRequest, StatusLine, run_to_end
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.probe_port import PollerProbes, Probes, ServiceManager, SupervisorProbes
from django_dbtaskqueue.poller.queue_state import Options

# A thread may keep the interpreter for this time. With Python's default of 5 ms a busy processor adds 5 ms to each
# round trip that checks out, settles or renews.
SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (20000, 20, 20)
DEFAULT_COROUTINES = Options().coroutines
RUN_EXIT_CODES = """\
Exit codes: 0 ended as asked; 1 something was left running, or a child process failed; 2 wrong usage;
3 wrong configuration (unknown queue, no processor, no database, not migrated).
The first SIGTERM or SIGINT drains: what runs finishes, what has not started is given back uncharged. A second one
cancels what runs."""


class Command(BaseCommand):
    """Run a poller, or with ``--processes`` a supervisor and its children."""

    help = f"Process tasks until a signal requests the end. {RUN_EXIT_CODES}"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shutdown = ShutdownRequest()
        self._arguments: list[str] | None = None  # how this process was started; None inside call_command

    def add_arguments(self, parser: CommandParser) -> None:
        _add_work(parser)
        _add_ends(parser)
        _add_elsewhere(parser.add_argument_group("processing elsewhere").add_argument)
        parser.add_argument(supervisor.CHILD_FLAG, type=int, dest="child", help="For the supervisor's own use.")

    def run_from_argv(self, argv: list[str]) -> None:
        """Remember how this process was started: it may end itself, and children are started the same way."""
        self._arguments = argv
        super().run_from_argv(argv)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Handle signals from here on, before system checks and anything else that takes time."""
        with self._shutdown.on_signals():
            return super().execute(*args, **options)

    @exit_codes()
    def handle(self, *args: Any, **options: Any) -> None:
        self._manager = ServiceManager()
        work = self._supervise if options["processes"] and options["child"] is None else self._poll
        if (options["recycle_after"] or options["recycle_memory"]) and not options["processes"]:
            raise wrong_usage("--recycle-after and --recycle-memory replace child processes: add --processes.")
        watcher = None
        if options["reload"] and options["child"] is None:
            if supervisor.is_parent():
                work = self._run_reloaded
            else:
                watcher = supervisor.FileWatcher(self._shutdown)
        queues = registry.weights_of(options["queue"], options["exclude"])
        registry.check_databases(queues, options["database"])
        with self._logging(queues, options) as status, tuned_interpreter():
            code = work(queues, options, status)
        if watcher is not None and watcher.changed:
            code = supervisor.RELOAD_CODE
        if code and self._arguments is None:
            raise CommandError(f"runtaskpoller ended with exit code {code}; the log says why.", returncode=code)
        if code:
            leave(code)

    def _poll(self, queues: dict[str, int], options: dict[str, Any], status: StatusLine | None) -> int:
        with named_executor(options["executor"], executor_options(options)) as executor:
            channel = None
            if options["child"] is not None:
                channel = supervisor.ChildChannel(options["child"], self._shutdown, conf.settings().heartbeat)
            same = {name: options[name] for name in ("coroutines", "once", "drain", "max_tasks", "name")}
            same |= {"tags": tuple(options["tag"]), "siblings": (options["processes"] or 1) - 1}
            given = Options(threads=options["threads"] or conf.settings().threads, executor=executor, **same)
            poller = Poller(queues, given, using=options["database"])
            if options["once"] or options["drain"]:  # it may end before the heartbeat's thread looks for ticks
                for alias in poller.aliases:
                    with suppress(Exception):  # the heartbeat looks again, and says what is wrong
                        ScheduleJob(alias, poller.wake).run()
            for text in lifetime.opening(poller):
                logger.info("%s", text)
            if self._arguments is not None:
                connections.close_all()  # each thread has its own; the main thread needs none from here on
            if channel is not None:
                channel.polls(lambda: PollerSnapshot.of(poller))
            if self._shutdown.level > RUN:
                logger.info("%s", lifetime.closing(poller, 0.0))
                return 0
            began = clock.monotonic()
            heartbeat = Heartbeat(poller)
            probes = PollerProbes(poller, heartbeat) if options["metrics_port"] or self._manager.present else None

            def show(poller: Poller) -> None:
                if status or probes:  # else nobody sees it, and it would be half of what an idle main thread costs
                    self._show(PollerSnapshot.of(poller), status, probes, stopping=poller.stopping)

            with probe_port.served(options["metrics_port"], probes):
                left = run_to_end(poller, heartbeat, self._shutdown, timeout=options["shutdown_timeout"], on_tick=show)
            self._manager.stopped()
            for text in left:
                logger.error("%s", text)
            logger.info("%s", lifetime.closing(poller, clock.monotonic() - began))
            return FAILED_CODE if left else 0

    def _supervise(self, queues: dict[str, int], options: dict[str, Any], status: StatusLine | None) -> int:
        port, settings = options["metrics_port"], conf.settings()
        parent = supervisor.Supervisor(
            self._command("--processes"),
            options["processes"],
            self._shutdown,
            endless=not (options["once"] or options["drain"] or options["max_tasks"]),
            heartbeat=settings.heartbeat,
            timeout=options["shutdown_timeout"],
            above=status.write if status else None,
            options_of=lambda number: ["--metrics-port", port.of_child(number)] if port else [],
            wear=Wear(
                options["recycle_after"] or settings.recycle_after, options["recycle_memory"] or settings.recycle_memory
            ),
        )
        probes = SupervisorProbes(parent)
        with probe_port.served(port, probes):
            code = parent.run(on_tick=lambda now: self._show(now, status, probes, stopping=self._shutdown.level > RUN))
        self._manager.stopped()
        return code

    def _show(self, now: PollerSnapshot, status: StatusLine | None, probes: Probes | None, *, stopping: bool) -> None:
        if status:
            status.draw(now)
        if probes:
            self._manager.tell(probes, now, stopping=stopping)

    def _run_reloaded(self, queues: dict[str, int], options: dict[str, Any], status: StatusLine | None) -> int:
        """Run the same command in a process that is started again when a file changes."""
        return supervisor.run_parent(self._command("--reload"), self._shutdown)

    def _command(self, option: str) -> list[str]:
        if self._arguments is None:
            raise CommandError(f"{option} needs its own process: run manage.py, not call_command().")
        base = get_child_arguments()
        return base[: len(base) - len(sys.argv[1:])] + self._arguments[1:]

    @contextmanager
    def _logging(self, queues: dict[str, int], options: dict[str, Any]) -> Iterator[StatusLine | None]:
        """Log inside the block. Yield the status line: drawn on a terminal, if the project's LOGGING does not log."""
        kind, verbosity = options["log_format"], options["verbosity"]
        drawn = kind == "text" and verbosity and options["child"] is None and sys.stderr.isatty()
        line = closing(StatusLine(sys.stderr, queues)) if drawn and not logger.hasHandlers() else nullcontext()
        with line as status, logs.configured(kind, verbosity, status):
            yield status


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Let threads switch faster inside the block, and collect garbage less often: a batch has thousands of objects."""
    before = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    gc.freeze()  # the loaded modules stay: no collection needs to look at them
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before[1])
        sys.setswitchinterval(before[0])


def _add_work(parser: CommandParser) -> None:
    add: AddArgument = parser.add_argument
    repeated, number = {"action": "append", "default": []}, {"type": positive, "metavar": "N"}
    text = (
        "Queue to poll. Repeat it, or separate names by commas. A queue of weight 2 is polled twice as often as one of "
        "weight 1. Default: every queue that has a processor, with weight 1."
    )
    add("--queue", metavar="NAME[:WEIGHT]", help=text, **repeated)
    add("--exclude", metavar="NAME", help="Queue to leave out.", **repeated)
    text = "Run N child processes, each a whole poller, and replace those that die. Default: poll in this one."
    add("--processes", help=text, **number)
    add("--threads", type=positive, metavar="M", help="Sync tasks at the same time (THREADS: 4).")
    given = {"nargs": "?", "const": DEFAULT_COROUTINES, "default": DEFAULT_COROUTINES, "dest": "coroutines"}
    add("--async", help="Async tasks at the same time (%(default)s).", **number, **given)
    add("--database", metavar="ALIAS", help="Database to poll. Default: that of each queue.")
    text = "Take tasks with this tag, too; again for more. Default: only tasks without a tag."
    add("--tag", metavar="TAG", help=text, **repeated)
    add("--name", default="", help="First part of the instance's name (the host's name).")
    text = (
        "Serve probes (/healthz/startup, /healthz/ready, /healthz/live) and /metrics at this port. Without HOST only "
        "to this host. With --processes child K has PORT + K."
    )
    add("--metrics-port", type=probe_port.address, metavar="[HOST:]PORT", help=text)
    text = "Format of the log on standard error; LOGGING wins where it has a handler for us."
    add("--log-format", choices=tuple(logs.FORMATTERS), default="text", help=text)


def _add_ends(parser: CommandParser) -> None:
    add, ending = parser.add_argument, parser.add_mutually_exclusive_group()
    ending.add_argument("--once", action="store_true", help="Check each queue out once, process that, and end.")
    text = "End when nothing is due, being processed, or due within five seconds."
    ending.add_argument("--drain", action="store_true", help=text)
    add("--max-tasks", type=positive, metavar="N", help="End after N tasks (of each process).")
    text = 'How long a stop waits for running tasks, such as "30s" or "5m" (30s).'
    add("--shutdown-timeout", type=duration, default=timedelta(seconds=30), metavar="TIME", help=text)
    text = "For development: when a file of the project changes, drain and start again with the new code."
    add("--reload", action="store_true", help=text)
    add = parser.add_argument_group("replacing child processes").add_argument
    text = "With --processes: replace a child that has processed N tasks, when what runs there has ended."
    add("--recycle-after", type=positive, metavar="N", help=text)
    text = "With --processes: replace a child that has more memory (RSS, in MiB). Linux only."
    add("--recycle-memory", type=positive, metavar="MIB", help=text)


def _add_elsewhere(add: AddArgument) -> None:
    text = (
        "Where sync tasks run whose processors name no executor: process (child processes), spark, or the dotted path "
        "of an executor."
    )
    add("--executor", metavar="PATH", help=text)
    add("--master", metavar="URL", help="Spark's master, such as local[4] or spark://HOST:7077.")
    add("--conf", action="append", default=[], metavar="KEY=VALUE", help="A setting of Spark.")
    text = "A variable of this process's environment that Spark's workers get; again for more."
    add("--worker-env", action="append", default=[], metavar="NAME", help=text)


def executor_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return what ``--executor`` is made with."""
    given: dict[str, Any] = {"master": options["master"]} if options["master"] else {}
    for text in options["conf"]:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise wrong_usage(f"--conf {text}: write KEY=VALUE, such as spark.executor.memory=2g.")
        given.setdefault("conf", {})[name] = value
    if missing := set(options["worker_env"]).difference(os.environ):
        raise wrong_usage(f"--worker-env {min(missing)}: there is no such variable in this process's environment.")
    if options["worker_env"]:
        given["environment"] = {name: os.environ[name] for name in options["worker_env"]}
    if given and options["executor"] is None:
        raise wrong_usage("--master, --conf and --worker-env say how --executor runs: add --executor spark.")
    return given


def leave(code: int) -> None:
    """End the process at once: a normal end of Python would fight with threads that still run processors."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
