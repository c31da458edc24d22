"""Cases, readings, targets: what a scenario is made of."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Reading = Mapping[str, float]


class NotRun(Exception):
    """Why a case cannot run here, in words for its row of the table."""


@dataclass(frozen=True)
class Case:
    """One thing measured: ``run()`` takes one reading, the same names of figures each time."""

    name: str
    run: Callable[[], Reading]


@dataclass(frozen=True)
class Target:
    """What a figure has to reach: ``limit``, or ``limit`` times another case's figure of the same run."""

    text: str
    case: str
    figure: str
    limit: float
    against: str | None = None
    other: str | None = None  # the other case's figure, when it has another name
    most: bool = False  # the limit is the most, not the least


@dataclass(frozen=True)
class Scenario:
    """Cases that are run in turns, so that a noisy minute hits all of them."""

    name: str
    title: str
    cases: Sequence[Case]
    targets: Sequence[Target] = ()
    picture: Sequence[str] = ()  # cases that ``--picture`` draws


@dataclass
class Result:
    """What a scenario's runs gave."""

    scenario: Scenario
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # case -> why it was not run
    failed: bool = False

    def figures(self, case: str) -> tuple[str, ...]:
        """Return the names of a case's figures, in order of appearance."""
        return tuple(dict.fromkeys(name for run in self.readings.get(case, []) for name in run))

    def values(self, case: str, figure: str) -> list[float]:
        """Return a figure of each run; empty when there is none."""
        return [run[figure] for run in self.readings.get(case, []) if figure in run]

    def json(self) -> dict[str, Any]:
        """Return everything as it was measured."""
        return {
            "scenario": self.scenario.name,
            "title": self.scenario.title,
            "readings": {case: [dict(run) for run in runs] for case, runs in self.readings.items()},
            "not run": self.missing,
            "targets": [verdict.json() for verdict in self.verdicts()],
        }

    def verdicts(self) -> list[Verdict]:
        """Return how each target was met, of those that were measured."""
        return [verdict for target in self.scenario.targets if (verdict := self._verdict(target)) is not None]

    def _verdict(self, target: Target) -> Verdict | None:
        ours = self.values(target.case, target.figure)
        if not ours:
            return Verdict(target, [], self.missing[target.case]) if target.case in self.missing else None
        if target.against is None:
            return Verdict(target, ours)
        theirs = self.values(target.against, target.other or target.figure)
        pairs = [mine / other for mine, other in zip(ours, theirs, strict=False) if other]
        return Verdict(target, pairs) if pairs else None


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured for it, one value per run."""

    target: Target
    values: Sequence[float]
    missing: str = ""  # why there are no values

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values) if self.values else float("nan")

    @property
    def met(self) -> bool:
        """Whether the median reaches the limit."""
        return self.value <= self.target.limit if self.target.most else self.value >= self.target.limit

    @property
    def words(self) -> str:
        """``met``, or by how much not."""
        if self.missing:
            return f"not measured: {self.missing}"
        if self.met:
            return "met"
        if not self.target.limit:
            return "missed"
        return f"missed by {abs(self.value / self.target.limit - 1):.0%}"

    def json(self) -> dict[str, Any]:
        """Return the facts."""
        return {
            "target": self.target.text,
            "case": self.target.case,
            "against": self.target.against,
            "limit": self.target.limit,
            "values": list(self.values),
            "median": self.value,
            "verdict": self.words,
        }


def take(scenario: Scenario, runs: int, say: Callable[[str], None]) -> Result:
    """Run each case ``runs`` times, in turns. A case that cannot run is left out of all turns."""
    result = Result(scenario)
    for number in range(runs):
        for case in scenario.cases:
            if case.name in result.missing:
                continue
            try:
                reading = case.run()
            except NotRun as reason:
                result.missing[case.name] = str(reason)
                say(f"{scenario.name}: {case.name}: {reason}")
                continue
            except Exception as error:  # the others' figures took long enough to be kept
                result.missing[case.name] = f"failed: {error}"
                result.failed = True
                say(f"{scenario.name}: {case.name}: {traceback.format_exc()}")
                continue
            result.readings.setdefault(case.name, []).append(reading)
            facts = ", ".join(f"{name} {value:,.4g}" for name, value in reading.items())
            say(f"{scenario.name} {number + 1}/{runs}: {case.name}: {facts}")
    return result
