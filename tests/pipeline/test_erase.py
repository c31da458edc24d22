"""``erase``: a person's tasks leave every table and every file, with a proof."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from django.core.management import CommandError, call_command
from django.db import connection

from django_dbtaskqueue import enqueue, models
from django_dbtaskqueue.models import Attempt, Step, Task, TaskChange, TaskHistory, UsedReference
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake import Lake
from django_dbtaskqueue.pipeline.lake.archive_jobs import sink
from django_dbtaskqueue.pipeline.lake.erase_job import Erase
from django_dbtaskqueue.pipeline.lake.export import Export, key_of, remove_out_of_date
from django_dbtaskqueue.pipeline.source import TASKS, few_tasks, staging
from tests.factories import make_task
from tests.pipeline.executors import ThisProcess
from tests.pipeline.lakes import DAY, MEANWHILE, Bucket, Census, archive, to_history
from tests.pipeline.test_archive import Killed
from tests.pipeline.test_lake import lake_of, rows
from tests.pipeline.test_source_write import staging_tables
from tests.support import minute_counts, sql
from tests.testapp.models import Parcel

PLACES = ("tasks", "history", "attempts", "steps and signals", "changes by operators", "used references", "staged rows")
PLACES += ("lake: attempts", "lake: finished", "lake: tasks")


def fill(database: Database, folder: Path) -> None:
    for name in ("ada", "bob"):
        for queue in ("claims", "refunds"):
            failed(name, queue, days=3)
    archive(database, folder)
    for name in ("ada", "bob"):
        to_history(make_task("COMPLETED", reference=name, queue="refunds", **ended(2)))
        task = failed(name, "claims", days=1, payload={"email": f"{name}@example.org"})
        about = {"task_id": task.pk, "task_time": task.create_time}
        Step.objects.create(kind="step", position=1, name="charge", result={"email": name}, **about)
        Step.objects.create(kind="sent", name="paid", result={"email": name}, **about)
        UsedReference.objects.create(queue="claims", reference=name)
    plan = staging.Plan(database, staging.open_staging(database), staging.Rules("claims"))  # of a load that was killed
    people = {"reference": ["ada", "bob"], "payload": [f'{{"email": "{name}@example.org"}}' for name in ("ada", "bob")]}
    staging.fill(plan, [pa.record_batch(people)], 1)
    entry = models.AuditEntry.objects.create(actor="operator", verb="edit")
    ids = [*Task.objects.order_by("pk").values_list("pk", flat=True)]
    for some in (ids, ids[1:]):
        span = {"first_task_id": some[0], "last_task_id": some[-1], "task_ids": some}
        TaskChange.objects.create(audit=entry, before={"payload": ["..."]}, **span)
    micro_batch = ThisProcess(few_tasks(database, TASKS.names, "task").to_batches())
    lake = Lake.at(folder)
    sink(lake, "a stream", database.location, micro_batch, 1)
    files = [*lake.files("tasks"), *lake.files("attempts")]
    export = Export(lake, key_of([one for one in files if one.day == files[0].day], "no options"))
    summary = pa.table({"part": ["failures"] * 2, "message": ["no ada", "no bob"]})
    remove_out_of_date(lake, [export.write_day("summaries", files[0].day, summary, "0")])
    assert len(lake.files("summaries")) == 1


def ended(days: int) -> dict[str, Any]:
    return {"finish_time": -days * DAY, **MEANWHILE}


def failed(name: str, queue: str, *, days: int, **columns: Any) -> Task:
    task = make_task("ERROR", reference=name, queue=queue, **columns, **ended(days))
    Attempt.objects.create(task_id=task.pk, queue=queue, attempt=1, total_attempt=1, message=f"no {name}")
    return task


def erase(*words: object) -> str:
    """Return the output. A reference that matches nothing, as after the first of two runs, is no failure here."""
    out = io.StringIO()
    try:
        call_command("runtaskpipeline", "erase", *map(str, words), "--quiet", stdout=out)
    except CommandError as error:
        if "Nothing has" not in str(error):
            raise
    return out.getvalue()


def names_in(folder: Path) -> set[str]:
    """Return the references in all files of the lake, whether they count or not."""
    found = set[str]()
    for tables, column in ((("tasks", "finished"), "reference_number"), (("attempts", "summaries"), "message")):
        for file in (file for table in tables for file in folder.rglob(f"{table}/*/*.parquet")):
            found |= {text.removeprefix("no ") for text in pq.ParquetFile(file).read([column])[0].to_pylist()}
    return found


def names_in_tables() -> set[str]:
    references = [model.objects.values_list("reference", flat=True) for model in (Task, TaskHistory, UsedReference)]
    mails = [Step.objects.values_list("result__email", flat=True)]
    messages = Attempt.objects.values_list("message", flat=True)
    staged = [[name for (name,) in sql(f"SELECT reference_number FROM {table}")] for table in staging_tables()]
    return {str(name).removeprefix("no ") for names in (*references, *mails, messages, *staged) for name in names}


def test_each_task_table_has_a_run_of_its_own(database: Database, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"model": "testapp.Parcel"}}}
    enqueue("parcels", "ada")
    Parcel.objects.checkout("parcels", poller_instance="p")[0].complete()
    wanted = ("--reference", "ada", "--json", "-")
    proof = json.loads(erase(*wanted))
    assert (proof["before"]["tasks"], proof["other_tables"]) == (0, ["testapp.parcel in default"])
    proof = json.loads(erase(*wanted, "--task-table", "testapp.Parcel"))
    assert (proof["before"]["tasks"], proof["after"]["tasks"]) == (1, 0)
    assert proof["other_tables"] == ["dbtaskqueue.task in default"] and not Parcel.objects.exists()
    with pytest.raises(CommandError, match=r"'testapp.parcl' is no task table of 'default'\. Did you mean"):
        erase(*wanted, "--task-table", "testapp.parcl")


def test_a_person_s_tasks_leave_every_place_with_a_proof(database: Database, folder: Path) -> None:
    fill(database, folder)
    before = Census.of(folder)
    assert names_in(folder) == names_in_tables() == {"ada", "bob"}
    with pytest.raises(CommandError, match=re.escape(f"--lake: tasks of this database are in {folder}")) as caught:
        erase("--reference", "ada")
    assert caught.value.returncode == 2
    assert "lake: tasks: 2\n" in erase("--reference", "ada", "--lake", folder, "--dry-run")
    assert Census.of(folder) == before
    proof = json.loads(erase("--reference", "ada", "--lake", folder, "--reason", "request 7", "--json", "-"))
    assert tuple(proof["before"]) == tuple(proof["after"]) == PLACES
    assert all(proof["before"].values()) and not any(proof["after"].values())
    assert (proof["files_not_deleted"], proof["database_vacuumed"]) == (0, True)
    assert proof["files_rewritten"] <= proof["files_deleted"]
    assert names_in(folder) == names_in_tables() == {"bob"}
    assert sorted(TaskChange.objects.values_list("before", flat=True), key=bool) == [None, {"payload": ["..."]}]
    entry = models.AuditEntry.objects.get(pk=proof["audit_entry"])
    assert (entry.verb, entry.reason, entry.changed) == ("erase", "request 7", 4)
    assert entry.details["after"] == proof["after"] and "ada" not in json.dumps(entry.details)
    after = Census.of(folder)
    assert after.tasks.total() + after.deleted == before.tasks.total() + before.deleted
    if database.vendor == "sqlite":
        connection.close()
        assert b"ada@example.org" not in Path(database.conninfo["dbname"]).read_bytes()
    assert "tasks: 0 -> 0\nhistory: 0 -> 0\n" in erase("--reference", "ada", "--lake", folder)
    assert Census.of(folder) == after


@pytest.mark.usefixtures("sqlite")
def test_a_person_s_objects_leave_the_bucket(bucket: Bucket) -> None:
    lake_of(bucket.lake, {**rows(1, 2), "reference_number": pa.array(["ada", "bob"])})

    def only_file() -> str:
        (uri,) = DeltaTable(f"{bucket.lake}/tasks").file_uris()
        return uri.removeprefix(f"s3://{bucket.name}/")

    old = only_file()
    assert bucket.get(old)
    proof = json.loads(erase("--reference", "ada", "--lake", bucket.lake, "--json", "-"))
    assert (proof["before"]["lake: tasks"], proof["after"]["lake: tasks"], proof["files_deleted"]) == (1, 0, 1)
    with pytest.raises(AssertionError, match=r"(?i)not found"):
        bucket.get(old)
    assert pq.read_table(io.BytesIO(bucket.get(only_file())))["reference_number"].to_pylist() == ["bob"]


def test_a_task_that_is_not_finished_is_refused(database: Database, tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("ada\nbob\n\n")
    running = make_task("PROCESSING", reference="ada")
    make_task("COMPLETED", reference="bob", **ended(1))
    with pytest.raises(CommandError, match=rf"1 of these tasks \(task {running.pk}\) run now.* Nothing was removed"):
        erase("--reference-file", names)
    Task.objects.filter(pk=running.pk).delete()
    enqueue("claims", "child", {}, after=[make_task("ERROR", reference="parent", **ended(1))])
    wrong = {"child": r"have not run yet\. Cancel them first", "parent": "are waited for by others"}
    for name, reason in wrong.items():
        with pytest.raises(CommandError, match=reason):
            erase("--reference", name)
    assert Task.objects.count() == 3
    erase("--reference-file", names, "--queue", "nothing")
    assert Task.objects.count() == 3
    erase("--reference-file", names)
    assert not Task.objects.filter(reference="bob").exists()
    assert sum(minute_counts("deletion").values_list("count", flat=True)) == 1
    with pytest.raises(CommandError, match="whose tasks"):
        erase()


@pytest.mark.parametrize("step", ["removing", "deleting", "committing", "vacuuming"])
def test_after_a_kill_the_next_run_removes_what_is_left(sqlite: Database, folder: Path, step: str) -> None:
    fill(sqlite, folder)

    def kill(stage: str, _done: int, _total: int) -> None:
        if stage == step:
            raise Killed

    with pytest.raises(Killed):
        Erase().run(Erase.context(database=sqlite, lake=folder, reference="ada", progress=kill))
    erase("--reference", "ada", "--lake", folder)
    assert names_in(folder) == names_in_tables() == {"bob"}
    assert sorted(Step.objects.values_list("kind", flat=True)) == ["sent", "step"]


FILES = {
    "a byte order mark": ("\ufeffP-1\nP-2\n", ["P-1", "P-2"]),
    "lines of Windows": ("P-1\r\n\r\nP-2", ["P-1", "P-2"]),
    "separators of lines": ("P\u20281\nP\u00852\nP\x0b3\n", ["P\u20281", "P\u00852", "P\x0b3"]),
    "spaces": ("P-1 \n \n", ["P-1 ", " "]),
}


@pytest.mark.usefixtures("sqlite")
@pytest.mark.parametrize(("content", "references"), FILES.values(), ids=FILES)
def test_a_file_of_references_is_read_as_it_is(tmp_path: Path, content: str, references: list[str]) -> None:
    for one in references:
        make_task("COMPLETED", reference=one)
    (tmp_path / "names").write_bytes(content.encode())
    erase("--reference-file", tmp_path / "names")
    assert not Task.objects.exists()


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_reference_that_matches_nothing_is_named(database: Database, more: tuple[str, ...]) -> None:
    make_task("COMPLETED", reference="ada")
    out, words = io.StringIO(), ("--reference", "ada", "--reference", "bob ", *more, "--quiet", "--json", "-")
    with pytest.raises(CommandError, match="Nothing has 1 of these references: 'bob '") as caught:
        call_command("runtaskpipeline", "erase", *words, stdout=out)
    assert (caught.value.returncode, json.loads(out.getvalue())["not_found"]) == (3, ["bob "])
    assert Task.objects.exists() == bool(more)
    assert "bob" not in json.dumps(list(models.AuditEntry.objects.values_list("details", flat=True)))
