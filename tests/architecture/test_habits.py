"""Small by measure, and nothing left half done."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.limits import LIMITS
from tests.architecture.source import MODULES, REPOSITORY, Module, files, length

CODE = [module.path for module in MODULES]
TESTS = files("tests")
EXAMPLE = files("example_project")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_functions_are_short_and_take_few_arguments(module: Module) -> None:
    for function in module.functions:
        assert length(function) <= LIMITS["function lines"], f"{module.place}:{function.lineno} {function.name}"
        positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        count = len([name for name in positional if name not in ("self", "cls")])
        most = LIMITS["positional arguments"] + 4 * (function.name in ("__init__", "__call__"))
        assert count <= most, f"{module.place}:{function.lineno} {function.name} takes {count} positional arguments"


def test_booleans_are_given_by_name() -> None:
    for module in MODULES:
        for function in module.functions:
            arguments = [*function.args.posonlyargs, *function.args.args]
            flags = [
                one.arg for one in arguments if isinstance(one.annotation, ast.Name) and one.annotation.id == "bool"
            ]
            assert not flags, f"{module.place}:{function.lineno} {function.name}({', '.join(flags)})"


# -- nobody sleeps, and nobody asks Python's clock for the time --------------------------------------------------------

MAY_SLEEP = {
    "tests/testapp/tasks.py",  # processors whose work is to take time
    "tests/chaos/tasks.py",  # the same
    "django_dbtaskqueue/contrib/embedded/__init__.py",  # the end of another program's process is no event
}


@pytest.mark.parametrize("path", [*CODE, *TESTS], ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nobody_sleeps_where_an_event_can_be_waited_for(path: Path) -> None:
    if str(path.relative_to(REPOSITORY)) in MAY_SLEEP:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("time.sleep", "sleep"), f"{path}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            assert "sleep" not in [alias.name for alias in node.names], f"{path}:{node.lineno}"


PYTHON_S_CLOCK = re.compile(r"\b(timezone\.now|datetime\.now|datetime\.utcnow|time\.time)\(")
DECIDING = ("core", "models", "db", "flow", "poller", "pull")
MAY_READ_THE_CLOCK = ("poller.process.logs", "poller.process.status_lines")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_what_decides_about_tasks_asks_the_database_for_the_time(module: Module) -> None:
    """Hosts disagree about the time; the database has one clock. Python's may only date log lines and screens."""
    if module.name.split(".")[0] in DECIDING and module.name not in MAY_READ_THE_CLOCK:
        assert not PYTHON_S_CLOCK.search(module.text)


# -- nothing half done -------------------------------------------------------------------------------------------------

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
HERE = Path(__file__)


@pytest.mark.parametrize("path", [*CODE, *TESTS, *EXAMPLE], ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_is_left_to_do(path: Path) -> None:
    if path != HERE:
        assert not UNFINISHED.search(path.read_text())


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("path", [*CODE, *TESTS, *EXAMPLE], ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_silenced_rule_says_why(path: Path) -> None:
    """``# noqa: CODE -- reason``; a ``type: ignore`` names its code."""
    for line, comment in comments(path):
        if "noqa" in comment:
            assert re.search(r"noqa: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)* +(-+|#) \S", comment), f"{path}:{line}: {comment}"
        if "type: ignore" in comment:
            assert re.search(r"type: ignore\[[a-z-]+(, ?[a-z-]+)*\]", comment), f"{path}:{line}: {comment}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_public_things_say_what_they_promise(module: Module) -> None:
    if module.name.startswith("migrations."):
        return
    assert ast.get_docstring(module.tree) or not module.text.strip()
    for node in module.tree.body:
        public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_"
        if public and not module.name.startswith("admin"):  # what Django's admin calls says its name
            assert ast.get_docstring(node), f"{module.place}:{node.lineno} {node.name}"
