"""What became of a run, judged from its directory: what the run said last, corrected by what is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from experiments.runs.claim import RELEASED, holder
from experiments.runs.files import read_json

State = Literal["planned", "running", "finished", "failed", "diverged", "interrupted"]
STATES: tuple[State, ...] = get_args(State)
#: Ways to end without a result.
ENDED: tuple[State, ...] = ("failed", "diverged", "interrupted")

STATUS = "status.json"
RESULT = "result.json"
#: A sweep's plan: {"runs": {run_id: {"overrides"}}, "dropped": [{"overrides", "reason"}]}. A study of single runs has none.
MANIFEST = "study.json"


@dataclass(frozen=True)
class Status:
    """`reason` is one line; `heartbeat`, in seconds since the epoch, is the last sign of life of whoever works or worked on the run."""

    status: State
    reason: str = ""
    heartbeat: float | None = None


def is_finished(directory: Path) -> bool:
    """Whether the run has a result that can be read; nothing else makes it finished."""
    return bool(read_json(directory / RESULT))


def status_of(directory: Path) -> Status:
    """The run's status. A run that says "running" while nobody works on it was interrupted; one that has a result is finished."""
    claim = holder(directory)  # first: a holder that is gone by now has written all it ever will
    if is_finished(directory):
        return Status("finished")
    heartbeat = claim.heartbeat if claim and claim.heartbeat != RELEASED else None
    lost = claim.lost if claim else ""
    if claim and not lost:
        return Status("running", heartbeat=heartbeat)
    said = read_json(directory / STATUS) or {}
    status, reason = said.get("status", "planned"), said.get("reason", "")
    if status in ENDED:
        return Status(status, reason, heartbeat)
    if status == "finished":
        return Status("interrupted", f"{RESULT} is missing or damaged", heartbeat)
    if status == "running" or claim:
        return Status("interrupted", lost if lost != "released" else "stopped without saying why", heartbeat)
    return Status("planned")
