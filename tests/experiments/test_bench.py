"""The benchmark: candidates agree before they are timed, and its rows have the stable form."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from experiments.bench import training_step
from experiments.bench.machine import median_seconds
from experiments.bench.training_step import figure_two, verify
from experiments.cli import app

ROW = {
    *("candidate", "peer", "mode", "level", "length", "seconds", "spread", "tokens_per_second", "share_of_limit"),
    *("peak_bytes", "state_bytes"),
}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_bench_has_the_stable_json(monkeypatch):
    monkeypatch.setattr(training_step, "SIZES", ((16, 2, 8, 2),))
    done = CliRunner().invoke(app, ["bench", "--repeats", "1", "--threads", "1", "--json"])
    document = json.loads(done.stdout)
    assert set(document) == {"machine", "rows", "exponents"}
    assert {"matmul_flops", "copy_bytes"} <= set(document["machine"])
    ours, peer = document["rows"]
    assert set(ours) == set(peer) == ROW
    assert (ours["peer"], peer["peer"], ours["mode"], ours["level"]) == (False, True, "train", "model")
    assert ours["tokens_per_second"] == pytest.approx(2 * 16 / ours["seconds"])


def test_figure_two_is_zoologys_set_up():
    config = figure_two(64, 4, 64, 256)
    task, model = training_step.prepare(config)
    assert task.vocab_size == 8192 and len(model.mixers()) == 2 and model.layers()[0].mlp is None
    assert config["trainer"]["batch_size"] == 256 and config["model"]["heads"] == 1


def test_gathered_and_full_logits_give_one_loss():
    verify(figure_two(32, 4, 16, 4))


def test_a_candidate_that_computes_something_else_is_not_timed(monkeypatch):
    monkeypatch.setattr(training_step, "IGNORE", -1)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        verify(figure_two(32, 4, 16, 4))


def test_the_first_call_is_not_timed():
    calls = []
    assert median_seconds(lambda: calls.append(1), repeats=3) >= 0
    assert len(calls) == 4
