"""`attnlab list`: what the registries hold. No torch: what is shown was read from the sources."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import registry
from registry import UnknownName
from variants.implementations import usable


def everything() -> dict[str, Any]:
    """The stable JSON of `attnlab list`."""
    found: dict[str, Any] = {
        "variants": [
            {
                "name": entry.name,
                "summary": entry.summary,
                "time": entry.facts.get("time", ""),
                "state": entry.facts.get("state", ""),
                "positions": list(entry.facts.get("hooks", ())),
                "implementations": {name: usable(name, quick=True) or "usable" for name in entry.facts.get("implementations", ())},
            }
            for entry in map(registry.variants.entry, registry.variants.names())
        ],
        "positions": [
            {"name": entry.name, "summary": entry.summary, "hooks": list(entry.facts.get("hooks", ()))}
            for entry in map(registry.positions.entry, registry.positions.names())
        ],
        "tasks": [
            {"name": entry.name, "summary": entry.summary, **entry.facts} for entry in map(registry.tasks.entry, registry.tasks.names())
        ],
    }
    if registry.unavailable:
        found["unavailable"] = dict(registry.unavailable)
    return found


def describe(name: str) -> dict[str, Any]:
    """One entry, with its options; raises UserError with the nearest name of any kind."""
    for names in (registry.variants, registry.positions, registry.tasks):
        if name in names.names():
            return {"kind": names.kind, **names.describe(name)}
    every = [n for names in (registry.variants, registry.positions, registry.tasks) for n in names.names()]
    raise UnknownName(f"nothing is named {name!r}.{registry.nearest(name, every)}")


def show(found: dict[str, Any]) -> None:
    """Three tables and the plug-ins that could not be loaded."""
    console = Console()
    table = _table("variants", "name", "what it computes", "time", "state", "position hooks", "implementations usable here")
    for row in found["variants"]:
        usable_here = [name for name, why in row["implementations"].items() if why == "usable"]
        unusable = [f"{name} ({why})" for name, why in row["implementations"].items() if why != "usable"]
        hooks = ", ".join(["embed", *row["positions"]])
        table.add_row(row["name"], row["summary"], row["time"], row["state"], hooks, Text("\n".join([", ".join(usable_here), *unusable])))
    console.print(table)
    table = _table("positions", "name", "what it does", "hooks")
    for row in found["positions"]:
        table.add_row(row["name"], row["summary"], ", ".join(row["hooks"]) or "none")
    console.print(table)
    table = _table("tasks", "name", "what it asks")
    for row in found["tasks"]:
        table.add_row(row["name"], row["summary"])
    console.print(table)
    for source, reason in found.get("unavailable", {}).items():
        console.print(f"unavailable: {source}: {reason}", markup=False)


def markdown(found: dict[str, Any]) -> str:
    """The same as Markdown, as it stands in README.md."""
    lines = ["| variant | what it computes | time | state | position schemes |", "|---|---|---|---|---|"]
    for row in found["variants"]:
        taken = [scheme["name"] for scheme in found["positions"] if _takes(row["name"], scheme["name"])]
        lines.append(
            f"| `{row['name']}` | {row['summary']} | O({row['time']}) | O({row['state']}) | {' '.join(f'`{name}`' for name in taken)} |"
        )
    for kind in ("positions", "tasks"):
        lines += ["", f"| {kind.removesuffix('s')} | |", "|---|---|", *(f"| `{row['name']}` | {row['summary']} |" for row in found[kind])]
    return "\n".join(lines)


def _takes(variant: str, position: str) -> bool:
    """Whether the facts of both say that they go together."""
    mixer, scheme = registry.variants.entry(variant).facts, registry.positions.entry(position).facts
    if not set(scheme.get("hooks", ())) <= {"embed", *mixer.get("hooks", ())}:
        return False
    # What keeps no key as it was made cannot turn it again once its row is longer.
    again = scheme.get("length_dependent", False) and not mixer.get("keeps_keys", mixer.get("state") != "1")
    return not again and (scheme.get("isometric", True) or not mixer.get("unit_keys", False))


def show_one(described: dict[str, Any]) -> None:
    """A name and its options."""
    console = Console()
    console.print(f"{described['kind']} {described['name']}: {described['summary']}", markup=False)
    console.print(described["source"], markup=False, style="dim")
    table = _table("options", "option", "type", "default", "meaning")
    for option in described["options"]:
        table.add_row(option["name"], option["type"], repr(option["default"]), option["doc"])
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
