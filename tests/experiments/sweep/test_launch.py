import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy_runs import attempts, job, launch

import registry
from experiments.runs.claim import Claim
from experiments.runs.status import status_of
from experiments.runs.write import mark
from experiments.sweep import launch as launching
from experiments.sweep.study import status
from registry import UserError

FOLDER = Path(__file__).parent


def start(runs_dir, processes, *deeds):
    environment = {**os.environ, "PYTHONPATH": f"{registry.ROOT}{os.pathsep}{FOLDER}"}
    command = [sys.executable, FOLDER / "toy_runs.py", runs_dir, str(processes), *deeds]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_second_sweep_does_nothing_and_touches_nothing(tmp_path, capsys):
    jobs = [job(tmp_path, seed=seed) for seed in range(3)]
    assert "0 finished, 3 to run" in capsys_of(lambda: launch(tmp_path, jobs), capsys)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != ".study.lock"}
    assert "3 finished, 0 to run" in capsys_of(lambda: launch(tmp_path, jobs), capsys)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [len(pids) for pids in attempts(tmp_path).values()] == [1, 1, 1]


def capsys_of(action, capsys):
    action()
    captured = capsys.readouterr()
    assert captured.out == "", "standard output is kept for results"
    return captured.err


def test_with_one_result_removed_exactly_that_run_runs(tmp_path):
    jobs = [job(tmp_path, seed=seed) for seed in range(3)]
    launch(tmp_path, jobs)
    (jobs[1].directory / "result.json").unlink()
    assert not launch(tmp_path, jobs).failed
    assert {one.run_id: len(attempts(tmp_path)[one.run_id]) for one in jobs} == {one.run_id: 1 + (one is jobs[1]) for one in jobs}


def test_a_failed_sweep_exits_non_zero_and_names_each_failed_run(tmp_path):
    sweep = start(tmp_path, 2, "raise", "kill", "finish")
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 1
    for deed, seed, reason in (("raise", 0, "ValueError: at step three"), ("kill", 1, "its process was ended by SIGKILL")):
        failed = job(tmp_path, deed, seed)
        row = next(line for line in out.splitlines() if line.startswith(failed.run_id))
        for part in (f"task.deed={deed} seed={seed}", reason, str(failed.log)):
            assert part in row
        assert failed.log.is_file()
        assert (failed.directory / "status.json").is_file()
    assert "3 runs: 1 finished, 1 failed, 1 interrupted" in out
    assert status_of(job(tmp_path, "finish", 2).directory).status == "finished"


def test_failed_runs_run_again_when_asked_and_diverged_ones_only_by_name(tmp_path):
    jobs = [job(tmp_path, "raise"), job(tmp_path, "diverge"), job(tmp_path)]

    def tries():
        return [len(attempts(tmp_path)[one.run_id]) for one in jobs]

    report = launch(tmp_path, jobs)
    assert [outcome.status for outcome in report.outcomes] == ["failed", "diverged", "finished"]
    assert [outcome.job for outcome in report.failed] == [jobs[0]]
    assert tries() == [1, 1, 1]
    assert jobs[1].run_id in str(launch(tmp_path, jobs))
    assert tries() == [2, 1, 1]
    launch(tmp_path, jobs, retry_diverged=True)
    assert tries() == [3, 2, 1]


def test_a_sweep_that_was_killed_leaves_no_run_behind_and_the_next_runs_exactly_what_is_missing(tmp_path):
    deeds = ["finish"] * 3 + ["wait"] + ["finish"] * 2
    jobs = [job(tmp_path, deed, seed) for seed, deed in enumerate(deeds)]
    sweep = start(tmp_path, 1, *deeds)
    wait_until(lambda: jobs[3].run_id in attempts(tmp_path))
    assert status(tmp_path / "toy")["counts"] == {
        "planned": 2, "running": 1, "finished": 3, "failed": 0, "diverged": 0, "interrupted": 0,
    }  # fmt: skip
    sweep.kill()
    sweep.communicate()
    wait_until(lambda: gone(attempts(tmp_path)[jobs[3].run_id][0]))
    assert status_of(jobs[3].directory).status == "interrupted"
    done = [(one.directory / "result.json").stat().st_mtime_ns for one in jobs[:3]]
    (tmp_path / "go").touch()
    assert not launch(tmp_path, jobs).failed
    assert [(one.directory / "result.json").stat().st_mtime_ns for one in jobs[:3]] == done
    assert [len(attempts(tmp_path)[one.run_id]) for one in jobs] == [1, 1, 1, 2, 1, 1]


def test_ctrl_c_interrupts_the_active_runs_and_keeps_what_was_finished(tmp_path):
    deeds = ["finish", "wait", "wait", "finish"]
    jobs = [job(tmp_path, deed, seed) for seed, deed in enumerate(deeds)]
    sweep = start(tmp_path, 2, *deeds)
    wait_until(lambda: all(one.run_id in attempts(tmp_path) for one in jobs[1:3]))
    os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does: everybody gets it
    _, err = sweep.communicate(timeout=30)
    assert sweep.returncode != 0
    assert "KeyboardInterrupt" in err
    assert [status_of(one.directory).status for one in jobs] == ["finished", "interrupted", "interrupted", "planned"]
    assert status_of(jobs[1].directory).reason == "asked to end (SIGTERM)"


def test_two_sweeps_at_once_share_the_work_and_both_end_well(tmp_path):
    deeds = ["sleep"] * 8
    sweeps = [start(tmp_path, 2, *deeds) for _ in range(2)]
    outs = [sweep.communicate(timeout=60)[0] for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0]
    assert all("8 runs: 8 finished" in out for out in outs)
    assert [len(pids) for pids in attempts(tmp_path).values()] == [1] * 8


@pytest.mark.parametrize("ending", ["finished", "failed", "interrupted"])
def test_a_sweep_waits_for_a_run_of_another_and_takes_it_over_only_if_it_was_left(tmp_path, monkeypatch, ending):
    one = job(tmp_path)
    one.directory.mkdir(parents=True)
    claim = Claim.acquire(one.directory)

    def end_elsewhere(seconds):
        claim.release()
        if ending == "finished":
            (one.directory / "result.json").write_text('{"accuracy": 1.0}')
        else:
            mark(one.directory, ending, "elsewhere")

    monkeypatch.setattr(launching.time, "sleep", end_elsewhere)
    report = launch(tmp_path, [one])
    assert [outcome.status for outcome in report.outcomes] == ["failed" if ending == "failed" else "finished"]
    assert len(attempts(tmp_path)) == (ending == "interrupted")


def test_a_sweep_with_an_unknown_executor_plans_nothing(tmp_path):
    with pytest.raises(UserError, match="no executor is named 'lokal'"):
        launching.sweep(tmp_path / "toy", [job(tmp_path)], executor={"name": "lokal"})
    assert not (tmp_path / "toy").exists()


def test_a_runs_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/toy"):
        launch(tmp_path / "file", [job(tmp_path / "file")])


def test_combinations_without_meaning_are_named_with_their_reason(tmp_path, capsys):
    launch(tmp_path, [], dropped=[(("variant=mamba", "position=alibi"), "mamba has no logits to add to")])
    assert "not applicable: variant=mamba position=alibi: mamba has no logits to add to" in capsys.readouterr().err
