"""The times of a cron text in a time zone. cronsim knows cron and DST; it is imported on first use."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

from django.utils.timezone import get_default_timezone_name

from django_dbtaskqueue.core.exceptions import near_match

CRON_PARTS = ("minute", "hour", "day-of-month", "month", "day-of-week")
CRON_HELP = (
    "A cron text has 5 fields, minute hour day-of-month month day-of-week, such as '0 7 * * mon-fri'; "
    "a sixth in front is the second."
)


def ticks(cron: str, zone: str, after: datetime) -> Iterator[datetime]:
    """Yield the times of a cron text that are later than ``after``, in UTC, each once and in order.

    A schedule that runs in each hour follows the clock of the zone: a skipped hour has no tick, a repeated one has all
    twice. One that names hours runs once each day: a tick in a skipped hour comes at its end, in a repeated one once.
    """
    from cronsim import CronSim

    last, seconds, parts = after.astimezone(UTC), [0], cron.split()
    if len(parts) == 6:  # cronsim knows DST in texts of minutes only
        seconds = sorted(CronSim(cron, last).seconds)
        del parts[0]
    if parts[1] != "*":  # cronsim takes the hours 0-23/2 as named, but not */2
        parts[:2] = parts[0].replace("*", "0-59"), parts[1].replace("*", "0-23")
    times = CronSim(" ".join(parts), (last - timedelta(minutes=1)).astimezone(ZoneInfo(zone)))
    times.minutes.add(60)  # there is none: where a clock changes by half an hour, a leap to the one minute is too far
    for local in times:
        for second in seconds:
            tick = local.astimezone(UTC) + timedelta(seconds=second)
            if tick > last:  # in a repeated hour, a time of the first turn may be over
                yield tick
                last = tick


def timing_fault(cron: str, zone: str) -> str:
    """Return what is wrong with a cron text and a time zone; empty: nothing."""
    try:
        check_timing(cron, zone)
    except ValueError as error:
        return str(error)
    return ""


def check_timing(cron: str, zone: str) -> None:
    """Raise ``ValueError``, which says what to write, for a cron text or a time zone that is wrong or ambiguous."""
    from cronsim import CronSim, CronSimError

    parts = cron.split()
    if len(parts) not in (5, 6):
        raise ValueError(f"cron={cron!r} has {len(parts)} fields. {CRON_HELP}")
    try:
        CronSim(cron, datetime(2024, 1, 1))
    except CronSimError as error:
        name = str(error).removeprefix("Bad ")
        given = dict(zip(("second", *CRON_PARTS)[-len(parts) :], parts, strict=True)).get(name, cron)
        raise ValueError(f"cron={cron!r}: {given!r} is not a {name} that can come. {CRON_HELP}") from None
    if parts[-3] != "*" and parts[-1] != "*":
        raise ValueError(
            f"cron={cron!r} is ambiguous: it names days of the month ({parts[-3]}) and of the week ({parts[-1]}). "
            "Cron would run on each day that is either. Make two schedules, or name days such as mon#1, the first "
            "Monday of the month."
        )
    if zone not in _zones():
        hint = near_match(zone, _zones()) or " Names are such as Europe/Madrid."
        raise ValueError(f"timezone={zone!r} is not a time zone of this machine.{hint} pip install tzdata brings all.")


_zones = lru_cache(maxsize=1)(available_timezones)
default_zone = get_default_timezone_name  # of a schedule that names none
