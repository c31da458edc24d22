"""The table of seeded bugs, and the import hook that applies one in this process.

Processes that tests start have the bug, too: they inherit the environment, and import their settings from ``tests``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

TABLE = Path(__file__).with_name("seeded_bugs.txt")
REPOSITORY = TABLE.parent.parent.parent
PACKAGE = "django_dbtaskqueue"


class Bug(NamedTuple):
    """One entry of the table."""

    place: str  # a file of the package
    name: str
    piece: str  # of its source
    replacement: str
    command: str  # what pytest is told to run

    @property
    def module(self) -> str:
        return ".".join((PACKAGE, *Path(self.place).with_suffix("").parts)).removesuffix(".__init__")

    @property
    def source(self) -> str:
        return (REPOSITORY / PACKAGE / self.place).read_text()

    def apply(self) -> str:
        """Return the broken source. Raise ``ValueError`` unless the piece occurs once."""
        if (number := self.source.count(self.piece)) != 1:
            raise ValueError(f"{self.place}: {self.name}: the piece occurs {number} times, not once")
        return self.source.replace(self.piece, self.replacement)


def bugs() -> Iterator[Bug]:
    for entry in TABLE.read_text().split("\n## ")[1:]:
        title, *lines = entry.splitlines()
        place, _, name = title.partition(": ")
        yield Bug(place, name, *("\n".join(line[2:] for line in lines if line[:1] == sign) for sign in "-+$"))


def install(name: str) -> None:
    """Break this process, before it imports what is to be broken."""
    [bug] = [one for one in bugs() if one.name == name]
    if bug.module in sys.modules:
        raise RuntimeError(f"{bug.module} is imported already, and cannot be broken any more.")
    sys.meta_path.insert(0, _Finder(bug))


class _Finder(MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._bug.module else None
        if spec is not None:
            spec.loader = _Loader(self._bug, str(spec.origin))
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, bug: Bug, path: str) -> None:
        super().__init__(bug.module, path)
        self._bug = bug

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._bug.apply(), self.path, "exec")  # not from a cache, and into none
