"""xPos: rotary positions whose pairs fade with the distance."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from registry import positions, variants
from tests.variants.positions import formulas
from variants.contract import Context
from variants.positions.rotary import XPos

FP64 = {"dtype": torch.float64}
ZETA = [0.28571429, 0.46428571, 0.64285714, 0.82142857]


def build(head_dim: int = 8, **options: object) -> XPos:
    scheme = positions.build("xpos", head_dim=head_dim, heads=2, dim=2 * head_dim, **options)
    assert isinstance(scheme, XPos)
    return scheme


def score(scheme: XPos, q: Tensor, k: Tensor, at_query: int, at_key: int) -> Tensor:
    q_turned, k_turned = scheme.rotate(q, k, torch.tensor([[at_query]]), torch.tensor([[at_key]]))
    return (q_turned * k_turned).sum()


@pytest.mark.parametrize(
    ("distance", "expected"), [(512, ZETA), (100, [0.78295483, 0.8608332, 0.91732316, 0.96230871]), (0, [1.0, 1.0, 1.0, 1.0])]
)
def test_pairs_fade_by_the_published_numbers(distance, expected) -> None:
    scheme, one = build(), torch.zeros(1, 1, 1, 8, **FP64)
    for pair, number in enumerate(expected):
        q = one.clone()
        q[..., pair] = 1  # its product with itself, turned by the angle between them
        turned = math.cos(distance * formulas.rope(8, 1e4)[pair])
        assert float(score(scheme, q, q, 1000 + distance, 1000)) == pytest.approx(number * turned, abs=5e-9)


@given(
    pairs=st.integers(1, 4),
    rest=st.integers(0, 3),
    at_key=st.integers(0, 20_000),
    distance=st.integers(0, 5000),
    layout=st.sampled_from(["half", "interleaved"]),
)
def test_a_score_is_the_sum_of_faded_turned_pairs_and_of_the_rest(pairs, rest, at_key, distance, layout) -> None:
    width, generator = 2 * pairs, torch.Generator().manual_seed(at_key)
    scheme = build(width + rest, layout=layout, fraction=(width + 0.5) / (width + rest + 0.5) if rest else 1.0)
    q, k = torch.randn(2, 1, 1, 1, width + rest, generator=generator, **FP64)
    places = [(i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1) for i in range(pairs)]
    expected = float((q[..., width:] * k[..., width:]).sum())
    for i, ((a, b), frequency) in enumerate(zip(places, formulas.rope(width, 1e4), strict=True)):
        of_q, of_k = (complex(float(x[..., a]), float(x[..., b])) for x in (q, k))
        fade = ((2 * i / width + 0.4) / 1.4) ** (distance / 512)
        expected += fade * (of_q * of_k.conjugate() * cmath.exp(1j * distance * frequency)).real
    got = score(scheme, q, k, at_key + distance, at_key)
    assert float(got) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("center", [0, 500])
def test_scores_depend_on_the_distance_alone_wherever_the_center_is(center) -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, **FP64)
    expected = score(build(), q, k, 40, 33)
    for shift in (5, 1000, 20_000):
        torch.testing.assert_close(score(build(center=center), q, k, 40 + shift, 33 + shift), expected)


def test_a_scale_base_without_end_is_rope() -> None:
    x, at = torch.randn(1, 1, 3, 8), torch.tensor([[0, 9, 70]])
    scheme, rope = build(scale_base=1e12), positions.build("rope", head_dim=8, heads=2, dim=16)
    torch.testing.assert_close(scheme.rotate(x, x, at, at), rope.rotate(x, x, at, at))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("center", [0, 300])
@pytest.mark.parametrize("side", [1, -1])
def test_factors_are_finite_as_far_as_positions_reach_and_the_next_is_refused(dtype, center, side) -> None:
    scheme, x = build(center=center), torch.ones(1, 1, 1, 8, dtype=dtype)
    furthest = center + side * scheme.reach(dtype)
    q, k = scheme.rotate(x, x, torch.tensor([[furthest]]), torch.tensor([[furthest]]))
    assert q.isfinite().all() and k.isfinite().all()
    assert (q.abs().amax(-1) > 0).all() and (k.abs().amax(-1) > 0).all()
    for at_query, at_key in ((furthest + side, furthest), (furthest, furthest + side)):
        with pytest.raises(ValueError, match=rf"at position {furthest + side} the factors leave the range of {dtype}.*center={center}"):
            scheme.rotate(x, x, torch.tensor([[at_query]]), torch.tensor([[at_key]]))


def test_fp16_ends_where_its_keys_would_overflow() -> None:
    assert 4000 < build().reach(torch.float16) < 4533  # 65504 is zeta_0^(-4533 / 512)
    assert build().max_positions == build().reach(torch.float32) + 1 > 30_000


def test_a_cached_run_across_thousands_of_tokens_is_the_full_pass() -> None:
    torch.manual_seed(0)
    mixer = variants.build("full", dim=16, heads=2, position="xpos").double()
    x, at = torch.randn(1, 6, 16, **FP64), torch.tensor([[0, 1, 2000, 2001, 9000, 9001]])
    expected = mixer(x, Context(positions=at)).y
    state, outputs = mixer.init_state(1), []
    for t in range(6):
        y, state, _ = mixer(x[:, t : t + 1], Context(positions=at[:, t : t + 1]), state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected)


def test_a_scale_base_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="scale_base must be positive; got 0.0"):
        build(scale_base=0.0)
