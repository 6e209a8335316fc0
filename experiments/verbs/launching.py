"""`attnlab train`, `sweep` and `status`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.runs.files import read_json
from experiments.runs.status import RESULT
from experiments.runs.write import AlreadyFinished, status_of
from experiments.sweep import launch, study
from registry import UserError

if TYPE_CHECKING:
    from experiments.sweep.job import Job
    from experiments.sweep.plan import Plan

Report = Callable[[Any], None]


def train(words: Sequence[str], report: Report | None) -> None:
    """Carry out one run, or show the result of a finished one."""
    job, result = carry_out(words)
    if report is not None:
        report({"run_id": job.run_id, "directory": str(job.directory), "result": result})
        return
    for name, value in result["metrics"].items():
        if name.endswith(("/accuracy", "/perplexity")):
            print(f"{name:32} {value:.4f}")
    steps = result["counts"]["steps"]
    ended = f"solved after {steps} steps" if result["stopped"] == "solved" else f"not solved in the budget of {steps} steps"
    speed = f", {result['costs']['tokens_per_second']:,.0f} tokens/s" if steps else ""
    print(f"{ended if steps else 'tested without training'}{speed}, in {job.directory}")


def carry_out(words: Sequence[str]) -> tuple[Job, dict[str, Any]]:
    """The run that `words` describe and its result, stored or made now."""
    from experiments.sweep.plan import single

    job = single(words)
    result = read_json(job.directory / RESULT)
    if result is None:
        return job, _train(job.config)
    print(f"{job.directory} is finished already; this is its result", file=sys.stderr)
    return job, result


def _train(config: dict[str, Any]) -> dict[str, Any]:
    """Run with a bar on standard error."""
    import torch

    from experiments.train import Diverged, run_job

    torch.set_num_threads(config["executor"]["threads"])
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task(config["variant"]["name"], total=config["trainer"]["steps"], text="")
        try:
            return run_job(config, lambda step, total, text: bars.update(bar, completed=step, total=total, text=text))
        except Diverged as diverged:
            raise UserError(f"the run diverged: {diverged}") from None
        except AlreadyFinished as finished:  # by another process, since we looked
            raise UserError(str(finished)) from None


def sweep(words: Sequence[str], *, dry_run: bool, retry: Sequence[str], report: Report | None) -> None:
    """Carry out what is missing of a grid; then its table and page. Leaves with 1 if a run failed."""
    from experiments.sweep.plan import expand

    for status in retry:
        if status != "diverged":
            raise UserError(f"--retry cannot be {status!r}: failed and interrupted runs are always carried out again. Valid: diverged")
    plan = expand(words)
    if not plan.jobs:
        reasons = "; ".join(f"{' '.join(chosen)}: {reason}" for chosen, reason in plan.dropped)
        raise UserError(f"nothing to run: no combination is applicable. {reasons}")
    if dry_run:
        _show_plan(plan, report)
        return
    ended = launch.sweep(
        plan.directory, plan.jobs, dropped=plan.dropped, compare=plan.compare, executor=plan.executor, retry_diverged="diverged" in retry
    )
    if report is not None:
        report(study.status(plan.directory))
    else:
        print(ended)
        if ended.having("finished"):
            from experiments.verbs import comparing

            print()
            comparing.compare(plan.directory)
            comparing.report(plan.directory)
    if ended.failed:
        sys.exit(1)


def status(directory: Path, report: Report | None) -> None:
    """What became of each run of a study."""
    found = study.status(directory)
    if report is not None:
        report(found)
        return
    counts = ", ".join(f"{count} {state}" for state, count in found["counts"].items() if count)
    print(f"study {found['study']}: {counts}")
    manifest = read_json(directory / study.MANIFEST) or {"runs": {}}
    for run in found["runs"]:
        words = " ".join(manifest["runs"].get(run["run_id"], {}).get("overrides", []))
        reason = f"  ({run['reason']})" if run["reason"] else ""
        print(f"{run['run_id']}  {run['status']:11}  {words}{reason}")


def _show_plan(plan: Plan, report: Report | None) -> None:
    """What a sweep would do."""
    rows = [{"run_id": job.run_id, "status": status_of(job.directory).status, "overrides": list(job.overrides)} for job in plan.jobs]
    if report is not None:
        dropped = [{"overrides": list(words), "reason": reason} for words, reason in plan.dropped]
        report({"study": plan.study, "runs": rows, "dropped": dropped})
        return
    for row in rows:
        print(f"{row['run_id']}  {row['status']:11}  {' '.join(row['overrides'])}")
    for words, reason in plan.dropped:
        print(f"not applicable: {' '.join(words)}: {reason}")
    print(f"{len(rows)} runs, {sum(row['status'] == 'finished' for row in rows)} finished")
