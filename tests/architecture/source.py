"""The package's source, read once: modules, their imports, their functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "django_dbtaskqueue"


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path

    @cached_property
    def name(self) -> str:
        """The dotted name inside the package: ``flow.settle``; "" for the package itself."""
        parts = self.path.relative_to(REPOSITORY / PACKAGE).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def place(self) -> str:
        return str(self.path.relative_to(REPOSITORY))

    def imported(self, node: ast.AST) -> Iterator[str]:
        """Yield the dotted names that an import statement names."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

    @cached_property
    def imports(self) -> list[str]:
        """Every dotted name imported, anywhere in the module, for type checkers too."""
        return [name for node in ast.walk(self.tree) for name in self.imported(node)]

    @cached_property
    def uses(self) -> set[str]:
        """The modules of the package that this one imports."""
        found = set()
        for name in self.imports:
            top, _, inner = name.partition(".")
            if top == PACKAGE:
                while inner and inner not in NAMES:
                    inner = inner.rpartition(".")[0]
                found.add(inner)
        return found - {self.name}


def files(folder: str) -> list[Path]:
    """Return the Python files under a folder of the repository."""
    return sorted(path for path in (REPOSITORY / folder).rglob("*.py") if "__pycache__" not in path.parts)


MODULES = [Module(path) for path in files(PACKAGE)]
NAMES = {module.name for module in MODULES}
