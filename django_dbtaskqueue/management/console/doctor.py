"""``taskqueue doctor``: what is wrong, in words, with what helps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django_dbtaskqueue.management.console.output import Screen, printable
from django_dbtaskqueue.operations.doctor import examine

WRONG = 1  # exit code


def doctor(screen: Screen, options: dict[str, Any]) -> int:
    """Each finding with its remedy, the worst first; 1 when one of them is an error."""
    findings = examine(options["database"])
    screen.data([asdict(finding) for finding in findings])
    for finding in findings:
        paint = {"error": screen.style.ERROR, "warning": screen.style.WARNING}.get(finding.level, str)
        screen.say(f"{paint(finding.level.upper())}  {printable(finding.words)}  [{finding.id}]")
        screen.say(f"    {printable(finding.remedy)}")
    if not findings:
        screen.say("Nothing is wrong.")
    return WRONG if any(finding.level == "error" for finding in findings) else 0
