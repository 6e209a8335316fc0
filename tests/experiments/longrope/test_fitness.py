"""Candidates in one batch: each turns as `longrope` would alone, is scored on what the objective counts, and leaves the model as it was."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments.config import resolve
from experiments.longrope.evolution import Settings, search
from experiments.longrope.fitness import Candidates, Fitness, rope_of, scheme_factors, seeds
from experiments.longrope.space import Genome, Space
from experiments.model import Decoder, build
from experiments.tasks.contract import IGNORE, Examples
from registry import UserError, positions
from tests.variants.positions import formulas
from variants.positions.rotary import Rotary

TRAINED, TIME, ROWS, VOCAB = 8, 20, 3, 11
SMALL = ["model.dim=16", "model.heads=2", "model.layers=2", "variant=full"]
GENOMES = [
    Genome((1.0, 1.0, 1.0, 1.0)),
    Genome((1.0, 1.5, 2.25, 3.0), unscaled=2),
    Genome((2.5, 2.5, 2.5, 2.5), unscaled=5),
    Genome((1.1, 1.7, 2.9, 3.1)),
    Genome((1.0, 1.0, 1.0, 3.1), unscaled=30),
]
MODELS: dict[str, list[str]] = {
    "full": [],
    "interleaved pairs": ["position.layout=interleaved", "position.base=100.0"],
    "gqa with a convolution": ["variant=gqa", "variant.kv_heads=1", "variant.short_conv=3"],
    "a window": ["variant=sliding_window", "variant.window=4", "variant.sinks=1"],
    "norms on queries and keys": ["variant.qk_norm=true"],
    "latents": ["variant=mla", "variant.rope_dim=8"],
    "one layer without position": ["model.layers=3", "model.position_layers=[true,false,true]"],
}


@functools.cache
def resolved(*words: str) -> dict[str, Any]:
    return resolve([*SMALL, *words])


def decoder(*words: str, **position: Any) -> Decoder:
    config = resolved(*words)
    torch.manual_seed(0)
    return build({**config, "position": {**config["position"], **position}}, vocab_size=VOCAB).double().eval()


def longrope(words: Sequence[str], genome: Genome, attention_factor: float | None = None) -> Decoder:
    """The same weights under the registered scheme."""
    lists = {"long_factors": list(genome.factors), "unscaled": genome.unscaled}
    return decoder(*words, name="longrope", trained_length=TRAINED, factor=2.5, attention_factor=attention_factor, **lists)


def examples(rows: int = ROWS, time: int = TIME, **meta: np.ndarray) -> Examples:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (rows, time))
    targets = np.where(rng.random((rows, time)) < 0.4, rng.integers(0, VOCAB, (rows, time)), IGNORE)
    distance = np.where(targets == IGNORE, IGNORE, rng.integers(0, 2 * TRAINED, (rows, time)))
    distance[targets != IGNORE] += (np.arange((targets != IGNORE).sum()) == 0) * 2 * TRAINED
    return Examples(tokens, targets, {"distance": distance} | meta)


def fit(model: Decoder, given: Examples | None = None, **options: Any) -> Fitness:
    return Fitness(model, examples() if given is None else given, **{"trained_length": TRAINED, "factor": 2.5} | options)


@torch.no_grad()
def expected(words: Sequence[str], genome: Genome, objective: str, given: Examples, attention_factor: float | None = None) -> float:
    """Token by token, from the logits of a model with the registered scheme."""
    logits = longrope(words, genome, attention_factor)(torch.from_numpy(given.tokens)).logits
    losses = []
    for row in range(len(given.tokens)):
        for t in range(given.tokens.shape[1]):
            if objective == "mean":
                target = given.tokens[row, t + 1] if t + 1 < given.tokens.shape[1] else IGNORE
            else:
                target = given.targets[row, t]
            distance = given.meta["distance"][row] if given.meta["distance"].ndim == 1 else given.meta["distance"][row, t]
            if target != IGNORE and (objective != "needle" or distance > TRAINED):
                losses.append(-math.log(logits[row, t].softmax(-1)[target]))
    assert 0 < len(losses) < given.tokens.size
    return math.fsum(losses) / len(losses)


def candidates(trained: Rotary, genomes: Sequence[Genome], magnitude: float = 1.0) -> Candidates:
    factors = torch.tensor([genome.factors for genome in genomes], dtype=torch.float64)
    return Candidates(trained, factors, torch.tensor([genome.unscaled for genome in genomes]), magnitude=magnitude)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_of_a_batch_of_candidates_are_those_of_longrope_built_for_each(name):
    words, model = MODELS[name], decoder(*MODELS[name])
    tokens = torch.from_numpy(examples().tokens)
    grown = math.sqrt(1 + math.log(2.5) / math.log(TRAINED))
    for mixer in model.mixers():
        if isinstance(mixer.position, Rotary):
            mixer.position = candidates(mixer.position, GENOMES, grown)
    found = model(tokens.repeat(len(GENOMES), 1)).logits.view(len(GENOMES), ROWS, TIME, VOCAB)
    for genome, logits in zip(GENOMES, found, strict=True):
        torch.testing.assert_close(logits, longrope(words, genome)(tokens).logits, msg=f"{genome}")
    assert (found[0] - found[1]).abs().max() > 1e-4


@pytest.mark.parametrize(("head_dim", "fraction"), [(8, 1.0), (8, 0.5), (10, 0.6), (98, 2.1 / 98)])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rows_turn_as_longrope_turns_them_to_the_bit(head_dim, fraction, layout):
    options = {"head_dim": head_dim, "heads": 2, "dim": 2 * head_dim, "fraction": fraction, "layout": layout}
    trained = positions.build("rope", **options)
    pairs = trained.width // 2
    genomes = [Genome(tuple(np.linspace(1, s, pairs).tolist()), unscaled) for s, unscaled in ((1.0, 0), (4.0, 3), (5.0, 0))]
    q, k = torch.randn(6, 2, 12, head_dim), torch.randn(6, 1, 12, head_dim)
    shared, own = torch.arange(12).expand(6, 12), torch.arange(12) + torch.arange(6).unsqueeze(1)
    for at in (shared, own, shared.contiguous()):
        found = candidates(trained, genomes, 1.25).rotate(q, k, at, at)
        for n, genome in enumerate(genomes):
            rows = slice(2 * n, 2 * n + 2)
            one = positions.build(
                "longrope", **options, long_factors=list(genome.factors), unscaled=genome.unscaled, attention_factor=1.25, trained_length=8
            )
            for turned, alone in zip(found, one.rotate(q[rows], k[rows], at[rows], at[rows]), strict=True):
                assert torch.equal(turned[rows], alone)


def test_angles_are_positions_times_slowed_frequencies_except_below_unscaled():
    trained = positions.build("rope", head_dim=8, heads=1, dim=8, base=500.0)
    found = candidates(trained, GENOMES).angles(torch.arange(TIME).expand(2 * len(GENOMES), TIME))
    assert found.shape == (len(GENOMES), TIME, 4)
    plain = torch.tensor(formulas.rope(8, 500.0), dtype=torch.float64)
    for genome, angles in zip(GENOMES, found, strict=True):
        slowed = torch.tensor(formulas.longrope(8, 500.0, list(genome.factors)), dtype=torch.float64)
        for p in range(TIME):
            torch.testing.assert_close(angles[p], p * (plain if p < genome.unscaled else slowed))


def test_rows_that_cannot_be_shared_out_and_lists_of_another_width_are_refused():
    trained = positions.build("rope", head_dim=8, heads=1, dim=8)
    with pytest.raises(ValueError, match="7 rows cannot be shared out evenly among 5"):
        candidates(trained, GENOMES).angles(torch.arange(3).expand(7, 3))
    with pytest.raises(ValueError, match="each needs a factor for each of the 4 pairs; got 3"):
        candidates(trained, [Genome((1.0, 2.0, 3.0))])


@pytest.mark.parametrize("objective", ["mean", "repeated", "needle"])
@pytest.mark.parametrize("name", ["full", "gqa with a convolution", "one layer without position"])
def test_the_score_is_the_mean_loss_of_the_counted_tokens_under_longrope(name, objective):
    words, given = MODELS[name], examples()
    found = fit(decoder(*words), objective=objective)(GENOMES)
    assert found == pytest.approx([expected(words, genome, objective, given) for genome in GENOMES], rel=1e-9)
    # Where no position is scaled, the factors do not count.
    assert found[4] == pytest.approx(found[0], rel=1e-12)
    assert len({round(loss, 9) for loss in found}) == 4


def test_a_distance_of_the_whole_sequence_chooses_sequences():
    given = examples(distance=np.array([TRAINED, TRAINED + 1, 0]))
    model, seen = decoder(), []
    model.embedding.register_forward_hook(lambda module, given, out: seen.append(tuple(given[0].shape)))
    found = fit(model, given, objective="needle", batch_tokens=1)(GENOMES)
    assert found == pytest.approx([expected([], genome, "needle", given) for genome in GENOMES], rel=1e-9)
    assert seen == [(1, TIME)] * len(GENOMES), "sequences of which nothing is counted need not run"


def test_an_attention_factor_that_is_given_is_final():
    found = fit(decoder(), attention_factor=1.3)(GENOMES)
    assert found == pytest.approx([expected([], genome, "mean", examples(), 1.3) for genome in GENOMES], rel=1e-9)
    assert fit(decoder()).attention_factor == pytest.approx(math.sqrt(1 + math.log(2.5) / math.log(TRAINED)), rel=1e-12)


@pytest.mark.parametrize("batch_tokens", [1, TIME, 2 * TIME, ROWS * TIME, 2 * ROWS * TIME + 1, 10**6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_score_of_a_candidate_does_not_depend_on_its_company(batch_tokens, dtype):
    model = decoder().to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    together = fit(model)(GENOMES)
    scored = fit(model, batch_tokens=batch_tokens)
    assert scored(GENOMES) == pytest.approx(together, rel=tolerance)
    assert scored(GENOMES[::-1]) == pytest.approx(together[::-1], rel=tolerance)
    assert [scored([genome])[0] for genome in GENOMES] == pytest.approx(together, rel=tolerance)
    assert scored(GENOMES) == scored(GENOMES), "equal calls differ"
    assert scored([]) == []


@pytest.mark.parametrize(
    ("batch_tokens", "shapes"), [(10**6, [15]), (2 * ROWS * TIME, [6, 6, 3]), (TIME, [1] * 15), (2 * TIME, [2, 1] * 5)]
)
def test_candidates_share_forward_passes_of_at_most_so_many_tokens(batch_tokens, shapes):
    model, seen = decoder(), []
    model.embedding.register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    fit(model, batch_tokens=batch_tokens)(GENOMES)
    assert seen == shapes


def state_of(model: Decoder) -> tuple[list[Any], list[bool], list[Tensor]]:
    return (
        [mixer.position for mixer in model.mixers()],
        [module.training for module in model.modules()],
        [parameter.clone() for parameter in model.parameters()],
    )


class Broken(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was_afterwards_also_when_scoring_fails(fails):
    model = decoder(*MODELS["one layer without position"]).train()
    model.layers()[1].eval()  # modes are those of each module, and not of the whole
    schemes, modes, weights = state_of(model)
    names, seen = [name for name, _ in model.named_modules()], []

    def hook(module: nn.Module, given: Any, output: Any) -> None:
        seen.append(([type(mixer.position).__name__ for mixer in model.mixers()], model.training, torch.is_grad_enabled()))
        if fails:
            raise Broken

    handle = model.norm.register_forward_hook(hook)
    if fails:
        with pytest.raises(Broken):
            fit(model)(GENOMES)
    else:
        fit(model)(GENOMES)
    handle.remove()
    assert seen == [(["Candidates", "NoneType", "Candidates"], False, False)]
    after = state_of(model)
    assert all(a is b for a, b in zip(after[0], schemes, strict=True))
    assert after[1] == modes
    assert all(torch.equal(a, b) for a, b in zip(after[2], weights, strict=True))
    assert [name for name, _ in model.named_modules()] == names
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_drops_out_in_training_is_scored_without():
    assert fit(decoder("model.dropout=0.5").train())(GENOMES) == pytest.approx(fit(decoder())(GENOMES), rel=1e-12)


def test_scores_are_fp32_whatever_autocast_is_on_outside():
    model = decoder().float()
    plain = fit(model)(GENOMES)
    with torch.autocast("cpu", torch.bfloat16):
        assert fit(model)(GENOMES) == plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["position=none"], "trained with position=rope; this one has no position in any layer"),
        (["position=learned"], "trained with position=rope; this one has Learned"),
        (["position=alibi"], "this one has ALiBi"),
        (["position=yarn"], "this one has YaRN"),
        (["position=p_rope"], "this one has Proportional"),
        (
            ["model.layers=2", "model.pattern=[variant,{name: full,head_dim: 4}]"],
            r"they turn differently: \(width, base, layout\) = \[\(4, .*\), \(8, ",
        ),
    ],
)
def test_a_model_whose_pairs_cannot_be_slowed_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        fit(decoder(*words))


@pytest.mark.parametrize(
    ("given", "objective", "message"),
    [
        (examples(time=TRAINED), "mean", "searched on sequences longer than the 8 tokens trained on; got 8"),
        (examples(rows=0), "mean", "objective='mean' counts no token"),
        (examples()._replace(targets=np.full((ROWS, TIME), IGNORE)), "repeated", "objective='repeated' counts no token"),
        (examples(distance=np.full((ROWS, TIME), TRAINED)), "needle", "objective='needle' counts no token"),
        (examples()._replace(meta={}), "needle", "objective='needle' counts answers by their distance, which this task's"),
        (examples(), "perplexity", "there is no objective 'perplexity'. Valid: mean, needle, repeated"),
    ],
)
def test_examples_on_which_nothing_can_be_scored_are_refused(given, objective, message):
    with pytest.raises(UserError, match=message):
        fit(decoder(), given, objective=objective)


@pytest.mark.parametrize(("width", "trained_length", "factor"), [(8, 2048, 4.0), (32, 128, 4.0), (64, 256, 8.0), (8, 2048, 1.0)])
def test_seeds_are_pi_ntk_and_yarn_rounded_up_to_the_grid(width, trained_length, factor):
    trained = positions.build("rope", head_dim=width, heads=1, dim=width)
    found = seeds(Space(width // 2, factor), trained, trained_length)
    plain = formulas.rope(width, 1e4)
    tables = {
        "pi": formulas.pi(width, 1e4, factor),
        "ntk": formulas.ntk(width, 1e4, factor),
        "yarn": formulas.yarn(width, 1e4, factor, trained_length),
    }
    assert list(found) == list(tables)
    for name, table in tables.items():
        for factor_found, f, g in zip(found[name].factors, plain, table, strict=True):
            assert f / g - 1e-6 <= factor_found < f / g + 0.01


def test_the_factors_of_partly_turned_heads_are_those_of_the_turned_width():
    trained = positions.build("rope", head_dim=16, heads=2, dim=32, fraction=0.5, base=500.0)
    found = scheme_factors(trained, 100, 4.0)
    expected = {"pi": [4.0] * 4, "ntk": [4 ** (i / 3) for i in range(4)]}
    for name, factors in expected.items():
        assert found[name] == pytest.approx(factors, rel=1e-12)
    assert [f / g for f, g in zip(formulas.rope(8, 500.0), found["yarn"], strict=True)] == pytest.approx(
        formulas.yarn(8, 500.0, 4.0, 100), rel=1e-12
    )


@pytest.mark.parametrize(("width", "base", "names"), [(2, 1e4, ["pi", "yarn"]), (8, 0.5, ["pi", "ntk"])])
def test_a_scheme_that_has_no_meaning_for_the_model_gives_no_seed(width, base, names):
    trained = positions.build("rope", head_dim=width, heads=1, dim=width, base=base)
    assert list(seeds(Space(width // 2, 4.0), trained, 64)) == names


def test_with_critical_pairs_there_is_a_seed_for_each():
    trained = positions.build("rope", head_dim=8, heads=1, dim=8)
    found = seeds(Space(4, 4.0, critical=(1, 2)), trained, 64)
    assert found == {"critical 1": Genome((1.0, 4.0, 4.0, 4.0)), "critical 2": Genome((1.0, 2.0, 4.0, 4.0))}
    assert [genome.critical for genome in found.values()] == [1, 2]


@pytest.mark.parametrize("objective", ["mean", "repeated", "needle"])
def test_a_search_on_a_small_decoder_improves_on_its_seeds(objective):
    scored = fit(decoder().float(), objective=objective)
    space = Space(4, 2.5, unscaled=(0, 2))
    start = list(seeds(space, rope_of(scored.model), TRAINED).values())
    settings = Settings(evaluations=60, population=16, mutations=6, crossovers=6)
    found = search(space, start, scored, settings=settings)
    assert found.score < min(found.seeds)
    assert found.seeds == pytest.approx(scored(start), rel=1e-5)
    assert scored([found.best])[0] == pytest.approx(found.score, rel=1e-5)
    assert search(space, start, scored, settings=settings) == found
