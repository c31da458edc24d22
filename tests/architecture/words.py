"""Identifiers that use an old word: ``python -m tests.architecture words`` prints them, each with its place.

The standard words are those of PostgreSQL, Django, Oban and River. Names are judged, not sentences: modules, classes,
functions, parameters, variables, attributes, constants, files of templates and styles, and classes and ids in HTML.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.architecture.source import EXAMPLE, MODULES, PACKAGE, REPOSITORY, TESTS, Module

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
INSIDE, OUTSIDE = set(ANYWHERE.split()), set(ANYWHERE.split()) - set(ORDINARY_OUTSIDE.split())
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
MARKUP = re.compile(r"""\b(?:class|id)=["']([^"'{}]+)["']""")
STYLE = re.compile(r"[.#](-?[a-z][\w-]*)[^;{}]*\{")
HOME = REPOSITORY / PACKAGE


def is_old(name: str, *, inside: bool = True) -> bool:
    """Whether a name, inside the package or outside of it, uses an old word."""
    parts = [part.lower() for part in PART.findall(name)]
    words = f"_{'_'.join(parts)}_"
    return not (INSIDE if inside else OUTSIDE).isdisjoint(parts) or any(f"_{run}_" in words for run in PHRASES.split())


def names(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of what a module defines, and the last part of its own name."""
    yield 1, module.path.stem
    for node in module.nodes:
        match node:
            case ast.ClassDef(name=text) | ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text):
                yield node.lineno, text
            case ast.arg(arg=text) | ast.alias(asname=str(text)):
                yield node.lineno, text
            case ast.Attribute(attr=text, ctx=ast.Store()) | ast.Name(id=text, ctx=ast.Store()):
                yield node.lineno, text


def in_python() -> Iterator[str]:
    for module in (*MODULES, *TESTS, *EXAMPLE):
        inside = module.place.startswith(PACKAGE)
        yield from (f"{module.place}:{line} {text}" for line, text in names(module) if is_old(text, inside=inside))


def in_markup() -> Iterator[str]:
    """Yield the old names among the files of templates and styles, and their classes and ids."""
    for path in sorted(path for folder in ("templates", "static") for path in (HOME / folder).rglob("*.*")):
        if "vendor" in path.parts or path.suffix not in (".html", ".css", ".js", ".txt"):
            continue
        pattern = STYLE if path.suffix == ".css" else MARKUP
        found = [(1, path.stem)]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [(number, name) for names in pattern.findall(line) for name in names.split()]
        yield from (f"{path}:{number} {name}" for number, name in found if is_old(name))


@cache
def old_names() -> tuple[str, ...]:
    return *in_python(), *in_markup()


def report() -> str:
    return "\n".join([*old_names(), f"{len(old_names())} old names"])
