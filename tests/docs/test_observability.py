"""The page about observability and its files name what the code exports, and their own tools accept them."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from django_dbtaskqueue.metrics import DATABASE_METRICS, POLLER_METRICS
from django_dbtaskqueue.poller.process import logs
from tests.docs.test_reference import DOCS, page, table

PAGE = "howto/observability.md"
DASHBOARD, ALERTS = DOCS / "files/grafana-dashboard.json", DOCS / "files/prometheus-alerts.yaml"
NAME = re.compile(r"\bdbtaskqueue_\w+")
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum")}
EXPORTED = {one.name + end for one in (*DATABASE_METRICS, *POLLER_METRICS) for end in SUFFIXES.get(one.type, ("",))}
LABELS = {label for one in (*DATABASE_METRICS, *POLLER_METRICS) for label in one.labels} | {"le"}


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return [target["expr"] for one in panels for target in one["targets"]] + [rule["expr"] for rule in rules]


def test_the_table_of_log_fields_is_the_code_s() -> None:
    assert [row[0] for row in table(page(PAGE), "## Log lines")] == [f"`{name}`" for name in logs.LOG_FIELDS]


def test_the_dashboard_and_the_alerts_ask_for_what_is_exported() -> None:
    asked = expressions()
    assert len(asked) > 15
    for text in asked:
        assert set(NAME.findall(text)) <= EXPORTED, text
        selectors = re.findall(r"\{([^}]*)\}", text)
        assert {name for one in selectors for name in re.findall(r"(\w+)\s*[=!]", one)} <= LABELS, text
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", text)
        assert {name.strip() for one in grouped for name in one.split(",")} <= LABELS, text


def test_every_alert_says_what_to_do() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "action"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alerts() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_s_library_reads_the_dashboard_without_a_loss() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="the extra test is not installed")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    written = json.loads(DASHBOARD.read_text())
    read = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(written)))
    assert lost(written, read) == []
    ids = [one["id"] for one in written["panels"]]
    assert len(set(ids)) == len(ids)


def lost(written: object, read: object, place: str = "") -> list[str]:
    """Return the places whose values the library did not take over."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [one for key, value in written.items() for one in lost(value, read.get(key), f"{place}/{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = enumerate(zip(written, read, strict=True))
        return [one for number, (left, right) in pairs for one in lost(left, right, f"{place}/{number}")]
    return [] if written == read else [place]
