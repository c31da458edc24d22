"""Durations in classes that each are a third wider than the one before: small to store, and right to about 15 %."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10

LEAST = 0.0001  # seconds; what is shorter counts as this
CLASSES = 8  # for each power of ten
MOST = 96  # the last class: 10**8 seconds


def class_of(seconds: float) -> int:
    """Return the class a duration falls into, from 0."""
    if seconds <= LEAST:
        return 0
    return min(MOST, int(CLASSES * log10(seconds / LEAST)) + 1)


def upper(number: int) -> float:
    """Return the longest duration of a class, in seconds."""
    return float(LEAST * 10 ** (number / CLASSES))


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the duration that ``share`` of all stay within, in seconds; None when nothing was counted.

    Within its class the durations are taken to be spread evenly.
    """
    wanted = share * sum(counts.values())
    if not wanted:
        return None
    seen = 0.0
    for number in sorted(counts):
        seen += counts[number]
        if seen >= wanted:
            low = upper(number - 1) if number else 0.0
            return low + (upper(number) - low) * (1 - (seen - wanted) / counts[number])
    return upper(max(counts))
