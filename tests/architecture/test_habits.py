"""Small by measure, and nothing left half done."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.limits import LIMITS
from tests.architecture.source import MODULES, Module, files, length

TESTS = [Module(path) for path in files("tests")]
EXAMPLE = [Module(path) for path in files("example_project")]


def test_functions_are_short_and_take_few_arguments() -> None:
    for module in MODULES:
        for function in module.functions:
            assert length(function) <= LIMITS["function lines"], f"{module.place}:{function.lineno} {function.name}"
            positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
            count = len([name for name in positional if name not in ("self", "cls")])
            most = LIMITS["positional arguments"] + 4 * (function.name in ("__init__", "__call__"))
            assert count <= most, f"{module.place}:{function.lineno} {function.name} takes {count} positional arguments"


def test_booleans_are_given_by_name() -> None:
    for module in MODULES:
        for function in module.functions:
            given = [*function.args.posonlyargs, *function.args.args]
            flags = [one.arg for one in given if one.annotation and ast.unparse(one.annotation) == "bool"]
            assert not flags, f"{module.place}:{function.lineno} {function.name}({', '.join(flags)})"


MAY_SLEEP = {
    "tests/patience.py",  # the one wait of tests
    "tests/poller/processes.py",  # the same
    "tests/testapp/tasks.py",  # processors whose work is to take time
    "tests/chaos/tasks.py",  # the same
    "tests/faults/tasks.py",  # the same
    "django_dbtaskqueue/contrib/embedded/__init__.py",  # the end of another program's process is no event
}


def test_nobody_sleeps_where_an_event_can_be_waited_for() -> None:
    for module in (*MODULES, *TESTS):
        if module.place in MAY_SLEEP or "sleep" not in module.text:
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("time.sleep", "sleep"), f"{module.place}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert "sleep" not in [alias.name for alias in node.names], f"{module.place}:{node.lineno}"


# tests.support.eventually is the one wait. These measure, or break things for as long as they were told:
MAY_TAKE_TIME = (
    *("tests/benchmarks/", "tests/faults/", "tests/upgrade/", "tests/patience.py", "tests/clock.py"),
    *("tests/calm.py", "tests/mutations/", "tests/typing/"),  # programs that say what they took
)
WAITS = {"wait", "join", "result", "acquire", "get", "wait_for"}
CLOCKS = {"monotonic", "time", "perf_counter"}
WAITING = {"PATIENCE", "DEFAULT_S", "Deadline", "eventually", "until"}


def waits(module: Module) -> Iterator[str]:
    for node in module.nodes:
        match node:
            case ast.BinOp(left=ast.Call(func=func), op=ast.Sub()) if ast.unparse(func).split(".")[-1] in CLOCKS:
                found = not ast.unparse(func).startswith(("clock.", "durations.clock."))
            case ast.Call(func=ast.Attribute(attr=name), args=[*given], keywords=keywords) if name in WAITS:
                found = any(map(is_moment, given[:1])) or any(map(is_timeout, keywords))
            case ast.Call(keywords=keywords):
                found = any(map(is_timeout, keywords))
            case ast.ImportFrom(module="tests.patience", names=names):
                found = not {name.name for name in names} <= WAITING
            case _:
                found = False
        if found:
            yield f"{module.place}:{getattr(node, 'lineno', 0)} {ast.unparse(node)[:80]}"


def is_timeout(keyword: ast.keyword) -> bool:
    return keyword.arg == "timeout" and is_moment(keyword.value)


def is_moment(node: ast.expr) -> bool:
    """Whether it is a number below a second. Zero is no wait."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and 0 < node.value < 1


def test_tests_wait_for_events_and_compare_no_measured_time() -> None:
    assert [one for module in TESTS if not module.place.startswith(MAY_TAKE_TIME) for one in waits(module)] == []


MAY_MEASURE = ("core.durations", "db.liveness", "contrib.embedded")  # the clock itself, and what waits for real wires


def test_what_waits_or_decides_by_time_asks_the_one_clock() -> None:
    for module in MODULES:
        if module.name not in MAY_MEASURE:
            names = [node for node in module.nodes if getattr(node, "id", getattr(node, "attr", "")) == "monotonic"]
            assert {ast.unparse(node) for node in names} <= {"clock.monotonic"}, module.place


PYTHON_S_CLOCK = re.compile(r"\b(timezone\.now|datetime\.now|datetime\.utcnow|time\.time)\(")
DECIDING = ("core", "models", "db", "flow", "poller", "pull")
MAY_READ_THE_CLOCK = ("flow.observe", "poller.process.logs", "poller.process.status_lines")


def test_what_decides_about_tasks_asks_the_database_for_the_time() -> None:
    """Hosts disagree about the time; the database has one clock. Python's may only date log lines and screens."""
    for module in MODULES:
        if module.name.split(".")[0] in DECIDING and module.name not in MAY_READ_THE_CLOCK:
            assert not PYTHON_S_CLOCK.search(module.text), module.place


UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
HERE = Path(__file__)


def test_nothing_is_left_to_do() -> None:
    for module in (*MODULES, *TESTS, *EXAMPLE):
        if module.path != HERE:
            assert not UNFINISHED.search(module.text), module.place


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_every_silenced_rule_says_why() -> None:
    """``# noqa: CODE -- reason``; a ``type: ignore`` names its code."""
    for module in (*MODULES, *TESTS, *EXAMPLE):
        if "noqa" not in module.text and "type: ignore" not in module.text:
            continue
        for line, comment in comments(module.text):
            place = f"{module.place}:{line}: {comment}"
            if "noqa" in comment:
                assert re.search(r"noqa: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)* +(-+|#) \S", comment), place
            if "type: ignore" in comment:
                assert re.search(r"type: ignore\[[a-z-]+(, ?[a-z-]+)*\]", comment), place


def test_public_things_say_what_they_promise() -> None:
    for module in MODULES:
        if module.name.startswith("migrations."):
            continue
        assert ast.get_docstring(module.tree) or not module.text.strip(), module.place
        for node in module.tree.body:
            public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_"
            if public and not module.name.startswith("admin"):  # what Django's admin calls says its name
                assert ast.get_docstring(node), f"{module.place}:{node.lineno} {node.name}"
