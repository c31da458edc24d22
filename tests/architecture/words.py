"""Identifiers that use an old word: ``python -m tests.architecture words`` prints them, each with its place.

The standard words are those of PostgreSQL, Django, Oban and River. Names are judged, not sentences: modules, classes,
functions, parameters, variables, attributes, constants, files of templates and styles, and classes and ids in HTML.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.architecture.source import MODULES, PACKAGE, REPOSITORY, Module, files

# Wherever one of these is a word of a name, the name is wrong.
ANYWHERE = """
    lane lanes walk walks door doors carrier carriers carry intake company sociable companion companions room rooms gate
    gates suspect suspects probation innocent innocents errand errands lifeline beat beats told maintenance duty duties
    chore chores obey tend tending standing aging forget keeper holding taker takers ear ears wording lockable crowd
    hostile alike screen stops queueconf buildtasks
"""
# But these are ordinary outside the package: a flight's carrier, the demo's screen, a hostile text.
ORDINARY_OUTSIDE = "carry carrier gate gates holding hostile room screen stops told"
# Words that are wrong when they follow each other.
PHRASES = """
    in_line of_line line_order enter_line leave_line line_without task_call enqueue_again last_word by_index task_picked
    user_key api_entry spent_in rescue_spent
"""
# (kind, folder): names that are wrong in that folder and in those inside it, and ordinary elsewhere.
EXACTLY = {
    ("module", ""): """
        sharing places calls telling again acting acts queue_acts poller_acts looking kinds figures planning limits
        words documents building weights runtime merging tuning preparing waiting manual operators inside
    """,
    ("module", "operations"): "findings selection",
    ("class", "operations"): "Order",
    ("module", "poller"): "control",
    ("class", ""): "Places Calls Kind Ages Swept Amount Count Look Share Fault",
    ("class", "flow"): "Line Part Step Bounds",
    ("class", "poller"): "Control",
    ("class", "pull"): "Place",
    ("class", "waiting"): "Place",
    ("function", ""): "say",
    ("function", "poller"): "spent watch places inside",
    ("function", "flow"): "chosen plain remove spent",
    ("function", "flow.sql"): "taken",
    ("function", "core.sql"): "taken spent",
    ("function", "operations"): "bounded",
    ("constant", ""): "GO_ON FEW SHARE LOOK TELLING MOST LEAST FEWEST",
    ("constant", "flow"): "BOUNDS",
    ("constant", "core.sql"): "BOUNDS",
    ("parameter", "flow"): "line bounds",
    ("parameter", "poller"): "places wire",
    ("attribute", "flow"): "bounds",
    ("attribute", "poller"): "places inside wire",
    ("variable", "flow"): "bounds",
    ("variable", "poller"): "inside wire",
    ("variable", "poller.lane"): "line",
    ("variable", "poller.queue_state"): "line",
    ("variable", "models"): "way most top first window wanted applied",
}
ALWAYS, OUTSIDE = set(ANYWHERE.split()), set(ANYWHERE.split()) - set(ORDINARY_OUTSIDE.split())
RUNS = PHRASES.split()
WRONG = {key: frozenset(names.split()) for key, names in EXACTLY.items()}
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
MARKUP = re.compile(r"""\b(?:class|id)=["']([^"'{}]+)["']""")
STYLE = re.compile(r"[.#](-?[a-z][\w-]*)[^;{}]*\{")
HOME = REPOSITORY / PACKAGE


def is_old(kind: str, module: str | None, text: str) -> bool:
    """Whether a name uses an old word. ``module``: its dotted name inside the package, None outside of it."""
    parts = [part.lower() for part in PART.findall(text)]
    words = f"_{'_'.join(parts)}_"
    if not (OUTSIDE if module is None else ALWAYS).isdisjoint(parts) or any(f"_{each}_" in words for each in RUNS):
        return True
    if module is None and kind != "class":
        return False
    inner = (module or "").split(".")
    folders = ["", *(".".join(inner[:depth]) for depth in range(1, len(inner) + 1))]
    return any(text.lstrip("_") in WRONG.get((kind, folder), ()) for folder in folders)


def names(module: Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of what a module defines, and the last part of its own name."""
    yield 1, "module", module.path.stem
    for node in module.nodes:
        match node:
            case ast.ClassDef(name=text):
                yield node.lineno, "class", text
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text):
                yield node.lineno, "function", text
            case ast.arg(arg=text):
                yield node.lineno, "parameter", text
            case ast.alias(asname=str(text)):
                yield node.lineno, "variable", text
            case ast.Attribute(attr=text, ctx=ast.Store()):
                yield node.lineno, "attribute", text
            case ast.Name(id=text, ctx=ast.Store()):
                yield node.lineno, _kind_of_variable(text.lstrip("_")), text


def _kind_of_variable(text: str) -> str:
    return "constant" if text.isupper() else "class" if text[:1].isupper() else "variable"


def in_python() -> Iterator[str]:
    """Yield the old names in the package, the tests and the example project."""
    others = [Module(path) for folder in ("tests", "example_project") for path in files(folder)]
    for module in [*MODULES, *others]:
        home = module.name if module.place.startswith(PACKAGE) else None
        found = [name for name in names(module) if is_old(name[1], home, name[2])]
        yield from (f"{module.place}:{line} {text} ({kind})" for line, kind, text in found)


def in_markup() -> Iterator[str]:
    """Yield the old names among the files of templates and styles, and their classes and ids."""
    for path in sorted(path for folder in ("templates", "static") for path in (HOME / folder).rglob("*.*")):
        if "vendor" in path.parts or path.suffix not in (".html", ".css", ".js", ".txt"):
            continue
        if is_old("module", "", path.stem.lstrip("_")):
            yield f"{path}:1 {path.stem} (file)"
        pattern = STYLE if path.suffix == ".css" else MARKUP
        for number, line in enumerate(path.read_text().splitlines(), 1):
            styles = [each for found in pattern.findall(line) for each in found.split()]
            yield from (f"{path}:{number} {each} (style)" for each in styles if is_old("style", "", each))


@cache
def old_names() -> tuple[str, ...]:
    return *in_python(), *in_markup()


def report() -> str:
    return "\n".join([*old_names(), f"{len(old_names())} old names"])
