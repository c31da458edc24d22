"""The house: what may import what."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from tests.architecture.source import MODULES, NAMES, REPOSITORY, Module

# A folder or file at the package's top imports what stands before it, and itself.
ORDER = (
    *("core", "models", "conf", "db", "migrations", "signals", "flow", "registry", "metrics", "operations"),
    *("poller", "pull", "backend", "admin", "api", "testing", "pipeline", "management", "contrib", "apps"),
)
# Of what stands before it, a folder does not import these.
NEVER = {"pull": {"poller"}, "api": {"admin"}, "testing": {"admin", "api"}, "pipeline": {*ORDER} - {"core", "pipeline"}}
# ``rescue`` is a checkout and a settle, and so no stage.
STAGES = ("enqueue", "enqueue_many", "checkout", "run", "settle", "observe", "move", "retention")
# These may use another: many tasks are enqueued and checked out as one is.
USES_STAGE = {"flow.enqueue_many": {"flow.enqueue"}}
# Django's start-up, and what pytest loads before Django: they import when they are called. So do lazy packages.
LAZY = {
    "apps",
    "testing.plugin",
    "backend",  # a project decorates functions before its apps are ready, so it imports models later
    "backend.results",
    "models.querysets",  # the manager's verbs are functions of the flow: each imports its function when it is called
}


def top(name: str) -> str:
    return name.partition(".")[0]


def is_lazy(module: Module) -> bool:
    return module.name in LAZY or "\n__getattr__" in module.text


def wrong_way(module: Module) -> set[str]:
    before = set(ORDER[: ORDER.index(top(module.name)) + 1]) - NEVER.get(top(module.name), set())
    return {name for name in module.uses if top(name) not in before}


def test_each_folder_has_its_place_and_imports_point_up() -> None:
    assert {top(name) for name in NAMES} == {"", *ORDER}
    for module in MODULES:
        if not is_lazy(module):
            assert wrong_way(module) == set(), module.place


def test_one_face_alone_imports_the_pipeline_and_nobody_imports_contrib() -> None:
    """Spark is an extra: a site without it must run everything else."""
    users = {module.name for module in MODULES if any(top(name) == "pipeline" for name in module.uses)}
    outside = {name for name in users if top(name) not in ("pipeline", "contrib")}
    assert outside == {"management.commands.runtaskpipeline"}
    assert {top(one.name) for one in MODULES if any(top(name) == "contrib" for name in one.uses)} <= {"contrib"}


def test_there_are_no_circles_and_stages_of_the_flow_do_not_import_each_other() -> None:
    TopologicalSorter({module.name: module.uses for module in MODULES if not is_lazy(module)}).prepare()
    stages = {f"flow.{name}" for name in STAGES}
    assert stages <= NAMES
    for module in MODULES:
        if module.name in stages:
            assert module.uses & stages <= USES_STAGE.get(module.name, set()), module.place


def test_the_core_needs_the_standard_library_only_and_the_pipeline_knows_no_django() -> None:
    allowed = {*sys.stdlib_module_names, "django_dbtaskqueue", "orjson"}
    for module in MODULES:
        used = {top(name) for name in module.imports}
        assert top(module.name) not in ("", "core") or used <= allowed, module.place
        assert top(module.name) != "pipeline" or "django" not in used, module.place


def test_the_package_s_own_imports_stand_at_the_top() -> None:
    """An import inside a function hides what needs what; only start-up and lazy names need it."""
    for module in MODULES:
        if is_lazy(module):
            continue
        for function in ast.walk(module.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [name for node in ast.walk(function) for name in module.imported(node)]
                assert not [name for name in names if name.startswith("django_dbtaskqueue")], module.place


def test_importing_the_package_imports_neither_django_nor_settings_nor_pydantic() -> None:
    """It is imported on Spark executors, where there is no Django: nor does its core need one."""
    core = "codecs, exceptions, json, lease, outcomes, retry, states"
    program = (
        "import sys\n"
        "import django_dbtaskqueue\n"
        f"from django_dbtaskqueue.core import {core}\n"
        "from django_dbtaskqueue.core.sql import dialects, pipeline\n"
        "from django_dbtaskqueue import Complete, Geometric, TaskQueueError, __version__\n"
        "assert 'enqueue' in dir(django_dbtaskqueue)\n"
        "codecs.encode((1,)), codecs.build_codec(int)\n"
        "found = sorted(name for name in sys.modules if name.split('.')[0] in ('django', 'psycopg', 'pydantic'))\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_public_is_an_error_as_of_any_module() -> None:
    import django_dbtaskqueue

    with pytest.raises(AttributeError, match="no attribute 'enqueu'"):
        django_dbtaskqueue.enqueu  # noqa: B018 -- reading it is the test
