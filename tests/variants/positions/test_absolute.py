"""No positions, learned ones, and sines and cosines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from registry import positions, variants
from tests.variants.positions import formulas
from variants.contract import Context


def test_without_positions_nothing_is_hooked() -> None:
    assert positions.build("none", head_dim=4, heads=2, dim=8).hooks == ()


def test_learned_positions_are_added_by_position() -> None:
    scheme = positions.build("learned", head_dim=4, heads=2, dim=8, max_positions=10)
    x = torch.randn(2, 3, 8)
    where = torch.tensor([[0, 1, 2], [9, 4, 4]])
    torch.testing.assert_close(scheme.embed(x, where) - x, scheme.table[where])
    assert 0.01 < scheme.table.std() < 0.03


@pytest.mark.parametrize(("start", "time", "worst"), [(0, 129, "128"), (120, 16, "135"), (-1, 2, "-1")])
def test_a_position_outside_the_table_is_refused_with_both_numbers(start, time, worst) -> None:
    scheme = positions.build("learned", head_dim=4, heads=2, dim=8, max_positions=128)
    with pytest.raises(ValueError, match=rf"position {worst} is outside the table of max_positions=128"):
        scheme.embed(torch.zeros(1, time, 8), torch.arange(start, start + time).expand(1, time))


def test_pads_take_no_place_in_the_table() -> None:
    mixer = variants.build("full", dim=8, heads=2, position={"name": "learned", "max_positions": 4})
    x = torch.randn(1, 9, 8)
    valid = torch.tensor([[False] * 5 + [True] * 4])
    torch.testing.assert_close(mixer(x, Context(valid=valid)).y[:, 5:], mixer(x[:, 5:]).y)


def test_a_table_without_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="max_positions must be positive; got 0"):
        positions.build("learned", head_dim=4, heads=2, dim=8, max_positions=0)


def waves(dim: int, at: list[list[int]], dtype: torch.dtype = torch.float64, **options: object) -> Tensor:
    scheme = positions.build("sinusoidal", head_dim=dim, heads=1, dim=dim, **options)
    return scheme.embed(torch.zeros(len(at), len(at[0]), dim, dtype=dtype), torch.tensor(at))


PUBLISHED = [0.14112001, -0.98999250, 0.29552021, 0.95533649, 0.02999550, 0.99955003, 0.00300000, 0.99999550]


@pytest.mark.parametrize(("layout", "expected"), [("interleaved", PUBLISHED), ("half", PUBLISHED[::2] + PUBLISHED[1::2])])
def test_the_waves_of_position_three_are_those_published(layout, expected) -> None:
    assert waves(8, [[3]], layout=layout).flatten().tolist() == pytest.approx(expected, abs=1e-8)


@given(dim=st.integers(1, 33), at=st.integers(0, 1_000_000), base=st.floats(10, 1e6), scale=st.floats(0.1, 4))
def test_waves_of_any_width_and_position_are_those_of_the_formula_added_to_x(dim, at, base, scale) -> None:
    expected = [scale * wave for wave in formulas.sinusoid(at, dim, base)]
    for layout, order in (("interleaved", list(range(dim))), ("half", [*range(0, dim, 2), *range(1, dim, 2)])):
        scheme = positions.build("sinusoidal", head_dim=dim, heads=1, dim=dim, base=base, scale=scale, layout=layout)
        x = torch.randn(1, 1, dim, dtype=torch.float64)
        got = scheme.embed(x, torch.tensor([[at]])) - x
        torch.testing.assert_close(got.flatten(), torch.tensor([expected[i] for i in order]).double(), rtol=0, atol=1e-6)


def test_an_odd_width_has_one_sine_more_than_cosines() -> None:
    at_zero = waves(5, [[0]])
    assert at_zero.flatten().tolist() == [0, 1, 0, 1, 0]  # sin 0 and cos 0
    assert waves(5, [[0]], layout="half").flatten().tolist() == [0, 0, 0, 1, 1]


def test_each_row_has_waves_of_its_own_positions() -> None:
    got = waves(6, [[0, 9, 4], [7, 7, 1]])
    for row, at in enumerate([[0, 9, 4], [7, 7, 1]]):
        torch.testing.assert_close(got[row], torch.tensor([formulas.sinusoid(p, 6) for p in at], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_neighbouring_waves_stay_apart_in_half_precision(dtype) -> None:
    at = [255, 256, 257, 2048, 2049, *range(4096, 4113), 131_071]
    got = waves(8, [at], dtype)
    assert got.dtype == dtype
    exact = torch.tensor([formulas.sinusoid(p, 8) for p in at], dtype=torch.float64)
    torch.testing.assert_close(got[0].double(), exact, rtol=0, atol=torch.finfo(dtype).eps)


def test_a_base_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="base must be positive; got 0.0"):
        waves(8, [[0]], base=0.0)
