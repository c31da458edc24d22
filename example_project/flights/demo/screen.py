"""What the demo shows: bars and colours on a terminal, plain lines anywhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from example_project.flights.demo.figures import Figures

Update = Callable[[int], None]
SIGN_OF_LIFE_S = 10.0  # between the lines of a step that lasts


class Screen:
    """Standard output, as the user sees it."""

    def __init__(self, *, no_color: bool = False) -> None:
        self.console = Console(no_color=no_color or None, highlight=False)

    def say(self, name: str, what: object) -> None:
        """Print a named fact."""
        self.console.print(f"[bold]{name:<10}[/] {what}", soft_wrap=True)

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """Say what is done now, before it is done. While it lasts there is a spinner, or a line now and then."""
        if self.console.is_terminal:
            with self.console.status(f"[bold]{name:<10}[/] {what}"):
                yield
            return
        self.say(name, f"{what} …")
        ended = threading.Event()
        threading.Thread(target=self._tell_time, args=(name, what, ended), daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _tell_time(self, name: str, what: str, ended: threading.Event) -> None:
        start = time.monotonic()
        while not ended.wait(SIGN_OF_LIFE_S):
            self.say(name, f"{what} … {time.monotonic() - start:.0f} s")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Update]:
        """Show how far a step is; the value is a function that takes how many are done."""
        if self.console.is_terminal:
            columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=self.console) as bars:
                bar = bars.add_task(title, total=total)
                yield lambda done: bars.update(bar, completed=done)
        else:
            yield self._lines(title, total)

    def _lines(self, title: str, total: int) -> Update:
        last = (time.monotonic(), -1)

        def update(done: int) -> None:
            nonlocal last
            if done != last[1] and (done >= total or time.monotonic() - last[0] >= 1):
                last = (time.monotonic(), done)
                self.say(title, f"{done:,} of {total:,}")

        return update

    def table(self, figures: Figures) -> None:
        """Print the result."""
        table = Table(title="What happened to the claims", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column(style="dim")
        for row in rows(figures):
            table.add_row(*row)
        self.console.print()
        self.console.print(table)
        self.say("Balance", balance(figures))


def rows(figures: Figures) -> Iterator[tuple[str, str, str]]:
    """Yield the table: name, figure, what it means."""
    status, run = figures.by_status, figures.run
    yield "enqueued", f"{figures.enqueued:,}", "committed together with their filings"
    yield "rolled back", f"{run.rolled_back:,}", f"and therefore absent: {run.rolled_back_present:,} in the queue"
    yield "completed", f"{status['COMPLETED']:,}", "decided: compensation due, or not"
    yield "retried", f"{run.retried:,}", "arrival not on record at the first attempt"
    yield "error", f"{status['ERROR']:,}", "an operator has to complete the record"
    yield "poison", f"{status['POISON']:,}", "no aircraft was ever assigned: undecidable"
    yield "failed attempts", f"{figures.attempts_failed:,}", "each with its traceback"
    seconds = f"in {run.drain_seconds:.1f} s, after {run.enqueue_seconds:.1f} s of enqueueing"
    yield "tasks per second", f"{figures.tasks_per_second:,.0f}", seconds
    for name, wait in run.wait_ms.items():
        yield f"wait {name}", "-" if wait is None else f"{wait:,.0f} ms", "from enqueue to start"


def balance(figures: Figures) -> str:
    """Return the conservation check in words."""
    places = {name: getattr(figures, name) for name in ("hot", "history", "archived", "deleted")}
    parts, total = " + ".join(f"{count:,} {name}" for name, count in places.items()), sum(places.values())
    if figures.conservation_ok:
        return f"{parts} = {total:,} enqueued. Nothing is lost, nothing is double."
    return f"{parts} = {total:,}, but {figures.enqueued:,} were enqueued: {abs(total - figures.enqueued):,} off."
