"""`attnlab check`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import registry
from experiments.words import plain_options
from registry import UserError
from variants.conformance.run import Outcome, as_json, left_out, subjects_of
from variants.conformance.run import check as run_checks

STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def check(name: str, words: Sequence[str], *, fast: bool, report: Callable[[Any], None] | None) -> None:
    """Judge a variant and show each property. Leaves with 1 if one failed."""
    if name not in registry.variants.names() and name in registry.positions.names():
        raise UserError(f"{name!r} is a position scheme; it is checked under a variant: attnlab check full position={name}")
    console = Console(stderr=True)
    options = plain_options(name, words)
    torch.set_num_threads(1)  # all tensors are small, and more threads would spend their time waiting for each other
    # What a mixer prints belongs on standard error: on the other there is the document alone.
    with console.status(f"checking {name}") as progress, contextlib.redirect_stdout(sys.stderr):
        outcomes = run_checks(
            name, options=options, fast=fast, on_progress=lambda prop, done, total: progress.update(f"{done}/{total} {prop}")
        )
        not_checked = left_out(name, options=options, fast=fast)
    if report:
        report(as_json(name, outcomes, not_checked))
    else:
        show(name, [subject.label for subject in subjects_of(name, options, fast=fast)], outcomes, not_checked)
    if any(outcome.status == "failed" for outcome in outcomes):
        sys.exit(1)


def show(name: str, forms: Sequence[str], outcomes: Sequence[Outcome], not_checked: Sequence[str]) -> None:
    """A property a line, what was found below it; then the counts, and what was left out."""
    console = Console(highlight=False)
    console.print(Text(f"{name}: {registry.variants.entry(name).source}", "bold"), soft_wrap=True)
    console.print(Text(f"{len(forms)} form{'s' * (len(forms) > 1)}: {'; '.join(forms)}\n"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for outcome in outcomes:
        table.add_row(Text(outcome.status, STYLES[outcome.status]), Text(outcome.property))
        table.add_row("", Text(outcome.detail, "" if outcome.status == "failed" else "dim"))
    console.print(table)
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in STYLES}
    console.print("", ", ".join(f"{count} {status}" for status, count in counts.items()), "", "Not checked:", sep="\n")
    for phrase in not_checked:
        console.print(Padding(Text(phrase), (0, 0, 0, 2)))
