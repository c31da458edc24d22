"""The table of seeded bugs, and the import hook that puts one of them into this process.

Processes that tests start have the bug, too: they inherit the variable, and import their settings from ``tests``.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

TABLE = Path(__file__).with_name("seeded_bugs.txt")
REPOSITORY, PACKAGE = TABLE.parent.parent.parent, "django_dbtaskqueue"
VARIABLE = "DBTASKQUEUE_SEEDED_BUG"  # its name; empty: none


class Bug(NamedTuple):
    """One entry of the table."""

    place: str  # a file of the package
    name: str
    piece: str  # of its source
    replacement: str
    command: str  # what pytest is told to run
    also: str  # "faults": a run of tests.faults must notice it, too

    @property
    def title(self) -> str:
        return f"{self.place}: {self.name}"

    @property
    def module(self) -> str:
        return ".".join((PACKAGE, *Path(self.place).with_suffix("").parts)).removesuffix(".__init__")

    def code(self) -> CodeType:
        """Return the module with the bug. Raise ``ValueError`` unless the piece occurs once."""
        file = REPOSITORY / PACKAGE / self.place
        source = file.read_text()
        if (number := source.count(self.piece)) != 1:
            raise ValueError(f"the piece occurs {number} times")
        return compile(source.replace(self.piece, self.replacement), file, "exec")


def bugs() -> Iterator[Bug]:
    for entry in TABLE.read_text().split("\n## ")[1:]:
        title, *lines = entry.splitlines()
        place, _, name = title.partition(": ")
        yield Bug(place, name, *("\n".join(line[2:] for line in lines if line[:1] == sign) for sign in "-+$%"))


def seed() -> None:
    """Put the bug that the environment names into its module, if that is not imported yet, as in some children."""
    [bug] = [one for one in bugs() if one.name == os.environ[VARIABLE]]
    sys.meta_path.insert(0, _Finder(bug))


class _Finder(MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self._bug.module else None
        if spec is not None:
            spec.loader = _Loader(name, str(spec.origin))
            spec.loader.bug = self._bug
        return spec


class _Loader(SourceFileLoader):
    bug: Bug

    def get_code(self, fullname: str) -> CodeType:
        return self.bug.code()  # neither from the cache of bytecode nor into it
