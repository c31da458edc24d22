"""Histogram of durations. Each class is a third wider than the one before, so quantiles are right to about 15 %."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10

SHORTEST_S = 0.0001  # the first class counts all durations up to this one
CLASSES_PER_DECADE = 8  # a decade is a power of ten
LAST_CLASS = 96  # durations of 10**8 seconds and more


def class_of(seconds: float) -> int:
    """Return the number of the class of a duration; the first class is 0."""
    if seconds <= SHORTEST_S:
        return 0
    return min(LAST_CLASS, int(CLASSES_PER_DECADE * log10(seconds / SHORTEST_S)) + 1)


def upper(number: int) -> float:
    """Return the longest duration of a class, in seconds."""
    return float(SHORTEST_S * 10 ** (number / CLASSES_PER_DECADE))


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the duration in seconds that ``share`` of the counted ones do not exceed; None if none were counted.

    The function assumes that durations are spread evenly inside a class.
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
