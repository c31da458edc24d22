"""The house: who may know whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from graphlib import TopologicalSorter

import pytest

from tests.architecture.source import MODULES, REPOSITORY, Module

# A module knows its own layer and those before it. The first pattern that fits a module's name counts.
LAYERS: dict[str, tuple[str, ...]] = {
    "0 vocabulary, standard library only": (
        "", "status", "lease", "outcomes", "retry", "clock", "exceptions", "payload", "payloads",
        "flow.sql", "flow.sql.*",
    ),
    "1 settings": (
        "conf", "queueconf", "settings_file", "durations", "signals", "codecs", "context", "reenqueueing", "listeners",
        "histogram",
    ),
    "2 storage": (
        "models", "models.*", "querysets", "preparing", "wording", "session", "notifier", "tuning", "routers",
        "overrides", "partitions", "migrations", "migrations.*",
    ),
    "3 the flow": ("flow", "flow.*"),
    "4 drivers": (
        "registry", "schedules", "backend", "manual", "pull", "keeper", "holding", "operators", "waiting",
        "poller", "poller.*", "bulk_operations",
        "metrics", "merging", "housekeeping",
        # What an act is, for whoever carries it out: a poller, too.
        "operations", "operations.kinds", "operations.search", "operations.selection", "operations.paginators",
        "operations.pausing", "operations.verbs", "operations.permissions", "operations.limits", "operations.audit",
        "operations.acts", "operations.bulk_steps", "operations.queue_acts",
    ),
    "5 the pipeline": ("pipeline", "pipeline.*"),
    "6 faces": (
        "apps", "checks", "admin", "admin.*", "operations", "operations.*", "testing", "testing.*", "pytest_plugin",
        "management", "management.*",
    ),
    "7 edges": ("contrib", "contrib.*"),
}  # fmt: skip
STAGES = ("enqueue", "checkout", "process", "settle", "observe", "move", "housekeep")
# The package's lazy names, Django's start-up, and what pytest loads before Django: they import when they are called.
LAZY = ("", "apps", "pytest_plugin")
# The manager's verbs are functions of layers above the models: each imports its function when it is called.
LAZY += ("models.querysets",)
# A manager's type names its model, whose manager it is; for type checkers only.
MUTUAL = {"querysets": {"models", "models.tasks"}}


def layer_of(name: str) -> int:
    for level, patterns in enumerate(LAYERS.values()):
        if any(fnmatch(name, pattern) for pattern in patterns):
            return level
    raise AssertionError(f"{name} has no layer: give it one in LAYERS, after all that it imports.")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_imports_point_to_the_same_layer_or_below(module: Module) -> None:
    own = layer_of(module.name)
    if module.name not in LAZY:
        assert {name: layer_of(name) for name in module.uses if layer_of(name) > own} == {}


def test_nobody_imports_the_faces_but_faces_and_edges() -> None:
    for module in MODULES:
        if layer_of(module.name) < 6:
            assert not {name for name in module.uses if layer_of(name) >= 6}, module.place


def test_one_face_alone_imports_the_pipeline() -> None:
    """Spark is an extra: a site without it must run everything else."""
    users = {
        module.name
        for module in MODULES
        if layer_of(module.name) < 7 and any(layer_of(name) == 5 for name in module.uses) and layer_of(module.name) != 5
    }
    assert users == {"management.commands.runtaskpipeline"}


def test_there_are_no_circles() -> None:
    TopologicalSorter(
        {module.name: module.uses - MUTUAL.get(module.name, set()) for module in MODULES if module.name not in LAZY}
    ).prepare()


def test_stages_of_the_flow_do_not_import_each_other() -> None:
    stages = {f"flow.{name}" for name in STAGES}
    for module in MODULES:
        if module.name in stages:
            assert not module.uses & stages, module.place


@pytest.mark.parametrize("module", [m for m in MODULES if layer_of(m.name) == 0], ids=lambda module: module.name)
def test_the_vocabulary_needs_the_standard_library_only(module: Module) -> None:
    allowed = {*sys.stdlib_module_names, "django_dbtaskqueue", "orjson"}
    assert {name.split(".")[0] for name in module.imports} <= allowed


@pytest.mark.parametrize("module", [m for m in MODULES if layer_of(m.name) == 5], ids=lambda module: module.name)
def test_the_pipeline_knows_no_django(module: Module) -> None:
    assert not [name for name in module.imports if name.split(".")[0] == "django"]
    assert {layer_of(name) for name in module.uses} <= {0, 5}


def test_the_package_s_own_imports_stand_at_the_top() -> None:
    """An import inside a function hides who knows whom; only start-up and lazy names need it."""
    for module in MODULES:
        if module.name in LAZY:
            continue
        for function in ast.walk(module.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [name for node in ast.walk(function) for name in module.imported(node)]
                assert not [name for name in names if name.startswith("django_dbtaskqueue")], module.place


def test_importing_the_package_imports_neither_django_nor_settings() -> None:
    """It is imported on Spark executors, where there is no Django: nor do its vocabulary and statements need one."""
    vocabulary = "exceptions, lease, outcomes, payload, retry, status"
    program = (
        "import sys\n"
        "import django_dbtaskqueue\n"
        f"from django_dbtaskqueue import {vocabulary}\n"
        "from django_dbtaskqueue.core.sql import dialects, statements\n"
        "from django_dbtaskqueue import Complete, Geometric, TaskQueueError, __version__\n"
        "assert 'enqueue' in dir(django_dbtaskqueue)\n"
        "found = sorted(name for name in sys.modules if name.split('.')[0] in ('django', 'psycopg'))\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_had() -> None:
    import django_dbtaskqueue

    for name in django_dbtaskqueue.__all__:
        assert getattr(django_dbtaskqueue, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'enqueu'"):
        django_dbtaskqueue.enqueu  # noqa: B018 -- reading it is the test
