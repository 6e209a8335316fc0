"""What the models of a study chose, as the page shows it: a map for each finished run that has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.compare.groups import Group
from experiments.compare.keys import natural, spell
from experiments.runs import read

LAYER = ("layer", "part", "block", "keys")


def selections(study_dir: Path | str, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The maps by group and seed; a run that has none, or a damaged one, is passed over."""
    found = []
    for i, group in enumerate(groups):
        for run in sorted(group.finished, key=lambda run: natural(run.config.get("seed"))):
            about = {"run_id": run.run_id, "group": i, "seed": spell(run.config.get("seed"))}
            if (told := _whole(read.selection(study_dir, run.run_id) or {})) is not None:
                found.append({**about, **told})
    return found


def _whole(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a file tells, every number a number; None for one that tells less."""
    try:
        return {
            **{name: int(told[name]) for name in ("length", "index", "queries")},
            "scored": [int(place) for place in told["scored"]],
            "answers": [None if place is None else int(place) for place in told["answers"]],
            "layers": [
                {**{name: int(layer[name]) for name in LAYER}, "percent": [[int(cell) for cell in row] for row in layer["percent"]]}
                for layer in told["layers"]
            ],
        }
    except (KeyError, TypeError, ValueError):
        return None
