"""A study: the directory of a sweep's runs, and the manifest that says which runs were planned.

    runs/<study>/study.json     {"study", "runs": {run_id: {"overrides"}}, "dropped": [{"overrides", "reason"}],
                                 "compare": {"by", "metric", "baseline"}}        what `attnlab compare` does where nothing else is asked for

Plans add up: a study swept again with another grid keeps the runs of the earlier one.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.runs.files import read_json, write_json, writing
from experiments.runs.status import MANIFEST, STATES, status_of
from experiments.sweep.job import Job
from registry import UserError, nearest

#: What a study may say of its comparison.
COMPARISON = ("by", "metric", "baseline")
#: A combination without meaning: its overrides, and why.
Dropped = tuple[Sequence[str], str]


def record_plan(directory: Path, jobs: Sequence[Job], dropped: Sequence[Dropped] = (), compare: Mapping[str, Any] | None = None) -> str:
    """Add a plan to the study's manifest; what that changed, in a sentence, "" for a new or unchanged study. Raises CannotWrite."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory):
        before = read_json(directory / MANIFEST)
        manifest = before or {"study": directory.name, "runs": {}, "dropped": []}
        planned = {job.run_id: {"overrides": list(job.overrides)} for job in jobs}
        runs = {**manifest["runs"], **planned}
        listed = [{"overrides": list(overrides), "reason": reason} for overrides, reason in dropped]
        known = [entry for entry in manifest["dropped"] if entry not in listed]
        after = {**manifest, "runs": runs, "dropped": known + listed, **({"compare": dict(compare)} if compare else {})}
        if after != before:
            write_json(directory / MANIFEST, after)
    added, kept = len(runs) - len(manifest["runs"]), len(runs) - len(planned)
    if before is None or not (added or kept):
        return ""
    return f"the plan of study {directory.name!r} changed: {added} runs are new, {kept} of earlier plans are kept and not run now"


def comparison(directory: Path, **asked: str | None) -> dict[str, str | None]:
    """`by`, `metric` and `baseline`: what is asked for, else what the study says. Its baseline goes with its own `by`."""
    said = (read_json(directory / MANIFEST) or {}).get("compare") or {}
    kept = {key: said.get(key) for key in COMPARISON if key != "baseline" or not asked.get("by")}
    return {**kept, **{key: value for key, value in asked.items() if value is not None}}


def status(directory: Path) -> dict[str, Any]:
    """{"study", "counts": {status: number}, "runs": [{"run_id", "status", "reason"}]} of a study, planned runs included.

    Raises UserError, naming the nearest study, if there is none in `directory`.
    """
    manifest = read_json(directory / MANIFEST) or {}
    found = {path.parent.name for path in directory.glob("*/config.json")}
    planned = manifest["runs"] if isinstance(manifest.get("runs"), dict) else {}
    run_ids = [*planned, *sorted(found - set(planned))]
    if not run_ids:
        studies = [path.name for path in directory.parent.glob("*/") if path.is_dir()]
        raise UserError(f"no study {directory.name!r} in {directory.parent}.{nearest(directory.name, studies)}")
    statuses = [status_of(directory / run_id) for run_id in run_ids]
    counts = Counter(status.status for status in statuses)
    return {
        "study": manifest.get("study", directory.name),
        "counts": {state: counts[state] for state in STATES},
        "runs": [{"run_id": run_id, "status": s.status, "reason": s.reason} for run_id, s in zip(run_ids, statuses, strict=True)],
    }


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """One at a time may read and rewrite the manifest; the system opens the lock when its holder dies."""
    with writing(directory), (directory / ".study.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
