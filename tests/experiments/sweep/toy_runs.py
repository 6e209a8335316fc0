"""Runs that take no time and do what their config says. As a program, a sweep of them: `toy_runs.py RUNS_DIR PROCESSES DEED...`."""

import os
import signal
import sys
import time
from pathlib import Path

from experiments.runs.identity import run_id
from experiments.runs.write import RunWriter
from experiments.sweep.job import Job
from experiments.sweep.launch import Report, sweep

TARGET = "toy_runs:carry_out"


def job(folder, deed="finish", seed=0, **options):
    config = {"study": "toy", "seed": seed, "runs_dir": str(folder), "task": {"name": "toy", "deed": deed, **options}}
    return Job(run_id(config), config, Path(folder) / "toy" / run_id(config), (f"task.deed={deed}", f"seed={seed}"))


def launch(folder, jobs, processes=2, **options) -> Report:
    executor = {"name": "local", "processes": processes, "threads": 1, "preload": ["experiments.sweep.launch"]}
    return sweep(Path(folder) / "toy", jobs, executor=executor, target=TARGET, **options)


def attempts(folder):
    """Process numbers of every run that was begun, by run."""
    path = Path(folder) / "attempts"
    found: dict[str, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        run, pid = line.split()
        found.setdefault(run, []).append(int(pid))
    return found


def carry_out(config, on_progress):
    deed, folder = config["task"]["deed"], Path(config["runs_dir"])
    if deed == "refuse":
        raise ValueError("heads=3 does not divide dim=8\nand more")
    with RunWriter.open(folder / "toy", config, {}) as run:
        with (folder / "attempts").open("a") as file:
            file.write(f"{run.directory.name} {os.getpid()}\n")
        for step in (1, 2, 3):
            run.log(step=step, tokens=step, seconds=0.0)
            on_progress(step, 3, "train")
        print("the run speaks")
        result = DEEDS[deed](run, folder)
        if deed != "diverge":
            run.finish(result or {"done": True})
    return {}


def _raise(run, folder):
    raise ValueError("at step three")


def _kill(run, folder):
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(run, folder):
    os._exit(3)


def _wait(run, folder):
    """Until the test says so; a test that goes wrong must not leave it behind."""
    for _ in range(6000):
        if (folder / "go").exists():
            return
        time.sleep(0.01)


def _ignore(run, folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _wait(run, folder)


def _torch(run, folder):
    preloaded = "torch" in sys.modules
    import torch

    weight = torch.ones(64, 64, requires_grad=True)
    (torch.randn(64, 64) @ weight).square().mean().backward()
    return {"preloaded": preloaded, "threads": torch.get_num_threads(), "moved": bool(weight.grad.abs().sum() > 0)}


DEEDS = {
    "finish": lambda run, folder: None,
    "sleep": lambda run, folder: time.sleep(0.1),
    "diverge": lambda run, folder: run.diverged("loss is nan"),
    "raise": _raise,
    "kill": _kill,
    "exit": _exit,
    "wait": _wait,
    "ignore": _ignore,
    "torch": _torch,
}

if __name__ == "__main__":
    runs_dir, processes, *deeds = sys.argv[1:]
    report = launch(runs_dir, [job(runs_dir, deed, seed) for seed, deed in enumerate(deeds)], int(processes))
    print(report)
    sys.exit(1 if report.failed else 0)
