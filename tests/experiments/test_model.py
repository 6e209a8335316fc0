"""The decoder: scored logits, its cache, padding, patterns, and what it says it costs."""

from __future__ import annotations

import math

import pytest
import torch

from experiments.config import resolve
from experiments.model import Decoder, build, on_meta
from registry import UserError
from variants.contract import Context, NotApplicable
from variants.ops.ranks import Simulated

SMALL = ["model.dim=16", "model.heads=2", "model.layers=2", "variant=full", "variant.short_conv=3"]


def decoder(*words: str) -> Decoder:
    torch.manual_seed(0)
    return build(resolve([*SMALL, *words]), vocab_size=11).double().eval()


def tokens(batch: int, time: int) -> torch.Tensor:
    return torch.randint(0, 11, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "words", [[], ["position=none"], ["position=learned"], ["variant=linear"], ["variant=sliding_window", "variant.window=4"]]
)
def test_logits_at_scored_places_are_those_of_the_whole_pass(words):
    model, x = decoder(*words), tokens(3, 9)
    scored = torch.rand(3, 9) < 0.3
    torch.testing.assert_close(model(x, scored=scored).logits, model(x).logits[scored])


@pytest.mark.parametrize("position", ["rope", "none", "learned"])
@pytest.mark.parametrize("variant", ["full", "gqa", "sliding_window", "linear"])
def test_pieces_with_a_cache_give_the_full_pass(variant, position):
    model, x = decoder(f"variant={variant}", f"position={position}"), tokens(2, 12)
    whole = model(x).logits
    state, pieces = model.init_state(2), []
    for piece in x.split([5, 1, 1, 3, 2], dim=1):
        output = model(piece, state=state)
        state = output.state
        pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert state.counters["seen"].tolist() == [12, 12]


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_its_unpadded_run(position, side):
    model, x = decoder(f"position={position}"), tokens(2, 9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[0, :4] = False
    if side == "right":
        valid = valid.flip(1)
    padded = model(x, Context(valid=valid)).logits
    torch.testing.assert_close(padded[0][valid[0]], model(x[:1, valid[0]]).logits[0])
    torch.testing.assert_close(padded[1], model(x[1:]).logits[0])
    junk = torch.where(valid, x, -100)  # a pad may be any number, also one without an embedding
    assert torch.equal(model(junk, Context(valid=valid)).logits[valid], padded[valid])


def test_scored_places_of_a_left_padded_batch_keep_their_order():
    model, x = decoder(), tokens(2, 6)
    valid = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    scored = torch.tensor([[0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 1, 0]]).bool()
    torch.testing.assert_close(model(x, Context(valid=valid), scored=scored).logits, model(x, Context(valid=valid)).logits[scored])


def test_packed_segments_equal_their_own_runs():
    model, x = decoder("position=learned"), tokens(1, 8)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    packed = model(x, Context(segment_ids=segments)).logits
    torch.testing.assert_close(packed[:, 3:], model(x[:, 3:]).logits)


def test_a_pattern_repeats_over_the_layers_and_position_layers_with_it():
    model = decoder(
        "model.layers=4", "model.pattern=[variant,{name: sliding_window,window: 2}]", "model.position_layers=[true,false,false]"
    )
    assert [type(mixer).__name__ for mixer in model.mixers()] == ["Full", "SlidingWindow"] * 2
    assert [mixer.position is not None for mixer in model.mixers()] == [True, False, False, True]
    assert [mixer.window for mixer in model.mixers()[1::2]] == [2, 2]


def test_a_pattern_names_the_nearest_mixer():
    with pytest.raises(UserError, match="Did you mean 'linear'"):
        decoder("model.pattern=[variant,liner]")


def test_a_scheme_without_meaning_under_a_mixer_is_refused_with_the_reason():
    import registry
    from variants.positions.contract import Scheme

    with registry.positions.scope():

        @registry.positions.register("distance", hooks=("bias",))
        class Distance(Scheme):
            """A bias."""

        with pytest.raises(NotApplicable, match="Distance needs the hook 'bias', which Linear does not have"):
            build({**resolve([*SMALL, "variant=linear"]), "position": {"name": "distance"}}, 11)


def test_the_meta_model_has_the_parameters_of_the_real_one():
    config = resolve(SMALL)
    meta, real = on_meta(config, 11), build(config, 11)
    assert [p.shape for p in meta.parameters()] == [p.shape for p in real.parameters()]
    assert all(p.is_meta for p in meta.parameters())


@pytest.mark.parametrize("variant", ["full", "gqa", "sliding_window", "linear"])
def test_declared_state_is_the_cache_of_a_real_pass(variant):
    model = decoder(f"variant={variant}")
    for time in (1, 3, 40):
        state = model(tokens(1, time), state=model.init_state(1)).state
        assert state.elements == model.state_elements(time) == model.read_elements(time)


def test_what_a_token_reads_is_what_the_layers_read():
    model = decoder("variant=nsa", "variant.window=4", "model.pattern=[variant,full]")
    chosen, whole = model.mixers()
    assert model.read_elements(400) == chosen.read_elements(400) + whole.state_elements(400) < model.state_elements(400)


def test_flops_count_the_output_layer_at_scored_tokens_alone():
    model = decoder()
    assert model.flops(10, 3) - model.flops(10, 1) == 2 * 2 * 16 * 11


def test_reach_adds_up_over_layers():
    assert decoder("variant=sliding_window", "variant.window=4").reach() == 2 * (3 + 2)
    assert decoder().reach() is None


def test_a_variant_that_differs_from_layer_to_layer_is_told_its_index():
    def shares(*words):
        config = resolve(["model.dim=16", "model.heads=2", "model.layers=3", "variant=differential", *words])
        return [block.mixer.lambda_init for block in build(config, vocab_size=8).blocks]

    assert shares() == pytest.approx([0.8 - 0.6 * math.exp(-0.3 * layer) for layer in range(3)])
    assert shares("variant.layer=5") == pytest.approx([0.8 - 0.6 * math.exp(-1.5)] * 3)


@pytest.mark.parametrize(
    "words",
    [[], ["position=learned"], ["model.pattern=[variant,gla]"], ["model.pattern=[mamba,variant]", "model.position_layers=[false,true]"]],
)
def test_rows_split_over_ranks_give_the_logits_and_gradients_of_whole_ones(words):
    model, x = decoder(*words), tokens(3, 13)
    scored = torch.rand(3, 13, generator=torch.Generator().manual_seed(2)) < 0.3
    valid = torch.ones(3, 13, dtype=torch.bool)
    valid[1, :4] = valid[2, 5:7] = False
    for context, marks in ((None, None), (None, scored), (Context(valid=valid), scored & valid)):
        results = []
        for ranks in (None, Simulated(3)):
            model.ranks = ranks
            logits = model(x, context, scored=marks).logits
            results.append((logits, torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
        (whole, expected), (split, found) = results
        kept = valid if context is not None and marks is None else slice(None)
        torch.testing.assert_close(split[kept], whole[kept])
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right)


def test_a_cache_is_of_whole_rows_also_in_a_model_whose_rows_are_split():
    model, x = decoder(), tokens(2, 9)
    whole = model(x).logits
    model.ranks = Simulated(2)
    torch.testing.assert_close(model(x, state=model.init_state(2)).logits, whole)
