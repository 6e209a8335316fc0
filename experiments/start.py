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


def stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the run to start from. Raises UserError if there is none."""
    found = directory(config)
    return (read_json(found / "config.json") if found else None) or {}


def load_weights(model: Decoder, config: Mapping[str, Any]) -> None:
    """Give `model` the weights of the run it starts from, if it starts from one. Raises UserError where they do not fit."""
    found = directory(config)
    if found is None:
        return
    require_same_model(config, read_json(found / "config.json") or {}, f"start={config['start']}")
    path = _trained(found) / "checkpoints" / LAST
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    except Exception as error:  # torch raises half a dozen kinds, each with a long story
        raise UserError(f"{path} cannot be read ({type(error).__name__})") from None
    weights = {name.removeprefix("model."): value for name, value in stored.items()}
    require_same(model.state_dict(), weights, f"start={config['start']}")
    model.load_state_dict(weights)


def trained_length(config: Mapping[str, Any]) -> int:
    """The length in tokens that multiples count: what the run, or the one it goes back to, was trained on."""
    return int(config["evaluation"]["unit"] or config["task"]["length"])


def require_same_model(mine: Mapping[str, Any], theirs: Mapping[str, Any], said: str) -> None:
    """Raises UserError for settings by which the same weights would be another model: heads, say, that their shapes do not tell."""
    for key, value in theirs.get("model", {}).items():
        if key != "dropout" and mine["model"].get(key) != value:
            raise UserError(f"{said}: the run to start from has model.{key}={value}, here it is {mine['model'].get(key)}")


def _trained(found: Path) -> Path:
    """The run whose weights a run has: its own, or of the one it goes back to if it was only tested."""
    config = read_json(found / "config.json") or {}
    only_tested = config.get("start") and not config["trainer"]["steps"]
    return _trained(found.parent / config["start"]) if only_tested else found


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

    {"needed", "reached", "length"}, or None where nothing is asked for. `metrics` are the run's own. Raises UserError where it is unknown.
    """
    needed = config["evaluation"]["gate"]
    if needed is None:
        return None
    found = directory(config)
    first = found
    while found is not None:
        first, metrics = found, (read_json(found / RESULT) or {}).get("metrics", {})
        earlier = (read_json(found / "config.json") or {}).get("start")
        found = found.parent / earlier if earlier else None
    length = trained_length(config)
    reached = metrics.get(f"test/length/{length}/accuracy")
    if reached is None:
        raise UserError(f"evaluation.gate asks what {first} reaches at {length} tokens, where it was not tested; gate=null leaves that out")
    return {"needed": needed, "reached": reached, "length": length}
