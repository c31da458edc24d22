"""A loop with a transaction for each row lets a row that raises rest, and goes on with its neighbours: ``Pauses``."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import MODULES, Module

OPENS, ISOLATES = {"atomic"}, {"around", "apart"}
MAY_STOP = {
    "flow.batches": "an operator's act on one batch: the error is the answer",
    "flow.dependencies": "inside the loop of ``sweep``, which tells ends apart",
    "flow.enqueue_many": "a producer's call: the error is the answer",
    "flow.groups": "chunks of one change of a limit, which is tried again as a whole",
    "flow.retention": "tables that are gone: no row is read",
    "flow.shard_move": "rounds of one step",
    "flow.task_signals": "an operator's act: the error is the answer",
    "operations.doctor": "its own checks, each of which says its error",
    "operations.housekeeping": "partitions, whose names the package makes",
    "operations.queue_control": "an operator's act: the error is the answer",
    "pull.queue_admin": "a caller's act: the error is the answer",
    "testing.running": "the blocks of one task",
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


def test_the_search_finds_such_loops(tmp_path: Path) -> None:
    work = "def work(row):\n    with transaction.atomic():\n        row.save()\n"
    for code, found in [
        ("for row in rows:\n    with transaction.atomic():\n        row.save()", [1]),
        (f"{work}for row in rows:\n    work(row)", [4]),
        (f"{work}for row in rows:\n    with pauses.around(row.pk, note):\n        work(row)", []),
        ("with transaction.atomic():\n    for row in rows:\n        row.save()", []),
    ]:
        path = tmp_path / "module.py"
        path.write_text(code)
        assert [*loops(Module(path))] == found
