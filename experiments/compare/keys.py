"""What sets the runs of a study apart: which settings vary, and how a group of runs is named.

What a registry builds is one key. `variant` stands for the variant's name and those of its options that vary among runs of that name
("sliding_window window=16"), so that an option that only one variant has is no axis of the study; `position` and `task` likewise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.runs.identity import NOT_IDENTITY
from experiments.runs.read import Run
from registry import UserError, nearest

SECTIONS = ("variant", "position", "task")
#: The run whose checkpoint a run starts from. Another seed starts from another one, so that it splits runs only where the seeds do not.
START = "start"
#: What follows from other settings in a study that starts from checkpoints: how these are found, and what is tested. Asked last, or never.
FOUND_BY, LATE = "parent", "evaluation"


class Keys:
    """The settings of some runs. A value is what the config says, None where it says nothing."""

    def __init__(self, runs: Sequence[Run]):
        self._settings = {run.run_id: run.settings for run in runs}
        names = {name: None for settings in self._settings.values() for name in settings}
        for section in SECTIONS:
            labels = self._labels(section, [name for name in names if _section(name) == section and not is_seed(name)])
            for run_id, label in labels.items():
                self._settings[run_id][section] = label
        self.names = [*SECTIONS, *names]
        self._own = [name for name in names if _section(name) not in NOT_IDENTITY and not is_seed(name)]
        others = [name for name in self._own if _section(name) not in (*SECTIONS, START, FOUND_BY)]
        self._candidates = [*SECTIONS, *sorted(others, key=lambda name: _section(name) == LATE)]
        self._seeds = [name for name in names if is_seed(name)]

    def value(self, run: Run, key: str) -> Any:
        """The run's value of a key."""
        return self._settings[run.run_id].get(key)

    def seed(self, run: Run) -> str:
        """All of the run's seeds: what makes it a repetition of another one."""
        return json.dumps([self.value(run, key) for key in self._seeds])

    def checked(self, keys: Iterable[str]) -> list[str]:
        """The keys, each of them known. Raises UserError with the nearest valid one."""
        chosen = list(keys)
        for key in chosen:
            if key not in self.names:
                raise UserError(f"no run of this study has the setting {key!r}.{nearest(key, self.names)}")
        return chosen

    def varying(self, after: Sequence[str] = ()) -> list[str]:
        """The keys besides seeds that split the runs further than `after` does. One that the keys before it decide is left out."""
        keys = list(after)
        for key in self._candidates:
            if not self._decided(key, keys):
                keys.append(key)
        if START in self.names and not self._decided(START, [*keys, *self._seeds]):
            keys.append(START)
        return keys[len(after) :]

    def differing(self) -> list[str]:
        """Every setting, besides seeds, that is not the same in all runs."""
        return [key for key in self._own if not self._decided(key, [])]

    def fits(self, runs: Sequence[Run], conditions: Mapping[str, Any]) -> bool:
        """Whether every run has these values, however they are spelt."""
        found = ((self.value(run, key), wanted) for run in runs for key, wanted in conditions.items())
        return all(value == wanted or spell(value) == spell(wanted) for value, wanted in found)

    def _decided(self, key: str, keys: Sequence[str]) -> bool:
        """Whether runs that agree on `keys` always agree on `key`."""
        seen: dict[str, Any] = {}
        for settings in self._settings.values():
            group = json.dumps([settings.get(k) for k in keys])
            if seen.setdefault(group, settings.get(key)) != settings.get(key):
                return False
        return True

    def _labels(self, section: str, names: Sequence[str]) -> dict[str, str]:
        same: dict[str, list[str]] = {}
        for run_id, settings in self._settings.items():
            if (name := settings.get(f"{section}.name")) is not None:
                same.setdefault(name, []).append(run_id)
        labels = {}
        for name, run_ids in same.items():
            told = [n for n in names if len({json.dumps(self._settings[run_id].get(n)) for run_id in run_ids}) > 1]
            for run_id in run_ids:
                options = (f"{n.removeprefix(section + '.')}={spell(self._settings[run_id].get(n))}" for n in told)
                labels[run_id] = " ".join([name, *options])
        return labels


def same_axis(key: str, others: Iterable[str]) -> bool:
    """Whether a key says the same kind of thing as one of the others: `variant` and `variant.name` do."""
    return _axis(key) in {_axis(other) for other in others}


def is_seed(key: str) -> bool:
    """Whether a setting only chooses random numbers: `seed`, `task.data_seed`."""
    return key.rpartition(".")[2].endswith("seed")


def spell(value: Any) -> str:
    """A setting's value as a person writes it."""
    if isinstance(value, list):
        return f"[{','.join(map(spell, value))}]"
    return value if isinstance(value, str) else "unset" if value is None else json.dumps(value)


def label(by: Mapping[str, Any]) -> str:
    """A group in a few words."""
    return " · ".join(spell(value) if key.removesuffix(".name") in SECTIONS else f"{key}={spell(value)}" for key, value in by.items())


def natural(value: Any) -> tuple[int, Any]:
    """A sort key: unset, then numbers, then words, in which numbers are ordered by their value."""
    if value is None:
        return 0, 0
    if isinstance(value, int | float):
        return 1, value
    return 2, [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", spell(value)))]


def _section(key: str) -> str:
    return key.partition(".")[0]


def _axis(key: str) -> str:
    return _section(key) if _section(key) in SECTIONS else key
