"""Every code block of the documentation is executed: see ``pages.py``. ``tests/stranger`` types the README."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.urls import include, path
from packaging.requirements import Requirement

from django_dbtaskqueue.db import notify
from tests.conftest import ProcessDatabase
from tests.docs.pages import FENCE, PROJECT, REPOSITORY, Reader, blocks

urlpatterns = [path("taskqueue/api/", include("django_dbtaskqueue.api.urls"))]  # as the page of the JSON API says
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
SOURCE_URL = PROJECT["urls"]["Source"]
FILE_URL = re.compile(rf"{re.escape(SOURCE_URL)}/(?:blob|raw|tree)/main/(\S+)")
LINK = re.compile(r"(?:\]\(|^\[[^\]]+\]: )([^)#\s]+)", re.MULTILINE)
SPARK = re.compile(r"^import pyspark|spark_session\(|\"runtaskpipeline\"", re.MULTILINE)
TYPED_BY_STRANGERS = {"README.md", "tutorial.md", "django-tasks.md"}  # in tests/stranger, with more than one Django
SLOW = {"own-tables.md", "spark-cluster.md", "test-your-tasks.md"}  # processes of a project of their own, or of Spark
READ = [
    pytest.param(page, marks=pytest.mark.slow) if page.name in SLOW or SPARK.search(page.read_text()) else page
    for page in PAGES
    if page.name not in TYPED_BY_STRANGERS
]


@pytest.fixture
def reader(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_process_database: ProcessDatabase,
    settings: Any, taskqueue_registry: None, monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Reader]:  # fmt: skip
    folder, page = tmp_path / "project", request.param
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)  # a file that a block names can be imported
    if page.name == "http-api.md":
        settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "API": True}
        settings.ROOT_URLCONF = __name__
    if SPARK.search(page.read_text()):
        request.getfixturevalue("spark")  # what the page asks for is then the session that runs
    yield Reader(page, folder, postgres_process_database, settings)
    notify.flush()


@pytest.mark.parametrize("reader", READ, indirect=True, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_block_of_the_page_works(reader: Reader) -> None:
    reader.read()


def test_links_and_the_addresses_of_the_project_lead_somewhere() -> None:
    """They stand once, in pyproject.toml; other files repeat the address of the repository only."""
    wrong = []
    for page in PAGES:
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            if ours := FILE_URL.fullmatch(target):
                there = (REPOSITORY / ours[1]).exists()
            else:  # on the page of a package index, a path leads nowhere
                near = page.name != "README.md" and (page.parent / target).exists()
                there = near or target.startswith(("http:", "https:", "mailto:"))
            wrong += [] if there else [f"{page.name} links to {target}"]
    assert not wrong
    for url in PROJECT["urls"].values():
        ours = FILE_URL.fullmatch(url)
        assert (REPOSITORY / ours[1]).exists() if ours else url.startswith(SOURCE_URL), url


# The executors themselves: each must be able to fail.
WRONG_BLOCKS = [
    ("```python\nassert False, 'wrong'\n```", "wrong"),
    ("```python\nprint(1)\n```\n\n```text\n2\n```", "It printed:\n1"),
    ("```python\nDBTASKQUEUE = {'QEUES': {}}\n```", "Did you mean 'QUEUES'"),
    ("```sql\nSELECT 1 FROM nowhere\n```", "nowhere"),
    ("```bash\nrm -rf /\n```", "no executor for the program 'rm'"),
    ("```bash\npip install something-else\n```", "that is not this project"),
    ("```bash\npip install django-dbtaskqueue[nothing]\n```", "no such extra"),
    ("```bash\npython manage.py no_such_command\n```", "Unknown command"),
    ("```ini\n[Service]\nExecStart=python manage.py runtaskpoller --nosuch\n```", "nosuch"),
    ("```toml\na =\n```", "Invalid value"),
    ("```toml\n[queues.mail]\nleese = '1m'\n```", "Did you mean 'lease'"),
    ("```cobol\nSTOP RUN\n```", "no executor for a block of 'cobol'"),
    ("```\nno language\n```", "no executor for a block of ''"),
]


def test_wrong_blocks_fail(tmp_path: Path, postgres_process_database: Any, settings: Any, capsys: Any) -> None:
    page = tmp_path / "page.md"
    for block, told in WRONG_BLOCKS:
        page.write_text(f"# A page\n\n{block}\n")
        with pytest.raises((Exception, SystemExit)) as caught:
            Reader(page, tmp_path, postgres_process_database, settings).read()
        assert told in f"{caught.value} {capsys.readouterr().err}", block


def test_the_pipeline_s_tutorial_needs_only_what_it_installs_and_sets_nothing_in_a_shell() -> None:
    typed = [one for one in blocks(REPOSITORY / "docs" / "pipeline-tutorial.md") if one.language == "python"]
    shell = ast.parse("\n".join(one.text for one in typed if one.title is None))
    names = {one.id for one in ast.walk(shell) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    assert "DBTASKQUEUE" not in names, "a setting that is typed into a shell has no effect"
    imported = {one.module or "" for one in ast.walk(shell) if isinstance(one, ast.ImportFrom)}
    imported |= {alias.name for one in ast.walk(shell) if isinstance(one, ast.Import) for alias in one.names}
    packages = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    extra = {Requirement(one).name for one in PROJECT["optional-dependencies"]["spark"]}
    assert packages <= extra | {"django", "django_dbtaskqueue"}
