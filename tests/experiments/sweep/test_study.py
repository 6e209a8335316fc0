import json
import threading

import pytest
from toy_runs import job

from experiments.runs.write import RunWriter, mark
from experiments.sweep.study import record_plan, status
from registry import UserError


def manifest(directory):
    return json.loads((directory / "study.json").read_text())


def test_the_manifest_names_planned_runs_and_dropped_combinations(tmp_path):
    one = job(tmp_path)
    assert record_plan(tmp_path / "toy", [one], [(("variant=mamba",), "why")]) == ""
    assert manifest(tmp_path / "toy") == {
        "study": "toy",
        "runs": {one.run_id: {"overrides": ["task.deed=finish", "seed=0"]}},
        "dropped": [{"overrides": ["variant=mamba"], "reason": "why"}],
    }


def test_a_changed_plan_adds_to_the_manifest_and_says_so(tmp_path):
    jobs = [job(tmp_path, seed=seed) for seed in range(4)]
    record_plan(tmp_path / "toy", jobs[:2], [(("a",), "why")])
    assert record_plan(tmp_path / "toy", jobs[:2], [(("a",), "why")]) == ""
    said = record_plan(tmp_path / "toy", jobs[1:], [(("b",), "why")])
    assert said == "the plan of study 'toy' changed: 2 runs are new, 1 of earlier plans are kept and not run now"
    assert list(manifest(tmp_path / "toy")["runs"]) == sorted(one.run_id for one in jobs)
    assert [entry["overrides"] for entry in manifest(tmp_path / "toy")["dropped"]] == [["a"], ["b"]]


def test_plans_recorded_at_once_all_arrive(tmp_path):
    jobs = [job(tmp_path, seed=seed) for seed in range(8)]
    threads = [threading.Thread(target=record_plan, args=(tmp_path / "toy", [one])) for one in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(manifest(tmp_path / "toy")["runs"]) == {one.run_id for one in jobs}


def test_status_counts_every_run_planned_ones_and_those_outside_the_plan(tmp_path):
    planned, failed, unplanned = (job(tmp_path, seed=seed) for seed in range(3))
    record_plan(tmp_path / "toy", [planned, failed])
    mark(failed.directory, "failed", "why")
    with RunWriter.open(tmp_path / "toy", unplanned.config, {}) as run:
        run.finish({"accuracy": 1.0})
    found = status(tmp_path / "toy")
    assert found["study"] == "toy"
    assert found["counts"] == {"planned": 1, "running": 0, "finished": 1, "failed": 1, "diverged": 0, "interrupted": 0}
    assert sorted(found["runs"], key=lambda row: row["status"]) == [
        {"run_id": failed.run_id, "status": "failed", "reason": "why"},
        {"run_id": unplanned.run_id, "status": "finished", "reason": ""},
        {"run_id": planned.run_id, "status": "planned", "reason": ""},
    ]


def test_a_misspelt_study_is_answered_with_the_nearest(tmp_path):
    record_plan(tmp_path / "quickstart", [job(tmp_path)])
    with pytest.raises(UserError, match=r"no study 'quickstat' in .*\. Did you mean 'quickstart'"):
        status(tmp_path / "quickstat")
