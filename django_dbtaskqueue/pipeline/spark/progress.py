"""Progress on standard error: a bar on a terminal where rich or tqdm is installed, else a line for each stage."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, TextIO

from django_dbtaskqueue.pipeline.jobs import Progress

STEP = 10  # percent between two plain lines of one stage


class Lines:
    """Plain lines: one when a stage begins, and one for each tenth of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: tuple[str, int] = ("", -1)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Write a line, unless the last one said the same."""
        tenth = done * 100 // total // STEP if total else 0
        if (stage, tenth) != self._last:
            self._last = (stage, tenth)
            amount = f": {done:,} of {total:,}" if total else f": {done:,}" if done else ""
            self._stream.write(f"{stage}{amount}\n")
            self._stream.flush()

    def close(self) -> None:
        """End."""


class RichBar:
    """A bar drawn by rich."""

    def __init__(self, stream: TextIO) -> None:
        rich: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console").Console(file=stream)
        self._bar = rich.Progress(
            rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(), console=console, transient=True,
        )  # fmt: skip
        self._bar.start()
        self._task = self._bar.add_task("", total=None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Draw."""
        self._bar.update(self._task, description=stage, completed=done, total=total or None)

    def close(self) -> None:
        """Wipe the bar out."""
        self._bar.stop()


class TqdmBar:
    """A bar drawn by tqdm, one for each stage."""

    def __init__(self, stream: TextIO) -> None:
        self._tqdm: Callable[..., Any] = importlib.import_module("tqdm").tqdm
        self._stream = stream
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Draw."""
        if stage != self._stage or self._bar is None:
            self.close()
            self._stage, self._bar = stage, self._tqdm(desc=stage, total=total or None, file=self._stream, leave=False)
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Wipe the bar out."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def shown_on(stream: TextIO, *, quiet: bool = False) -> Iterator[Progress]:
    """Show progress on ``stream`` meanwhile; nothing when ``quiet``."""
    shower: Any = _Nothing() if quiet else _best(stream)
    try:
        yield shower
    finally:
        shower.close()


class _Nothing:
    def __call__(self, stage: str, done: int, total: int) -> None: ...

    def close(self) -> None: ...


def _best(stream: TextIO) -> Lines | RichBar | TqdmBar:
    if stream.isatty():
        for name, bar in (("rich.progress", RichBar), ("tqdm", TqdmBar)):
            if _importable(name):
                return bar(stream)
    return Lines(stream)


def _importable(name: str) -> ModuleType | None:
    with suppress(ImportError):
        return importlib.import_module(name)
    return None
