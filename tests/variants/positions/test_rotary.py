"""Rotary positions, against published vectors and against multiplication by complex numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from registry import positions
from tests.variants import oracles
from variants.positions.rotary import Rotary, frequencies, turn

LAYOUTS = ["half", "interleaved"]
ONE_TO_EIGHT = torch.arange(1.0, 9.0, dtype=torch.float64).view(1, 1, 1, 8)


def rope(head_dim: int, **options: object) -> Rotary:
    scheme = positions.build("rope", head_dim=head_dim, heads=2, dim=2 * head_dim, **options)
    assert isinstance(scheme, Rotary)
    return scheme


def turned(scheme: Rotary, x: Tensor, position: int) -> Tensor:
    where = torch.full(x.shape[:1] + x.shape[2:3], position)
    return scheme.rotate(x, x, where, where)[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [-1.69559254, 0.13755174, 2.7886816, 3.97598204, -4.80884247, 6.32305935, 7.08683674, 8.01196398]),
        (
            {"layout": "interleaved"},
            [-1.27223251, -1.83886499, 1.68392864, 4.70790658, 4.81777717, 6.1472777, 6.97596854, 8.02096397],
        ),
        ({"fraction": 0.5}, [-1.41335252, 1.87911807, -2.82885748, 4.05819114, 5, 6, 7, 8]),
    ],
)
def test_position_three_turns_one_to_eight_into_the_published_vector(options, expected) -> None:
    got = turned(rope(8, **options), ONE_TO_EIGHT, 3).flatten()
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)


def test_frequencies_are_those_published() -> None:
    torch.testing.assert_close(frequencies(8, 1e4), torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64))
    picked = frequencies(64, 1e4)[[1, 4, 12, 31]].tolist()
    assert picked == pytest.approx([7.49894209e-01, 3.16227766e-01, 3.16227766e-02, 1.33352143e-04], rel=1e-8)


@given(
    pairs=st.integers(1, 4),
    rest=st.integers(0, 3),
    position=st.integers(0, 100_000),
    layout=st.sampled_from(LAYOUTS),
    base=st.floats(10, 1e6),
)
def test_every_pair_is_multiplied_by_a_complex_number_and_the_rest_passes_through(pairs, rest, position, layout, base) -> None:
    head_dim = 2 * pairs + rest
    x = torch.randn(1, 1, 1, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(position))
    scheme = rope(head_dim, layout=layout, base=base, fraction=(2 * pairs + 0.5) / (head_dim + 0.5) if rest else 1.0)
    assert scheme.width == 2 * pairs
    values = x.flatten().tolist()
    expected = oracles.rotated(values[: 2 * pairs], position, base, layout) + values[2 * pairs :]
    torch.testing.assert_close(turned(scheme, x, position).flatten(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("head_dim", "fraction"), [(6, 1.0), (8, 1.0), (8, 0.5)])
def test_scores_depend_on_the_distance_alone_norms_are_kept_and_position_zero_is_the_identity(layout, head_dim, fraction) -> None:
    scheme = rope(head_dim, layout=layout, fraction=fraction)
    q, k = torch.randn(2, 1, 1, 1, head_dim, dtype=torch.float64)
    score = [(turned(scheme, q, i + shift) * turned(scheme, k, j + shift)).sum() for i, j in [(7, 3)] for shift in (0, 5, 1000)]
    torch.testing.assert_close(score[1], score[0])
    torch.testing.assert_close(score[2], score[0])
    torch.testing.assert_close(turned(scheme, q, 9).norm(), q.norm())
    assert torch.equal(turned(scheme, q, 0), q)


def test_the_layouts_are_one_another_permuted() -> None:
    x, order = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    half, interleaved = rope(8), rope(8, layout="interleaved")
    torch.testing.assert_close(turned(half, x[..., order], 5), turned(interleaved, x, 5)[..., order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_neighbouring_positions_stay_apart_in_half_precision(dtype, autocast) -> None:
    scheme = rope(8).to(dtype)
    where = torch.tensor([[255, 256, 257, 2048, 2049, 4096, 4097, 4112, 131_071]])
    x = torch.zeros(1, 1, where.shape[1], 8, dtype=dtype)
    x[..., 0] = 1
    with torch.autocast("cpu", dtype, enabled=autocast):
        got, _ = scheme.rotate(x, x, where, where)
        assert scheme.angles(where).dtype == torch.float64
    assert got.dtype == dtype
    exact = torch.tensor([math.cos(p) for p in where[0].tolist()])
    spacing = torch.finfo(dtype).eps
    torch.testing.assert_close(got[0, 0, :, 0].float(), exact, rtol=0, atol=spacing)


def test_nothing_of_it_is_stored_so_a_cast_checkpoint_cannot_round_it() -> None:
    assert not rope(8).state_dict()
    assert not list(rope(8).buffers())


def test_equal_rows_are_turned_by_one_table() -> None:
    scheme = rope(8)
    shared, own = torch.arange(5).expand(3, 5), torch.arange(5).repeat(3, 1)
    assert scheme.angles(shared).shape == (1, 5, 4)
    assert scheme.angles(own).shape == (3, 5, 4)
    x = torch.randn(3, 2, 5, 8)
    assert torch.equal(scheme.rotate(x, x, shared, shared)[0], scheme.rotate(x, x, own, own)[0])


def test_each_row_is_turned_by_its_own_positions() -> None:
    scheme = rope(8)
    x = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    q, k = scheme.rotate(x, x, torch.tensor([[2], [7]]), torch.tensor([[1], [4]]))
    torch.testing.assert_close(q, torch.cat([turned(scheme, x[:1], 2), turned(scheme, x[1:], 7)]))
    torch.testing.assert_close(k, torch.cat([turned(scheme, x[:1], 1), turned(scheme, x[1:], 4)]))


def test_a_magnitude_multiplies_the_turned_channels_alone() -> None:
    angles = torch.zeros(1, 1, 2, dtype=torch.float64)
    assert turn(ONE_TO_EIGHT, angles, magnitude=2.0).flatten().tolist() == [2, 4, 6, 8, 5, 6, 7, 8]


def test_gradients_turn_back() -> None:
    scheme = rope(8, layout="interleaved", fraction=0.5)
    x = torch.randn(1, 1, 2, 8, dtype=torch.float64, requires_grad=True)
    where = torch.tensor([[3, 8]])
    assert torch.autograd.gradcheck(lambda x: scheme.rotate(x, x, where, where)[0], (x,))


@pytest.mark.parametrize(
    ("head_dim", "options", "message"),
    [
        (25, {}, "fraction=1.0 of head_dim=25 is 25"),
        (10, {"fraction": 0.5}, "fraction=0.5 of head_dim=10 is 5"),
        (8, {"fraction": 0.1}, "fraction=0.1 of head_dim=8 is 0"),
        (8, {"fraction": 1.5}, "fraction must lie above 0 and not above 1; got 1.5"),
        (8, {"base": -1.0}, "base must be positive; got -1.0"),
    ],
)
def test_widths_that_cannot_be_paired_are_refused_with_the_numbers(head_dim, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        rope(head_dim, **options)
