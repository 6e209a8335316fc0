"""The wheel holds everything: installed away from the sources, the command works from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import registry

SMALL = [
    *("model.dim=16", "trainer.steps=2", "trainer.batch_size=2", "trainer.validation_sequences=2", "seed=0"),
    *("evaluation.sequences=2", "evaluation.multiples=[1]"),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    subprocess.run(["git", "clone", "--quiet", str(registry.ROOT), str(sources)], check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(sources)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    return site


def attnlab(installed: Path, cwd: Path, *words: str) -> str:
    code = "import registry, sys; from experiments.cli import main; print(registry.__file__, file=sys.stderr); main()"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith(str(installed)), "the sources were used, not the wheel"
    return done.stdout


def test_the_quickstart_runs_from_an_installed_wheel_in_an_empty_folder(installed, tmp_path):
    said = attnlab(installed, tmp_path, "sweep", "experiment=quickstart", "variant=full,gqa", "position=rope", *SMALL)
    assert "2 runs: 2 finished" in said
    assert (tmp_path / "runs" / "quickstart" / "report.html").stat().st_size > 1_000_000
    assert json.loads(attnlab(installed, tmp_path, "status", "quickstart", "--json"))["counts"]["finished"] == 2
