"""The times of a cron text in any zone, against a reference that reads the clock of the zone minute by minute."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings, strategies as st

from django_dbtaskqueue.conf.cron import check_timing, ticks

MINUTE = timedelta(minutes=1)
# Skipped and repeated hours by night, at midnight, of half an hour, of two hours, in the south.
ZONES = (
    "Europe/Madrid", "America/New_York", "Australia/Lord_Howe", "Antarctica/Troll", "America/Santiago", "Asia/Beirut",
    "Africa/Cairo", "America/Havana", "Africa/Casablanca", "Atlantic/Azores", "Asia/Tehran",
)  # fmt: skip
BEGIN, END = datetime(2021, 1, 1, tzinfo=UTC), datetime(2027, 12, 31, tzinfo=UTC)


def offset_changes(zone: str) -> list[datetime]:
    def changes(moments: Iterable[datetime]) -> list[datetime]:
        zoned = [moment.astimezone(ZoneInfo(zone)) for moment in moments]
        return [one.astimezone(UTC) for one, after in pairwise(zoned) if one.utcoffset() != after.utcoffset()]

    days = changes(BEGIN + timedelta(days=day) for day in range((END - BEGIN).days))
    return [hour for day in days for hour in changes(day + timedelta(hours=hour) for hour in range(25))]


Change = tuple[str, datetime]
CHANGES = [(zone, change) for zone in ZONES for change in offset_changes(zone)]


class Reference:
    """Which wall clock times a cron text of numbers, lists and stars names."""

    def __init__(self, cron: str) -> None:
        self.parts = [None if one == "*" else {int(number) for number in one.split(",")} for one in cron.split()]
        self.hourly = self.parts[1] is None

    def matches(self, wall: datetime) -> bool:
        found = (wall.minute, wall.hour, wall.day, wall.month, wall.isoweekday() % 7)
        return all(part is None or value in part for part, value in zip(self.parts, found, strict=True))

    def ticks(self, zone: str, begin: datetime, end: datetime) -> Iterator[datetime]:
        tz, moment = ZoneInfo(zone), begin
        before = (begin - MINUTE).astimezone(tz).replace(tzinfo=None)
        while moment <= end:
            local = moment.astimezone(tz)
            wall = local.replace(tzinfo=None, fold=0)
            skipped = [before + MINUTE * n for n in range(1, (wall - before) // MINUTE)]
            if self.hourly:
                if self.matches(wall):
                    yield moment
            elif (self.matches(wall) and not local.fold) or any(map(self.matches, skipped)):
                yield moment
            before, moment = wall, moment + MINUTE


def numbers(low: int, high: int) -> st.SearchStrategy[str]:
    return st.sets(st.integers(low, high), min_size=1, max_size=3).map(lambda found: ",".join(map(str, sorted(found))))


star = st.just("*")
days = st.tuples(star, star, star) | st.tuples(numbers(1, 31), star, star) | st.tuples(star, star, numbers(0, 6))
# Most hours that are skipped or repeated are these.
hours = st.one_of(star, numbers(0, 4), numbers(22, 23), numbers(0, 23))
crons = st.tuples(numbers(0, 59), hours, days).map(lambda parts: f"{parts[0]} {parts[1]} {' '.join(parts[2])}")


@settings(max_examples=60)
@given(crons, st.sampled_from(CHANGES), st.integers(-600, 600))
@example("30 2 * * *", ("Europe/Madrid", datetime(2026, 3, 29, 0, tzinfo=UTC)), 0)
@example("30 2 * * *", ("Europe/Madrid", datetime(2026, 10, 25, 0, tzinfo=UTC)), 0)
@example("45 1 * * *", ("Australia/Lord_Howe", datetime(2026, 4, 4, 14, tzinfo=UTC)), 55)
@example("0 * * * 5", ("Africa/Cairo", datetime(2026, 4, 23, 21, tzinfo=UTC)), 0)
def test_around_each_change_of_a_clock_the_ticks_are_those_of_the_zone(cron: str, change: Change, shift: int) -> None:
    zone, moment = change
    begin = moment - timedelta(hours=5) + timedelta(minutes=shift)
    end = begin + timedelta(hours=30)
    expected = list(Reference(cron).ticks(zone, begin, end))
    found = [tick for tick in islice(ticks(cron, zone, begin - timedelta(seconds=1)), len(expected) + 1) if tick <= end]
    assert found == expected


@given(
    st.sampled_from(("* * * * *", "*/7 * * * *", "0 */2 * * *", "*/20 1-3 * * *", "5 0,12 * * mon-fri", "0 0 1 * *",
                     "30 2 * * sun", "0 0 L * *", "15 3 * * mon#1", "*/30 * * * * *")),
    st.sampled_from(CHANGES),
    st.integers(-86_400, 86_400),
)  # fmt: skip
def test_ticks_grow_and_do_not_depend_on_where_one_begins(cron: str, change: Change, shift: int) -> None:
    """A poller asks anew after each tick: it must find those that an uninterrupted list has."""
    zone, moment = change
    begin = moment + timedelta(seconds=shift)
    found = list(islice(ticks(cron, zone, begin), 12))
    assert all(begin < found[0] and one < other for one, other in pairwise(found))
    again, after = [], begin
    for _ in found:
        after = next(ticks(cron, zone, after))
        again.append(after)
    assert again == found and found[-1] - begin < timedelta(days=31 * 13)


def test_what_is_wrong_or_ambiguous_is_said() -> None:
    for cron, zone, words in [
        ("0 7 * *", "UTC", "has 4 fields. A cron text has 5 fields, minute hour"),
        ("0 25 * * *", "UTC", "'25' is not a hour that can come"),
        ("0 7 * * mun", "UTC", "'mun' is not a day-of-week"),
        ("0 0 30 2 *", "UTC", "'30' is not a day-of-month that can come"),
        ("@daily", "UTC", "has 1 fields"),
        ("0 7 13 * fri", "UTC", "is ambiguous: it names days of the month (13) and of the week (fri)"),
        ("0 7 * * *", "Europe/Madird", "Did you mean 'Europe/Madrid'?"),
        ("0 7 * * *", "CEST", "is not a time zone of this machine"),
        ("0 7 * * *", "../etc/passwd", "is not a time zone of this machine"),
    ]:
        with pytest.raises(ValueError) as raised:
            check_timing(cron, zone)
        assert words in str(raised.value)


@pytest.mark.parametrize("hours", ["2", "*", "*/2"])
@pytest.mark.parametrize("second", ["0", "00", "15", "10,40"])
def test_a_field_of_seconds_changes_nothing_but_the_second(hours: str, second: str) -> None:
    """Given both changes of a clock, then each tick is that of the text without the field, and some seconds."""
    for begin in (datetime(2026, 3, 28, 12, tzinfo=UTC), datetime(2026, 10, 24, 12, tzinfo=UTC)):
        minutes = [*islice(ticks(f"30 {hours} * * *", "Europe/Madrid", begin), 12)]
        seconds = [timedelta(seconds=int(one)) for one in second.split(",")]
        expected = [minute + one for minute in minutes for one in seconds]
        assert [*islice(ticks(f"{second} 30 {hours} * * *", "Europe/Madrid", begin), len(expected))] == expected
