"""The benchmark: candidates are right before they are timed, take turns, and come out in one stable form."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
import torch
from typer.testing import CliRunner

import registry
from experiments.bench import core, layer, peers, training_step
from experiments.bench.candidate import Candidate, Group, Notes, Point, Timing, in_turns, measure, metered, output_gradient, work
from experiments.bench.candidate import verify as check
from experiments.bench.machine import median_seconds
from experiments.bench.rows import exponents, growths, rows
from experiments.bench.sizes import Sizes
from experiments.bench.training_step import figure_two, verify
from experiments.cli import app
from variants.ops import reference
from variants.ops.attention import Sight

PAGE = registry.ROOT / "docs" / "performance.md"
ROW = {
    *("candidate", "peer", "mode", "level", "length", "seconds", "spread", "tokens_per_second", "share_of_limit"),
    *("peak_bytes", "state_bytes", "read_bytes", "group", "baseline", "ratio"),
}
EXPONENT = {"candidate", "mode", "quantity", "exponent", "r2", "lengths", "values", "level", "group"}
SMALL = Sizes(heads=2, head_dim=8, dim=16, window=8)
WORDS = ["--heads", "2", "--head-dim", "8", "--dim", "16", "--window", "8", "--repeats", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bench(*words: str, code: int = 0):
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == code, f"{done.stdout}\n{done.stderr}\n{done.exception!r}"
    return done


def document(*words: str) -> dict:
    return json.loads(bench(*words, "--json").stdout)


def found(group: Group, modes=("forward", "train"), repeats=1) -> tuple[list[Timing], Notes]:
    notes = Notes()
    return list(measure("core", group, modes, repeats, notes)), notes


def wrong(candidate: Candidate) -> str | None:
    return check([candidate])[candidate.name].wrong


def timing(candidate: str, length: int, seconds: list[float], **more) -> Timing:
    facts = {"level": "core", "group": "g", "baseline": "base", "peer": False, "mode": "train", "tokens": length, "flops": 1000}
    facts |= {"peak_bytes": length, "state_bytes": 0} | more
    return Timing(candidate=candidate, length=length, seconds=seconds, **facts)


def test_the_model_level_has_the_stable_json(monkeypatch):
    monkeypatch.setattr(training_step, "SIZES", ((16, 2, 8, 2),))
    told = document("--repeats", "1", "--threads", "1")
    assert set(told) == {"machine", "rows", "exponents"}
    assert {"matmul_flops", "copy_bytes"} <= set(told["machine"])
    peer, ours = told["rows"]
    assert set(ours) == set(peer) == ROW
    assert (ours["peer"], peer["peer"], ours["mode"], ours["level"]) == (False, True, "train", "model")
    assert ours["tokens_per_second"] == pytest.approx(2 * 16 / ours["seconds"])
    assert ours["ratio"] == pytest.approx(peer["seconds"] / ours["seconds"])


def test_the_core_level_times_every_group_in_both_modes_against_its_baseline():
    told = document("--level", "core", "--lengths", "48", *WORDS)
    assert {(row["group"], row["mode"]) for row in told["rows"]} == {(g, m) for g in core.GROUPS for m in ("forward", "train")}
    for row in told["rows"]:
        assert set(row) == ROW and row["level"] == "core" and row["length"] == 48 and row["seconds"] > 0
        assert row["peer"] == (row["candidate"] not in ("tiles", "fused", "loops", "chunks", "token loop"))
        assert row["candidate"] != row["baseline"] or row["ratio"] == 1
    names = {group: {row["candidate"] for row in told["rows"] if row["group"] == group} for group in core.GROUPS}
    assert names.pop("selective_scan") == {"loops", "chunks", "mambapy", "token loop"}
    assert all({"tiles", "fused"} <= found or {"sdpa", "chunks", "token loop"} <= found for found in names.values())
    assert "transformers" in names["gated_delta"] & names["channel_delta"]


def test_the_layer_level_times_variants_and_fits_exponents_over_the_lengths():
    told = document("--level", "layer", "--only", "full,linear", "--only", "sliding_window", "--lengths", "32,64,128", *WORDS)
    assert {row["candidate"] for row in told["rows"]} == {"full", "linear", "sliding_window"}
    assert {row["mode"] for row in told["rows"]} == {"forward", "train", "decode"}
    assert {row["baseline"] for row in told["rows"]} == {"full"}
    assert all(set(row) == ROW and row["state_bytes"] > 0 and row["share_of_limit"] > 0 for row in told["rows"])
    assert all(set(entry) == EXPONENT and entry["lengths"] == [32, 64, 128] for entry in told["exponents"])
    assert {entry["quantity"] for entry in told["exponents"]} == {"seconds", "peak_bytes"}
    states = {row["length"]: row["state_bytes"] for row in told["rows"] if (row["candidate"], row["mode"]) == ("full", "train")}
    assert states == {length: 4 * 2 * 16 * length for length in (32, 64, 128)}


def test_a_decoded_token_says_what_it_reads_of_the_cache():
    words = ["--level", "layer", "--only", "full,moba block=4 count=2", "--lengths", "64", *WORDS]
    read = {(row["candidate"], row["mode"]): row["read_bytes"] for row in document(*words)["rows"]}
    kept, chosen = 64 + 64, 2 * 4  # keys and values of every token; those of one block, as at 64 tokens a new one begins
    assert read["full", "decode"] == 4 * 16 * kept
    assert read["moba block=4 count=2", "decode"] == 4 * 16 * (chosen + 64 // 4 + 3)
    assert all(value == 0 for (_, mode), value in read.items() if mode != "decode")
    said = bench(*words).stdout
    assert said.count("state kB") == 3 and said.count("read kB") == 1


def test_options_and_public_layers_of_the_same_parameters_stand_beside_a_variant():
    told = document("--level", "layer", "--only", "mamba,mamba2 state_dim=4", "--mode", "train", "--lengths", "24", *WORDS)
    assert {row["candidate"]: row["peer"] for row in told["rows"]} == {
        "mamba": False,
        "mamba (mambapy)": True,
        "mamba (transformers)": True,
        "mamba2 state_dim=4": False,
        "mamba2 state_dim=4 (transformers)": True,
    }
    said = bench("--level", "layer", "--only", "mamba norms=true", "--mode", "forward", "--lengths", "24", *WORDS).stderr
    assert "mamba norms=true (mambapy) is left out" in said
    assert "--dim sets" in bench("--level", "layer", "--only", "mamba dim=48", *WORDS, code=2).stderr
    assert "cannot read 'state_dim'" in bench("--level", "layer", "--only", "mamba2 state_dim", *WORDS, code=2).stderr


def test_a_table_names_the_baseline_and_the_growth():
    said = bench("--level", "layer", "--only", "gqa,full", "--mode", "forward", "--lengths", "16,32", *WORDS).stdout
    assert "layer, forward" in said and "x full" in said and "growth over the length" in said and "T^" in said


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^attnlab bench(.*)$", PAGE.read_text(), flags=re.MULTILINE))))
def test_a_documented_command_runs(command, monkeypatch):
    monkeypatch.setattr(training_step, "SIZES", ((16, 2, 8, 2),))
    words = shlex.split(command, comments=True)
    at = ["--lengths", "16,32"] if "--level" in words else []
    assert "GFLOP/s" in bench(*words, *at, *WORDS).stdout


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--level", "cor"], "Did you mean 'core'?"),
        (["--level", "core", "--only", "windw"], "Did you mean 'window'?"),
        (["--level", "layer", "--only", "slidng_window"], "Did you mean 'sliding_window'?"),
        (["--level", "core", "--mode", "decode"], "Valid: forward, train."),
        (["--level", "model", "--only", "full"], "--lengths chooses: 64, 256"),
        (["--level", "model", "--lengths", "65"], "64, 256"),
        (["--level", "layer", "--lengths", "64,x"], "such as 512,2048"),
        (["--level", "layer", "--lengths", "0"], "at least 1"),
        (["--level", "layer", "--head-dim", "0"], "--head-dim must be at least 1"),
        (["--repeats", "0"], "at least 1"),
    ],
)
def test_a_mistake_is_answered_with_what_is_valid(words, answer):
    assert answer in bench(*words, code=2).stderr


def test_a_candidate_with_wrong_gradients_is_said_and_not_timed(capsys):
    x = torch.randn(4, 3, requires_grad=True)
    oracle = lambda: 2 * x
    candidates = [
        Candidate("right", lambda: x + x, oracle, (x,)),
        Candidate("wrong output", lambda: x + 1.001 * x, oracle, (x,)),
        Candidate("wrong gradient", lambda: x + x.detach(), oracle, (x,)),
        Candidate("wrong shape", lambda: (2 * x)[:2], oracle, (x,)),
        Candidate("not a number", lambda: 2 * x * torch.nan, oracle, (x,)),
    ]
    timings, notes = found(Group("g", 4, 4, "right", candidates))
    assert {entry.candidate for entry in timings} == {"right"}
    assert {name for _, name in notes.wrong} == {candidate.name for candidate in candidates[1:]}
    said = capsys.readouterr().err
    assert "wrong gradient is wrong and not timed: gradient 1 of 1 is off by" in said and "output is off by" in said


def test_a_wrong_core_makes_the_command_fail(monkeypatch):
    monkeypatch.setattr(core.softmax, "attention", lambda q, k, v, **_: v + 0 * (q + k))
    done = bench("--level", "core", "--only", "causal", "--lengths", "16", *WORDS, "--json", code=1)
    assert {row["candidate"] for row in json.loads(done.stdout)["rows"]} == {"sdpa", "sdpa math", "fused"}
    assert "causal: tiles is wrong" in done.stderr


def test_candidates_take_turns():
    order: list[str] = []
    jobs = {name: (lambda name=name: order.append(name), calls) for name, calls in (("a", 1), ("b", 2))}
    seconds = in_turns(jobs, 3)
    assert order == ["a", "b", "b"] * 3
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_long_rounds_are_fewer_unless_a_number_is_asked_for(monkeypatch):
    monkeypatch.setattr("experiments.bench.candidate.SECONDS", 0.0)
    assert len(in_turns({"a": (lambda: None, 1)}, None)["a"]) == 3
    assert len(in_turns({"a": (lambda: None, 1)}, 5)["a"]) == 5
    monkeypatch.setattr("experiments.bench.candidate.SECONDS", 60.0)
    assert len(in_turns({"a": (lambda: None, 1)}, None)["a"]) == 7


def test_peak_bytes_are_those_beside_what_is_returned():
    def job():
        return (torch.ones(1000).repeat(10).reshape(10, 1000).sum(0),)

    assert metered(job)[1] == 4 * 10_000 + 4 * 1000 - 4 * 1000
    assert metered(lambda: (torch.ones(1000),))[1] == 0
    x = torch.ones(1000, requires_grad=True)
    assert metered(work(Candidate("a", lambda: x + 1, leaves=(x,)), "train"))[1] == 0


def test_a_row_is_medians_and_their_ratio_to_the_baseline():
    made = rows([timing("base", 8, [4.0, 2.0, 3.0]), timing("ours", 8, [1.0, 1.5, 100.0])], {"matmul_flops": 100.0})
    assert [row["seconds"] for row in made] == [3.0, 1.5] and [row["ratio"] for row in made] == [1.0, 2.0]
    assert made[0]["spread"] == 1.0 and made[1]["share_of_limit"] == pytest.approx(10 / 1.5)
    assert rows([timing("ours", 8, [1.0])], {"matmul_flops": 1.0})[0]["ratio"] is None


def test_a_ratio_is_taken_within_group_mode_and_length():
    others = [timing("base", 16, [9.0]), timing("base", 8, [7.0], mode="forward"), timing("base", 8, [5.0], group="h")]
    made = rows([timing("base", 8, [2.0]), *others, timing("ours", 8, [1.0])], {"matmul_flops": 1.0})
    assert made[-1]["ratio"] == 2.0


def test_exponents_are_those_of_the_power_laws_behind_them():
    timings = [timing(name, n, [c * n**e] * 3, peak_bytes=7 * n) for name, c, e in (("a", 2, 2.0), ("b", 5, 0.5)) for n in (8, 16, 64)]
    fits = {(entry["candidate"], entry["quantity"]): entry for entry in exponents(growths(timings))}
    assert fits["a", "seconds"]["exponent"] == pytest.approx(2) and fits["b", "seconds"]["exponent"] == pytest.approx(0.5)
    assert fits["a", "peak_bytes"]["exponent"] == pytest.approx(1) and fits["a", "peak_bytes"]["values"] == [56, 112, 448]
    assert all(entry["r2"] == pytest.approx(1) and entry["lengths"] == [8, 16, 64] for entry in fits.values())
    assert exponents(growths(timings[:1])) == []


def test_the_oracle_in_blocks_is_the_reference(monkeypatch):
    monkeypatch.setattr(core, "BLOCK", 7)
    q, k, v = (torch.randn(1, 2, 24, 4, dtype=torch.float64) for _ in range(3))
    total = torch.rand(1, 2, 24, dtype=torch.float64).log().cumsum(-1)
    fade, sink = core.Fade(total, total), torch.randn(2, dtype=torch.float64)
    for window in (None, 5):
        right = reference.attention(q, k, v, sight=Sight(window=window), fade=fade, sink=sink)
        torch.testing.assert_close(core.oracle(q, k, v, window=window, fade=lambda: fade, sink=sink), right)


def test_the_memory_of_the_tiles_grows_linearly_with_the_length():
    workload = core.Workload(core.window, 8192, (2048, 4096, 8192))
    points = list(core.memory("window", workload, Sizes(head_dim=8, window=16), ("forward", "train")))
    fits = {entry["mode"]: entry for entry in exponents(points)}
    assert {(entry["group"], entry["quantity"]) for entry in fits.values()} == {("window, one head", "peak_bytes")}
    assert fits["train"]["exponent"] == pytest.approx(1, abs=0.15)
    square = [Point("core", "g", "square", "train", "peak_bytes", n, 4.0 * n * n) for n in (2048, 4096, 8192)]
    assert all(entry["values"][-1] < square[-1].value / 20 for entry in fits.values())


def test_local_attention_has_one_token_more_in_sight_than_its_window():
    pytest.importorskip("local_attention")
    q, k, v = (torch.randn(1, 2, 40, 4) for _ in range(3))
    found = peers.local_attention(8)(q, k, v)
    torch.testing.assert_close(found, reference.attention(q, k, v, sight=Sight(window=9)))
    assert (found - reference.attention(q, k, v, sight=Sight(window=8))).abs().max() > 0.01


def test_a_peer_that_is_not_installed_is_named_and_everything_else_timed(monkeypatch):
    monkeypatch.setitem(sys.modules, "local_attention", None)
    done = bench("--level", "core", "--only", "window", "--lengths", "24", *WORDS, "--json")
    assert "local-attention is left out: not installed: pip install local-attention" in done.stderr
    assert {row["candidate"] for row in json.loads(done.stdout)["rows"]} == {"sdpa", "sdpa band mask", "tiles", "fused"}


def test_a_variant_that_cannot_be_built_of_these_sizes_is_named(capsys):
    mixers = layer.build(["full", "gqa"], Sizes(heads=3, dim=16), Notes())
    assert not mixers and "full is left out" in capsys.readouterr().err


class Copying(torch.nn.Module):
    """A mixer whose cache is copied at every call."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, x, state=None):
        copied = None if state is None else state.replace(keys=state["keys"].clone(), values=state["values"].clone())
        return self.mixer(x, state=copied)

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "mixer" else getattr(self.mixer, name)


@pytest.mark.parametrize(("wrap", "copies"), [(lambda mixer: mixer, False), (Copying, True)])
def test_a_decoded_token_does_not_copy_the_cache_and_a_copy_would_be_seen(wrap, copies):
    mixer = wrap(registry.variants.build("full", dim=64, heads=2))
    (candidate,) = layer.decoding("full", layer.Built(mixer, None, {}, {}), Sizes(dim=64, heads=2), 1024, verified=True)
    timings, notes = found(Group("decode", 1024, 1, "full", [candidate]), modes=("decode",))
    assert not notes.wrong
    (row,) = timings
    assert row.state_bytes >= 4 * 2 * 64 * 1024
    assert (row.peak_bytes > row.state_bytes) if copies else (row.peak_bytes < row.state_bytes / 8)


def test_decoding_is_verified_against_the_full_pass():
    mixer = registry.variants.build("full", dim=16, heads=2)
    (candidate,) = layer.decoding("full", layer.Built(mixer, None, {}, {}), SMALL, 32, verified=True)
    candidate.call.state = mixer.init_state(1)
    assert wrong(candidate)


def test_a_layer_is_verified_against_its_reference():
    built = layer.build(["full"], SMALL, Notes())["full"]
    (right,) = layer.sequence("full", built, SMALL, 32, verified=True)
    assert not wrong(right)
    built.mixer.look_through(4, 0)  # what the reference does not do
    assert wrong(right)


def test_a_training_job_gives_output_and_gradients_and_a_forward_job_records_none():
    x = torch.ones(2, requires_grad=True)
    candidate = Candidate("a", lambda: 3 * x, leaves=(x,))
    y, dx = work(candidate, "train")()
    assert y.tolist() == [3, 3] and dx.equal(3 * output_gradient(y.shape)) and dx[0] != dx[1]
    assert not work(candidate, "forward")()[0].requires_grad


def test_figure_two_is_zoologys_set_up():
    config = figure_two(64, 4, 64, 256)
    task, model = training_step.prepare(config)
    assert task.vocab_size == 8192 and len(model.mixers()) == 2 and model.layers()[0].mlp is None
    assert config["trainer"]["batch_size"] == 256 and config["model"]["heads"] == 1


def test_gathered_and_full_logits_give_one_loss():
    verify(figure_two(32, 4, 16, 4))


def test_a_loss_that_is_computed_otherwise_is_not_timed(monkeypatch):
    monkeypatch.setattr(training_step, "IGNORE", -1)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        verify(figure_two(32, 4, 16, 4))


def test_the_first_call_is_not_timed():
    calls = []
    assert median_seconds(lambda: calls.append(1), repeats=3) >= 0
    assert len(calls) == 4


def test_layers_whose_rows_two_processes_share_stand_beside_those_of_one_and_are_verified():
    told = document("--level", "layer", "--only", "full,gla,moba", "--processes", "2", "--lengths", "65", "--mode", "train", *WORDS)
    names = ["full", "full (2 processes)", "gla", "gla (2 processes)", "moba"]  # what were wrong would not be timed
    assert [row["candidate"] for row in told["rows"]] == names
    said = bench("--level", "layer", "--only", "full,moba", "--processes", "3", "--lengths", "5,6", "--mode", "forward", *WORDS).stderr
    assert "full (3 processes) is left out: rows of 5 tokens" in said and "give 6 tokens or more" in said
    assert "moba (3 processes) is left out: MoBA has no form" in said
    assert "use it with --level layer" in bench("--level", "core", "--processes", "2", *WORDS, code=2).stderr
