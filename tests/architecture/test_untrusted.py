"""Rows and requests are data. Only the listed modules unpickle, evaluate or import by name, and each has a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import MODULES, Module

CODE_BEARING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "jsonpickle"}
LOADING = {"eval", "exec", "__import__", "import_string", "import_module", "resolve_name"}
MAY_LOAD = {
    "": "import_module: its own names, on first use",
    "testing": "import_module: its own names, on first use",
    "contrib.spark": "import_module, import_string: constants",
    "contrib.spark.executor": "pickle: between a driver and its own Spark workers",
    "contrib.spark.work": "pickle: between a driver and its own Spark workers",
    "flow.checkout": "import_string: `strategy`, which a queue's row cannot set",
    "flow.chunks": "eval: a function made of our own columns",
    "flow.placement": "import_string: `router`, which a queue's row cannot set",
    "operations.checks": "import_string: the settings",
    "operations.permissions": "import_string: the settings",
    "pipeline.jobs": "resolve_name: the list of jobs",
    "pipeline.source": "import_module: its own names, on first use",
    "poller.executors.process": "import_string: the names of registered processors, never of a row",
    "flow.middleware": "import_string: paths of the settings and of processors",
    "poller.executors.pool": "import_string: `executor=` of a processor, and the command line",
    "signals": "import_string: the settings",
}


def loads(module: Module) -> Iterator[str]:
    yield from (name for name in module.imports if name.partition(".")[0] in CODE_BEARING)
    for node in module.nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in LOADING:
                yield name


def test_only_listed_modules_turn_data_into_code() -> None:
    for module in MODULES:
        found = set(loads(module))
        assert bool(found) == (module.name in MAY_LOAD), f"{module.place}: {', '.join(found) or 'nothing any more'}"


def test_the_search_finds_what_loads_code(tmp_path: Path) -> None:
    for code, found in [
        ("import pickle", ["pickle"]),
        ("from yaml import load", ["yaml.load"]),
        ("def f(row):\n    return eval(row)", ["eval"]),
        ("module_loading.import_string(row.path)", ["import_string"]),
        ("import json\njson.loads(row)", []),
        ("compiled = re.compile(text)", []),
    ]:
        path = tmp_path / "module.py"
        path.write_text(code)
        assert list(loads(Module(path))) == found
