"""No positions, and learned ones."""

from __future__ import annotations

import pytest
import torch

from registry import positions, variants
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
