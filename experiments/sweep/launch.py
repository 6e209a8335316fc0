"""Carrying out a study: only what is missing, shared with whoever else works on it, and an honest account at the end.

A run with a valid result is never touched. Failed and interrupted runs are carried out when the sweep is started again; a diverged one is
an outcome of the experiment, and is carried out again only on request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs.status import status_of
from experiments.sweep import progress
from experiments.sweep.executors import find
from experiments.sweep.job import TARGET, Job, Outcome
from experiments.sweep.study import Dropped, record_plan

#: How often to look at runs that another sweep works on.
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Report:
    """What became of every run of the plan."""

    outcomes: list[Outcome]

    def having(self, *statuses: str) -> list[Outcome]:
        """The outcomes with one of these statuses."""
        return [outcome for outcome in self.outcomes if outcome.status in statuses]

    @property
    def failed(self) -> list[Outcome]:
        """The runs that should have a result and have none."""
        return self.having("failed", "interrupted")

    def __str__(self) -> str:
        counts = {status: len(self.having(status)) for status in ("finished", "planned", "diverged", "failed", "interrupted")}
        summary = f"{len(self.outcomes)} runs: " + ", ".join(f"{n} {status}" for status, n in counts.items() if n or status == "finished")
        unfinished = self.having("diverged", "failed", "interrupted")
        return f"{summary}\n{progress.table(unfinished)}" if unfinished else summary


def sweep(
    directory: Path,
    jobs: Sequence[Job],
    *,
    dropped: Sequence[Dropped] = (),
    compare: Mapping[str, Any] | None = None,
    executor: Mapping[str, Any] | None = None,
    retry_diverged: bool = False,
    target: str = TARGET,
) -> Report:
    """Carry out the jobs of the study in `directory` that are missing; the report of all of them.

    `compare` is how the study is compared by default; `executor` is {"name": ..., options}; `target` is the function that carries out one
    run. Raises UserError for an unknown executor and CannotWrite; KeyboardInterrupt once the active runs have ended.
    """
    chosen = dict(executor or {"name": "local"})
    carry_out = find(chosen.pop("name"))
    change = record_plan(directory, jobs, dropped, compare or {})
    outcomes = {job.run_id: _present(job, retry_diverged) for job in jobs}
    pending = [job for job in jobs if outcomes[job.run_id] is None]
    settled = len(jobs) - len(pending)
    with progress.display(len(jobs), settled) as display:
        for overrides, reason in dropped:
            display.note(f"not applicable: {' '.join(overrides)}: {reason}")
        if change:
            display.note(change)
        display.note(_announcement([o for o in outcomes.values() if o is not None], len(pending)))
        while pending:
            now, later = _parents_first(pending)
            done = carry_out(now, target=target, on_event=display.event, **chosen)
            outcomes.update({outcome.job.run_id: outcome for outcome in done})
            left = _left_by_others([outcome.job for outcome in done if outcome.status == "running"], outcomes, display)
            pending = [*left, *later]
    return Report([outcome for outcome in outcomes.values() if outcome is not None])


def _parents_first(jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
    """The jobs that can begin, and those that start from one of the others."""
    unfinished = {job.run_id for job in jobs}
    waiting = {job.run_id for job in jobs if job.config.get("start") in unfinished}
    return [job for job in jobs if job.run_id not in waiting], [job for job in jobs if job.run_id in waiting]


def _present(job: Job, retry_diverged: bool) -> Outcome | None:
    """The outcome that a job has already; None if it is to be carried out."""
    status = status_of(job.directory)
    if status.status == "finished" or (status.status == "diverged" and not retry_diverged):
        return Outcome(job, status.status, status.reason)
    return None


def _announcement(present: Sequence[Outcome], missing: int) -> str:
    diverged = sum(outcome.status == "diverged" for outcome in present)
    kept = f", {diverged} diverged (kept; --retry diverged runs them again)" if diverged else ""
    return f"{len(present) - diverged} finished{kept}, {missing} to run"


def _left_by_others(jobs: Sequence[Job], outcomes: dict[str, Outcome | None], display: progress.Display) -> list[Job]:
    """Wait for runs that other sweeps work on, noting how they end; returns those that were left unfinished, as soon as there are any."""
    waiting = list(jobs)
    if waiting:
        display.note(f"waiting for {len(waiting)} runs that another sweep works on")
    while waiting:
        for job in waiting[:]:
            status = status_of(job.directory)
            if status.status in ("finished", "failed", "diverged"):
                waiting.remove(job)
                outcomes[job.run_id] = Outcome(job, status.status, status.reason)
                display.event(Outcome(job, status.status, status.reason))
            elif status.status != "running":
                return waiting
        if waiting:
            time.sleep(POLL_SECONDS)
    return []
