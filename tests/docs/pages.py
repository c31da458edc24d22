"""Executes a page of documentation, block by block, as a reader would.

A page works in a folder of its own. Once there is a ``manage.py`` in it (which some pages make), the page is about that
project: Python is typed into its shell. Any other page is about this repository: Python runs here, on a PostgreSQL
database of the page's own. ``title="desk/tasks.py"`` names a file of the folder to write to.

Each language needs an executor and each program on a command line, too. What has none is a failure, never skipped.
"""

import configparser
import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from django.core.management import ManagementUtility
from packaging.requirements import Requirement

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.contrib.embedded import free_port as free_port  # other tests take it from here
from django_dbtaskqueue.management.commands.runtaskpoller import Command
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.stranger.environments import execute
from tests.support import in_time, sql

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
FROM_TESTS = re.compile(r"(?<=<!-- from the tests -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)
FROM_CODE = runpy.run_path(str(REPOSITORY / "docs/_ext/from_code.py"))  # the tables that the site makes


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str
    line: int


def shown(page: Path) -> str:
    """Return the text of a page as the site shows it."""
    return str(FROM_CODE["fill"](page.read_text()))


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        language, _, rest = found[1].partition(" ")
        title = TITLE.search(rest)
        yield Block(language, title[1] if title else None, found[2], text[: found.start(2)].count("\n") + 1)


class Typist:
    """Types blocks in one folder. There is a method for each language, and each program on a command line needs one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, ""

    def type(self, page: Path, block: Block) -> None:
        try:
            typed = getattr(self, f"type_{block.language}", None)
            assert typed, f"no executor for a block of {block.language!r}"
            in_time(lambda: typed(block))
        except Exception as error:
            error.add_note(f"{page.name}, line {block.line}: {block.language} block\n{block.text}")
            raise

    def write(self, block: Block) -> str:
        """Add a block to the end of the file that it names; return all that is in there."""
        file = self.folder / str(block.title)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as end:
            end.write(f"\n{block.text}")
        return file.read_text()

    def type_text(self, block: Block) -> None:
        """Compare with what the block before printed; ``...`` stands for anything."""
        same = doctest.OutputChecker().check_output(block.text, self.output.rstrip() + "\n", doctest.ELLIPSIS)
        assert same, f"It printed:\n{self.output}"

    def type_bash(self, block: Block) -> None:
        self.output = "".join([self.command(words) for words in commands(block.text)])

    def command(self, words: list[str]) -> str:
        raise AssertionError(f"There is no executor for the program {words[0]!r}.")


class Reader(Typist):
    def __init__(self, page: Path, folder: Path, database: ProcessDatabase, settings: Any) -> None:
        super().__init__(folder)
        self.page, self.database, self.settings = page, database, settings
        self.module = ModuleType(f"page_{page.stem.replace('-', '_')}")
        self.exported: dict[str, str] = {}

    def read(self) -> None:
        for block in blocks(self.page):
            self.type(self.page, block)

    @property
    def in_project(self) -> bool:
        return (self.folder / "manage.py").exists()

    # -- languages ---------------------------------------------------------------------------------------------------
    def type_yaml(self, block: Block) -> None:
        yaml.safe_load(block.text)

    def type_python(self, block: Block) -> None:
        """Write a file of the project, type into its shell, or run here."""
        if block.title is not None:
            code = compile(self.write(block), block.title, "exec")
            if block.title == "settings.py":  # of the reader's own project
                exec(code, vars(self.module))  # noqa: S102 -- the documentation is our own
                self.apply_settings()
        elif self.in_project:
            self.output = self.run([sys.executable, "manage.py", "shell", "--verbosity", "0", "--command", block.text])
        else:
            code = compile("\n" * (block.line - 1) + block.text, str(self.page), "exec")
            sys.modules[self.module.__name__] = self.module  # where classes look for their own
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(code, vars(self.module))  # noqa: S102 -- the documentation is our own
            self.output = said.getvalue()
            self.apply_settings()

    def apply_settings(self) -> None:
        """Put DBTASKQUEUE, where a block sets it, in force for the rest of the page."""
        namespace = vars(self.module)
        if "DBTASKQUEUE" in namespace:
            self.settings.DBTASKQUEUE = namespace.pop("DBTASKQUEUE")
            for queue in conf.settings_queues():
                conf.default_settings(queue)

    def type_sql(self, block: Block) -> None:
        self.output = "\n".join(" | ".join(map(str, row)) for row in sql(block.text))

    def type_ini(self, block: Block) -> None:
        """Parse; a systemd unit's ExecStart must be a command line that we accept."""
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(block.text)
        assert parser.sections()
        for name, value in [item for section in parser.sections() for item in parser[section].items()]:
            assert value, f"{name} is empty"
            if name == "ExecStart":  # its options are those of our parser
                words = shlex.split(value)
                options = words[words.index("runtaskpoller") + 1 :]
                Command().create_parser("manage.py", "runtaskpoller").parse_args(options)

    def type_toml(self, block: Block) -> None:
        assert set(tomllib.loads(block.text)) == {"queues"}, "Only settings files are in TOML here."
        file = self.folder / f"settings-{block.line}.toml"
        file.write_text(block.text)
        self.settings.DBTASKQUEUE = {"FILE": str(file)}
        assert conf.settings().queues

    # -- command lines -----------------------------------------------------------------------------------------------
    def command(self, words: list[str]) -> str:
        program, rest = words[0], words[1:]
        if program == "pip":
            return self.pip(rest)
        if program == "export":
            self.exported |= [rest[0].split("=", 1)]
            return ""
        if program == "python" and rest[0] == "manage.py":
            return self.manage(rest[1:])
        modules = {"django-admin": ["django"], "pytest": ["pytest", "-p", "no:cacheprovider", "-W", "error"]}
        if program in modules:
            return self.run([sys.executable, "-m", *modules[program], *rest])
        return super().command(words)

    def pip(self, words: list[str]) -> str:
        """Check that it installs this project, with extras that exist."""
        assert words[0] == "install"
        for requirement in map(Requirement, words[1:]):
            assert requirement.name == PROJECT["name"], f"pip install {requirement}: that is not this project"
            assert requirement.extras <= set(PROJECT["optional-dependencies"]), f"{requirement}: no such extra"
        return ""

    def manage(self, words: list[str]) -> str:
        """Run a management command; those of this repository run in this process, but for pollers."""
        name = words[0]
        if name == "runtaskpipeline" and any(word.startswith("spark://") for word in words):
            words = [*words, "--explain"]  # there is no such cluster here; tests/pipeline/test_cluster.py has one
        if name == "runtaskpoller" or self.in_project:
            return self.run([sys.executable, "manage.py" if self.in_project else str(REPOSITORY / "manage.py"), *words])
        said = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                ManagementUtility(["manage.py", *words]).execute()
            except SystemExit as end:
                assert not end.code, f"manage.py {shlex.join(words)}: exit {end.code}\n{said.getvalue()}"
        return said.getvalue()

    @property
    def env(self) -> dict[str, str]:
        env = self.database.env if not self.in_project else {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        if self.in_project:
            env.pop("DJANGO_SETTINGS_MODULE", None)
        return {**env, "PYTHONUNBUFFERED": "1", **self.exported}

    def run(self, command: list[str]) -> str:
        return execute(command, env=self.env, cwd=self.folder)


def commands(text: str) -> Iterator[list[str]]:
    parts = re.split("\n| && ", text.replace("\\\n", " "))
    yield from filter(None, (shlex.split(part, comments=True) for part in parts))
