"""`attnlab check`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

import registry
from registry import UserError
from variants.conformance.run import Outcome, as_json
from variants.conformance.run import check as run_checks

STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def check(name: str, words: Sequence[str], *, fast: bool, report: Callable[[Any], None] | None) -> None:
    """Judge a variant and show each property. Leaves with 1 if one failed."""
    if name not in registry.variants.names() and name in registry.positions.names():
        raise UserError(f"{name!r} is a position scheme; it is checked under a variant: attnlab check full position={name}")
    console = Console(stderr=True)
    options = _options(name, words)
    with console.status(f"checking {name}") as progress:
        outcomes = run_checks(
            name, options=options, fast=fast, on_progress=lambda prop, done, total: progress.update(f"{done}/{total} {prop}")
        )
    report(as_json(name, outcomes)) if report else show(name, outcomes)
    if any(outcome.status == "failed" for outcome in outcomes):
        sys.exit(1)


def show(name: str, outcomes: Sequence[Outcome]) -> None:
    """A row a property."""
    table = Table(
        title=f"{name}: {registry.variants.entry(name).source}", title_justify="left", box=None, pad_edge=False, header_style="bold"
    )
    for column in ("property", "status", "detail"):
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        table.add_row(Text(outcome.property), Text(outcome.status, STYLES[outcome.status]), Text(outcome.detail))
    Console().print(table)
    counts = {status: sum(o.status == status for o in outcomes) for status in STYLES}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))


def _options(name: str, words: Sequence[str]) -> dict[str, Any]:
    """`window=8` as {"window": 8}, read as YAML reads it."""
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"cannot read {word!r}; an option of {name} is written option=value")
        options[key] = yaml.safe_load(value)
    return options
