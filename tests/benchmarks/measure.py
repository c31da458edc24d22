"""Cases, readings, targets: what a scenario is made of."""

import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Reading = Mapping[str, float]
Case = Callable[[], Reading]  # one thing measured: it takes one reading, the same names of figures each time


class NotRun(Exception):
    """Why a case cannot run here, in words for its row of the table."""


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


class Verdict(NamedTuple):
    target: Target
    values: list[float]  # one for each run
    words: str  # "met", or by how much not


@dataclass(frozen=True)
class Scenario:
    """Cases by their names, which are run in turns, so that a noisy minute hits all of them."""

    name: str
    title: str
    cases: Mapping[str, Case]
    targets: Sequence[Target] = ()
    picture: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by what grows, labels and cases drawn


@dataclass
class Result:
    scenario: Scenario
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # case -> why it was not run
    failed: bool = False

    def figures(self, case: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for run in self.readings.get(case, []) for name in run))

    def values(self, case: str, figure: str) -> list[float]:
        return [run[figure] for run in self.readings.get(case, []) if figure in run]

    def verdicts(self) -> Iterator[Verdict]:
        """Yield how each target was met, of those that were measured or could not be."""
        for target in self.scenario.targets:
            values = self.values(target.case, target.figure)
            if target.against is not None:
                others = self.values(target.against, target.other or target.figure)
                values = [ours / other for ours, other in zip(values, others, strict=False) if other]
            if values:
                share = statistics.median(values) / target.limit
                met = share <= 1 if target.most else share >= 1
                yield Verdict(target, values, "met" if met else f"missed by {abs(share - 1):.0%}")
            elif reason := self.missing.get(target.case):
                yield Verdict(target, [], f"not measured: {reason}")


def take(scenario: Scenario, runs: int) -> Result:
    """Run each case ``runs`` times, in turns. A case that cannot run is left out of all turns."""
    result = Result(scenario)
    for number in range(runs):
        for case, read in scenario.cases.items():
            if case in result.missing:
                continue
            try:
                reading = read()
            except NotRun as reason:
                result.missing[case] = said = str(reason)
            except Exception as error:  # the others' figures took long enough to be kept
                result.missing[case], said = f"failed: {error}", traceback.format_exc()
                result.failed = True
            else:
                result.readings.setdefault(case, []).append(reading)
                said = ", ".join(f"{name} {value:,.4g}" for name, value in reading.items())
            print(f"{scenario.name} {number + 1}/{runs}: {case}: {said}", file=sys.stderr, flush=True)
    return result
