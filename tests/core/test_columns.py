"""The table of columns, what must agree with it, and what a new option on the row takes."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from django.db.models import Field

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.core import columns
from django_dbtaskqueue.core.columns import TASK_COLUMNS, TaskOptions
from django_dbtaskqueue.models import Task, TaskHistory
from django_dbtaskqueue.testing.kit import ASSERTABLE, Wanted
from tests.architecture.source import PACKAGE, REPOSITORY

TYPES = {
    "BigAutoField": "bigint", "BigIntegerField": "bigint", "BooleanField": "bool", "CharField": "text",
    "DateTimeField": "timestamptz", "FloatField": "float8", "IntegerField": "int", "JSONField": "jsonb",
    "SmallIntegerField": "smallint", "TextField": "text",
}  # fmt: skip


def declared(fields: list[Field]) -> set[tuple[str, str, str]]:
    return {(field.name, str(field.column), TYPES[field.get_internal_type()]) for field in fields}


def test_the_models_and_the_table_of_columns_agree() -> None:
    own = {"id", "location", "task_id", "moved_time"}
    moved = [field for field in TaskHistory._meta.concrete_fields if field.name not in own]
    for fields, table in ((Task._meta.concrete_fields, TASK_COLUMNS), (moved, columns.HISTORY_COLUMNS)):
        assert declared(fields) == {(column.name, column.db, column.type) for column in table}


def test_the_functions_take_every_option_and_assertions_know_it() -> None:
    said = {*TaskOptions.__annotations__, *columns.InsertOptions.__annotations__}
    assert {"queue", *said} == set(inspect.signature(enqueue).parameters)
    assert {column.option for column in TASK_COLUMNS if column.option} <= set(TaskOptions.__annotations__)
    assert set(Wanted.__annotations__) == set(ASSERTABLE)
    for function, options in ((enqueue, columns.EnqueueOptions), (enqueue_many, columns.EnqueueManyOptions)):
        parameters = inspect.signature(function).parameters.values()
        assert {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} == set(options.__annotations__)


# What a developer writes for a text option ``region``: (file, before which line, what).
EDITS = (
    ("core/columns.py", '    Column("tag", ', """\
        Column(
            "region", "text", "region_name", enqueued=True, option="region", leased="region", shown=Shown.IF_SET,
            search=("region",),
        ),
    """),
    ("core/columns.py", "    columns: Mapping[str, object] | None = None", "    region: str | None = None\n"),
    ("core/columns.py", "    tag: str | None\n", "    region: str | None\n"),
    ("core/lease.py", "    port: Port", "    region: str | None\n"),
    ("models/tasks.py", "    tag: OptionalText = models", """\
        region: OptionalText = models.CharField("region", max_length=9, null=True, blank=True, db_column="region_name")
    """),
    ("flow/enqueue.py", "    tag: str | None = None,", "    region: str | None = None,\n"),
    ("flow/enqueue.py", "        ttl=ttl, context", "    region=region,\n"),
    ("testing/kit.py", "    tag: Any", "    region: Any\n"),
)  # fmt: skip
# Run with the changed package, on SQLite.
SCRIPT = """
import importlib.util

import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
                    "django.contrib.messages", "django.contrib.sessions", "django_filters", "django_tables2",
                    "django_dbtaskqueue"],
    MIGRATION_MODULES={"dbtaskqueue": None}, DBTASKQUEUE={"QUEUES": {"parcels": {"keep": "history"}}}, USE_TZ=True,
    SECRET_KEY="x", DEFAULT_AUTO_FIELD="django.db.models.BigAutoField", ROOT_URLCONF="none",
)
django.setup()
from django.core.management import call_command

call_command("migrate", run_syncdb=True, verbosity=0)
from django_dbtaskqueue import Reenqueue, enqueue, enqueue_many, processor
from django_dbtaskqueue.admin import TaskAdmin
from django_dbtaskqueue.models import Task, TaskHistory
from django_dbtaskqueue.operations import serializers
from django_dbtaskqueue.operations.actions import enqueue_copy
from django_dbtaskqueue.operations.search.query import select
from django_dbtaskqueue.testing import assert_enqueued, drain

assert enqueue("parcels", "a", {"n": 1}, region="east").region == "east"
assert Task.objects.get(reference="a").region == "east"
enqueue("parcels", "a", {"n": 1}, region="west", on_duplicate="replace")
enqueue_many("parcels", [{"reference": "b", "region": "north"}])
assert assert_enqueued("parcels", region="west").reference == "a"
assert [task.reference for task in select("region:north", Task.objects.all())] == ["b"]
copy = enqueue_copy(Task.objects.get(reference="b"))
assert (copy.region, copy.reference) == ("north", None)
one = Task.objects.get(reference="a")
assert serializers.summary(one)["region"] == "west"
assert "region" in TaskAdmin.page_fields(None, one)

seen = []
processor("parcels")(lambda task: seen.append((task.reference, task.region)))
drain("parcels")
assert sorted(seen, key=str) == [("a", "west"), ("b", "north"), (None, "north")], seen
assert TaskHistory.objects.get(reference="a").region == "west"

from django_dbtaskqueue.core.sql.dialects import POSTGRESQL, Tables
from django_dbtaskqueue.core.sql.pipeline import StagingStatements

assert "region_name text" in StagingStatements(Tables("t"), POSTGRESQL, "s").create
if importlib.util.find_spec("pyspark"):
    from django_dbtaskqueue.pipeline.lake import LAKE_TASKS
    from django_dbtaskqueue.pipeline.source import HISTORY, TASKS
    from django_dbtaskqueue.pipeline.source.staging import ACCEPTED, COLUMNS

    assert all("region_name" in schema.names for schema in (TASKS, HISTORY, LAKE_TASKS))
    assert COLUMNS["region"] == "region_name"
    assert "region" in ACCEPTED
    from django_dbtaskqueue.core.columns import COPIED

    assert "region" in [column.argument for column in COPIED]
print("found everywhere")
"""


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    shutil.copytree(REPOSITORY / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for name, line, added in EDITS:
        path = tmp_path / PACKAGE / name
        text = path.read_text()
        assert text.count(f"\n{line}") == 1, f"{name}: {line!r}"
        indented = textwrap.indent(textwrap.dedent(added), "    ").replace("\n    \n", "\n")
        path.write_text(text.replace(f"\n{line}", f"\n{indented.rstrip()}\n{line}"))
    return tmp_path


def test_a_new_option_on_the_row_is_found_everywhere(changed: Path) -> None:
    """Given one line in the table of columns and what the type checker asks for, then each list has the option.

    Eight files: ``core/columns.py``, ``core/lease.py`` (if processors see it), ``models/tasks.py`` and its migration,
    ``flow/enqueue.py`` (the signature), ``testing/kit.py``, and the two files of statements, which are written by
    ``python -m tests.core.statements --write``. Then documentation, and ``flow/enqueue.py`` for no text or timedelta.
    """

    def run(code: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(changed), "PYTHONWARNINGS": "error"}
        environment.pop("DJANGO_SETTINGS_MODULE", None)
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=changed, env=environment, capture_output=True, text=True)

    done = run(SCRIPT)
    assert done.stdout == "found everywhere\n", done.stderr
    lease = changed / PACKAGE / "core" / "lease.py"
    lease.write_text(re.sub(r"\n    region: .*", "", lease.read_text()))
    assert "TypeError: Lease must begin with the leased columns" in run("import django_dbtaskqueue.core.lease").stderr
