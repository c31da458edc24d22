"""A newcomer, who reads a page from top to bottom and types each block where the text says."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from django_dbtaskqueue.contrib.embedded import free_port
from tests.docs.pages import Block, Typist, blocks
from tests.forks import program
from tests.stranger.environments import execute

VISIT = Path(__file__).with_name("visit.py")
READY = {"runtaskpoller": "Queues: ", "runserver": "Quit the server"}


class Newcomer(Typist):
    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        super().__init__(folder)
        self.env = env
        self.leaves_out = ""  # a part of the blocks that are not for this reader
        self.writes = ("", "")  # what this reader writes otherwise, as the text says
        self.before: dict[str, Callable[[], None]] = {}  # what to look at before a command is typed
        self.while_running: dict[str, Callable[[str], None]] = {}  # and while a server runs, given its address

    def read(self, page: Path, *, after: str = "", until: str = "") -> None:
        lines = page.read_text().splitlines()
        first = lines.index(after) if after else 0
        last = lines.index(until) if until else len(lines)
        for block in blocks(page):
            if first < block.line <= last and not (self.leaves_out and self.leaves_out in block.text):
                self.type(page, replace(block, text=block.text.replace(*self.writes)) if self.writes[0] else block)

    def type_python(self, block: Block) -> None:
        """Add to the file that the block names, or type into the project's shell."""
        if block.title is None:
            self.output = self.run(["python", "manage.py", "shell", "--verbosity", "0", "--command", block.text])
        else:
            self.write(block)

    def command(self, words: list[str]) -> str:
        """Run a command line as it stands; what has no end is stopped with Ctrl-C once it is ready."""
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.env[name] = value
            return ""
        name = words[2] if words[:2] == ["python", "manage.py"] else ""
        if step := self.before.pop(name, None):
            step()
        if name in READY and not {"--drain", "--once"}.intersection(words):
            return self.run_until_ready(words, READY[name])
        return self.run(words)

    def run(self, words: list[str]) -> str:
        """Run a program to its end; a warning is an error."""
        return execute(words, env=self._env(words), cwd=self.folder)

    def run_until_ready(self, words: list[str], ready: str) -> str:
        """Run a program until it says that it is ready, look at it, and stop it with Ctrl-C; it must end well."""
        address = f"127.0.0.1:{free_port()}"
        if "runserver" in words:
            words = [*words, "--noreload", address]
        with program(words, self._env(words), self.folder) as running:
            running.until_logged(ready)
            if look := self.while_running.get(words[2]):
                look(f"http://{address}")
            running.signal(signal.SIGINT)
            return running.ended()

    def visit(self, stage: str) -> None:
        execute(["python", str(VISIT), stage], env=self._env(["python"]), cwd=self.folder)

    def _env(self, words: list[str]) -> dict[str, str]:
        return {**self.env, "PYTHONWARNINGS": "error"} if words[0] in ("python", "django-admin") else self.env
