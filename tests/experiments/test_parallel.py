"""A run whose rows are split over processes: the run of one process, and no process is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import parallel
from experiments.config import resolve, without
from experiments.model import build
from experiments.runs.identity import run_id
from experiments.runs.write import LAST, status_of
from experiments.sweep.plan import expand, single
from experiments.train import prepare
from registry import UserError
from variants.conformance.costs import Meter

TINY = [
    *("variant=full", "variant.short_conv=3", "position=rope", "task=mqar", "executor.threads=1"),
    *("task.length=19", "task.pairs=2", "task.keys=8", "task.values=8", "model.dim=16", "model.heads=2", "model.layers=2"),
    *("trainer.steps=6", "trainer.batch_size=4", "trainer.log_every=1", "trainer.validate_every=3", "trainer.validation_sequences=4"),
    *("trainer.checkpoint_every=2", "trainer.stop_at=null", "evaluation.multiples=[1,2]", "evaluation.sequences=4"),
]


def words(runs: Path, *more: str) -> list[str]:
    return [*TINY, f"runs_dir={runs}", *more]


def start(runs: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.cli", "train", *words(runs, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def directory(runs: Path, *more: str) -> Path:
    return single(words(runs, *more)).directory


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def children(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of its followers."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and b"experiments.parallel" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def wait_for(condition, seconds: float = 90.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_losses_and_weights_are_those_of_one_process_also_after_an_interruption(tmp_path):
    for processes in (1, 2):
        process = start(tmp_path, f"trainer.context_parallel={processes}")
        assert process.wait(120) == 0, process.stderr.read()
    alone, shared = (directory(tmp_path, f"trainer.context_parallel={n}") for n in (1, 2))
    for mine, right in zip(rows(shared), rows(alone), strict=True):
        assert {k: v for k, v in mine.items() if k != "seconds"} == pytest.approx(
            {k: v for k, v in right.items() if k != "seconds"}, abs=1e-5
        )
    weights, expected = (torch.load(run / "checkpoints" / LAST, weights_only=True)["state_dict"] for run in (shared, alone))
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)

    elsewhere = tmp_path / "again"
    run = directory(elsewhere, "trainer.context_parallel=2")
    process = start(elsewhere, "trainer.context_parallel=2")
    wait_for((run / "checkpoints" / LAST).exists)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    if status_of(run).status != "finished":  # it may have been faster
        assert status_of(run).status == "interrupted"
        assert start(elsewhere, "trainer.context_parallel=2").wait(120) == 0
    resumed = torch.load(run / "checkpoints" / LAST, weights_only=True)["state_dict"]
    assert all(torch.equal(value, weights[name]) for name, value in resumed.items())


def test_a_process_that_dies_fails_the_run_and_the_run_takes_its_processes_with_it(tmp_path):
    endless = ("trainer.context_parallel=2", "trainer.steps=100000", "trainer.validate_every=100000")
    run = directory(tmp_path, *endless)

    for word in (signal.SIGKILL, signal.SIGTERM):
        process = start(tmp_path, *endless)
        (follower,) = wait_for(lambda process=process: children(process))
        before = len(rows(run)) if (run / "metrics.jsonl").exists() else 0
        wait_for(lambda before=before: (run / "metrics.jsonl").exists() and len(rows(run)) > before)
        os.kill(follower, word)
        assert process.wait(60) == 1
        assert status_of(run).status == "failed"
        assert re.search("of the 2 processes that share each row number 1 (was ended by|ended: exit code)", status_of(run).reason)

    process = start(tmp_path, *endless)
    (follower,) = wait_for(lambda: children(process))
    before = len(rows(run))
    wait_for(lambda: len(rows(run)) > before)
    os.kill(follower, signal.SIGSTOP)
    time.sleep(1)  # by now it is waited for
    process.send_signal(signal.SIGINT)
    process.wait(30)
    assert status_of(run).status == "interrupted"

    process = start(tmp_path, *endless)
    (follower,) = wait_for(lambda: children(process))
    before = len(rows(run))
    wait_for(lambda: len(rows(run)) > before)
    process.kill()
    process.wait(60)
    wait_for(lambda: not alive(follower), 30)


def test_what_cannot_be_split_is_refused_before_anything_is_trained(tmp_path):
    plan = expand(words(tmp_path, "variant=full,nsa", "trainer.context_parallel=2"))
    assert len(plan.jobs) == 1
    ((_, reason),) = plan.dropped
    assert "trainer.context_parallel=2: NSA has no form for rows that are split" in reason
    with pytest.raises(UserError, match="rows of 20 tokens or more; the shortest has 19"):
        expand(words(tmp_path, "trainer.context_parallel=10"))
    with pytest.raises(UserError, match="context_parallel=2: NSA has no form for rows that are split"):
        prepare(without(resolve(words(tmp_path, "variant=nsa", "trainer.context_parallel=2")), "sweep"))
    with pytest.raises(UserError, match=r"trainer.context_parallel must be at least 1; got 0"):
        expand(words(tmp_path, "trainer.context_parallel=0"))
    assert run_id(resolve(words(tmp_path, "trainer.context_parallel=2"))) != run_id(resolve(words(tmp_path)))


def test_a_process_that_does_not_start_is_named_at_once():
    said = "of the 2 processes that share each row number 1 ended: ModuleNotFoundError: .*no_such_module"
    with pytest.raises(RuntimeError, match=said), parallel.processes(2, "no_such_module:follow", {}):
        pytest.fail("there is nobody to share with")


FOLLOWING = """
import time
import torch
import torch.distributed as dist

def exchange(told, ranks):
    while True:
        dist.all_reduce(torch.ones(1))

def leave_late(told, ranks):
    time.sleep(told)
"""


@pytest.fixture
def following(tmp_path, monkeypatch):
    (tmp_path / "following.py").write_text(FOLLOWING)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_error_of_the_first_process_is_its_own(following, monkeypatch):
    monkeypatch.setattr(parallel, "LAST_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match="^out of memory here alone$"), parallel.processes(2, "following:exchange", {}):
        raise RuntimeError("out of memory here alone")


def test_what_is_made_is_kept_though_somebody_is_slow_to_leave(following, monkeypatch):
    monkeypatch.setattr(parallel, "GRACE_SECONDS", 0.5)
    with parallel.processes(2, "following:leave_late", 60):
        pass


def test_a_folder_with_modules_of_the_same_names_changes_nothing(following, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "tokenize.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path / "here")
    with parallel.processes(2, "following:leave_late", 0):
        pass


def peak_of_a_step(told, ranks) -> int:
    """The most bytes alive at once in a step of a deep stack over one long row, of which this process has its part."""
    torch.manual_seed(0)
    model = build(resolve(["model.dim=64", "model.heads=4", "model.layers=8", "variant=full"]), vocab_size=16)
    model.ranks = ranks
    tokens = torch.arange(told).remainder(16)[None]
    with Meter() as meter:
        model(tokens, scored=tokens == 0).logits.square().mean().backward()
    return meter.peak


def test_each_of_two_processes_keeps_half_of_the_activations():
    alone = peak_of_a_step(2048, None)
    with parallel.processes(2, "tests.experiments.test_parallel:peak_of_a_step", 2048) as ranks:
        shared = peak_of_a_step(2048, ranks)
    assert shared < 0.6 * alone  # of the last layer, keys and gradients are on their way besides
