"""``manage.py demo`` as a user runs it: a process of its own, with real pollers, on PostgreSQL and on SQLite."""

import json
import re
import signal
import urllib.error
import urllib.request
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.core.management import CommandError, call_command

from django_dbtaskqueue.models import Task
from example_project.flights.demo import screen
from example_project.flights.models import Claim, Filing
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.docs.pages import free_port
from tests.poller.processes import manage
from tests.support import PATIENCE, eventually, until

SETTINGS = {"DJANGO_SETTINGS_MODULE": "example_project.settings"}
KEYS = {
    *("database", "enqueued", "hot", "history", "archived", "deleted", "rolled_back_present", "by_status"),
    *("attempts_failed", "conservation_ok", "duration_s", "drain_tasks_per_s", "wait_ms", "pipeline"),
}


def demo(database: ProcessDatabase, folder: Path, *options: str, spark: bool = False, **env: str) -> tuple[Any, str]:
    file, without = folder / "out.json", () if spark else ("--no-spark",)
    run = replace(database, extra=SETTINGS | env).run
    said = run("demo", "--no-serve", "--json", str(file), *without, *options).stdout
    return json.loads(file.read_text()), said


@pytest.mark.slow
def test_a_second_run_neither_duplicates_nor_loses(process_database: ProcessDatabase, tmp_path: Path) -> None:
    first, said = demo(process_database, tmp_path, "--tasks", "300")
    assert set(first) == KEYS
    assert first["database"]["vendor"] == process_database.vendor and first["database"]["embedded"] is False
    assert first["enqueued"] == first["hot"] == 300
    assert first["history"] == first["archived"] == first["deleted"] == first["rolled_back_present"] == 0
    assert first["conservation_ok"] is True
    statuses = first["by_status"]
    assert sum(statuses.values()) == 300 and statuses["CREATED"] == statuses["PROCESSING"] == 0
    assert min(statuses["COMPLETED"], statuses["ERROR"], statuses["POISON"]) > 0
    assert first["attempts_failed"] > statuses["ERROR"]
    assert first["wait_ms"]["p50"] <= first["wait_ms"]["p95"] <= first["wait_ms"]["p99"]
    assert Claim.objects.count() == statuses["COMPLETED"]
    for words in ("rolled back", "absent: 0", "tasks per second", "Nothing is lost", "operator / "):
        assert words in said
    second, _ = demo(process_database, tmp_path, "--tasks", "300")
    for key in ("enqueued", "hot", "by_status", "attempts_failed", "rolled_back_present", "conservation_ok"):
        assert second[key] == first[key]


@pytest.mark.slow
def test_a_run_goes_on_after_another_without_spark(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    for name in ("pyarrow", "pyspark", "orjson"):  # as with the extra "quick"
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name={name!r})")
    without = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    demo(postgres_process_database, tmp_path, "--tasks", "50", "--pollers", "1", **without)
    with pytest.raises(AssertionError, match=r"Spark's part needs pyarrow: .* or give --no-spark"):
        demo(postgres_process_database, tmp_path, spark=True, **without)
    figures, _ = demo(postgres_process_database, tmp_path, "--tasks", "120", "--pollers", "1")
    assert figures["enqueued"] == Filing.objects.count() == Task.objects.count() >= 120
    assert figures["conservation_ok"] is True
    Task.objects.first().delete()  # behind the queue's back: not counted
    with pytest.raises(AssertionError, match=r"(?s)exit 1.*1 off.*The balance is off"):
        demo(postgres_process_database, tmp_path, "--tasks", "20", "--pollers", "1")
    assert json.loads((tmp_path / "out.json").read_text())["conservation_ok"] is False


def test_a_long_step_gives_a_sign_of_life_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "SIGN_OF_LIFE_S", 0.01)
    with redirect_stdout(StringIO()) as said, screen.Screen().step("Spark", "starting"):
        until(lambda: re.search(r"Spark +starting … \d+ s", said.getvalue()))


def test_bad_options_are_refused_at_once(db: None) -> None:
    for options, words in [
        (["--tasks", "0"], "--tasks must be at least 1, not 0"),
        (["--pollers", "-1"], "--pollers must be at least 1, not -1"),
        (["--json", "/no/such/folder/out.json"], "there is no folder /no/such/folder"),
        (["--port", "99999"], "--port 99999 cannot be used"),
    ]:
        with pytest.raises(CommandError, match=re.escape(words)):
            call_command("demo", *options)
        assert not Filing.objects.exists()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_stopped(postgres_process_database: ProcessDatabase, stop: signal.Signals) -> None:
    port, database = free_port(), replace(postgres_process_database, extra=SETTINGS)
    with manage(database, "demo", "--no-spark", "--tasks", "20", "--port", str(port)) as served:
        served.until_logged("\nDesk", timeout=PATIENCE)
        for path, words in ("", "File a claim"), ("admin/login/", "Log in"), ("static/flights/desk.css", "accent"):
            assert words in page(f"http://127.0.0.1:{port}/{path}")
        children = psutil.Process(served.pid).children(recursive=True)
        assert children
        served.signal(stop)
        served.ended()
        assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []


def page(url: str) -> str:
    """Return a page of the server, which may be just about to listen."""

    def read() -> str:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:  # noqa: S310 - our own http address
                return str(answer.read().decode())
        except urllib.error.URLError as error:
            raise AssertionError(f"{url} does not answer") from error

    return eventually(read)
