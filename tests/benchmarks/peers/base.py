"""What each peer's process has in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import monotonic, process_time
from typing import Protocol

from tests.benchmarks.children import begin, finish

SECONDS = 2.0


class Peer(Protocol):
    """One other queue."""

    def install(self) -> None:
        """Make its tables."""

    def single(self) -> Callable[[], object]:
        """Return what enqueues one task in a transaction of its own."""

    def fill(self, tasks: int) -> None:
        """Enqueue many in the way it offers for many."""

    def drain(self, tasks: int) -> int:
        """Process until nothing waits; return how many tasks this process did."""


def serve(peer: Peer, way: str, *arguments: str) -> None:
    """Do what the command line asks, and report."""
    if way == "single":
        act = peer.single()
        act()
        begin()
        done, began = 0, monotonic()
        while monotonic() < began + SECONDS:
            act()
            done += 1
        finish(tasks=done, began=began, ended=monotonic(), cpu=0.0)
    else:
        begin()
        cpu, began = _cpu(), monotonic()
        answer = getattr(peer, way)(*map(int, arguments))
        finish(tasks=answer or 0, began=began, ended=monotonic(), cpu=_cpu() - cpu)
    sys.stdout.flush()
    os._exit(0)  # some leave threads or processes behind


def _cpu() -> float:
    times = os.times()
    return process_time() + times.children_user + times.children_system
