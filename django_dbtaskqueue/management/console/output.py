"""How the command line speaks: tables that fit, ages in two units, one line of an error; or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import OutputWrapper
from django.core.management.color import Style
from django.core.serializers.json import DjangoJSONEncoder

NOTHING = "-"
UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
STYLES = {"ERROR": "ERROR", "POISON": "WARNING", "COMPLETED": "SUCCESS", "PROCESSING": "NOTICE", "paused": "WARNING"}


@dataclass(frozen=True, slots=True)
class Screen:
    """Where answers go: as words with colours, or as one JSON document."""

    out: OutputWrapper
    style: Style
    as_json: bool = False

    def say(self, text: str = "") -> None:
        """Write a line; nothing where JSON is wanted."""
        if not self.as_json:
            self.out.write(text)

    def data(self, value: Any) -> None:
        """Write a JSON document; nothing where words are wanted."""
        if self.as_json:
            self.out.write(json.dumps(value, cls=DjangoJSONEncoder, ensure_ascii=False))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[str] = ()) -> None:
        """Write rows under their heads, each column as wide as it must be; ``right`` names columns of numbers."""
        cells = [[_cell(value) for value in row] for row in rows]
        widths = [max(len(line[place]) for line in [list(head), *cells]) for place in range(len(head))]
        self.say(self.style.MIGRATE_HEADING(_line(head, widths, head, right)))
        for cell in cells:
            self.say(_line(cell, widths, head, right, self._coloured))

    def _coloured(self, text: str) -> str:
        name = STYLES.get(text.strip())
        return str(getattr(self.style, name)(text)) if name else text


def _line(
    cells: Sequence[str],
    widths: Sequence[int],
    head: Sequence[str],
    right: Sequence[str],
    paint: Callable[[str], str] = str,
) -> str:
    padded = [
        cell.rjust(width) if name in right else cell.ljust(width)
        for cell, width, name in zip(cells, widths, head, strict=True)
    ]
    return "  ".join(paint(text) for text in padded).rstrip()


def _cell(value: Any) -> str:
    return NOTHING if value is None or value == "" else printable(str(value))


def printable(text: str) -> str:
    """Return text that cannot command a terminal: control signs are shown, not sent."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def span(value: timedelta | None) -> str:
    """Return a length of time in its two largest units, such as "4m 12s"."""
    if value is None:
        return NOTHING
    seconds = max(int(value.total_seconds()), 0)
    for place, (unit, size) in enumerate(UNITS):
        if seconds >= size and place + 1 < len(UNITS):
            lesser, one = UNITS[place + 1]
            return f"{seconds // size}{unit} {seconds % size // one}{lesser}"
    return f"{seconds}s"


def ago(value: datetime | None, now: datetime) -> str:
    """Return a time as its distance from now."""
    if value is None:
        return NOTHING
    return f"{span(now - value)} ago" if value <= now else f"in {span(value - now)}"


def facts(screen: Screen, pairs: Mapping[str, Any]) -> None:
    """Write names and values under each other; what is empty is left out."""
    shown = {name: _cell(value) for name, value in pairs.items() if value not in (None, "", [], {})}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        screen.say(f"{name.rjust(width)}  {screen._coloured(value)}")
