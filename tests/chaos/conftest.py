"""Settings that the tests and their child processes share, and the processes themselves."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import QUEUES
from tests.chaos.processes import Configure, PollerProcess, Start
from tests.conftest import ProcessDatabase
from tests.proxy import Proxy, proxied
from tests.support import Audit

# No lease runs out by itself: ``expire`` and ``until_all`` of processes.py let it.
QUEUE: dict[str, Any] = {"lease": "10m", "max_attempts": 3, "retry": "fixed:50ms"}
QUEUE |= {"poll_interval": "100ms", "idle_interval": "200ms"}


@pytest.fixture
def database(request: pytest.FixtureRequest) -> ProcessDatabase:
    """PostgreSQL's, unless a test says ``on``."""
    return request.getfixturevalue(getattr(request, "param", "postgres_process_database"))


@pytest.fixture
def audited(database: ProcessDatabase) -> Iterator[None]:
    watched = Audit()
    watched.install()
    yield
    assert watched.problems() == []


@pytest.fixture
def proxy(database: ProcessDatabase) -> Iterator[Proxy]:
    with proxied(database.url) as found:
        yield found


@pytest.fixture
def queues(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Call it with settings of all queues, or of one by its name; children started from then on have them, too.

    A supervisor kills a child that is silent for three heartbeats: let them be long where there is one.
    """
    values: dict[str, Any] = {"QUEUES": {name: dict(QUEUE) for name in QUEUES}}

    def configure(*, heartbeat: str = "500ms", listeners: tuple[str, ...] = (), **changes: Any) -> None:
        values.update(HEARTBEAT=heartbeat, LISTENERS=listeners)
        for name, queue in values["QUEUES"].items():
            queue.update({key: value for key, value in changes.items() if key not in values["QUEUES"]})
            queue.update(changes.get(name, {}))
        settings.DBTASKQUEUE = copy.deepcopy(values)
        monkeypatch.setenv("CHAOS_DBTASKQUEUE", json.dumps(values))

    configure()
    return configure


@pytest.fixture
def start(database: ProcessDatabase, queues: Configure, tmp_path: Path) -> Iterator[Start]:
    """Start a ``runtaskpoller``; whatever still runs at the end is killed, and the logs are shown.

    ``url``: its way to the database. ``die``: the point of ``crashing.py`` where it kills itself.
    """
    processes: list[PollerProcess] = []

    def begin(*options: str, queue: str = "chaos,ledger", die: str = "", url: str = "") -> PollerProcess:
        env = replace(database, url=url or database.url).env
        env |= {"DJANGO_SETTINGS_MODULE": "tests.chaos.settings", "CHAOS_KILL": die}
        log = tmp_path / f"poller-{len(processes)}.log"
        processes.append(PollerProcess(["runtaskpoller", "--queue", queue, *options], env, log))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
    for process in processes:
        print(f"--- {process.log_file.name}\n{process.log[-4000:]}")
