"""Figures of reports as their JSON has them, made without Spark: a week of two queues."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 1, 5, tzinfo=UTC)
HOURS = [(START + timedelta(hours=hour)).isoformat() for hour in range(7 * 24)]
PERIOD = {"since": START.isoformat(), "until": (START + timedelta(days=7)).isoformat()}


def wave(height: float, hour: int) -> float:
    """Return a value that is high in the middle of each day, and higher every day."""
    return round(height * (1.2 + math.sin((hour - 6) / 12 * math.pi)) * (1 + hour / 100), 3)


def report_figures(name: str = "claims", **changes: Any) -> dict[str, Any]:
    queues = (name, "mail")
    times = {
        f"{time}_{p}": value for time in ("wait", "run") for p, value in (("p50", 0.42), ("p95", 61.5), ("p99", 8123.0))
    }
    rates = {"success_rate": 0.97, "retry_rate": None, "failure_rate": 0.03}
    total = {"arrived": 12_345, "ended": 12_001, **times, **rates}
    error = f"ValueError: no gate for {name}"
    last = {"queue": name, "last": HOURS[30], "example": f"{error} 4711"}
    shares = {"share_of_tasks": 0.1, "share_of_run_time": 0.25, "share_of_unsuccessful": 0.9}

    def lines(height: float) -> list[dict[str, Any]]:
        heights = zip(queues, (height, height / 3), strict=True)
        return [{"name": queue, "values": [wave(one, hour) for hour in range(len(HOURS))]} for queue, one in heights]

    heights = {"wait_p95": 90.0, "backlog": 400.0, "budget_spent": 0.4, "failure_rate": 0.02}
    over_time = {"times": HOURS, "run_p95": [], **{one: lines(height) for one, height in heights.items()}}
    for outcome, most in (("completed", 60), ("failed", 9)):
        over_time[outcome] = [round(wave(most, hour)) for hour in range(len(HOURS))]
    spendings = (name, None), (name, 3.008), ("mail", 0.4)
    budget = {"objective": "99%", "reached": 0.97, "bad": 361, "allowed": 120.01}
    tables = {
        "queues": [{"queue": queue, **total} for queue in queues],
        "budgets": [{"queue": one, **budget, "spent": spent} for one, spent in spendings],
        "failures": [{**last, "message": f"{error} #", "tasks_ended": 1, "attempts_failed": 3}],
        "never_succeeding": [{**last, "tag": None, "reference": name, "ended": 3}],
        "noisy": [{"queue": name, "attempts": 12_400, "unsuccessful_attempts": 399, **shares, "noisy": True}],
        "retry_waste": [],
    }
    summary = f"12,001 tasks ended, 97 % of them COMPLETED. Beyond their error budget: {name}."
    facts = {"kind": "report", **PERIOD, "summary": summary, "everything": total}
    return {**facts, **tables, "over_time": over_time, **changes}


def forecast_figures() -> dict[str, Any]:
    edges = {"expected": 4, "arrivals_least": 1.0, "arrivals_most": 900.0}
    hours = [
        {"hour": hour, "arrivals": wave(300, hour), "servers": round(wave(6, hour)), **edges}
        for hour in range(len(HOURS) - 5)
    ]
    model, unusual = "last week without unusual days", {"value": 9000.0, "usual": 31.5, "score": 12.3}
    capacity = {"target_wait": 30.0, "share": 0.95, "pollers": 6, "slots": 4, "run_seconds": 20.0}
    capacity |= {"unevenness_of_arrivals": 1.7, "unevenness_of_run_times": 1.0}
    quality = {"coverage": 0.912, "weeks": 8, "weeks_tested": 7}
    facts = {"kind": "forecast", **PERIOD, "summary": "Add 2 pollers Sunday 10-14 UTC.", "time_zone": "Europe/Berlin"}
    return {
        **(facts | capacity | quality),
        "model": model,
        "errors": [{"model": model, "error": 1.36}, {"model": "same hour last week", "error": 1.55}],
        "stretches": [{"when": "Sunday 10-14", "start": 154, "end": 158, "pollers": 8, "expected": 7}],
        "hours": hours,
        "anomalies": [{"queue": "mail", "hour": HOURS[8], "measure": "arrivals", **unusual}],
    }


def whatif_figures() -> dict[str, Any]:
    waits = {"p50": 1.0, "p95": 60.0, "max": 7200.0}
    found = {"recorded": 3.0, "now": 2.0, "then": 0.5}
    replays = {one: {"mean_lead": 5.0, **{p: wait * found[one] for p, wait in waits.items()}} for one in found}
    over_time = {one: [wave(90 * found[one], hour) for hour in range(len(HOURS))] for one in ("now", "then")}
    summary = "95 % of the tasks would have waited at most 30s instead of 2m: shorter."
    facts = {"kind": "whatif", **PERIOD, "summary": summary, "tasks": 1484, "slots_now": 1, "slots_then": 3}
    return {
        **facts,
        **replays,
        "over_time": {"times": HOURS, **over_time},
        "curve": {name: [found[name] * (share / 20) ** 4 for share in range(101)] for name in ("now", "then")},
    }
