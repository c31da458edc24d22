"""The reference is complete and true: compared with the code it describes."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest
from django.core.management.base import BaseCommand

from django_dbtaskqueue.api.urls import ROUTES
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.peers import Peer
from django_dbtaskqueue.core import exceptions, retry
from django_dbtaskqueue.core.states import EDGES, Edge, Status
from django_dbtaskqueue.management.commands.generatetasks import Command as GenerateTasks
from django_dbtaskqueue.management.commands.housekeeptasks import Command as HousekeepTasks
from django_dbtaskqueue.management.commands.runtaskpoller import Command as RunTaskPoller
from django_dbtaskqueue.operations import checks, schedules
from django_dbtaskqueue.pipeline.command_line import Face, parser
from django_dbtaskqueue.pipeline.jobs import JOBS, Argument, job
from example_project.flights.management.commands.demo import Command as Demo
from tests.crossings import features
from tests.crossings.roads import ROADS
from tests.docs.pages import REPOSITORY, blocks

DOCS = REPOSITORY / "docs"
PACKAGE = REPOSITORY / "django_dbtaskqueue"
ROW = re.compile(r"^\|(.+)\|$", re.MULTILINE)


def page(name: str) -> str:
    return (DOCS / name).read_text()


def table(text: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading, without its head."""
    after = f"\n{text}".split(f"\n{heading}\n", 1)[1]
    rows = [[cell.strip() for cell in found[1].split("|")] for found in ROW.finditer(after.split("\n## ", 1)[0])]
    return rows[2:]


def diagram() -> str:
    """Return the statuses and the ways between them as a Mermaid state diagram."""
    ways: dict[tuple[str, str], list[str]] = {}
    for edge in EDGES:
        for source in edge.sources or ("[*]",):
            target = str(edge.target or "[*]")
            if source != target:
                ways.setdefault((str(source), target), []).append(edge.verb)
    lines = [f"    {source} --> {target}: {', '.join(verbs)}" for (source, target), verbs in ways.items()]
    return "\n".join(["stateDiagram-v2", *lines, ""])


def edge_row(edge: Edge) -> list[str]:
    sources = ", ".join(f"`{status}`" for status in edge.sources) or "-"
    return [f"`{edge.verb}`", sources, f"`{edge.target}`" if edge.target else "leaves the table", edge.actor]


def test_the_diagram_and_the_tables_of_statuses_are_the_code_s() -> None:
    text = page("reference/statuses.md")
    (drawn,) = [block.text for block in blocks(DOCS / "reference/statuses.md") if block.language == "mermaid"]
    assert drawn == diagram(), f"Write this diagram:\n{diagram()}"
    written = [row[:4] for row in table(text, "## Every way between them")]
    expected = [edge_row(edge) for edge in EDGES]
    assert written == expected, "Write these rows:\n" + "\n".join(f"| {' | '.join(row)} |" for row in expected)
    assert {row[0] for row in table(text, "# Statuses")} == {f"`{status}`" for status in Status}


def shown(value: object) -> str:
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        if seconds >= 86_400:
            return f"`{value.days} d`"
        return f"`{seconds:g} s`" if seconds >= 1 else f"`{seconds * 1000:g} ms`"
    if isinstance(value, int) and not isinstance(value, bool) and value > 9_999:
        return f"`{value:,}`"
    if value is retry.DEFAULT:
        return f"`{retry.describe(retry.DEFAULT)}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def test_every_setting_is_documented_with_its_default() -> None:
    for heading, kind, name in [
        ("## Settings of a queue", conf.QueueSettings, str),
        ("## Keys of DBTASKQUEUE", conf.Settings, str.upper),
        ("## Settings of a peer", Peer, str),
    ]:
        written = {row[0]: row[1] for row in table(page("reference/settings.md"), heading)}
        defaults = {one.name: "`{}`" if one.default is MISSING else shown(one.default) for one in fields(kind)}
        assert written == {f"`{name(key)}`": default for key, default in defaults.items()}


def test_every_option_is_documented() -> None:
    for heading, command in [
        ("## runtaskpoller", RunTaskPoller()),
        ("## housekeeptasks", HousekeepTasks()),
        ("## generatetasks", GenerateTasks()),
        ("## demo", Demo()),
    ]:
        documented = " ".join(row[0] for row in table(page("reference/commands.md"), heading))
        ours, django_s = (one.create_parser("manage.py", "command") for one in (command, BaseCommand()))
        options = ours._option_string_actions.keys() - django_s._option_string_actions.keys() - {"--child"}
        assert set(re.findall(r"--[a-z][a-z-]*", documented)) == {name for name in options if name.startswith("--")}


def options_of(text: str) -> set[str]:
    documented = " ".join(row[1] for row in re.findall(r"^(\| (`[^|]*) \|.*)$", text, re.MULTILINE))
    return set(re.findall(r"--[a-z][a-z-]*", documented))


@pytest.mark.parametrize("name", JOBS)
def test_every_option_of_every_job_is_documented(name: str) -> None:
    section = page("reference/commands.md").split("\n## runtaskpipeline\n", 1)[1].split("\n## ", 1)[0]
    common, *parts = section.split("\n### ")
    documented = {part.partition("\n")[0]: options_of(part) for part in parts}
    place = (Argument("database", ""), Argument("task_table", ""))
    face = Face("", place, lambda alias, table: None, sys.stdout, sys.stderr)
    known = {word for action in parser(job(name), face)._actions for word in action.option_strings}
    own = known - {one.flag for one in job(name).arguments if one.type is bool and one.default}
    assert set(documented) == set(JOBS)
    assert documented[name] | options_of(common) == {word for word in own if word.startswith("--")}


def test_every_error_and_every_system_check_is_documented() -> None:
    documented = {row[0].strip("`") for row in table(page("reference/errors.md"), "# Errors")}
    kinds = [kind for kind in vars(exceptions).values() if isinstance(kind, type)]
    assert documented == {kind.__name__ for kind in kinds if kind.__module__ == exceptions.__name__}
    documented = {row[0].strip("`") for row in table(page("reference/errors.md"), "## System checks")}
    texts = [Path(str(module.__file__)).read_text() for module in (checks, schedules)]
    ids = re.findall(r'id="(dbtaskqueue\.[EW]\d+)"', "".join(texts))
    assert documented == set(ids)


def test_the_page_of_reasons_has_each_code() -> None:
    tree = ast.parse((PACKAGE / "operations" / "explain.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Explanation"]
    given = {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}
    rows = table(page("howto/why-a-task-does-not-run.md"), "## The reasons")
    assert {*chain(*(re.findall(r"`(\w+)`", row[0]) for row in rows))} == given | {
        "sleeping",
        "signal",
        "max_running",
        "rate",
    }  # which other functions return


def log_lines() -> Iterator[str]:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in ("info", "warning", "error", "exception", "log") and isinstance(node, ast.Call) and node.args:
                message = node.args[0]
                if isinstance(message, ast.Constant) and isinstance(message.value, str):
                    yield re.sub(r"%(?:\.\d+)?[srgfd]", "…", message.value)


def test_explained_log_lines_exist() -> None:
    written = [row[0].strip("`") for row in table(page("howto/operate-at-night.md"), "## What a log line means")]
    assert written and set(written) <= set(log_lines())


TEST = re.compile(r"\[`(\w+)`\]\(([\w./-]+\.py)\)")


def test_each_semantic_names_a_test_that_exists_or_says_not_yet() -> None:
    rows = table(page("reference/semantics.md"), "# Semantics")
    assert len(rows) >= 24 and [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        tests = TEST.findall(row[-1])
        assert tests or row[-1] == "not yet", f"row {row[0]} names no test"
        for name, path in tests:
            source = (DOCS / "reference" / path).read_text()
            assert f"def {name}(" in source, f"row {row[0]}: {path} has no {name}"


def test_the_table_of_crossings_is_that_of_their_tests() -> None:
    written = page("reference/semantics.md").split("\n## Each feature on each road\n", 1)[1].split("\n\n", 1)[1]
    assert written == (expected := features.table(ROADS)), f"Write this table:\n{expected}"


def test_every_request_of_the_api_is_documented() -> None:
    written = [(row[0], row[3]) for row in table(page("reference/http-api.md"), "## Requests")]
    named = [(re.sub(r"<\w+:(\w+)>", lambda part: part[1].upper(), route.path), route) for route in ROUTES]
    assert written == [(f"`{route.method} {address}`", route.needs) for address, route in named]
