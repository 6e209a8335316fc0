"""The sliding window as a layer: its cache when it fills and wraps, its reach and its costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from registry import variants
from tests.variants import oracles
from variants.ops import tiling


@torch.no_grad()
def test_the_cache_is_window_less_one_and_sinks_from_the_first_token_to_after_it_wrapped() -> None:
    mixer = variants.build("sliding_window", dim=8, heads=2, window=4, sinks=2).double()
    x = torch.randn(3, 12, 8, dtype=torch.float64)
    keys = (x @ mixer.projections.inward.weight[8:16].T).view(3, 12, 2, 4)
    state = mixer.init_state(3)
    size = state.nbytes
    for t in range(12):
        y, state, _ = mixer(x[:, t : t + 1], state=state)
        torch.testing.assert_close(y, mixer(x[:, : t + 1]).y[:, -1:])
        assert state.nbytes == size
        assert state.elements == 3 * mixer.state_elements(t + 1) == 3 * 2 * 8 * (3 + 2)
        held = torch.cat([keys[:, :2], torch.zeros(3, 3, 2, 4), keys[:, : t + 1]], dim=1)
        held = torch.cat(
            [held[:, :2] if t else held[:, :1].expand(-1, 2, -1, -1) * torch.tensor([1.0, 0])[:, None, None], held[:, -3:]], dim=1
        )
        torch.testing.assert_close(state["keys"], held)


@pytest.mark.parametrize("blocks", [None, 3])
@torch.no_grad()
def test_a_token_outside_the_window_is_out_of_sight(blocks, monkeypatch) -> None:
    if blocks:
        monkeypatch.setattr(tiling, "FEWEST", blocks)
    mixer = variants.build("sliding_window", dim=8, heads=2, window=4, short_conv=3)
    assert mixer.reach() == 3 + 2
    x = torch.randn(1, 20, 8)
    changed = x.clone()
    changed[:, 7] += 1
    differs = (mixer(x).y != mixer(changed).y).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(7, 13))


def test_sinks_are_in_sight_for_good() -> None:
    mixer = variants.build("sliding_window", dim=8, heads=2, window=2, sinks=1)
    assert mixer.reach() is None
    x = torch.randn(1, 9, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(mixer(x).y[0, -1].sum(), x)
    assert gradient[0].any(-1).tolist() == [True] + [False] * 6 + [True, True]


@torch.no_grad()
def test_a_window_of_one_returns_the_value_itself() -> None:
    mixer = variants.build("sliding_window", dim=8, heads=2, window=1)
    x = torch.randn(2, 5, 8)
    weight = mixer.projections.outward.weight @ mixer.projections.inward.weight[16:]
    torch.testing.assert_close(mixer(x).y, x @ weight.T)


@torch.no_grad()
def test_a_window_as_long_as_the_sequence_is_full_attention() -> None:
    mixer = variants.build("sliding_window", dim=8, heads=2, window=6, position="rope")
    full = variants.build("full", dim=8, heads=2, position="rope")
    full.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(mixer(x).y, full(x).y)


@given(time=st.integers(1, 14), width=st.integers(1, 6), sinks=st.integers(0, 4), causal=st.booleans())
def test_the_pairs_in_sight_are_counted_exactly(time, width, sinks, causal) -> None:
    mixer = variants.build("sliding_window", dim=4, heads=1, window=width, sinks=sinks, causal=causal)
    sees = oracles.through_window([[0] * time], width, sinks, ahead=not causal)
    assert mixer.pairs(time) == sum(sees(0, i, j) for i in range(time) for j in range(time))
    assert mixer.flops(time) == mixer.projections.flops(time) + 4 * 4 * mixer.pairs(time)


def test_dropout_leaves_the_blocks_in_place() -> None:
    mixer = variants.build("sliding_window", dim=8, heads=2, window=2, dropout=0.5)
    x = torch.randn(2, 40, 8)
    assert not torch.equal(mixer(x).y, mixer(x).y)
    fused = variants.build("sliding_window", dim=8, heads=2, window=2)
    fused.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(mixer.eval()(x).y, fused(x).y)
