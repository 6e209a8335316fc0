"""Runs written straight in the format of the run record, so that reading is tested without the writer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from experiments.runs.identity import run_id


def write_run(
    study: Path,
    *,
    variant: str | Mapping[str, Any] = "full",
    position: str | Mapping[str, Any] = "rope",
    seed: int = 0,
    status: str = "finished",
    reason: str = "",
    metrics: Mapping[str, float | None] | None = None,
    result: Mapping[str, Any] | None = None,
    log: list[dict[str, Any]] | None = None,
    evaluation: pyarrow.Table | None = None,
    tests: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """One run's directory. `settings` are further sections of its config; `tests` is the section that is named "evaluation" there."""
    config = {
        "study": study.name,
        "seed": seed,
        "runs_dir": str(study.parent),
        "variant": {"name": variant} if isinstance(variant, str) else dict(variant),
        "position": {"name": position} if isinstance(position, str) else dict(position),
        "task": {"name": "mqar", "length": 32, "data_seed": 0},
        "model": {"dim": 64, "layers": 2, "heads": 2},
        "optimizer": {"lr": 0.003},
        "trainer": {"steps": 1000, "batch_size": 64},
        **({"evaluation": dict(tests)} if tests is not None else {}),
        **settings,
    }
    directory = study / run_id(config)
    directory.mkdir(parents=True)
    _write(directory / "config.json", config)
    _write(directory / "status.json", {"status": status, "reason": reason})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log or []))
    if status == "finished":
        costs = {"parameters": 1000, "tokens_per_second": 5000.0}
        costs |= {"state_bytes": {"32": 512, "64": 1024}, "read_bytes": {"32": 512, "64": 640}}
        stored = {"metrics": metrics or {}, "costs": costs, "counts": {"tokens": 64000}, "stopped": "budget", "steps_to_solve": None}
        _write(directory / "result.json", {**stored, **(result or {})})
        if evaluation is not None:
            pyarrow.parquet.write_table(evaluation, directory / "evaluation.parquet")
    return directory


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, allow_nan=False, sort_keys=True))
