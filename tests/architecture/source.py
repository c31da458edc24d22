"""The package's source, read once: modules, their imports, their functions."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "django_dbtaskqueue"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
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
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    @cached_property
    def imports(self) -> list[str]:
        """Every dotted name imported, anywhere in the module, for type checkers too."""
        return [name for node in self.nodes for name in self.imported(node)]

    @cached_property
    def uses(self) -> set[str]:
        return self._inside(self.imports)

    @cached_property
    def needs(self) -> set[str]:
        """The modules of the package that are imported with this one: at its top, and not for type checkers only."""
        return self._inside([name for node in _executed(self.tree.body) for name in self.imported(node)])

    def _inside(self, imports: Iterable[str]) -> set[str]:
        found = set()
        for name in imports:
            top, _, inner = name.partition(".")
            if top == PACKAGE:
                while inner and inner not in NAMES:
                    inner = inner.rpartition(".")[0]
                found.add(inner)
        return found - {self.name}


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module that run when it is imported, those under ``if TYPE_CHECKING`` left out."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _executed(node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else node.body)
        elif isinstance(node, ast.Try):
            yield from _executed([*node.body, *(each for handler in node.handlers for each in handler.body)])
        elif isinstance(node, ast.With):
            yield from _executed(node.body)


def length(function: Function) -> int:
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1


def files(folder: str) -> list[Path]:
    return sorted(path for path in (REPOSITORY / folder).rglob("*.py") if "__pycache__" not in path.parts)


MODULES = [Module(path) for path in files(PACKAGE)]
NAMES = {module.name for module in MODULES}
TESTS = [Module(path) for path in files("tests")]
EXAMPLE = [Module(path) for path in files("example_project")]
WRITTEN = [module for module in MODULES if not module.name.startswith("migrations")]  # Django writes the others
