"""What a schema cannot say: settings that are of the right type and still cannot be trained or tested."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import registry
from experiments.tasks.contract import Evaluation, Task
from registry import UserError

#: Names of studies: no separators, no dot at the front.
FOLDER = re.compile(r"\w[\w .+-]*")
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "trainer": {"precision": ("fp32", "bf16"), "device": ("cpu", "cuda")},
    "search": {"objective": ("repeated", "mean", "needle"), "form": ("free", "critical")},
}
AT_LEAST: dict[str, dict[str, float]] = {
    "model": {"dim": 1, "layers": 1, "heads": 1, "mlp_ratio": 0, "dropout": 0},
    "optimizer": {"lr": 0, "weight_decay": 0, "warmup_steps": 0, "final_lr_ratio": 0},
    "trainer": {
        **{"steps": 0, "batch_size": 1, "clip_norm": 0, "context_parallel": 1},
        **{"log_every": 1, "validate_every": 1, "validation_sequences": 1, "checkpoint_every": 1},
    },
    "evaluation": {"sequences": 1, "batch_tokens": 1},
    "search": {"evaluations": 0, "sequences": 1, "population": 1, "mutations": 0, "crossovers": 0, "parents": 1, "seed": 0},
    "executor": {"processes": 1, "threads": 1},
}


def checked_task(config: Mapping[str, Any]) -> tuple[Task, list[Evaluation]]:
    """The task of a config and its test sets, every one of which has been asked for a sequence. Raises UserError for what cannot be."""
    check_settings(config)
    try:
        task: Task = registry.tasks.resolve(config["task"])
        tests = task.evaluations(tuple(config["evaluation"]["multiples"]), config["evaluation"]["unit"])
        task.batch("train", task.length, 0, 1)
        for test in tests:
            task.batch("test", test.length, 0, 1, **test.difficulty)
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from None
    return task, tests


def check_settings(config: Mapping[str, Any]) -> None:
    """Raises UserError for a value out of range, naming its key."""
    for group, keys in CHOICES.items():
        for key, valid in keys.items():
            if config[group][key] not in valid:
                raise UserError(f"{group}.{key} cannot be {config[group][key]!r}.{registry.nearest(config[group][key], valid)}")
    for group, least in AT_LEAST.items():
        for key, bound in least.items():
            if config[group][key] < bound:
                raise UserError(f"{group}.{key} must be at least {bound}; got {config[group][key]}")
    if not FOLDER.fullmatch(str(config["study"])) or not config["runs_dir"]:
        raise UserError(f"study={config['study']!r} and runs_dir={config['runs_dir']!r}: a study is the name of one folder in runs_dir")
    if not 0 <= config["seed"] < 2**63:
        raise UserError(f"seed must lie between 0 and 2^63 - 1; got {config['seed']}")
    multiples, betas = config["evaluation"]["multiples"], config["optimizer"]["betas"]
    if not multiples or min(multiples) < 1:
        raise UserError(f"evaluation.multiples must be whole numbers from 1, one at least; got {multiples}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"optimizer.betas must be two numbers from 0, below 1; got {betas}")
    if config["model"]["dropout"] >= 1:
        raise UserError(f"model.dropout must be below 1; got {config['model']['dropout']}")
    _check_unset(config)
    _check_start(config)


def _check_unset(config: Mapping[str, Any]) -> None:
    """Settings that may be null."""
    stop_at, gate, unit = config["trainer"]["stop_at"], config["evaluation"]["gate"], config["evaluation"]["unit"]
    if stop_at is not None and not 0 <= stop_at <= 1:
        raise UserError(f"trainer.stop_at must be an accuracy from 0 to 1, or null to train all steps; got {stop_at}")
    if gate is not None and not 0 <= gate <= 1:
        raise UserError(f"evaluation.gate must be an accuracy from 0 to 1, or null for none; got {gate}")
    if gate is not None and 1 not in config["evaluation"]["multiples"]:
        raise UserError("evaluation.gate is judged at the trained length, so that evaluation.multiples must hold 1")
    if unit is not None and unit < 1:
        raise UserError(f"evaluation.unit must be a number of tokens, or null for task.length; got {unit}")


def _check_start(config: Mapping[str, Any]) -> None:
    """Settings that mean something only where another run is started from. Raises NotApplicable for a scheme that cannot be trained."""
    afresh, search, position = config["start"] is None, config["search"], config["position"]["name"]
    if config["trainer"]["steps"] and "relate" in registry.positions.get(position).hooks:
        from variants.contract import NotApplicable

        raise NotApplicable(
            f"position {position} maps the distances of a model that was trained with rope, and is for its evaluation alone: "
            "trainer.steps=0, and start= that model's run"
        )
    if not config["trainer"]["steps"] and afresh:
        raise UserError("trainer.steps=0 trains nothing; a run that is only tested needs start=, the run whose weights it takes")
    if search["evaluations"] and (position != "longrope" or afresh):
        raise UserError("search.evaluations asks for LongRoPE's factors; it needs position=longrope, and start=, a trained rotary run")
    if search["evaluations"] and (not search["unscaled"] or min(search["unscaled"]) < 0):
        raise UserError(f"search.unscaled must be numbers of tokens, [0] for none; got {search['unscaled']}")
    if search["evaluations"] and len({*search["unscaled"]}) < len(search["unscaled"]):
        raise UserError(f"search.unscaled needs different numbers; got {search['unscaled']}")
    if search["evaluations"] and not search["mutations"] + search["crossovers"]:
        raise UserError("search.mutations and search.crossovers cannot both be 0: a generation needs children")
