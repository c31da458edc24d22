"""What the doctor says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    id: str  # stable, such as "queue.no_poller"
    level: str  # "error", "warning" or "info"
    words: str
    remedy: str  # a sentence or a command
