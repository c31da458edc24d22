"""Tables of the reference that are made from the code while the site is built.

A page marks the place with a comment such as ``<!-- from the code: options runtaskpoller -->``. A Markdown table that
follows it directly holds notes: its first column names a row of the made table, and the note goes to the end of that
row's text. A repository's host shows the notes alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType

from django.core.management import load_command_class
from django.core.management.base import BaseCommand

Row = list[str]
MARK = re.compile(r"^<!-- from the code: ([^\n]+) -->\n((?:\|[^\n]*\n)*)", re.MULTILINE)
APPS = {"demo": "example_project.flights"}  # other commands are the package's
PACKAGE = "django_dbtaskqueue"


def fill(text: str) -> str:
    """Return the text of a page with its tables in place."""
    return MARK.sub(lambda found: made(found[1], found[2]), text)


def made(wanted: str, notes: str) -> str:
    """Return what a mark asks for."""
    kind, *arguments = wanted.split()
    head, rows = KINDS[kind](*arguments)
    return written([head, *annotated(list(rows), notes)]) if head else "\n".join(row[0] for row in rows) + "\n"


def written(rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table; the first one is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def annotated(rows: list[Row], notes: str) -> list[Row]:
    """Return rows with the notes of a page at their ends. A note to a row that is not there is an error."""
    cells = [line.strip("|\n").split(" | ") for line in notes.splitlines()[2:]]
    said = {key(row[0]): row[-1].strip() for row in cells}
    for row in rows:
        row[-1] = sentence(row[-1], said.pop(key(row[0]), ""))
    if said:
        raise ValueError(f"Notes to what the code does not have: {', '.join(said)}")
    return rows


def key(cell: str) -> str:
    """Return the name that a first cell begins with, as `name`, `--name VALUE` or `name(argument)`."""
    found = re.search(r"`([\w.-]+)", cell)
    return found[1] if found else cell.strip()


def sentence(text: str, more: str) -> str:
    """Return two texts as one."""
    return ". ".join(one for one in (text.rstrip("."), more) if one)


def code(text: object) -> str:
    return f"`{text}`"


def cell(text: str) -> str:
    """Return a text of the code, such as a help or a docstring, for a cell."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").replace("*", "\\*").split())


# -- command lines -----------------------------------------------------------------------------------------------------


def parser_of(command: str) -> argparse.ArgumentParser:
    return load_command_class(APPS.get(command, PACKAGE), command).create_parser("manage.py", command)


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options that are not of every command of Django."""
    usual = BaseCommand().create_parser("manage.py", "command")._option_string_actions
    for action in parser._actions:
        if action.option_strings and action.option_strings[-1] not in {**usual, "--child": 0}:
            yield action


def option(action: argparse.Action) -> str:
    names = [name for name in action.option_strings if not name.startswith("--no-") or len(action.option_strings) == 1]
    value = "" if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) else value_of(action)
    return ", ".join(code(f"{name} {value}".strip()) for name in names)


def value_of(action: argparse.Action) -> str:
    if action.choices and not isinstance(action.choices, Mapping):
        return "{" + ",".join(map(str, action.choices)) + "}"
    value = str(action.metavar or action.dest.upper())
    return f"[{value}]" if action.nargs == "?" else value


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    facts = {name: value for name, value in vars(action).items() if value is not argparse.SUPPRESS}
    return cell((action.help or "") % {**facts, "prog": parser.prog})


def options(command: str) -> tuple[Row, Iterator[Row]]:
    """Return the options of a management command."""
    parser = parser_of(command)
    return ["Option", "Does"], ([option(one), help_of(one, parser)] for one in options_of(parser))


def about(command: str) -> tuple[Row, Iterator[Row]]:
    """Return what a management command says of itself, with its exit codes, as a paragraph."""
    return [], iter([[cell(load_command_class(APPS.get(command, PACKAGE), command).help)]])


def subparsers(command: str) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Return the parser and the help of each subcommand."""
    (action,) = (one for one in parser_of(command)._actions if isinstance(one, argparse._SubParsersAction))
    helps = {one.dest: one.help or "" for one in action._choices_actions}
    return {name: (parser, helps[name]) for name, parser in action.choices.items()}


def subcommands(command: str) -> tuple[Row, Iterator[Row]]:
    """Return the subcommands of a management command, with what they are given without an option."""
    rows = []
    for name, (parser, text) in subparsers(command).items():
        given = [one for one in parser._actions if not one.option_strings]
        words = [value_of(one) if one.choices else code(one.metavar or one.dest.upper()) for one in given]
        shown = [", ".join(code(one) for one in word.strip("{}").split(",")) if "{" in word else word for word in words]
        rows.append([" ".join([code(name), *shown]), cell(text)])
    return ["Command", "Does"], iter(rows)


def suboptions(command: str) -> tuple[Row, Iterator[Row]]:
    """Return the options of all subcommands: those that say the same of several stand once."""
    users: dict[tuple[str, str], list[str]] = {}
    commands = subparsers(command)
    for name, (parser, _text) in commands.items():
        for action in options_of(parser):
            if "-h" not in action.option_strings:
                users.setdefault((option(action), help_of(action, parser)), []).append(name)
    rows = [[shown, of_which(names, list(commands)), text] for (shown, text), names in users.items()]
    return ["Option", "Of", "Does"], iter(sorted(rows, key=lambda row: (row[1] != "all", row[0])))


def of_which(names: list[str], commands: list[str]) -> str:
    """Return the names of subcommands, short where they are all, or all verbs."""
    from django_dbtaskqueue.management.commands.taskqueue import VERB_OF_COMMAND

    if names == commands:
        return "all"
    many = {*VERB_OF_COMMAND} - {"edit"} <= {*names}
    others = [name for name in names if not many or name not in VERB_OF_COMMAND]
    group = ("verbs" if "edit" in names else "verbs but `edit`") if many else ""
    return ", ".join([*filter(None, [group]), *map(code, others)])


def jobs(which: str) -> tuple[Row, Iterator[Row]]:
    """Return the options of a pipeline job, or those of every job."""
    from django_dbtaskqueue.pipeline.command_line import COMMON, Face, parser
    from django_dbtaskqueue.pipeline.jobs import job

    face = Face("", (), lambda *place: None, sys.stdout, sys.stderr)
    job_parser = parser(job("enqueue" if which == "every" else which), face)
    common = {one.name for one in COMMON} | {"help"}
    shown = [one for one in job_parser._actions if (one.dest in common) == (which == "every")]
    defaults = {one.name: one.default for one in job(which).arguments} if which != "every" else {}
    rows = ([option(one), help_of(one, job_parser) + default_of(defaults.get(one.dest))] for one in shown)
    return ["Option", "Does"], rows


def default_of(value: object) -> str:
    return f" ({shown_value(value)})" if value is not None and value not in (True, False, ()) else ""


# -- settings ----------------------------------------------------------------------------------------------------------


def settings(place: str, named: str = "str") -> tuple[Row, Iterator[Row]]:
    """Return the fields of a dataclass of settings: name, default and the comment beside it."""
    from django_dbtaskqueue.core import retry

    kind = found(place)
    comments = comments_of(kind)
    rows = []
    for one in dataclasses.fields(kind):
        value = one.default_factory() if one.default is dataclasses.MISSING else one.default
        text = retry.policy_text(value) if value is retry.DEFAULT else shown_value(value)
        name = one.name.upper() if named == "upper" else one.name
        rows.append([code(name), "`{}`" if one.name == "bridge" else code(text), comments.get(one.name, "")])
    return ["Setting", "Default", "Says"], iter(rows)


def shown_value(value: object) -> str:
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        if seconds >= 86_400:
            return f"{value.days} d"
        return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"
    if isinstance(value, int) and not isinstance(value, bool) and value > 9_999:
        return f"{value:,}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def comments_of(kind: type) -> dict[str, str]:
    """Return the comment of each field: behind it, or in the lines before it."""
    comments, before = {}, ""
    for line in inspect.getsource(kind).splitlines():
        text, _, comment = line.partition("  # ")
        name = re.match(r"    (\w+): ", text)
        if name:
            comments[name[1]] = cell(comment or before).replace("\\*", "*")
        before = line.strip().removeprefix("# ") if line.strip().startswith("# ") else ""
    return comments


# -- names, documents and columns --------------------------------------------------------------------------------------


def found(place: str) -> type:
    """Return the class at a dotted path of the package."""
    module, _, name = place.rpartition(".")
    found: type = getattr(import_module(f"{PACKAGE}.{module}"), name)
    return found


def described(one: object) -> str:
    return cell(inspect.getdoc(one) or "")


def errors() -> tuple[Row, Iterator[Row]]:
    """Return the errors of the package."""
    from django_dbtaskqueue.core import exceptions

    return ["Error", "Means"], ([code(name), described(getattr(exceptions, name))] for name in exceptions.__all__)


def models(*names: str) -> tuple[Row, Iterator[Row]]:
    """Return models, their tables and what a row is."""
    from django_dbtaskqueue import models as ours

    kinds = [getattr(ours, name) for name in names]
    tables = ["" if one._meta.abstract else code(one._meta.db_table) for one in kinds]
    rows = ([code(one.__name__), table, described(one)] for one, table in zip(kinds, tables, strict=True))
    return ["Model", "Table", "Is"], rows


def hooks() -> tuple[Row, Iterator[Row]]:
    """Return the hooks of a listener."""
    from django_dbtaskqueue.signals import Listener

    named = {name: hook for name, hook in vars(Listener).items() if name[0] != "_"}
    rows = ([code(f"{name}({arguments(hook)})"), described(hook)] for name, hook in named.items())
    return ["Hook", "Called when"], rows


def arguments(function: Callable[..., object]) -> str:
    return ", ".join([name for name in inspect.signature(function).parameters if name != "self"])


def signals() -> tuple[Row, Iterator[Row]]:
    """Return the signals, from the comments at them."""
    from django_dbtaskqueue import signals as ours

    rows, before = [], ""
    for line in inspect.getsource(ours).splitlines():
        signal = re.match(r"(\w+) = Signal\(\)(?:  #: (.*))?", line)
        before = f"{before} {line[3:]}".strip() if line.startswith("#: ") else before
        if signal:
            names, _, text = (signal[2] or before).partition(": ")
            rows.append([code(signal[1]), ", ".join(map(code, names.split(", "))), cell(text)])
            before = ""
    return ["Signal", "Arguments", "Sent when"], iter(rows)


def requests() -> tuple[Row, Iterator[Row]]:
    """Return the routes of the JSON API."""
    from django_dbtaskqueue.api.urls import ROUTES, SEARCH_FIELDS

    rows = []
    for route in ROUTES:
        address = re.sub(r"<\w+:(\w+)>", lambda part: part[1].upper(), route.path)
        names = [one.name for one in (*route.query, *route.body)]
        qualifiers = [one.name for one in SEARCH_FIELDS[1:]]
        given = [name for name in names if name not in qualifiers or set(qualifiers) - set(names)]
        given += ["each qualifier"] if len(given) < len(names) else []
        does = described(route.view).partition(". ")[0]
        rows.append([code(f"{route.method} {address}"), does, ", ".join(map(code, given)) or "-", route.permission])
    return ["Request", "Does", "Fields", "Needs"], iter(rows)


def names() -> tuple[Row, Iterator[Row]]:
    """Return the public names of each module."""
    rows = []
    for file in sorted(Path(str(import_module(PACKAGE).__file__)).parent.rglob("*.py")):
        if "\n__all__ = " in file.read_text():
            module = public_module(file)
            rows.append([code(module.__name__), ", ".join(map(code, module.__all__))])
    return ["Module", "Names"], iter(rows)


def public_module(file: Path) -> ModuleType:
    parts = file.with_suffix("").parts
    name = ".".join(parts[len(parts) - 1 - parts[::-1].index(PACKAGE) :])
    return import_module(name.removesuffix(".__init__"))


def metrics(which: str) -> tuple[Row, Iterator[Row]]:
    """Return the metrics of the database, or of a poller."""
    from django_dbtaskqueue.api.prometheus import DATABASE_METRICS
    from django_dbtaskqueue.poller.probe_port import POLLER_METRICS

    shown = DATABASE_METRICS if which == "database" else POLLER_METRICS
    labels = [", ".join(map(code, one.labels)) or "-" for one in shown]
    rows = ([code(one.name), one.type, names, one.help] for one, names in zip(shown, labels, strict=True))
    return ["Metric", "Type", "Labels", "Says"], rows


def edges() -> tuple[Row, Iterator[Row]]:
    """Return every way between two statuses."""
    from django_dbtaskqueue.core.states import EDGES

    rows = []
    for edge in EDGES:
        sources = ", ".join(map(code, edge.sources)) or "-"
        rows.append(
            [code(edge.verb), sources, code(edge.target) if edge.target else "leaves the table", edge.actor, ""]
        )
    return ["Verb", "From", "To", "By", ""], iter(rows)


def diagram() -> tuple[Row, Iterator[Row]]:
    """Return the statuses and the ways between them as a Mermaid state diagram."""
    from django_dbtaskqueue.core.states import EDGES

    ways: dict[tuple[str, str], list[str]] = {}
    for edge in EDGES:
        target = str(edge.target or "[*]")
        for source in edge.sources or ("[*]",):
            if source != target:
                ways.setdefault((str(source), target), []).append(edge.verb)
    lines = [f"    {source} --> {target}: {', '.join(verbs)}" for (source, target), verbs in ways.items()]
    return [], ([line] for line in ["```mermaid", "stateDiagram-v2", *lines, "```"])


def verbs() -> tuple[Row, Iterator[Row]]:
    """Return the verbs of operators on tasks, with the permission of each."""
    from django_dbtaskqueue.operations.verbs import ID_VERBS, QUEUE_VERBS

    rows = []
    for name, verb in {**ID_VERBS, **QUEUE_VERBS}.items():
        inputs = [one.name for one in getattr(verb, "inputs", ())]
        rows.append([code(name), code(verb.permission), ", ".join(map(code, inputs)) or "-", cell(str(verb.effect))])
    return ["Verb", "Permission", "Asks for", "Does"], iter(rows)


KINDS: dict[str, Callable[..., tuple[Row, Iterable[Row]]]] = {
    one.__name__: one
    for one in (
        *(
            about,
            options,
            subcommands,
            suboptions,
            jobs,
            settings,
            errors,
            models,
            hooks,
            signals,
            requests,
            names,
            metrics,
        ),
        *(edges, diagram, verbs),
    )
}
