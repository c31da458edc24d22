"""Which references ``erase`` has found: a file is read as it is, and what matches nothing is named."""

import io
import json
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from django_dbtaskqueue.models import AuditEntry, Task
from django_dbtaskqueue.pipeline.database import Database
from tests.factories import make_task

FILES = {
    "a byte order mark": ("\ufeffP-1\nP-2\n", ["P-1", "P-2"]),
    "lines of Windows": ("P-1\r\n\r\nP-2", ["P-1", "P-2"]),
    "separators of lines": ("P\u20281\nP\u00852\nP\x0b3\n", ["P\u20281", "P\u00852", "P\x0b3"]),
    "spaces": ("P-1 \n \n", ["P-1 ", " "]),
}


@pytest.mark.parametrize(("content", "references"), FILES.values(), ids=FILES)
def test_a_file_of_references_is_read_as_it_is(
    sqlite: Database, tmp_path: Path, content: str, references: list[str]
) -> None:
    for one in references:
        make_task("COMPLETED", reference=one)
    (tmp_path / "names").write_bytes(content.encode())
    call_command("runtaskpipeline", "erase", "--reference-file", tmp_path / "names", "--quiet", stdout=io.StringIO())
    assert not Task.objects.exists()


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_reference_that_matches_nothing_is_named(database: Database, more: tuple[str, ...]) -> None:
    make_task("COMPLETED", reference="ada")
    out, names = io.StringIO(), ("--reference", "ada", "--reference", "bob ")
    with pytest.raises(CommandError, match="Nothing has 1 of these references: 'bob '") as caught:
        call_command("runtaskpipeline", "erase", *names, *more, "--quiet", "--json", "-", stdout=out)
    assert caught.value.returncode == 3
    assert json.loads(out.getvalue())["not_found"] == ["bob "]
    assert Task.objects.exists() == bool(more)
    assert "bob" not in json.dumps(list(AuditEntry.objects.values_list("details", flat=True)))
