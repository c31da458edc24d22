"""Programs with their logs; among them ``manage.py`` commands that are forked from a process that has loaded Django.

The start of a fork takes milliseconds instead of a second. What it reads from its environment, settings above all, it
reads after the fork. Its parent is the server, which therefore has to be asked for its exit code.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.patience import DEFAULT_S, PATIENCE, eventually, until

REPOSITORY = Path(__file__).resolve().parent.parent
MANAGE, SERVE = str(REPOSITORY / "manage.py"), "from tests.forks import serve; serve()"


class ForkServer:
    """The loaded process, for one settings module."""

    def __init__(self, env: Mapping[str, str]) -> None:
        # The path is there for who reads a list of processes: the process and its forks have the same command line.
        command = [sys.executable, "-c", SERVE, MANAGE]
        self._process = subprocess.Popen(
            command, env=dict(env), cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._lock = threading.Lock()

    def ask(self, **request: Any) -> Any:
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the server. Its forks have ended, or go on without it."""
        self._process.communicate()


@cache
def fork_server(settings_module: str) -> ForkServer:
    """Return the server whose forks have these settings. It ends with this process."""
    from tests.settings import SERVER_URL

    ours = {"DATABASE_URL": SERVER_URL, "DJANGO_SETTINGS_MODULE": settings_module, "PYTHONPATH": str(REPOSITORY)}
    server = ForkServer(os.environ | ours)
    atexit.register(server.close)
    return server


class Program:
    """A process in a group of its own, with its output in a file."""

    pid: int
    code: int | None  # its exit code, negative for a signal; None while it runs

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def ended(self, code: int = 0) -> str:
        """Wait for the end with this exit code; return the log."""
        until(lambda: self.code is not None, timeout=PATIENCE)
        assert self.code == code, self.log[-4000:]
        return self.log

    def stop(self) -> str:
        self.signal()
        return self.ended()

    def stop_at_once(self, code: int = 0) -> str:
        """Ask a second time, once it waits for what runs."""
        self.signal()
        self.until_logged("Stopping: waiting")
        self.signal()
        return self.ended(code)

    def until_logged(self, text: str, *, times: int = 1, timeout: float = DEFAULT_S) -> None:
        def logged() -> None:
            assert self.log.count(text) >= times, f"{text!r} is not in the log:\n{self.log[-4000:]}"

        eventually(logged, timeout=timeout)

    def kill(self) -> None:
        """Kill it and what it started, stopped ones too, and wait for its end."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        until(lambda: self.code is not None)


class Started(Program):
    """A program that was started as a user starts it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path, log_file: Path) -> None:
        super().__init__(log_file)
        with log_file.open("ab") as log:
            outputs = {"stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen(command, env=env, cwd=folder, **outputs)
        self.pid = self.process.pid

    @property
    def code(self) -> int | None:
        return self.process.poll()


@contextmanager
def killed(start: Callable[[Path], Program]) -> Iterator[Any]:
    """Start a program with a log; kill it on the way out, and all that it started, if they still run."""
    with tempfile.NamedTemporaryFile() as log:
        started = start(Path(log.name))
        try:
            yield started
        finally:
            started.kill()


def program(
    command: Sequence[str], env: Mapping[str, str], folder: Path = REPOSITORY
) -> AbstractContextManager[Started]:
    return killed(lambda log: Started(command, env, folder, log))


class Fork(Program):
    """A command of ``manage.py`` in a fork of a server."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_file: Path) -> None:
        super().__init__(log_file)
        log_file.touch()  # readable before the process has begun
        self._server, self._code = fork_server(env["DJANGO_SETTINGS_MODULE"]), None
        self.pid: int = self._server.ask(command=[MANAGE, *command], env=dict(env), log=str(log_file))

    @property
    def code(self) -> int | None:
        if self._code is None:
            self._code = self._server.ask(pid=self.pid)
        return self._code


def serve() -> None:
    """Answer requests; in a fork, run its command to the end of the process."""
    import django

    django.setup()
    importlib.import_module("django_dbtaskqueue.management.commands.runtaskpoller")
    gc.freeze()  # a fork that looked through it for garbage would copy its pages
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            ended, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = os.fork()
            if answer == 0:
                _run(**request)
                return
            os.setpgid(answer, answer)
        print(json.dumps(answer), flush=True)


def _run(command: list[str], env: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(env)
    _read_settings()
    sys.argv = command
    from django.core.management import execute_from_command_line

    code: object = None
    try:
        execute_from_command_line(command)
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # As at each end of Python, but for the modules: to take them down costs more than all that a short fork does.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _read_settings() -> None:
    from django.conf import empty, settings
    from django.db import connections

    assert not any(connection.connection for connection in connections.all(initialized_only=True)), "a shared socket"
    for name in dict.fromkeys(("tests.settings", os.environ["DJANGO_SETTINGS_MODULE"])):
        importlib.reload(importlib.import_module(name))
    settings._wrapped = empty
    connections.__dict__.clear()
    connections.__init__()  # type: ignore[misc]
