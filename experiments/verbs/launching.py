"""`attnlab train`, `sweep` and `status`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.runs.files import read_json
from experiments.runs.status import RESULT
from experiments.runs.write import AlreadyFinished, status_of
from experiments.sweep import launch, study
from experiments.sweep.job import Job
from registry import UserError

Report = Callable[[Any], None]


def train(words: Sequence[str], report: Report | None) -> None:
    """Carry out one run, or show the result of a finished one."""
    from experiments.sweep.plan import single

    planned = single(words)
    directory = Path(planned.config["runs_dir"]) / planned.config["study"] / planned.run_id
    result = read_json(directory / RESULT)
    if result is None:
        result = _train(planned.config)
    else:
        print(f"{directory} is finished already; this is its result", file=sys.stderr)
    if report is not None:
        report({"run_id": planned.run_id, "directory": str(directory), "result": result})
        return
    for name, value in result["metrics"].items():
        if name.endswith("/accuracy"):
            print(f"{name:32} {value:.4f}")
    counts = result["counts"]
    print(f"{result['stopped']} after {counts['steps']} steps, {result['costs']['tokens_per_second']:,.0f} tokens/s; record: {directory}")


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
    jobs = [Job(run.run_id, run.config, plan.directory / run.run_id, run.overrides) for run in plan.runs]
    if not jobs:
        reasons = "; ".join(f"{' '.join(chosen)}: {reason}" for chosen, reason in plan.dropped)
        raise UserError(f"nothing to run: no combination is applicable. {reasons}")
    if dry_run:
        _show_plan(plan.study, jobs, plan.dropped, report)
        return
    ended = launch.sweep(plan.directory, jobs, dropped=plan.dropped, executor=plan.executor, retry_diverged="diverged" in retry)
    if report is not None:
        report(study.status(plan.directory))
    else:
        print(ended)
        if ended.having("finished"):
            from experiments.verbs import comparing

            print()
            comparing.compare(plan.directory, report=None, **plan.compare)
            comparing.report(plan.directory, None)
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


def _show_plan(name: str, jobs: Sequence[Job], dropped: Sequence[tuple[Sequence[str], str]], report: Report | None) -> None:
    """What a sweep would do."""
    statuses = [status_of(job.directory).status for job in jobs]
    if report is not None:
        runs = [{"run_id": job.run_id, "status": now, "overrides": list(job.overrides)} for job, now in zip(jobs, statuses, strict=True)]
        report({"study": name, "runs": runs, "dropped": [{"overrides": list(words), "reason": reason} for words, reason in dropped]})
        return
    for job, now in zip(jobs, statuses, strict=True):
        print(f"{job.run_id}  {now:11}  {' '.join(job.overrides)}")
    for words, reason in dropped:
        print(f"not applicable: {' '.join(words)}: {reason}")
    print(f"{len(jobs)} runs, {sum(now == 'finished' for now in statuses)} finished")
