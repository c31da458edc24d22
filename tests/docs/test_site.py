"""The site builds without a warning and shows each public name, which a page explains and an example uses."""

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import django_dbtaskqueue
from django_dbtaskqueue.core import exceptions
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.pull.handle import QueueHandle
from django_dbtaskqueue.signals import Listener
from tests.architecture.source import MODULES, PACKAGE, REPOSITORY
from tests.browser.conftest import chromium as chromium
from tests.browser.pictures import DOCS
from tests.docs.pages import FENCE, blocks, shown
from tests.docs.test_blocks import PAGES
from tests.docs.test_reference import page, table
from tests.stranger.environments import execute

SEARCHES = {
    "cron": "howto/schedules", "cancel": "howto/stop-tasks", "requeue": "howto/operate-at-night",
    "retry": "howto/operate-at-night", "stuck": "howto/why-a-task-does-not-run", "delete old tasks": "howto/deploy",
    "permissions": "reference/operations", "async": "reference/api",
}  # fmt: skip
IMAGE = re.compile(r"!\[([^]]*)\]\([^)]*images/([^)]+)\)")


def public_names() -> dict[str, list[str]]:
    found = {}
    for module in MODULES:
        for node in module.tree.body if "__all__" in module.text else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[f"{PACKAGE}.{module.name}".rstrip(".")] = ast.literal_eval(node.value)
    return dict(sorted(found.items()))


def test_the_public_names_are_listed_and_the_documentation_imports_no_others() -> None:
    expected = [[f"`{module}`", ", ".join(f"`{name}`" for name in names)] for module, names in public_names().items()]
    assert table(page("reference/stability.md"), "## Public Python names") == expected
    public = {f"{module}.{name}" for module, names in public_names().items() for name in ("", *names)}
    nodes = [node for one in PAGES for program in programs(one) for node in ast.walk(program)]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE)]
    used = {f"{node.module}.{name.name}" for node in imports for name in node.names}
    used -= {f"{PACKAGE}.pipeline.__main__"}  # a command line
    assert used and {name for name in used if not {name, f"{name}."} & public} == set()


def test_each_picture_is_small_and_shown_with_a_text_that_says_what_it_shows() -> None:
    shown = {found[1]: found[0] for page in PAGES for found in IMAGE.findall(page.read_text(encoding="utf-8"))}
    files = {file.name: file.stat().st_size for file in (REPOSITORY / "docs" / "images").iterdir()}
    assert set(shown) == set(files) and all(shown.values())
    assert set(files) - {"growth.svg"} == {f"admin-{name}.webp" for name in DOCS}  # that one is of a benchmark
    assert max(files.values()) <= 150_000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; a warning fails its build, such as that of a page that no table of contents has."""
    if importlib.util.find_spec("sphinx") is None and "CI" not in os.environ:
        pytest.skip('the extra "docs" is not installed')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs", str(folder)]
    execute(command, cwd=REPOSITORY)
    return folder


@pytest.mark.slow
def test_the_site_shows_every_public_name(built: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    shown = InventoryFile.loads((built / "objects.inv").read_bytes(), uri="").data
    names = {name for kind, objects in shown.items() if kind.startswith("py:") for name in objects}
    assert {f"{module}.{name}" for module, found in public_names().items() for name in found} - names == set()
    # It shows the titles of files, and no link leaves the pages.
    tutorial, semantics = ((built / name).read_text() for name in ("tutorial.html", "reference/semantics.html"))
    assert "flightdesk/settings.py" in tutorial and 'href="../../tests' not in semantics
    assert "/blob/main/tests/conformance/test_settle.py" in semantics


@pytest.mark.slow
def test_the_search_answers_in_three_and_the_comparison_is_seen_whole(built: Path, chromium: Any) -> None:
    browser_page = chromium.new_page()
    for words, right in SEARCHES.items():
        browser_page.goto(f"{(built / 'search.html').as_uri()}?q={words}")
        answers = browser_page.locator("#search-results li > a")
        answers.nth(2).wait_for()
        found = [str(answers.nth(number).get_attribute("href")) for number in range(3)]
        assert [one for one in found if one.startswith(right)], f"{words}: {found}"
    browser_page.set_viewport_size({"width": 1440, "height": 900})
    browser_page.goto((built / "explanation/comparison.html").as_uri())
    wide = "[...document.querySelectorAll('.table-wrapper')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert browser_page.evaluate(wide) == 0, "its tables are whole"


# -- each public name is explained on a page, and an executed example uses it ------------------------------------------
EXPLAINING = [page for page in PAGES if page.name != "stability.md"]  # which lists names and explains none
IN_BACKTICKS = re.compile(r"`[^`\n]+`")
# Names that no example can use in a sensible way, and the page that explains each.
EXPLAINED_ONLY = {
    f"{exceptions.__name__}.ProcessDied": "reference/errors.md",  # never raised
    f"{exceptions.__name__}.SearchTooSlow": "reference/errors.md",  # needs a database that is slow
    f"{exceptions.__name__}.TooManyGroups": "reference/errors.md",  # needs more locks than a server has
    f"{exceptions.__name__}.TaskSuspended": "reference/errors.md",  # not to be caught
    f"{PACKAGE}.models.Doctor": "reference/tables.md",  # these three name pages of the admin
    f"{PACKAGE}.models.Overview": "reference/tables.md",
    f"{PACKAGE}.models.PoisonTask": "reference/tables.md",
}


def programs(page: Path) -> Iterator[ast.Module]:
    for block in blocks(page):
        if block.language == "python":
            yield ast.parse(block.text)


def dotted(node: ast.expr, imported: dict[str, str]) -> str | None:
    """Return the dotted path that a name or an attribute stands for; None if it was not imported."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    owner = dotted(node.value, imported) if isinstance(node, ast.Attribute) else None
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else None


def used_names(page: Path) -> set[str]:
    """Return the dotted paths of imported names that the page's blocks use; an import alone is no use."""
    imported: dict[str, str] = {}
    used: set[str] = set()
    for program in programs(page):
        nodes = [*ast.walk(program)]
        for node in [node for node in nodes if isinstance(node, ast.ImportFrom)]:
            imported |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        used |= {dotted(node, imported) or "" for node in nodes if isinstance(node, ast.Name | ast.Attribute)}
    # The package exports some errors under a second path.
    again = {name for name in vars(exceptions) if name in django_dbtaskqueue.__all__}
    return used | {f"{exceptions.__name__}.{name}" for name in again if f"{PACKAGE}.{name}" in used}


def explained_words(page: Path) -> set[str]:
    return set(re.findall(r"\w+", " ".join(IN_BACKTICKS.findall(FENCE.sub("", shown(page))))))


def test_every_public_name_is_explained_and_used() -> None:
    public = {f"{module}.{name}": name for module, names in public_names().items() for name in names}
    words, used = (set().union(*map(read, EXPLAINING)) for read in (explained_words, used_names))
    assert sorted(path for path, name in public.items() if name not in words) == []
    assert sorted(public.keys() - used) == sorted(EXPLAINED_ONLY), "no other name is excused"
    for path, place in EXPLAINED_ONLY.items():
        assert public[path] in explained_words(REPOSITORY / "docs" / place), path


@pytest.mark.parametrize(
    ("kind", "name"), [(QueueHandle, "pull.md"), (TaskQuerySet, "api.md"), (Lease, "api.md"), (Listener, "signals.md")]
)
def test_every_method_is_explained_and_used(kind: type, name: str) -> None:
    page = REPOSITORY / "docs/reference" / name
    nodes = [node for program in programs(page) for node in ast.walk(program)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}  # hooks are overridden
    ours = [vars(base).items() for base in kind.__mro__ if base.__module__.startswith(PACKAGE)]
    methods = {name for base in ours for name, value in base if name[0] != "_" and callable(value)}
    methods -= {"gone", "is_expired", "result_of"}  # of a lease, for the code that writes outcomes
    assert methods and sorted(methods - used) == [] and sorted(methods - explained_words(page)) == []
