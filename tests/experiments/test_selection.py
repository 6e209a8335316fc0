"""What a trained model chose: counted choice by choice, and written beside the result of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import registry
from experiments import selection
from experiments.config import resolve, without
from experiments.model import DecoderOutput, build
from experiments.runs import read
from experiments.runs.identity import run_id
from experiments.train import run_job
from registry import UserError

TINY = [
    *("task=mqar", "task.length=24", "task.pairs=2", "task.keys=8", "task.values=8", "position=rope", "study=s"),
    *("model.dim=16", "model.heads=4", "model.layers=2", "trainer.steps=2", "trainer.batch_size=2", "trainer.validation_sequences=2"),
    *("evaluation.multiples=[1]", "evaluation.sequences=2"),
]
MOBA = ["variant=moba", "variant.block=4", "variant.count=2"]


def config(runs: Path, *words: str):
    return without(resolve([*TINY, f"runs_dir={runs}", *words]), "sweep")


def model(*words: str):
    torch.manual_seed(0)
    return build(without(resolve([*TINY, *words]), "sweep"), 30).eval()


def tokens(time: int) -> torch.Tensor:
    return torch.randint(0, 30, (1, time), generator=torch.Generator().manual_seed(1))


def test_every_cell_is_the_share_of_the_heads_that_chose_it() -> None:
    built, x = model(*MOBA), tokens(22)
    first, second = selection.chosen(built, x)
    aux = built(x).aux
    assert [(part["layer"], part["part"], part["block"], part["keys"]) for part in (first, second)] == [(0, 0, 4, 4), (1, 0, 4, 4)]
    for layer, part in enumerate((first, second)):
        blocks = aux[f"blocks/{layer}"][0]
        expected = [[25 * sum(n in blocks[h, t].tolist() for h in range(4)) for n in range(6)] for t in range(22)]
        assert part["percent"] == expected


def test_a_long_sequence_is_binned_by_means(monkeypatch) -> None:
    monkeypatch.setattr(selection, "BINS", 3)
    (layer, _) = selection.chosen(model(*MOBA), tokens(22))
    blocks = model(*MOBA)(tokens(22)).aux["blocks/0"][0]
    assert layer["keys"] == 8 and selection.bin_size(22, 1) == 8
    for i in range(3):
        for j in range(3):
            queries, keys = range(8 * i, min(8 * i + 8, 22)), range(2 * j, 2 * j + 2)
            cells = [blocks[h, t].tolist().count(n) for h in range(4) for t in queries for n in keys]
            assert layer["percent"][i][j] == pytest.approx(100 * sum(cells) / len(cells), abs=0.51)


def test_tokens_and_the_parts_of_a_hybrid_are_told_apart() -> None:
    (only,) = selection.chosen(model("variant=dsa", "variant.count=3", "model.pattern=[full,variant]"), tokens(9))
    assert (only["layer"], only["block"], len(only["percent"][0])) == (1, 1, 9)
    assert [sum(row) for row in only["percent"]] == [100 * min(t + 1, 3) for t in range(9)]
    beside = ["variant=hybrid", "variant.pattern=gla+moba", "variant.settings={moba:{block:3}}"]
    assert [(part["part"], part["block"]) for part in selection.chosen(model(*beside), tokens(9))] == [(1, 3)] * 2
    assert selection.chosen(model("variant=full"), tokens(9)) == []


def test_what_else_a_mixer_tells_is_not_taken_for_a_choice(monkeypatch) -> None:
    built = model(*MOBA)
    aux = built(tokens(9)).aux
    told = {
        "gates/0": torch.rand(1, 4, 9, 2),
        "blocks/0": torch.rand(1, 4, 9, 2),
        "tokens/1": torch.tensor(3),
        "loss/indexer/1": torch.rand(()),
    }
    for mixer, found in ((built, 1), (model("variant=full"), 0)):
        monkeypatch.setattr(
            type(mixer), "forward", lambda *_, **__: DecoderOutput(torch.empty(0), None, told | {"blocks/1": aux["blocks/1"]})
        )
        assert len(selection.chosen(mixer, tokens(9))) == found


def test_the_answers_are_where_the_values_stand() -> None:
    task = registry.tasks.build("mqar", length=24, pairs=3)
    examples = task.sample("test", 24, 0)
    asked = selection.asked(examples)
    row = examples.tokens[0]
    assert [row[answer] for answer in asked["answers"]] == [examples.targets[0][at] for at in asked["scored"]]
    passkey = registry.tasks.build("passkey", length=24).sample("test", 24, 0)
    ((answer,), (at,)) = selection.asked(passkey)["answers"], selection.asked(passkey)["scored"]
    assert (at, passkey.tokens[0][answer]) == (23, passkey.targets[0][23])
    parity = registry.tasks.build("parity", length=8).sample("test", 8, 0)
    assert set(selection.asked(parity)["answers"]) == {None}


def test_a_run_that_chooses_says_so_and_can_be_asked_again_later(tmp_path) -> None:
    settings = config(tmp_path, "variant=nsa", "variant.window=4", "variant.block=16", "variant.compress_block=16")
    run_job(settings)
    directory = tmp_path / "s" / run_id(settings)
    written = (directory / "selection.json").read_text()
    told = json.loads(written)
    assert (told["length"], told["index"], told["queries"], len(told["scored"]), len(told["layers"])) == (24, 0, 1, 2, 2)
    assert read.selection(tmp_path / "s", directory.name) == told
    (directory / "selection.json").unlink()
    assert read.selection(tmp_path / "s", directory.name) is None
    moved = tmp_path / "elsewhere" / "study"
    moved.parent.mkdir()
    directory.parent.rename(moved)
    selection.write_afterwards(moved / directory.name)
    assert (moved / directory.name / "selection.json").read_text() == written


def test_a_run_that_does_not_choose_has_no_map(tmp_path) -> None:
    settings = config(tmp_path, "variant=full")
    run_job(settings)
    assert not (tmp_path / "s" / run_id(settings) / "selection.json").exists()
    with pytest.raises(UserError, match="is no finished run"):
        selection.write_afterwards(tmp_path / "s")
