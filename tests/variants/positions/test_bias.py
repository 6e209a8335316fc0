"""Biases on the logits: published slopes and buckets, and what attention makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from registry import positions, variants
from tests.variants import oracles
from tests.variants.positions import formulas
from variants.contract import Context, NotApplicable
from variants.positions.bias import slopes

HALVING = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
CAUSAL_BUCKETS = {
    **{0: 0, 1: 1, 15: 15, 16: 16, 17: 16, 18: 16, 20: 17, 23: 18, 24: 19, 26: 19, 31: 21, 32: 21, 40: 23},
    **{63: 26, 64: 26, 90: 29, 112: 30, 113: 31, 127: 31, 128: 31, 1000: 31},
}
BIDIRECTIONAL_BUCKETS = {-130: 15, -64: 14, -16: 10, -8: 8, -7: 7, 0: 0, 1: 17, 7: 23, 8: 24, 12: 25, 16: 26, 64: 30, 128: 31}


def build(name: str, heads: int = 2, **options: object) -> Any:
    return positions.build(name, head_dim=4, heads=heads, dim=4 * heads, **options)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (8, HALVING),
        (12, [*HALVING, 0.70710678, 0.35355339, 0.17677670, 0.08838835]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (3, [0.0625, 0.00390625, 0.25]),
        (1, [0.00390625]),
    ],
)
def test_slopes_are_those_published(heads, expected) -> None:
    assert slopes(heads) == pytest.approx(expected, abs=1e-8)


def test_the_first_of_eight_heads_takes_half_a_logit_a_token() -> None:
    bias = build("alibi", 8).bias(torch.tensor([[3]]), torch.arange(4).unsqueeze(0))
    assert bias.shape == (1, 8, 1, 4)
    assert bias[0, 0, 0].tolist() == [-1.5, -1, -0.5, 0]


@given(heads=st.integers(1, 40), start=st.integers(0, 100_000), stride=st.integers(1, 1000))
def test_alibi_falls_with_the_distance_to_either_side_and_never_lifts_a_key(heads, start, stride) -> None:
    at = start + stride * torch.arange(5).unsqueeze(0)
    bias = build("alibi", heads).bias(at, at)[0]
    expected = [[[-slope * stride * abs(i - j) for j in range(5)] for i in range(5)] for slope in formulas.alibi_slopes(heads)]
    torch.testing.assert_close(bias.double(), torch.tensor(expected, dtype=torch.float64))
    assert bias.max() == 0
    assert not bias.diagonal(dim1=1, dim2=2).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distances_are_not_rounded_in_a_model_of_half_precision(dtype) -> None:
    scheme = build("alibi").to(dtype)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        bias = scheme.bias(torch.tensor([[5000]]), torch.arange(5001).unsqueeze(0))
    finally:
        torch.set_default_dtype(default)
    assert len(bias[0, 0, 0].unique()) == 5001


@pytest.mark.parametrize(("bidirectional", "known"), [(False, CAUSAL_BUCKETS), (True, BIDIRECTIONAL_BUCKETS)])
def test_buckets_are_those_published(bidirectional, known) -> None:
    ahead = torch.tensor([key if bidirectional else -key for key in known])
    assert build("t5_bias", bidirectional=bidirectional).bucket(ahead).tolist() == list(known.values())


def test_a_bucket_that_begins_at_a_whole_distance_begins_there() -> None:
    scheme = build("t5_bias", buckets=10, max_distance=160)
    assert scheme.bucket(-torch.tensor([9, 10, 19, 20, 39, 40, 79, 80])).tolist() == [5, 6, 6, 7, 7, 8, 8, 9]


@given(half=st.integers(1, 20), beyond=st.integers(1, 300), bidirectional=st.booleans())
def test_buckets_of_any_number_are_all_used_ascend_and_are_those_of_the_formula(half, beyond, bidirectional) -> None:
    buckets, max_distance = half * (4 if bidirectional else 2), half + beyond
    scheme = build("t5_bias", buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    distances = range(max_distance + 2)
    got = scheme.bucket(-torch.arange(max_distance + 2)).tolist()
    assert got == sorted(got)
    assert got[:half] == list(range(half))
    assert got[-1] == got[-2] == 2 * half - 1
    assert got == [formulas.t5_bucket(-n, buckets, max_distance, bidirectional) for n in distances]
    ahead = scheme.bucket(torch.arange(1, max_distance + 2)).tolist()
    assert ahead == [n + 2 * half * bidirectional for n in got[1:]]


def mixer_and_bias(name: str, variant: str, **options: Any) -> tuple[Any, Any]:
    """An fp64 layer, and the bias of any queries and keys by the formula."""
    torch.manual_seed(0)
    mixer = variants.build(variant, dim=12, heads=3, position=name, **options).double()
    numbers = formulas.alibi_slopes(3)

    def entry(h: int, q: int, k: int) -> Tensor:
        if name == "alibi":
            return torch.tensor(-numbers[h] * abs(q - k), dtype=torch.float64)
        return mixer.position.table[formulas.t5_bucket(k - q), h]

    def dense(at: list[int]) -> Tensor:
        return torch.stack([torch.stack([torch.stack([entry(h, q, k) for k in at]) for q in at]) for h in range(3)]).unsqueeze(0)

    return mixer, dense


def by_hand(mixer: Any, x: Tensor, sees: oracles.Sees, bias: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (x @ mixer.projections.inward.weight.T).chunk(3, -1))
    y = oracles.attention(q, k, v, sees, bias)
    return y.transpose(1, 2).flatten(2) @ mixer.projections.outward.weight.T


FORMS = {
    "full": ("full", {}, oracles.causal(9, 9)),
    "bidirectional": ("full", {"causal": False}, lambda row, i, j: True),
    "window": ("sliding_window", {"window": 3, "sinks": 1}, oracles.through_window([[0] * 9], 3, 1)),
    "bidirectional window": ("sliding_window", {"window": 3, "causal": False}, oracles.through_window([[0] * 9], 3, ahead=True)),
}


@pytest.mark.parametrize("name", ["alibi", "t5_bias"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", ["reference", "torch", "sdpa"])
def test_attention_adds_the_bias_of_every_pair_to_its_logit(name, form, impl) -> None:
    variant, options, sees = FORMS[form]
    mixer, dense = mixer_and_bias(name, variant, impl=impl, **options)
    x = torch.randn(1, 9, 12, dtype=torch.float64, requires_grad=True)
    expected = by_hand(mixer, x, sees, dense(list(range(9))))
    got = mixer(x).y
    torch.testing.assert_close(got, expected)
    # The table is trained by what it did to each logit.
    oracles.same_gradients(got, expected, [x, *mixer.parameters()])


@pytest.mark.parametrize("name", ["alibi", "t5_bias"])
@pytest.mark.parametrize("form", ["full", "window"])
@torch.no_grad()
def test_a_cached_run_adds_the_same_bias_wherever_the_row_begins(name, form) -> None:
    variant, options, sees = FORMS[form]
    mixer, dense = mixer_and_bias(name, variant, **options)
    x, at = torch.randn(1, 9, 12, dtype=torch.float64), [100, 101, 102, 107, 108, 130, 131, 132, 133]
    expected = by_hand(mixer, x, sees, dense(at))
    for pieces in ([1] * 9, [4, 5], [2, 1, 6]):
        state, outputs = mixer.init_state(1), []
        for part, where in zip(x.split(pieces, 1), torch.tensor([at]).split(pieces, 1), strict=True):
            y, state, _ = mixer(part, Context(positions=where), state)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), expected)


@pytest.mark.parametrize("name", ["alibi", "t5_bias"])
def test_a_mixer_without_logits_refuses_a_bias_and_says_why(name) -> None:
    with pytest.raises(NotApplicable, match="needs the hook 'bias', which Linear does not have: it never writes out the logits"):
        variants.build("linear", dim=8, heads=2, position=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 7}, "buckets must be a multiple of 2; got 7"),
        ({"buckets": 0}, "buckets must be a multiple of 2; got 0"),
        ({"buckets": 6, "bidirectional": True}, "buckets must be a multiple of 4; got 6"),
        ({"max_distance": 16}, "max_distance must lie above 16, where exact buckets end; got 16"),
        ({"max_distance": 8, "bidirectional": True}, "max_distance must lie above 8, where exact buckets end; got 8"),
    ],
)
def test_buckets_that_cannot_be_are_refused_with_the_numbers(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        build("t5_bias", **options)


def test_the_table_starts_small_and_centred() -> None:
    torch.manual_seed(0)
    table = positions.build("t5_bias", head_dim=64, heads=8, dim=512, buckets=128).table
    assert table.shape == (128, 8)
    assert float(table.detach().std()) == pytest.approx(512**-0.5, rel=0.1)
