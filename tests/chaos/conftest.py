"""Settings that the tests and their child processes share, and the processes themselves."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.processes import PollerProcess
from tests.conftest import ProcessDatabase

LEASE = 3.0  # seconds
QUEUE: dict[str, Any] = {"lease": f"{LEASE}s", "max_attempts": 3, "retry": "fixed:50ms"}
Start = Callable[..., PollerProcess]


@pytest.fixture
def queues(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with settings of both queues, or of one by its name; children started from then on have them, too."""
    values: dict[str, Any] = {"QUEUES": {"chaos": dict(QUEUE), "ledger": dict(QUEUE)}}

    def configure(*, heartbeat: str = "500ms", **changes: Any) -> None:
        values["HEARTBEAT"] = heartbeat
        for name, queue in values["QUEUES"].items():
            queue.update({key: value for key, value in changes.items() if key not in values["QUEUES"]})
            queue.update(changes.get(name, {}))
        settings.DBTASKQUEUE = copy.deepcopy(values)
        monkeypatch.setenv("CHAOS_DBTASKQUEUE", json.dumps(values))

    configure()
    return configure


@pytest.fixture
def start(queues: Callable[..., None], tmp_path: Path) -> Iterator[Start]:
    """Start a ``runtaskpoller`` on a database; whatever still runs at the end is killed, and the logs are shown."""
    processes: list[PollerProcess] = []

    def begin(database: ProcessDatabase, *options: str, **more: Any) -> PollerProcess:
        log = tmp_path / f"poller-{len(processes)}.log"
        processes.append(PollerProcess(database, log, options, **more))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
    for process in processes:
        print(f"--- {process.log_file.name}: {process.command}\n{process.log[-4000:]}")
