"""Only the flow writes ``status``, and only the statements and the edges say which may follow which."""

import ast
import re

from django_dbtaskqueue.core.states import BY_VERB, EDGES, TERMINAL, Status
from tests.architecture.source import MODULES, Module

WRITING = re.compile(r"(UPDATE|INSERT INTO)\s+\W*(dbtaskqueue_task\b|\{[^}]*task[^}]*\})", re.IGNORECASE)
CALLS = ("update", "create", "update_or_create", "get_or_create", "aupdate", "acreate", "bulk_create")


def may_write(module: Module) -> bool:
    return module.name.startswith(("flow.", "core.sql.")) or module.name == "core.states"


def sins(module: Module) -> list[str]:
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
    assert {module.place: sins(module) for module in MODULES if not may_write(module) and sins(module)} == {}
    writers = {module.name for module in MODULES if sins(module)}
    assert {"flow.move", "core.sql.checkout", "core.sql.settle", "core.sql.enqueue"} <= writers


def test_edges_name_each_verb_once_and_leave_no_status_without_a_way_in_and_out() -> None:
    assert len(BY_VERB) == len(EDGES)
    ways_in = {edge.target for edge in EDGES if set(edge.sources) != {edge.target}}
    ways_out = {source for edge in EDGES for source in edge.sources if edge.target != source}
    assert ways_in == {*Status, None}
    assert ways_out == set(Status)
    for edge in EDGES:
        if set(edge.sources) & set(TERMINAL):
            assert edge.actor == "operator", edge.verb
