"""The command: what it answers, how fast, and with which exit code."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import registry
from experiments.cli import app
from tests.variants.conformance.broken import LeakByOne
from variants.conformance.checks import PROPERTIES, sentence

TINY = [
    *("task=mqar", "task.length=16", "task.pairs=2", "model.dim=16", "model.layers=1", "trainer.steps=4", "trainer.batch_size=4"),
    *("trainer.validation_sequences=4", "evaluation.multiples=[1]", "evaluation.sequences=4"),
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(registry.ROOT)}
VERBS = ("list", "train", "evaluate", "longrope-search", "sweep", "status", "check", "compare", "report", "bench")


def attnlab(*words: str, cwd: Path, code: int = 0) -> Result:
    """The command in this process, in another folder. (Importing torch and Lightning anew takes longer than any of the tests.)"""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, words)
    assert done.exit_code == code, f"{done.stdout}\n{done.stderr}\n{done.exception!r}"
    return done


@pytest.mark.parametrize("words", [["--help"], ["list"], ["list", "--json"], *[[verb, "--help"] for verb in VERBS]])
def test_help_and_list_import_neither_torch_nor_lightning(words, tmp_path):
    code = (
        "import sys, experiments.cli\n"
        f"sys.argv = ['attnlab', *{words!r}]\n"
        "try:\n    experiments.cli.main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'lightning', 'hydra', 'scipy', 'duckdb', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=ENVIRONMENT, capture_output=True)


def test_list_has_the_stable_json(tmp_path):
    found = json.loads(attnlab("list", "--json", cwd=tmp_path).stdout)
    by_name = {row["name"]: row for row in found["variants"]}
    assert {"full", "mqa", "gqa", "sliding_window", "linear"} <= set(by_name)
    assert set(by_name["full"]) == {"name", "summary", "time", "state", "positions", "implementations"}
    assert by_name["full"]["implementations"]["reference"] == "usable"
    assert {row["name"] for row in found["positions"]} >= {"none", "learned", "rope"}
    assert {row["name"] for row in found["tasks"]} >= {"mqar", "passkey"}


def test_list_of_one_name_shows_its_options(tmp_path):
    said = attnlab("list", "sliding_window", cwd=tmp_path).stdout
    assert "window" in said and "sinks" in said and "short_conv" in said
    assert "Did you mean 'linear'" in attnlab("list", "liner", cwd=tmp_path, code=2).stderr


def test_a_plugin_that_fails_is_listed_with_its_reason(tmp_path):
    (tmp_path / "broken.py").write_text("raise OSError('no driver')")
    said = attnlab("list", "--plugin", "broken.py", cwd=tmp_path).stdout
    assert "OSError: no driver" in said and "sliding_window" in said


@pytest.mark.parametrize(
    "words",
    [
        ["train", "variant.windw=3"],
        ["train", "model.mixer=linear"],
        ["train", "hydra.swep.dir=x"],
        ["train", "variant=liner"],
        ["train", "trainer.steps=abc"],
        ["train", "variant=full,gqa"],
        ["train", "model.dim=10", "model.heads=3"],
        ["evaluate", "runs/nothing"],
        ["longrope-search", "factor=4"],
        ["longrope-search", "checkpoint=runs/nothing", "factor=4"],
        ["sweep", "compare.bsline=full"],
        ["sweep", "variant=full,liner"],
        ["sweep", "executor=slrm"],
        ["sweep", "--retry", "failed"],
        ["status", "nothing"],
        ["compare", "nothing"],
        ["report", "nothing"],
        ["check", "liner"],
        ["check", "full", "windw=3"],
        ["check", "full", "window"],
        ["bench", "--level", "modl"],
    ],
)
def test_a_mistake_is_answered_in_under_ten_lines_with_an_exit_code(words, tmp_path):
    done = attnlab(*words, cwd=tmp_path, code=2)
    assert done.stderr.startswith("attnlab: ") and len(done.stderr.splitlines()) < 10 and not done.stdout
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


@pytest.fixture
def leaking():
    """A variant that sees the next token, for this process alone."""
    with registry.variants.scope():
        registry.variants.register("leaking", time="T^2", state="1")(LeakByOne)
        yield ["check", "leaking", "--fast", "position=null", "short_conv=0", "causal=true"]


def test_check_has_the_stable_json_whose_last_row_says_what_was_not_checked(leaking, tmp_path):
    found = json.loads(attnlab(*leaking, "--json", cwd=tmp_path, code=1).stdout)
    assert set(found) == {"name", "properties"} and found["name"] == "leaking"
    assert {frozenset(row) for row in found["properties"]} == {frozenset({"property", "status", "detail"})}
    assert {row["status"] for row in found["properties"]} == {"passed", "failed", "not applicable"}
    last = found["properties"][-1]
    assert (last["property"], last["status"]) == ("what was not checked", "not applicable") and "CUDA" in last["detail"]


@pytest.mark.parametrize("columns", [80, 160])
def test_check_prints_each_property_on_a_line_with_what_was_found_below(leaking, tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = [line.rstrip() for line in attnlab(*leaking, cwd=tmp_path, code=1).stdout.splitlines()]
    assert max(map(len, lines[1:])) <= columns
    for judged in PROPERTIES:
        (row,) = (n for n, line in enumerate(lines) if line[16:] == sentence(judged))
        assert lines[row][:16].strip() in ("passed", "failed", "not applicable")
        assert lines[row + 1].startswith(16 * " ") and lines[row + 1].strip()
    row = lines.index(f"{'failed':16}changing a token changes no earlier output")
    assert "as given: of 2 tokens: changing token 1" in lines[row + 1]
    counts, left = lines.index("Not checked:") - 2, lines[lines.index("Not checked:") + 1 :]
    assert re.fullmatch(r"\d+ passed, \d+ failed, \d+ not applicable", lines[counts])
    assert sum(map(int, re.findall(r"\d+", lines[counts]))) == len(PROPERTIES)
    assert any(line.startswith("  CUDA: ") for line in left)


def test_train_sweep_status_compare_and_report_go_together(tmp_path):
    first = json.loads(attnlab("train", "study=demo", "variant=gqa", *TINY, "--json", cwd=tmp_path).stdout)
    result = Path(tmp_path, first["directory"], "result.json")
    before = result.stat().st_mtime_ns
    words = ["sweep", "study=demo", "variant=full,gqa", "seed=0,1", *TINY]
    assert "4 runs: 4 finished" in attnlab(*words, cwd=tmp_path).stdout
    assert result.stat().st_mtime_ns == before, "a finished run is left alone"
    again = attnlab(*words, cwd=tmp_path)
    assert "4 finished, 0 to run" in again.stderr
    assert json.loads(attnlab("status", "demo", "--json", cwd=tmp_path).stdout)["counts"]["finished"] == 4
    groups = json.loads(attnlab("compare", "demo", "--json", cwd=tmp_path).stdout)["groups"]
    assert {"by", "metric", "n", "mean", "low", "high", "difference", "difference_low", "difference_high", "p", "verdict"} <= set(groups[0])
    assert {group["n"] for group in groups} == {2}
    said = attnlab("report", "demo", "--output", "page.html", cwd=tmp_path).stdout
    assert "page.html" in said and "<html" in (tmp_path / "page.html").read_text()
    assert attnlab("compare", "demo", "--format", "csv", cwd=tmp_path).stdout.count("\n") >= 2
    assert "\\toprule" in attnlab("compare", "demo", "--format", "latex", cwd=tmp_path).stdout


def test_a_sweep_with_one_result_removed_runs_that_one_alone(tmp_path):
    words = ["sweep", "study=one", "seed=0,1,2", *TINY]
    attnlab(*words, cwd=tmp_path)
    results = sorted((tmp_path / "runs" / "one").glob("*/result.json"))
    times = {path: path.stat().st_mtime_ns for path in results}
    results[1].unlink()
    assert "2 finished, 1 to run" in attnlab(*words, cwd=tmp_path).stderr
    assert [path.stat().st_mtime_ns == times[path] for path in results] == [True, False, True]


def test_a_sweep_killed_outright_goes_on_with_what_is_missing(tmp_path):
    words = ["sweep", "study=killed", "seed=range(0,4)", *TINY, "trainer.steps=60", "executor.processes=1"]
    process = subprocess.Popen([sys.executable, "-m", "experiments.cli", *words], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    study = tmp_path / "runs" / "killed"
    deadline = time.monotonic() + 120
    while not list(study.glob("*/result.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in study.glob("*/result.json")}
    assert 1 <= len(done) < 4
    attnlab(*words, cwd=tmp_path)
    assert len(list(study.glob("*/result.json"))) == 4
    assert all(path.stat().st_mtime_ns == then for path, then in done.items())


def test_a_dry_run_writes_nothing(tmp_path):
    said = attnlab("sweep", "--dry-run", "variant=full,gqa", *TINY, cwd=tmp_path).stdout
    assert "2 runs, 0 finished" in said and not (tmp_path / "runs").exists()


def test_a_runs_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    done = attnlab("train", *TINY, "runs_dir=file/runs", cwd=tmp_path, code=2)
    assert "file/runs" in done.stderr and len(done.stderr.splitlines()) < 10


def test_ctrl_c_is_answered_in_one_line_and_the_run_goes_on_later(tmp_path):
    words = [
        "train",
        "study=broken",
        *TINY,
        "trainer.steps=4000",
        "trainer.stop_at=null",
        "trainer.checkpoint_every=5",
        "trainer.log_every=1",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.cli", *words], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/broken/*/checkpoints/last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said
    assert json.loads(attnlab("status", "broken", "--json", cwd=tmp_path).stdout)["counts"]["interrupted"] == 1


def test_one_name_of_lightning_is_imported_throughout():
    for file in [registry.ROOT / "registry.py", *registry.ROOT.glob("variants/**/*.py"), *registry.ROOT.glob("experiments/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not any(name.split(".")[0] in ("pytorch_lightning", "lightning_fabric") for name in names), file


def test_what_a_mixer_prints_while_it_is_checked_is_not_in_the_document(monkeypatch, capsys):
    from experiments.verbs import checking

    def noisy(*words, **options):
        print("noise")
        return []

    monkeypatch.setattr(checking, "run_checks", noisy)
    checking.check("full", [], fast=True, report=lambda document: print(json.dumps(document)))
    out, err = capsys.readouterr()
    assert json.loads(out)["name"] == "full"
    assert "noise" in err


def test_a_finished_run_is_evaluated_and_searched_and_what_was_found_is_taken_up(tmp_path):
    words = ["task=repeated_segments", "task.length=16", "task.shortest=4", "task.longest=6", *TINY[3:], "evaluation.multiples=[1,2]"]
    trained = json.loads(attnlab("train", *words, "study=s", "--json", cwd=tmp_path).stdout)
    run = trained["directory"]
    tested = json.loads(attnlab("evaluate", run, "position=pi", "position.factor=2", "--json", cwd=tmp_path).stdout)
    assert tested["run_id"] != trained["run_id"] and tested["result"]["counts"]["steps"] == 0
    assert "test/length/32/perplexity" in attnlab("evaluate", f"s/{trained['run_id']}", cwd=tmp_path).stdout

    search = ["longrope-search", f"checkpoint={run}/checkpoints/last.ckpt", "factor=2", "search.evaluations=9", "search.sequences=2"]
    said = attnlab(*search, cwd=tmp_path).stdout
    assert "9 candidates" in said and "held out" in said and "yarn" in said
    found = json.loads(attnlab(*search, "--json", cwd=tmp_path).stdout)
    file = Path(found["directory"]) / "position.yaml"
    assert str(file) in said and found["position"]["name"] == "longrope" and found["position"]["trained_length"] == 16
    again = json.loads(attnlab("evaluate", run, f"position={file}", "--json", cwd=tmp_path).stdout)
    stored = json.loads((tmp_path / found["directory"] / "result.json").read_text())
    assert again["result"]["metrics"] == stored["metrics"]
    assert "candidates" in attnlab(*search, "search.evaluations=0", cwd=tmp_path, code=2).stderr
    assert "up to 1024" in attnlab("longrope-search", f"checkpoint={run}", "factor=1e9", cwd=tmp_path, code=2).stderr
    tuned = attnlab("train", *words, "study=s", f"position={file}", f"start={trained['run_id']!r}", "trainer.steps=2", cwd=tmp_path)
    assert "not solved in the budget of 2 steps" in tuned.stdout
    bad = attnlab("longrope-search", f"checkpoint={tested['directory']}", "factor=2", cwd=tmp_path, code=2)
    assert "trained with position=rope" in bad.stderr and "has pi" in bad.stderr


def test_another_scheme_keeps_what_the_trained_one_turns_by(tmp_path):
    words = ["task=repeated_segments", "task.length=16", "task.shortest=4", "task.longest=6", *TINY[3:], "evaluation.multiples=[1,2]"]
    rope = ["position.layout=interleaved", "position.base=500", "position.fraction=0.5"]
    trained = json.loads(attnlab("train", *words, *rope, "study=s", "--json", cwd=tmp_path).stdout)
    same = json.loads(attnlab("evaluate", trained["directory"], "position=pi", "position.factor=1", "--json", cwd=tmp_path).stdout)
    assert same["result"]["metrics"] == trained["result"]["metrics"]
    yarn = json.loads(attnlab("evaluate", trained["directory"], "position=yarn", "position.base=10", "--json", cwd=tmp_path).stdout)
    config = json.loads((tmp_path / yarn["directory"] / "config.json").read_text())["position"]
    assert config["trained_length"] == 16 and config["base"] == 10 and config["layout"] == "interleaved" and config["fraction"] == 0.5


def test_an_experiment_says_how_it_is_compared(tmp_path):
    attnlab("sweep", "study=s", *TINY, "variant=full,gqa,mqa", "compare.baseline='variant=gqa'", "--json", cwd=tmp_path)
    groups = json.loads(attnlab("compare", "s", "--json", cwd=tmp_path).stdout)["groups"]
    assert [group["verdict"] for group in groups if group["by"]["variant"] == "gqa"] == ["baseline"]
    asked = json.loads(attnlab("compare", "s", "--baseline", "variant=mqa", "--json", cwd=tmp_path).stdout)["groups"]
    assert [group["verdict"] for group in asked if group["by"]["variant"] == "mqa"] == ["baseline"]
