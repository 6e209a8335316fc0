"""What a sweep hands to an executor, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs.status import State

#: Where the function is that carries out one run: (config, on_progress) -> result.
TARGET = "experiments.train:run_job"


@dataclass(frozen=True)
class Job:
    """One run to carry out. `overrides` are the words that tell it from its neighbours."""

    run_id: str
    config: dict[str, Any]
    directory: Path
    overrides: Sequence[str] = ()

    @property
    def label(self) -> str:
        """How a person recognises the run."""
        return " ".join(self.overrides) or self.run_id

    @property
    def log(self) -> Path:
        """What the run printed, all attempts in a row."""
        return self.directory / "log.txt"


@dataclass(frozen=True)
class Outcome:
    """What became of a job. "running" means that another sweep works on it; "planned", that it is submitted."""

    job: Job
    status: State
    reason: str = ""


@dataclass(frozen=True)
class Progress:
    """How far a job is: `step` of `total`, and a few words on what it does."""

    job: Job
    step: int
    total: int
    text: str


Event = Progress | Outcome
OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """An event nobody waits for."""
