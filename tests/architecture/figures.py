"""The shape of the package in figures: ``python -m tests.architecture`` prints them."""

import ast
import json
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from types import UnionType
from typing import Any

from tests.architecture import words
from tests.architecture.limits import LIMITS, LONG_FILE_LINES
from tests.architecture.source import PACKAGE, REPOSITORY, WRITTEN, Module, length
from tests.patience import PATIENCE

OUTCOMES = {"Complete", "CompleteDelete", "Reenqueue", "Fail", "Poison", "Release", "Park"}
OUTCOMES |= {"Outcome", "OUTCOMES", "Settlement"}
NOT_CODE = {"__pycache__", "locale", "py.typed", "static", "templates"}
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")


def lines(module: Module) -> int:
    return module.text.count("\n")


def top() -> list[str]:
    """Return the modules and packages at the package's top: folders of data and the marker of types are none."""
    names = sorted(path.name for path in (REPOSITORY / PACKAGE).iterdir())
    return [name for name in names if name[0] != "." and name not in NOT_CODE]


def long_files() -> list[str]:
    long = [(lines(module), module.place) for module in WRITTEN if lines(module) > LONG_FILE_LINES]
    return [f"{place}: {count} lines" for count, place in sorted(long, reverse=True)]


def file_names_twice() -> list[str]:
    """Return base names that several files have. ``core/sql/X`` is the SQL of ``flow/X``, so that pair is one name."""
    homes = defaultdict(set)
    for module in WRITTEN:
        if not module.path.name.startswith("__"):
            homes[module.path.name].add(module.path.parent.relative_to(REPOSITORY / PACKAGE).as_posix())
    for folders in homes.values():
        if "flow" in folders:
            folders.discard("core/sql")
    return [f"{name}: {', '.join(sorted(folders))}" for name, folders in sorted(homes.items()) if len(folders) > 1]


def constant_names_twice() -> list[str]:
    values: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for module in WRITTEN:
        for node in module.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id) and node.value is not None:
                    values[target.id.lstrip("_")][module.name] = ast.unparse(node.value)
    return [f"{name}: {', '.join(homes)}" for name, homes in sorted(values.items()) if len(set(homes.values())) > 1]


def class_names_twice() -> list[str]:
    """Return public names that stand for two classes, but for Django's name of a command."""
    return [fault for fault in _names_twice(ast.ClassDef) if not fault.startswith("Command:")]


def function_names_twice() -> list[str]:
    """Return public names that stand for two functions, but for the words of users: ``__all__``, routes, commands."""
    words_of_users = {
        (module.name, name.value)
        for module in WRITTEN
        for node in module.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.walk(node.value)
        if isinstance(name, ast.Constant)
    }
    words_of_users |= {
        (module.name, function.name)
        for module in WRITTEN
        if module.name in ("api.views", "management.reading", "management.changes")
        for function in module.functions
    }
    return _names_twice(ast.FunctionDef | ast.AsyncFunctionDef, words_of_users)


def _names_twice(kind: type | UnionType, besides: Collection[tuple[str, str]] = ()) -> list[str]:
    homes = defaultdict(list)
    for module in WRITTEN:
        packages = {module.name, module.name.rpartition(".")[0]}
        for node in module.tree.body:
            name = node.name if isinstance(node, kind) else "_"
            if name[0] != "_" and not any((package, name) in besides for package in packages):
                homes[name].append(module.name)
    return [f"{name}: {', '.join(places)}" for name, places in sorted(homes.items()) if len(places) > 1]


def road() -> list[str]:
    functions = {function for journey in journeys().values() for function in journey["functions"]}
    return sorted({function.partition(":")[0] for function in functions})


def import_chain() -> tuple[str, ...]:
    modules = {module.name: module for module in WRITTEN if module.name != "apps"}

    @cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max([chain(used) for used in modules[name].needs if used in modules], key=len, default=()))

    return max((chain(name) for name in sorted(modules)), key=len)


def branches(module: Module) -> list[int]:
    found = []
    for node in module.nodes:
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                asked: list[ast.AST | None] = [kinds]
            case ast.Compare(left=left, comparators=others):
                asked = [left, *others]
            case ast.MatchClass(cls=kind):
                asked = [kind]
            case ast.Dict(keys=keys):
                asked = [key for key in keys if isinstance(key, ast.Name | ast.Attribute)]
            case _:
                continue
        if any(_names_outcome(expression) for expression in asked if expression is not None):
            found.append(node.lineno)
    return found


def _names_outcome(expression: ast.AST) -> bool:
    """Whether an expression names an outcome's class; a call of it makes a value, which is no question."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in OUTCOMES
        case ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.List(elts=parts):
            return any(_names_outcome(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return _names_outcome(left) or _names_outcome(right)
    return False


@cache
def journeys() -> dict[str, Any]:
    """Return what ``journeys.py`` counts, in a process of its own."""
    command = [sys.executable, "-m", "tests.architecture.journeys"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def tables() -> list[str]:
    """Return the models that have a table. Proxies have the base class of another table, by its name."""
    roots = {"models.Model", "NumberedRow", "TaskColumns", "AbstractTask"}
    classes = [node for module in WRITTEN for node in module.tree.body if isinstance(node, ast.ClassDef)]
    stored = [node for node in classes if roots & set(map(ast.unparse, node.bases))]
    return [node.name for node in stored if "abstract = True" not in ast.unparse(node)]


def of_journeys() -> dict[str, int]:
    found = {f"{name}: {what}": journeys()[name][what] for name in journeys() for what in ("calls", "modules")}
    sources = [(REPOSITORY / PACKAGE / place).read_text() for place in road()]
    return {**found, "road of a task: lines": "".join(sources).count("\n"), "road of a task: files": len(sources)}


def of_source() -> dict[str, int]:
    lengths = sorted(length(function) for module in WRITTEN for function in module.functions)
    return {
        "lines": sum(map(lines, WRITTEN)),
        "files": len(WRITTEN),
        "tables": len(tables()),
        "entries at the top": len(top()),
        "lines of the longest file": max(map(lines, WRITTEN)),
        "file names twice": len(file_names_twice()),
        "constant names twice": len(constant_names_twice()),
        "class names twice": len(class_names_twice()),
        "function names twice": len(function_names_twice()),
        "old names": len(words.old_names()),
        "longest import chain": len(import_chain()) - 1,
        "Any": sum(len(re.findall(r"\bAny\b", module.text)) for module in WRITTEN),
        "files that branch on outcomes": sum(bool(branches(module)) for module in WRITTEN),
        "median function lines": round(statistics.median(lengths)),
        "90 % of functions, lines": lengths[len(lengths) * 9 // 10],
    }


def report() -> str:
    parts = [f"{'':<32}{'now':>8}{'limit':>8}"]
    parts += [f"{name:<32}{now:>8,}{LIMITS[name]:>8,}" for name, now in {**of_source(), **of_journeys()}.items()]
    parts = ["\n".join(parts)]
    details = {
        f"Files of more than {LONG_FILE_LINES} lines": long_files(),
        "File names twice": file_names_twice(),
        "Constant names twice": constant_names_twice(),
        "Class names twice": class_names_twice(),
        "Function names twice": function_names_twice(),
        "The road of a task": road(),
        "Longest import chain": list(import_chain()),
        "Branches on outcomes": [f"{module.place}: {branches(module)}" for module in WRITTEN if branches(module)],
    }
    parts += ["\n  ".join([f"{title}: {len(found)}", *found]) for title, found in details.items()]
    return "\n\n".join(parts)
