"""Which runs a sweep consists of: the grid of an experiment and of the command line, expanded, checked and named.

A grid is a mapping from a key to its choices. A choice may carry overrides that belong to it alone:

    sweep:
      variant: [full, sliding_window variant.window=8]
      position: [rope, none]
      seed: [0, 1, 2]

A key given on the command line (`seed=0,1`) takes the place of the experiment's choices for it.
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
from registry import UserError


@dataclass(frozen=True)
class Plan:
    """The runs of a study, and the combinations that have no meaning, with the reason."""

    study: str
    directory: Path
    jobs: list[Job]
    dropped: list[Dropped]
    executor: dict[str, Any]


def single(words: Sequence[str]) -> Job:
    """The one run that `words` describe."""
    return _job(words, words)


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
        job = _job([*chosen, *_not_in_grid(overrides, grid)], chosen)
        reason = why_not(job.config, chosen)
        if reason:
            dropped.append((chosen, reason))
        else:
            jobs.setdefault(job.run_id, job)
    study = str(base["study"])
    return Plan(study, Path(base["runs_dir"]) / study, list(jobs.values()), dropped, base["executor"])


def _job(words: Sequence[str], overrides: Sequence[str]) -> Job:
    config = without(resolve(words), "sweep")  # the grid plans a study, and means nothing to a run
    return Job(run_id(config), config, Path(config["runs_dir"]) / config["study"] / run_id(config), tuple(overrides))


def why_not(config: Mapping[str, Any], chosen: Sequence[str]) -> str:
    """Why this combination has no meaning ("" if it has one). Raises UserError where it is a mistake."""
    from experiments.model import on_meta, require_positions
    from variants.contract import NotApplicable

    try:
        task, tests = checked_task(config)
        require_positions(on_meta(config, task.vocab_size), task, tests)
    except NotApplicable as reason:
        return str(reason)
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"{' '.join(chosen) or 'this config'}: {error}") from None
    return ""


def _grid(declared: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, list[tuple[str, ...]]]:
    """Key -> choices, each a tuple of override words: the experiment's keys first, then those of the command line."""
    grid: dict[str, list[tuple[str, ...]]] = {}
    given = {o.key_or_group: o for o in overrides}
    for key, choices in declared.items():
        if not isinstance(choices, list) or not choices:
            raise UserError(f"sweep.{key} must be a list of choices; got {choices!r}")
        if key not in given:
            grid[key] = [tuple(f"{key}={choice}".split()) if isinstance(choice, str) else (f"{key}={_word(choice)}",) for choice in choices]
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


def _word(value: Any) -> str:
    """A YAML value as it would be typed in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(_word(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_word(item)}" for key, item in value.items()) + "}"
    return str(value)
