"""One run: it repeats bitwise, survives being broken off anywhere, and stops for the right reasons."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import registry
from experiments import settings
from experiments.callbacks import LAST, Diverged
from experiments.config import resolve, without
from experiments.module import learning_rate, mean_loss, parameter_groups, step_seed
from experiments.runs.identity import run_id
from experiments.runs.write import status_of
from experiments.train import prepare, run_job
from registry import UserError

TINY = [
    *("variant=full", "variant.short_conv=3", "variant.dropout=0.1", "position=rope", "task=mqar"),
    *(
        "task.length=16",
        "task.pairs=2",
        "task.keys=8",
        "task.values=8",
        "model.dim=16",
        "model.heads=2",
        "model.layers=1",
        "model.dropout=0.1",
    ),
    *("trainer.steps=10", "trainer.batch_size=4", "trainer.log_every=1", "trainer.validate_every=4", "trainer.validation_sequences=4"),
    *("trainer.checkpoint_every=3", "trainer.stop_at=null", "evaluation.multiples=[1,2]", "evaluation.sequences=4"),
]


def tiny(runs: Path, *words: str) -> dict[str, Any]:
    return without(resolve([*TINY, f"runs_dir={runs}", *words]), "sweep")


def record(config: dict[str, Any]) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """(directory, metric rows without their times, weights)."""
    directory = Path(config["runs_dir"]) / config["study"] / run_id(config)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds")
    weights = torch.load(directory / "checkpoints" / LAST, weights_only=True)["state_dict"]
    return directory, rows, weights


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def untimed(result: dict[str, Any]) -> dict[str, Any]:
    costs = {key: value for key, value in result["costs"].items() if key not in ("seconds", "tokens_per_second", "peak_bytes")}
    return {**result, "costs": costs}


class Stop(Exception):
    pass


def breaking_off_at(step: int, error: type[BaseException]):
    def progress(now: int, total: int, text: str) -> None:
        if now >= step:
            raise error

    return progress


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("straight"))
    result = run_job(config)
    return result, *record(config)


def test_equal_seeds_give_bitwise_equal_runs(straight, tmp_path):
    result, _, rows, weights = straight
    torch.rand(7)  # whatever else happened in the process
    config = tiny(tmp_path)
    assert untimed(run_job(config)) == untimed(result)
    _, again, same_weights = record(config)
    assert again == rows and same(weights, same_weights)
    other = tiny(tmp_path, "seed=1")
    run_job(other)
    assert not same(weights, record(other)[2])


@pytest.mark.parametrize(
    "step, error", [(1, KeyboardInterrupt), (3, Stop), (4, KeyboardInterrupt), (5, Stop), (8, Stop), (10, KeyboardInterrupt)]
)
def test_a_run_broken_off_at_any_step_and_resumed_equals_the_straight_run(straight, tmp_path, step, error):
    result, _, rows, weights = straight
    config = tiny(tmp_path)
    with pytest.raises((error, SystemExit, KeyboardInterrupt)):
        run_job(config, breaking_off_at(step, error))
    directory = Path(config["runs_dir"]) / config["study"] / run_id(config)
    assert status_of(directory).status == ("interrupted" if error is KeyboardInterrupt else "failed")
    assert not (directory / "result.json").exists()
    assert untimed(run_job(config)) == untimed(result)
    _, again, resumed = record(config)
    assert again == rows and same(weights, resumed)


def test_a_killed_process_is_resumed_to_the_straight_run(straight, tmp_path):
    result, _, rows, weights = straight
    config = tiny(tmp_path)
    code = (
        "import json, sys, time\nfrom experiments.train import run_job\n"
        "run_job(json.load(sys.stdin), lambda step, total, text: (step == 7 and (print('now', flush=True), time.sleep(60))))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=registry.ROOT)
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(config))
    process.stdin.close()
    assert process.stdout.readline() == "now\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    directory = Path(config["runs_dir"]) / config["study"] / run_id(config)
    assert status_of(directory).status == "interrupted"
    assert untimed(run_job(config)) == untimed(result)
    assert record(config)[1] == rows and same(weights, record(config)[2])


@pytest.mark.parametrize("kept", ["last.ckpt", None])
def test_a_run_broken_off_after_its_last_step_is_not_trained_further(tmp_path, kept):
    words = ["trainer.stop_at=0", "trainer.steps=40"]
    straight = run_job(tiny(tmp_path / "straight", *words))
    config = tiny(tmp_path / "broken", *words)

    def at_the_test(step: int, total: int, text: str) -> None:
        if text.startswith("test"):
            raise Stop

    with pytest.raises(Stop):
        run_job(config, at_the_test)
    directory = Path(config["runs_dir"]) / config["study"] / run_id(config)
    if kept is None:  # killed before the first checkpoint was in place: only the best one and a half-written one are there
        (directory / "checkpoints" / "last.ckpt").rename(directory / "checkpoints" / "last.ckpt.tmp")
    assert untimed(run_job(config)) == untimed(straight)
    steps = [row["step"] for row in record(config)[1]]
    assert steps == sorted(steps) == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path, left):
    config = tiny(tmp_path)
    with pytest.raises(Stop):
        run_job(config, breaking_off_at(9, Stop))
    last = Path(config["runs_dir"]) / config["study"] / run_id(config) / "checkpoints" / LAST
    last.write_bytes(last.read_bytes()[:left])
    with pytest.raises(UserError, match=r"last\.ckpt is damaged .* remove it"):
        run_job(config)


def test_a_checkpoint_loads_where_the_project_cannot_be_imported(straight, tmp_path):
    _, directory, _, _ = straight
    path = directory / "checkpoints" / LAST
    code = f"import torch; assert torch.load({str(path)!r}, weights_only=True)['global_step'] == 10"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, cwd=tmp_path)


def test_the_last_validation_is_at_the_last_step(straight):
    steps = [row["step"] for row in straight[2] if "validation/loss" in row]
    assert steps == [4, 8, 10]


def test_training_stops_once_the_task_is_solved(tmp_path):
    result = run_job(tiny(tmp_path, "trainer.stop_at=0", "trainer.steps=100"))
    assert (result["stopped"], result["steps_to_solve"], result["counts"]["steps"]) == ("solved", 4, 4)


def test_a_run_that_diverges_is_said_to_have_diverged(tmp_path):
    config = tiny(tmp_path, "optimizer.lr=1e30", "optimizer.warmup_steps=1", "trainer.clip_norm=0", "trainer.steps=50")
    with pytest.raises(Diverged, match="training loss is"):
        run_job(config)
    directory = Path(config["runs_dir"]) / config["study"] / run_id(config)
    assert status_of(directory).status == "diverged"


def test_bf16_trains_in_autocast_with_parameters_in_fp32(tmp_path):
    config = tiny(tmp_path, "trainer.precision=bf16")
    result = run_job(config)
    assert math.isfinite(result["metrics"]["test/length/16/loss"])
    assert all(weight.dtype == torch.float32 for weight in record(config)[2].values())


@pytest.mark.parametrize(
    "words, said",
    [
        (["model.dim=10", "model.heads=3"], "heads=3 does not divide dim=10"),
        (["variant=gqa", "model.heads=6", "model.dim=24", "variant.kv_heads=4"], "4"),
        (["task.length=8", "task.pairs=4"], "8"),
        (["trainer.precision=fp17"], "Did you mean 'fp32'"),
        (["trainer.device=tpu"], "cpu"),
        (["trainer.steps=0"], "trainer.steps=0 trains nothing"),
        (["model.pattern=[full]"], "never uses the variant"),
        (["model.layers=0"], "model.layers must be at least 1"),
        (["seed=-1"], "seed must lie between 0 and 2^63 - 1"),
        (["seed=99999999999999999999"], "seed must lie between 0 and 2^63 - 1"),
        (["trainer.stop_at=2"], "trainer.stop_at must be an accuracy"),
        (["study=../elsewhere"], "a study is the name of one folder"),
        (["study=/tmp/elsewhere"], "a study is the name of one folder"),
        (["study=."], "a study is the name of one folder"),
        (["trainer.clip_norm=-1"], "trainer.clip_norm must be at least 0"),
        (["optimizer.lr=-1"], "optimizer.lr must be at least 0"),
        (["optimizer.betas=[0.9]"], "optimizer.betas must be two numbers"),
        (["evaluation.multiples=[]"], "evaluation.multiples"),
        (["evaluation.multiples=[0]"], "evaluation.multiples"),
        (["evaluation.sequences=0"], "evaluation.sequences must be at least 1"),
        (["position=learned", "position.max_positions=16"], "max_positions=16 is too small for the longest sequence, of 32 tokens"),
        (["position=learned", "model.position_layers=[false]"], "cannot switch it off"),
        (["variant.impl=sdap"], "sdap"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_written(tmp_path, words, said):
    with pytest.raises(UserError) as caught:
        run_job(tiny(tmp_path / "runs", *words))
    assert said in str(caught.value) and not (tmp_path / "runs").exists()


def test_the_loss_of_a_batch_without_scored_tokens_is_zero_with_zero_gradients():
    logits = torch.randn(0, 5, requires_grad=True)
    loss = mean_loss(logits, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None


def test_norms_biases_and_what_a_mixer_protects_go_without_weight_decay(tmp_path):
    task, model = prepare(tiny(tmp_path))
    protected = next(iter(model.mixers()[0].parameters()))
    model.mixers()[0].undecayed = lambda: [protected]  # type: ignore[method-assign]
    decayed, kept = parameter_groups(model, 0.1)
    ids = {id(p) for p in decayed["params"]}
    assert id(protected) not in ids and decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert len(ids) + len(kept["params"]) == len(list(model.parameters()))


def test_a_layer_in_a_model_starts_like_the_bare_layer(tmp_path):
    config = tiny(tmp_path, "position=none", "variant.dropout=0")
    _, model = prepare(config)
    state = torch.get_rng_state()
    del state
    bare = registry.variants.build("full", dim=16, heads=2, short_conv=3)
    for (name, ours), (_, theirs) in zip(model.mixers()[0].named_parameters(), bare.named_parameters(), strict=True):
        assert ours.shape == theirs.shape, name
        assert ours.std().isclose(theirs.std(), rtol=0.5, atol=1e-3) or ours.numel() < 64, name


def test_the_rate_warms_up_and_decays_by_a_cosine():
    chosen = settings.Optimizer(warmup_steps=10, final_lr_ratio=0.1)
    rates = [learning_rate(step, chosen, 110) for step in (0, 4, 9, 10, 60, 110, 500)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1])


def test_random_streams_of_steps_differ():
    assert len({step_seed(seed, step, rank) for seed in range(20) for step in range(100) for rank in range(2)}) == 4000


def test_tokens_per_second_is_measured_over_training_alone(straight):
    costs, counts = straight[0]["costs"], straight[0]["counts"]
    assert counts == {"steps": 10, "tokens": 10 * 4 * 16, "sequences": 40}
    assert costs["tokens_per_second"] == pytest.approx(counts["tokens"] / costs["seconds"])
    assert costs["seconds"] < time.process_time()
