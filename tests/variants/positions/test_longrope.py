"""LongRoPE's two lists of factors, and schemes that depend on the length in rows that grow across the trained one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from registry import positions, variants
from tests.variants.positions import formulas
from variants.conformance import caching
from variants.conformance.run import judge, subjects_of
from variants.contract import Context
from variants.positions.longrope import LongRoPE
from variants.softmax.full import Full

FP64 = {"dtype": torch.float64}
SHORT, LONG = [1.0, 1.01, 1.1, 1.2], [1.0, 1.5, 3.0, 4.0]
#: The trained length is 8 tokens, so that few cross it.
BY_LENGTH: dict[str, dict[str, Any]] = {
    "dynamic_ntk": {"name": "dynamic_ntk", "trained_length": 8, "factor": 2.0},
    "longrope": {"name": "longrope", "trained_length": 8, "short_factors": [1.0, 1.1], "long_factors": [1.5, 4.0]},
    "longrope, the first unscaled": {"name": "longrope", "trained_length": 8, "factor": 8.0, "unscaled": 3},
    "longrope, on the logits": {"name": "longrope", "trained_length": 8, "temperature_on": "logits", "fraction": 0.5},
}
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "gqa": ("gqa", {"kv_heads": 2, "short_conv": 3}),
    "sliding_window": ("sliding_window", {"window": 5}),
    "sliding_window with sinks": ("sliding_window", {"window": 4, "sinks": 2}),
}
TIME = 14


def build(head_dim: int = 8, **options: object) -> LongRoPE:
    scheme = positions.build("longrope", head_dim=head_dim, heads=2, dim=2 * head_dim, **options)
    assert isinstance(scheme, LongRoPE)
    return scheme


def build_mixer(mixer: str, scheme: str) -> Any:
    name, options = MIXERS[mixer]
    torch.manual_seed(0)
    return variants.build(name, dim=16, heads=4, position=BY_LENGTH[scheme], **options).double()


def table(scheme: LongRoPE, length: int) -> list[float]:
    return scheme.frequencies(torch.tensor([length]))[0].tolist()


every_scheme = pytest.mark.parametrize("scheme", BY_LENGTH)
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


@pytest.mark.parametrize("trained_length", [8, 4096])
def test_the_short_list_serves_up_to_the_trained_length_and_the_long_one_above(trained_length) -> None:
    scheme = build(short_factors=SHORT, long_factors=LONG, factor=32.0, trained_length=trained_length)
    for length in (1, trained_length - 1, trained_length):
        assert table(scheme, length) == pytest.approx(formulas.longrope(8, 1e4, SHORT), rel=1e-12)
    for length in (trained_length + 1, 32 * trained_length):
        assert table(scheme, length) == pytest.approx(formulas.longrope(8, 1e4, LONG), rel=1e-12)


def test_the_length_of_a_row_is_told_by_its_last_key() -> None:
    scheme = build(short_factors=SHORT, long_factors=LONG, trained_length=8)
    x = torch.randn(1, 1, 1, 8, **FP64)

    def query_at_five(last_key: int) -> Tensor:
        return scheme.rotate(x, x.expand(1, 1, 2, 8), torch.tensor([[5]]), torch.tensor([[0, last_key]]))[0]

    assert torch.equal(query_at_five(7), query_at_five(5))
    assert torch.equal(query_at_five(8), query_at_five(100))
    assert not torch.equal(query_at_five(7), query_at_five(8))


@pytest.mark.parametrize(
    ("factor", "trained_length", "expected"), [(1.0, 4096, 1.0), (4.0, 2048, 1.087114613009), (32.0, 4096, 1.190238071424)]
)
def test_short_and_long_rows_grow_by_one_factor(factor, trained_length, expected) -> None:
    scheme = build(factor=factor, trained_length=trained_length)
    assert scheme.magnitude == pytest.approx(expected, abs=1e-12)
    for length in (10, trained_length + 10):
        x, at = torch.randn(1, 1, 2, 8, **FP64), torch.tensor([[0, length - 1]])
        grown = scheme.rotate(x, x, at, at)[0].norm(dim=-1) / x.norm(dim=-1)
        torch.testing.assert_close(grown, torch.full_like(grown, expected))


def test_an_attention_factor_that_is_given_is_final() -> None:
    assert build(factor=32.0, attention_factor=1.0).magnitude == 1.0
    given = build(factor=32.0, attention_factor=1.5, temperature_on="logits")
    assert (given.magnitude, given.logit_scale) == (1.0, 2.25)


@pytest.mark.parametrize("trained_length", [8, 100])
def test_the_first_positions_keep_their_angles_in_rows_of_either_length(trained_length) -> None:
    scheme = build(short_factors=[2.0] * 4, long_factors=LONG, trained_length=trained_length, unscaled=3)
    angles = scheme.angles(torch.arange(20).unsqueeze(0), torch.tensor([20]))[0]
    plain = torch.tensor(formulas.rope(8, 1e4), **FP64)
    scaled = plain / torch.tensor(LONG if trained_length == 8 else [2.0] * 4, **FP64)
    for p in range(20):
        torch.testing.assert_close(angles[p], p * (plain if p < 3 else scaled))


@pytest.mark.parametrize("head_dim", [2, 4, 8, 64])
def test_without_lists_long_rows_are_slowed_as_ntk_slows_them_and_short_ones_are_not(head_dim) -> None:
    scheme = build(head_dim, factor=16.0, trained_length=32)
    assert table(scheme, 32) == pytest.approx(formulas.rope(head_dim, 1e4), rel=1e-12)
    expected = [1 / 16] if head_dim == 2 else formulas.ntk(head_dim, 1e4, 16.0)
    assert table(scheme, 33) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"long_factors": LONG[:3]}, "long_factors needs one number for each of the 4 pairs; got 3"),
        ({"short_factors": [*SHORT, 1.0]}, "short_factors needs one number for each of the 4 pairs; got 5"),
        ({"long_factors": LONG, "fraction": 0.5}, "long_factors needs one number for each of the 2 pairs; got 4"),
        ({"short_factors": []}, "short_factors needs one number for each of the 4 pairs; got 0"),
        ({"long_factors": [1.0, 0.0, 1.0, 1.0]}, "long_factors must be positive; got 0.0"),
        ({"unscaled": -1}, "unscaled must not be negative; got -1"),
        ({"attention_factor": -1.0}, "attention_factor must be positive; got -1.0"),
    ],
)
def test_lists_and_numbers_that_cannot_be_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


@every_mixer
@every_scheme
@torch.no_grad()
def test_each_token_sees_what_the_full_pass_of_all_tokens_up_to_it_shows_its_last(mixer, scheme) -> None:
    layer = build_mixer(mixer, scheme)
    x = torch.randn(2, TIME, 16, **FP64)
    state = layer.init_state(2)
    for t in range(TIME):
        y, state, _ = layer(x[:, t : t + 1], state=state)
        torch.testing.assert_close(y, layer(x[:, : t + 1]).y[:, -1:], msg=f"after {t + 1} tokens")


@every_mixer
@every_scheme
@pytest.mark.parametrize("chunk", [1, 3, 7])
@torch.no_grad()
def test_a_prompt_in_chunks_ends_as_the_whole_prompt_does(mixer, scheme, chunk) -> None:
    layer = build_mixer(mixer, scheme)
    x = torch.randn(2, TIME, 16, **FP64)
    for time in (5, 8, 9, 14):
        state = layer.init_state(2)
        for part in x[:, :time].split(chunk, 1):
            y, state, _ = layer(part, state=state)
        torch.testing.assert_close(y, layer(x[:, :time]).y[:, -y.shape[1] :], msg=f"{time} tokens")
        one_more = torch.randn(2, 1, 16, **FP64)
        whole = layer(torch.cat([x[:, :time], one_more], 1)).y[:, -1:]
        torch.testing.assert_close(layer(one_more, state=state).y, whole, msg=f"the token after {time}")


@every_scheme
def test_earlier_outputs_of_a_longer_row_are_others(scheme) -> None:
    layer, x = build_mixer("full", scheme), torch.randn(1, 9, 16, **FP64)
    within, beyond = layer(x[:, :8]).y, layer(x).y
    torch.testing.assert_close(within[:, :7], layer(x[:, :7]).y)
    assert (within - beyond[:, :8]).abs().max() > 1e-4


@every_mixer
@every_scheme
def test_padded_rows_on_both_sides_of_the_trained_length_equal_rows_of_their_own(mixer, scheme) -> None:
    layer = build_mixer(mixer, scheme)
    x, lengths = torch.randn(4, TIME, 16, **FP64), [14, 9, 8, 3]
    for side in ("left", "right"):
        slots = torch.arange(TIME).flip(0) if side == "left" else torch.arange(TIME)
        valid = slots.unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
        y = layer(x.masked_fill(~valid.unsqueeze(-1), torch.nan), Context(valid=valid)).y
        cached = layer(x, Context(valid=valid), layer.init_state(4))
        more = torch.randn(4, 2, 16, **FP64)
        after = layer(more, state=cached.state).y
        for row, keep in enumerate(valid):
            alone = x[row : row + 1, keep]
            torch.testing.assert_close(y[row : row + 1, keep], layer(alone).y, msg=f"row {row} padded {side}")
            torch.testing.assert_close(cached.y[row : row + 1, keep], layer(alone).y, msg=f"row {row} padded {side}, cached")
            whole = layer(torch.cat([alone, more[row : row + 1]], 1)).y[:, -2:]
            torch.testing.assert_close(after[row : row + 1], whole, msg=f"what follows row {row} padded {side}")


@every_scheme
def test_packed_segments_are_refused_because_each_has_its_own_length(scheme) -> None:
    layer = build_mixer("full", scheme)
    with pytest.raises(ValueError, match="depends on the length of a row, and packed segments have lengths of their own"):
        layer(torch.randn(1, 4, 16, **FP64), Context(segment_ids=torch.tensor([[0, 0, 1, 1]])))


CHECKS = [
    caching.single_steps_give_the_full_pass_of_every_length,
    caching.split_passes_give_the_full_pass,
    caching.states_agree_however_the_sequence_was_split,
    caching.a_state_may_be_continued_twice_and_its_rows_reordered,
    caching.positions_are_those_given_and_otherwise_counted,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", ["dynamic_ntk", "longrope"])
def test_the_checks_compare_pieces_with_a_full_pass_where_both_have_one_length(check, scheme) -> None:
    outcome = judge(check, subjects_of("full", {"position": BY_LENGTH[scheme]}, fast=True))
    assert (outcome.status, outcome.detail) == ("passed", outcome.detail)


@pytest.mark.parametrize("check", [CHECKS[0], CHECKS[1], CHECKS[4]], ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", ["dynamic_ntk", "longrope"])
def test_the_checks_find_a_cache_of_keys_turned_for_the_length_at_which_they_came(check, scheme) -> None:
    with variants.scope():

        @variants.register("stale", hooks=("rotate",))
        class Stale(Full):
            _turns_late = False

        outcome = judge(check, subjects_of("stale", {"position": BY_LENGTH[scheme]}, fast=True))
    assert outcome.status == "failed"
    assert "from single steps" in outcome.detail or "differ from the full pass" in outcome.detail
