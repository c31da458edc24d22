"""How one poller runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    threads: int = 4
    coroutines: int = 100
    once: bool = False  # one checkout per queue
    drain: bool = False  # until nothing is due, being processed, or due within five seconds
    max_tasks: int | None = None
    name: str = ""
    tags: tuple[str, ...] = ()  # tasks with another tag are left to other pollers
