"""Each public name is explained on a page, and an executed example uses it.

``test_blocks.py`` executes every block; this file only reads them. ``stability.md`` lists names and explains none.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import django_dbtaskqueue
from django_dbtaskqueue.core import exceptions
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.pull.handle import QueueHandle
from django_dbtaskqueue.signals import Listener
from tests.architecture.source import PACKAGE
from tests.docs import test_blocks
from tests.docs.pages import FENCE, REPOSITORY, blocks, shown
from tests.docs.test_site import public_names

PAGES = [page for page in test_blocks.PAGES if page.name != "stability.md"]
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
        for node in ast.walk(program):
            if isinstance(node, ast.ImportFrom):
                imported |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        for node in ast.walk(program):
            if isinstance(node, ast.Name | ast.Attribute) and (path := dotted(node, imported)):
                used.add(path)
    # The package exports some errors under a second path.
    again = {name for name in vars(exceptions) if name in django_dbtaskqueue.__all__}
    return used | {f"{exceptions.__name__}.{name}" for name in again if f"{PACKAGE}.{name}" in used}


def explained_words(page: Path) -> set[str]:
    return set(re.findall(r"\w+", " ".join(IN_BACKTICKS.findall(FENCE.sub("", shown(page))))))


def test_every_public_name_is_explained_and_used() -> None:
    public = {f"{module}.{name}": name for module, names in public_names().items() for name in names}
    words, used = (set().union(*map(read, PAGES)) for read in (explained_words, used_names))
    assert sorted(path for path, name in public.items() if name not in words) == []
    assert sorted(public.keys() - used) == sorted(EXPLAINED_ONLY), "no other name is excused"
    for path, page in EXPLAINED_ONLY.items():
        assert public[path] in explained_words(REPOSITORY / "docs" / page), path


@pytest.mark.parametrize(
    ("kind", "name"), [(QueueHandle, "pull.md"), (TaskQuerySet, "api.md"), (Lease, "api.md"), (Listener, "signals.md")]
)
def test_every_method_is_explained_and_used(kind: type, name: str) -> None:
    page = REPOSITORY / "docs/reference" / name
    nodes = [node for program in programs(page) for node in ast.walk(program)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}  # hooks are overridden
    ours = [base for base in kind.__mro__ if base.__module__.startswith(PACKAGE)]
    named = {name: value for base in ours for name, value in vars(base).items() if name[0] != "_"}
    methods = {name for name, value in named.items() if callable(value)}
    methods -= {"gone", "is_expired", "result_of"}  # of a lease, for the code that writes outcomes
    assert methods and sorted(methods - used) == [] and sorted(methods - explained_words(page)) == []


def test_an_import_alone_is_no_use(tmp_path: Path) -> None:
    for code, used in [
        ("from django_dbtaskqueue import enqueue", set()),
        ("from django_dbtaskqueue import enqueue as put\nput('q')", {"enqueue"}),
        ("from django_dbtaskqueue import signals\nclass A(signals.Listener): ...", {"signals", "signals.Listener"}),
        ("enqueue('q')", set()),
    ]:
        page = tmp_path / "page.md"
        page.write_text(f"```python\n{code}\n```\n")
        assert used_names(page) == {f"{PACKAGE}.{name}" for name in used}
