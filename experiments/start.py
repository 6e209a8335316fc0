"""Starting from another run: its weights, and what it had reached.

start: <run_id>        of the same study; its last checkpoint gives the weights, whatever position scheme they are used with
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.model import Decoder
from experiments.runs.files import read_json
from experiments.runs.status import RESULT, is_finished
from experiments.runs.write import LAST
from registry import UserError


def directory(config: Mapping[str, Any]) -> Path | None:
    """The directory of the run to start from. Raises UserError if it is not finished, or no name of a run."""
    if config["start"] is None:
        return None
    study = Path(config["runs_dir"]) / config["study"]
    found = study / str(config["start"])
    if found.parent != study or not is_finished(found):
        raise UserError(f"start={config['start']}: no finished run of that name in {study}; `attnlab status {study}` lists them")
    return found


def load_weights(model: Decoder, config: Mapping[str, Any]) -> None:
    """Give `model` the weights of the run it starts from, if it starts from one. Raises UserError where they do not fit."""
    found = directory(config)
    if found is None:
        return
    path = found / "checkpoints" / LAST
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    except Exception as error:  # torch raises half a dozen kinds, each with a long story
        raise UserError(f"{path} cannot be read ({type(error).__name__})") from None
    weights = {name.removeprefix("model."): value for name, value in stored.items()}
    require_same(model.state_dict(), weights, f"start={config['start']}")
    model.load_state_dict(weights)


def require_same(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], said: str) -> None:
    """Raises UserError, beginning with what was `said`, unless both have the same weights by name and shape."""
    for name in sorted({*mine, *theirs}):
        own, found = (tuple(side[name].shape) if name in side else None for side in (mine, theirs))
        if own != found:
            raise UserError(
                f"{said}: the run to start from has another model: its weight {name} is {found or 'absent'}, here it is {own or 'absent'}; "
                "variant, model and task must be those of that run"
            )


def gate(config: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """What the run, or the first of those it goes back to, reaches at the trained length, beside what the study asks for.

    {"needed", "reached", "length"}, or None where nothing is asked for. `metrics` are the run's own.
    """
    needed = config["evaluation"]["gate"]
    if needed is None:
        return None
    found = directory(config)
    while found is not None:
        parent = read_json(found / "config.json") or {}
        metrics = (read_json(found / RESULT) or {}).get("metrics", {})
        earlier = parent.get("start")
        found = found.parent / earlier if earlier else None
    length = config["evaluation"]["unit"] or config["task"]["length"]
    return {"needed": needed, "reached": metrics.get(f"test/length/{length}/accuracy"), "length": length}
