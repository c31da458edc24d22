"""Small by measure, nothing left half done; who may write a status, load code, and stop at a row that raises."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from django_dbtaskqueue.core.states import BY_VERB, EDGES, TERMINAL, Status
from tests.architecture.limits import LIMITS
from tests.architecture.source import EXAMPLE, MODULES, TESTS, Module, length


def test_functions_are_short_and_take_few_arguments() -> None:
    for module in MODULES:
        for function in module.functions:
            assert length(function) <= LIMITS["function lines"], f"{module.place}:{function.lineno} {function.name}"
            positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
            count = len([name for name in positional if name not in ("self", "cls")])
            most = LIMITS["positional arguments"] + 4 * (function.name in ("__init__", "__call__"))
            assert count <= most, f"{module.place}:{function.lineno} {function.name} takes {count} positional arguments"


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
MAY_READ_THE_CLOCK = ("flow.observe", "poller.logs", "poller.lifetime")


def test_what_decides_about_tasks_asks_the_database_for_the_time() -> None:
    """Hosts disagree about the time; the database has one clock. Python's may only date log lines and screens."""
    for module in MODULES:
        if module.name.split(".")[0] in DECIDING and module.name not in MAY_READ_THE_CLOCK:
            assert not PYTHON_S_CLOCK.search(module.text), module.place


def test_nothing_is_left_to_do() -> None:
    for module in (*MODULES, *TESTS, *EXAMPLE):  # what comments leave is refused by ruff
        assert "NotImplementedError" not in {getattr(node, "id", "") for node in module.nodes}, module.place


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_every_silenced_rule_says_why() -> None:
    """``# noqa: CODE -- reason``. Ruff wants the code of a ``type: ignore``."""
    for module in (*MODULES, *TESTS, *EXAMPLE):
        for line, comment in comments(module.text) if "noqa" in module.text else ():
            if "noqa" in comment:
                found = re.search(r"noqa: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)* +(-+|#) \S", comment)
                assert found, f"{module.place}:{line}: {comment}"


def test_public_things_say_what_they_promise() -> None:
    for module in MODULES:
        if module.name.startswith("migrations."):
            continue
        assert ast.get_docstring(module.tree) or not module.text.strip(), module.place
        for node in module.tree.body:
            public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_"
            if public and not module.name.startswith("admin"):  # what Django's admin calls says its name
                assert ast.get_docstring(node), f"{module.place}:{node.lineno} {node.name}"


# -- only the flow writes ``status``; only statements and edges say which may follow which -----------------------------
WRITING = re.compile(r"(UPDATE|INSERT INTO)\s+\W*(dbtaskqueue_task\b|\{[^}]*task[^}]*\})", re.IGNORECASE)
CALLS = ("update", "create", "update_or_create", "get_or_create", "aupdate", "acreate", "bulk_create")


def status_writes(module: Module) -> list[str]:
    found = []
    prose = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    for node in module.nodes:
        if id(node) in prose:
            continue
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call) and any(key.arg == "status" for key in node.keywords):
            words = {getattr(part, "attr", getattr(part, "value", None)) for part in (node.func, *node.args[:1])}
            found += [f"{line}: {word}(status=…)" for word in words & set(CALLS)]  # or its partial, or a methodcaller
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [f"{line}: .status = …" for t in targets if isinstance(t, ast.Attribute) and t.attr == "status"]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WRITING.search(node.value):
            found.append(f"{line}: {node.value[:60]!r}")
        if isinstance(node, ast.JoinedStr) and WRITING.search(ast.unparse(node)):
            found.append(f"{line}: {ast.unparse(node)[:60]}")
    return found


def test_only_the_flow_writes_status() -> None:
    found = {module.name: written for module in MODULES if (written := status_writes(module))}
    allowed = {name for name in found if name.startswith(("flow.", "core.sql.")) or name == "core.states"}
    assert {name: written for name, written in found.items() if name not in allowed} == {}
    assert {"flow.move", "core.sql.checkout", "core.sql.settle", "core.sql.enqueue"} <= found.keys()


def test_edges_name_each_verb_once_and_leave_no_status_without_a_way_in_and_out() -> None:
    assert len(BY_VERB) == len(EDGES)
    ways_in = {edge.target for edge in EDGES if set(edge.sources) != {edge.target}}
    ways_out = {source for edge in EDGES for source in edge.sources if edge.target != source}
    assert ways_in == {*Status, None}
    assert ways_out == set(Status)
    for edge in EDGES:
        if set(edge.sources) & set(TERMINAL):
            assert edge.actor == "operator", edge.verb


# -- rows are data: only the listed modules unpickle, evaluate or import by name, and each has a reason ----------------
CODE_BEARING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "jsonpickle"}
LOADING = {"eval", "exec", "__import__", "import_string", "import_module", "imported", "resolve_name"}
MAY_LOAD = {
    "core": "import_module: a package's own names, on first use",
    "conf.settings": "import_string: for `imported`",
    "contrib.spark": "import_string: a constant",
    "contrib.spark.executor": "pickle: between a driver and its own Spark workers",
    "flow.checkout": "import_string: `strategy`, which a queue's row cannot set",
    "core.sql.enqueue": "eval: a function made of our own columns",
    "flow.placement": "import_string: `router`, which a queue's row cannot set",
    "operations.checks": "imported: the settings",
    "operations.permissions": "imported: the settings",
    "pipeline.jobs": "resolve_name: the list of jobs",
    "poller.executors.process": "import_string: the names of registered processors, never of a row",
    "flow.middleware": "imported: paths of the settings and of processors",
    "poller.executors.pool": "imported: `executor=` of a processor, and the command line",
    "signals": "import_string: the settings",
}


def loads(module: Module) -> Iterator[str]:
    yield from (name for name in module.imports if name.partition(".")[0] in CODE_BEARING)
    for node in module.nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            name = ast.unparse(node).rpartition(".")[2]
            if name in LOADING:
                yield name


def test_only_listed_modules_turn_data_into_code() -> None:
    for module in MODULES:
        found = set(loads(module))
        assert bool(found) == (module.name in MAY_LOAD), f"{module.place}: {', '.join(found) or 'nothing any more'}"


# -- a loop with a transaction for each row lets a row that raises rest, and goes on with its neighbours: ``Pauses`` ---
OPENS, ISOLATES = {"atomic"}, {"around", "apart"}
MAY_STOP = {
    "flow.batches": "an operator's act on one batch: the error is the answer",
    "flow.dependencies": "inside the loop of ``sweep``, which tells ends apart",
    "flow.enqueue_many": "a producer's call: the error is the answer",
    "flow.retention": "tables that are gone: no row is read",
    "flow.shard_move": "rounds of one step",
    "flow.port": "an operator's act: the error is the answer",
    "operations.doctor": "its own checks, each of which says its error",
    "operations.housekeeping": "partitions, whose names the package makes",
    "pull.handle": "a caller's act: the error is the answer",
    "testing.kit": "the blocks of one task",
}


def names_called(*nodes: ast.AST) -> set[str]:
    calls = [one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {ast.unparse(call.func).rpartition(".")[2] for call in calls}


def loops(module: Module) -> Iterator[int]:
    """Yield the lines of loops in which a transaction is opened, here or in a function of the module, for each row."""
    opening = OPENS | {one.name for one in module.functions if names_called(one) & OPENS}
    for node in module.nodes:
        if isinstance(node, ast.For) and names_called(*node.body) & opening and not names_called(*node.body) & ISOLATES:
            yield node.lineno


def test_each_loop_over_rows_goes_on_behind_one_that_raises() -> None:
    for module in MODULES:
        found = [*loops(module)]
        assert bool(found) == (module.name in MAY_STOP), f"{module.place}: {found or 'nothing any more'}"


WORK = "def work(row):\n    with transaction.atomic():\n        row.save()\n"
FOUND: list[tuple[Callable[[Module], Any], str, list[object]]] = [
    (loops, "for row in rows:\n    with transaction.atomic():\n        row.save()", [1]),
    (loops, f"{WORK}for row in rows:\n    work(row)", [4]),
    (loops, f"{WORK}for row in rows:\n    with pauses.around(row.pk, note):\n        work(row)", []),
    (loops, "with transaction.atomic():\n    for row in rows:\n        row.save()", []),
    (loads, "import pickle", ["pickle"]),
    (loads, "from yaml import load", ["yaml.load"]),
    (loads, "def f(row):\n    return eval(row)", ["eval"]),
    (loads, "module_loading.import_string(row.path)", ["import_string"]),
    (loads, "import json\njson.loads(row)", []),
    (loads, "compiled = re.compile(text)", []),
]


@pytest.mark.parametrize(("search", "code", "found"), FOUND)
def test_the_searches_find_what_they_look_for(tmp_path: Path, search: Any, code: str, found: list[object]) -> None:
    (tmp_path / "module.py").write_text(code)
    assert [*search(Module(tmp_path / "module.py"))] == found
