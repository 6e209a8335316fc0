"""What a person sees of a sweep: a bar for it and one for each active run; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from experiments.sweep.job import Event, Job, Outcome, Progress


class Lines:
    """A line when a run begins and when it ends: for logs and pipes."""

    def __init__(self, console: Console, total: int, done: int = 0):
        self._console, self._total, self._done = console, total, done

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def note(self, text: str) -> None:
        self._print(text)

    def event(self, event: Event) -> None:
        if isinstance(event, Outcome) and event.status != "running":
            self._done += 1
            self._print(f"[{self._done}/{self._total}] {event.job.label}: {said(event)}")
        elif isinstance(event, Progress) and event.total == 0:
            self._print(f"{event.job.label}: {event.text}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Live:
    """Moving bars: for a terminal."""

    def __init__(self, console: Console, total: int, done: int = 0):
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
        )
        self._sweep = self._bars.add_task("[bold]sweep", total=total, completed=done, text="")
        self._runs: dict[str, TaskID] = {}

    def __enter__(self) -> Live:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)

    def event(self, event: Event) -> None:
        run = event.job.run_id
        if isinstance(event, Progress):
            if run not in self._runs:
                self._runs[run] = self._bars.add_task(escape(event.job.label), total=None, text="")
            self._bars.update(self._runs[run], completed=event.step, total=event.total or None, text=escape(event.text))
            return
        if run in self._runs:
            self._bars.remove_task(self._runs.pop(run))
        if event.status != "running":
            self._bars.advance(self._sweep)
        if event.status not in ("finished", "running"):
            self.note(f"{event.job.label}: {said(event)}")


#: Where a sweep says what happens: `note` takes a sentence about it, `event` what a run did.
Display = Lines | Live


def display(total: int, done: int, console: Console | None = None) -> Display:
    """What suits the console: standard error unless given, so that standard output stays free for results."""
    console = console or Console(stderr=True)
    return Live(console, total, done) if console.is_terminal else Lines(console, total, done)


def said(outcome: Outcome) -> str:
    """An outcome in words."""
    return f"{outcome.status} ({outcome.reason})" if outcome.reason else outcome.status


def table(outcomes: Sequence[Outcome]) -> str:
    """A row a run: identifier, status, overrides, reason, log. Not wrapped, so that a path can be copied."""
    rows = [("run", "status", "overrides", "reason", "log"), *(_row(outcome.job, outcome) for outcome in outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(job: Job, outcome: Outcome) -> tuple[str, str, str, str, str]:
    return job.run_id, outcome.status, " ".join(job.overrides), outcome.reason, str(job.log)
