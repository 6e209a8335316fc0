"""Which runs a sweep consists of: the grid of an experiment and of the command line, expanded, checked and named.

A grid is a mapping from a key to its choices. A choice may carry overrides that belong to it alone:

    sweep:
      variant: [full, sliding_window variant.window=8]
      position: [rope, none]
      seed: [0, 1, 2]

A key given on the command line (`seed=0,1`) takes the place of the experiment's choices for it.

A run that starts from another one says which by overrides of its own config (`parent: [position=rope, trainer.steps=3000]`); that run is
then part of the plan, once for all that start from it, and comes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from experiments.checked import checked_task
from experiments.config import parse, resolve, without
from experiments.runs.identity import run_id
from experiments.sweep.job import Job
from experiments.sweep.study import Dropped
from experiments.words import changed, spell
from registry import UserError

#: Keys that plan a study, and mean nothing to a run.
PLAN_ONLY = ("sweep", "parent", "compare")


@dataclass(frozen=True)
class Plan:
    """The runs of a study, the combinations that have no meaning, with the reason, and how the study is compared."""

    study: str
    directory: Path
    jobs: list[Job]
    dropped: list[Dropped]
    executor: dict[str, Any]
    compare: dict[str, Any]


def single(words: Sequence[str]) -> Job:
    """The one run that `words` describe."""
    return _jobs(words, words)[-1]


def expand(words: Sequence[str]) -> Plan:
    """The plan that `words` describe. Raises UserError for a combination that cannot be built; one without meaning is dropped."""
    overrides = parse(words)
    fixed = [o.input_line for o in overrides if not o.is_sweep_override()]
    base = resolve([str(word) for word in fixed])
    grid = _grid(base["sweep"], overrides)
    jobs: dict[str, Job] = {}
    dropped: list[Dropped] = []
    for choice in itertools.product(*grid.values()):
        chosen = tuple(word for words_of_choice in choice for word in words_of_choice)
        line = _jobs([*chosen, *_not_in_grid(overrides, grid)], chosen)
        reason = next((reason for job in line if (reason := why_not(job.config, job.overrides))), "")
        if not reason:
            _require_same_weights(line)
        if reason:
            dropped.append((chosen, reason))
        else:
            for job in line:
                jobs.setdefault(job.run_id, job)
    study = str(base["study"])
    compare = {key: value for key, value in base["compare"].items() if value is not None}
    return Plan(study, Path(base["runs_dir"]) / study, list(jobs.values()), dropped, base["executor"], compare)


def _jobs(words: Sequence[str], overrides: Sequence[str]) -> list[Job]:
    """The run that `words` describe, behind those that it goes back to."""
    from experiments.start import stored, trained_length

    resolved = resolve(words)
    config, parent = without(resolved, *PLAN_ONLY), resolved["parent"]
    before: list[Job] = []
    if parent:
        if config["start"] is not None:
            raise UserError(f"start={config['start']} and parent={parent} both say what to start from; give one")
        mine = [*parent, *([] if "parent" in {word.partition("=")[0] for word in parent} else ["parent=[]"])]
        before = _jobs(changed(words, mine), changed(overrides, parent))
        config["start"] = before[-1].run_id
        if (config["study"], config["runs_dir"]) != (before[-1].config["study"], before[-1].config["runs_dir"]):
            raise UserError("parent: a run starts from one of its own study; it cannot have another study or runs_dir")
    if config["start"] is not None and config["evaluation"]["unit"] is None:  # test sets are those of the first run's length
        config["evaluation"]["unit"] = trained_length(before[-1].config if before else stored(config))
    identity = run_id(config)
    return [*before, Job(identity, config, Path(config["runs_dir"]) / config["study"] / identity, tuple(overrides))]


def why_not(config: Mapping[str, Any], chosen: Sequence[str]) -> str:
    """Why this combination has no meaning ("" if it has one). Raises UserError where it is a mistake."""
    from experiments.model import on_meta, require_parts, require_positions
    from variants.contract import NotApplicable

    try:
        task, tests = checked_task(config)
        model = on_meta(config, task.vocab_size)
        require_positions(model, task, tests)
        require_parts(model, task, tests, config["trainer"]["context_parallel"])
    except NotApplicable as reason:
        return str(reason)
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"{' '.join(chosen) or 'this config'}: {error}") from None
    return ""


def _require_same_weights(line: Sequence[Job]) -> None:
    """Raises UserError where a run cannot take the weights of the one before it in `line`."""
    from experiments.model import on_meta
    from experiments.start import require_same, require_same_model

    for before, job in itertools.pairwise(line):
        require_same_model(job.config, before.config, job.label)
    models = [on_meta(job.config, checked_task(job.config)[0].vocab_size) for job in line]
    for (_, theirs), (job, mine) in itertools.pairwise(zip(line, models, strict=True)):
        require_same(mine.state_dict(), theirs.state_dict(), job.label)


def _grid(declared: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, list[tuple[str, ...]]]:
    """Key -> choices, each a tuple of override words: the experiment's keys first, then those of the command line."""
    grid: dict[str, list[tuple[str, ...]]] = {}
    given = {o.key_or_group: o for o in overrides}
    for key, choices in declared.items():
        if not isinstance(choices, list) or not choices:
            raise UserError(f"sweep.{key} must be a list of choices; got {choices!r}")
        if key not in given:
            grid[key] = [tuple(f"{key}={choice}".split()) if isinstance(choice, str) else (f"{key}={spell(choice)}",) for choice in choices]
    for key, override in given.items():
        if override.is_sweep_override():
            grid[key] = [(f"{key}={word}",) for word in _choices(override)]
    return grid


def _not_in_grid(overrides: Sequence[Override], grid: Mapping[str, Any]) -> list[str]:
    return [str(o.input_line) for o in overrides if o.key_or_group not in grid]


def _choices(override: Override) -> Iterator[str]:
    try:
        yield from override.sweep_string_iterator()
    except Exception:
        raise UserError(f"cannot sweep over {override.input_line!r}; write key=a,b,c or key=range(0,5)") from None
