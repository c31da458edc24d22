"""The site builds without a warning and shows each public name; ``stability.md`` lists exactly the public names."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import MODULES, PACKAGE, REPOSITORY
from tests.browser.pictures import DOCS
from tests.docs.pages import blocks
from tests.docs.test_blocks import PAGES
from tests.docs.test_reference import page, table

SPHINX = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
IMAGE = re.compile(r"!\[([^]]*)\]\([^)]*images/([^)]+)\)")
MAX_IMAGE_BYTES = 150_000


def public_names() -> dict[str, list[str]]:
    """Return the names in ``__all__`` of each module that has one."""
    found = {}
    for module in MODULES:
        for node in module.tree.body if "__all__" in module.text else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[f"{PACKAGE}.{module.name}".rstrip(".")] = ast.literal_eval(node.value)
    return dict(sorted(found.items()))


def imported_by(code: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{name.name}" for node in nodes for name in node.names}
    return {name for name in names if name.startswith(PACKAGE)}


def test_the_public_names_are_listed_and_the_documentation_imports_no_others() -> None:
    expected = [[f"`{module}`", ", ".join(f"`{name}`" for name in names)] for module, names in public_names().items()]
    assert table(page("reference/stability.md"), "## Public Python names") == expected
    public = {f"{module}.{name}" for module, names in public_names().items() for name in ("", *names)}
    code = [block.text for one in PAGES for block in blocks(one) if block.language == "python"]
    used = set().union(*map(imported_by, code)) - {f"{PACKAGE}.pipeline.__main__"}  # a command line
    assert used and {name for name in used if not {name, f"{name}."} & public} == set()


def test_each_picture_is_small_and_shown_with_a_text_that_says_what_it_shows() -> None:
    shown = {found[1]: found[0] for page in PAGES for found in IMAGE.findall(page.read_text(encoding="utf-8"))}
    files = {file.name: file.stat().st_size for file in (REPOSITORY / "docs" / "images").iterdir()}
    assert set(shown) == set(files)
    assert set(files) - {"growth.svg"} == {f"admin-{name}.webp" for name in DOCS}  # that one is of a benchmark
    assert all(shown.values())
    assert max(files.values()) <= MAX_IMAGE_BYTES


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (REPOSITORY / "docs/conf.py").read_text()
    pages = [one.relative_to(REPOSITORY / "docs").with_suffix("") for one in (REPOSITORY / "docs").rglob("*.[mr][ds]*")]
    assert pages and [str(one) for one in pages if one.name != "index" and f'"{one}"' not in contents] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_warning_and_shows_every_public_name(tmp_path: Path) -> None:
    if importlib.util.find_spec("sphinx") is None and "CI" not in os.environ:
        pytest.skip('the extra "docs" is not installed')
    from sphinx.util.inventory import InventoryFile

    command = [*SPHINX, "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = InventoryFile.loads((tmp_path / "objects.inv").read_bytes(), uri="").data
    names = {name for kind, objects in shown.items() if kind.startswith("py:") for name in objects}
    public = {f"{module}.{name}" for module, found in public_names().items() for name in found}
    assert public - names == set()
    # It shows the titles of files, and no link leaves the pages.
    tutorial, semantics = ((tmp_path / name).read_text() for name in ("tutorial.html", "reference/semantics.html"))
    assert "flightdesk/settings.py" in tutorial
    assert 'href="../../tests' not in semantics
    assert "/blob/main/tests/conformance/test_settle.py" in semantics
