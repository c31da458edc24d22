"""Files outside the database: what producers and processors began, and what they were answered.

One event is one short append to a file of the process that writes it, which no other process can tear. A process
writes its monotonic clock, which all processes of a machine share and which a wrong time of day does not shift.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Event(NamedTuple):
    kind: str  # of a producer: invoked, ok, unknown, refused, rolled back; of a processor: start, end
    clock: float  # seconds since 1970
    pid: int
    values: dict[str, Any]


class Ledger:
    """The file of this process. A forked child begins a file of its own."""

    def __init__(self) -> None:
        self._folder, self._pid, self._file = Path(os.environ["FAULTS_LEDGER"]), 0, -1
        self._opening = threading.Lock()

    def write(self, kind: str, **values: Any) -> None:
        now = time.monotonic()
        with self._opening:
            if self._pid != os.getpid():
                file = self._folder / f"{os.getpid()}.jsonl"
                self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                self._pid = os.getpid()
        line = json.dumps([kind, now, self._pid, values], separators=(",", ":"))
        os.write(self._file, f"{line}\n".encode())


def read(folder: Path) -> Iterator[Event]:
    """Return the events of all processes. The last line of a killed process may be torn: then it was not written."""
    start = time.time() - time.monotonic()
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_bytes().split(b"\n")[:-1]:
            kind, clock, pid, values = json.loads(line)
            yield Event(kind, start + clock, pid, values)
