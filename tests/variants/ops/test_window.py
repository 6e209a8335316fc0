"""Sliding-window attention in blocks and under a mask, against sums over explicit sets of keys."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.variants import oracles
from tests.variants.schemes import SharedSlopes, Slopes
from variants.ops import reference, softmax, window

small_blocks = mock.patch.object(window, "SMALLEST_BLOCK", 3)


def inputs(batch: int, time: int, heads: int = 2, kv_heads: int = 2, width: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(time)
    return [
        torch.randn(batch, h, time, width, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    ]


def places(ids: list[list[int]]) -> Tensor:
    """How many tokens of its run lie before each token."""
    rows = []
    for row in ids:
        place: list[int] = []
        for i, one in enumerate(row):
            place.append(place[-1] + 1 if i and row[i - 1] == one else 0)
        rows.append(place)
    return torch.tensor(rows)


def run_ids(lengths: list[int], time: int) -> list[int]:
    """Runs of the given lengths, the last as long as it takes."""
    ids = [i for i, length in enumerate(lengths) for _ in range(length)][:time]
    return ids + [len(lengths)] * (time - len(ids))


segments = st.lists(st.lists(st.integers(1, 12), max_size=4), min_size=2, max_size=2)


@given(
    time=st.integers(1, 26), width=st.integers(1, 9), sinks=st.integers(0, 3), lengths=segments, causal=st.booleans(), blocked=st.booleans()
)
def test_segments_windows_and_sinks_show_each_query_exactly_its_keys(time, width, sinks, lengths, causal, blocked) -> None:
    ids = [run_ids(row, time) for row in lengths]
    q, k, v = inputs(2, time)
    before, after = places(ids), places([row[::-1] for row in ids]).flip(1)
    with small_blocks:
        got = window.attention(
            q, k, v, window=width, sinks=sinks, causal=causal, before=before, after=None if causal else after, blocked=blocked
        )
    expected = oracles.attention(q, k, v, oracles.through_window(ids, width, sinks, ahead=not causal))
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v))


@given(
    past=st.integers(0, 20),
    time=st.integers(1, 16),
    width=st.integers(1, 7),
    sinks=st.integers(0, 3),
    lengths=segments,
    blocked=st.booleans(),
)
def test_a_cache_of_window_less_one_and_sinks_stands_in_for_the_whole_past(past, time, width, sinks, lengths, blocked) -> None:
    total = past + time
    ids = [run_ids(row, total) for row in lengths]
    q, k, v = inputs(2, total, 4, 2)
    before = places(ids)
    # What a cache holds: the sinks of the segment the past stops in (junk where they have not come), then the keys of the window.
    starts = [past - 1 - int(row[past - 1]) if past else total for row in before]
    index = torch.tensor([[min(start + p, total - 1) for p in range(sinks)] + list(range(past - width + 1, total)) for start in starts])
    cached = [x.gather(2, index.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v)]
    with small_blocks:
        got = window.attention(q[:, :, past:], *cached, window=width, sinks=sinks, kept=sinks, before=before[:, past:], blocked=blocked)
    expected = oracles.attention(q, k, v, oracles.through_window(ids, width, sinks))[:, :, past:]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("blocked", [False, True])
def test_the_window_counts_the_query_itself(blocked) -> None:
    one_hot, zeros = torch.eye(8)[None, None], torch.zeros(1, 1, 8, 4)
    with small_blocks:
        y = window.attention(zeros, zeros, one_hot, window=4, blocked=blocked)
        assert (y[0, 0] > 0).sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
        torch.testing.assert_close(window.attention(zeros, zeros, one_hot, window=1, blocked=blocked), one_hot)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_as_long_as_the_sequence_is_full_attention(causal) -> None:
    q, k, v = inputs(2, 9)
    for blocked in (None, True):
        torch.testing.assert_close(
            window.attention(q, k, v, window=9, causal=causal, blocked=blocked), reference.attention(q, k, v, causal=causal)
        )


@pytest.mark.parametrize("blocked", [False, True])
def test_for_fewer_queries_than_keys_the_rows_are_the_last_of_the_square(blocked) -> None:
    q, k, v = inputs(2, 12)
    with small_blocks:
        got = window.attention(q[:, :, 8:], k, v, window=5, blocked=blocked)
    torch.testing.assert_close(got, oracles.attention(q, k, v, oracles.through_window([[0] * 12] * 2, 5))[:, :, 8:])


def test_without_causality_the_window_reaches_as_far_to_both_sides() -> None:
    zeros = torch.zeros(1, 1, 7, 4)
    with small_blocks:
        y = window.attention(zeros, zeros, torch.eye(7)[None, None], window=3, causal=False, blocked=True)
    assert (y[0, 0, 3] > 0).tolist() == [False, True, True, True, True, True, False]


@pytest.mark.parametrize(("scheme", "blocked"), [(Slopes, False), (Slopes, True), (SharedSlopes, False)])
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_bias_is_added_by_position_and_not_by_slot(scheme, blocked, sinks) -> None:
    q, k, v = inputs(2, 20)
    positions = (torch.arange(20).expand(2, 20) ** 2,) * 2
    sees = oracles.through_window([[0] * 20] * 2, 4, sinks)
    expected = oracles.attention(q, k, v, sees, Slopes(3, 2, 6).bias(*positions))
    with small_blocks:
        got = window.attention(q, k, v, window=4, sinks=sinks, bias=scheme(3, 2, 6).bias, positions=positions, blocked=blocked)
    torch.testing.assert_close(got, expected)


def test_the_blocks_run_any_inner_attention() -> None:
    q, k, v = inputs(2, 130)
    fused, written_out = (window.attention(q, k, v, window=8, sinks=1, inner=inner) for inner in (softmax.attention, reference.attention))
    torch.testing.assert_close(fused, written_out)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_the_blocks_are_those_of_finite_differences(causal) -> None:
    with small_blocks:
        inner = reference.attention
        assert torch.autograd.gradcheck(
            lambda q, k, v: window.attention(q, k, v, window=3, sinks=1, causal=causal, blocked=True, inner=inner), inputs(1, 8, 2, 1)
        )


def test_the_end_of_a_very_long_sequence_needs_only_the_window_before_it() -> None:
    q, k, v = (torch.randn(1, 1, 65_536, 4) for _ in range(3))
    whole = window.attention(q, k, v, window=64)[:, :, -256:]
    end = window.attention(*(x[:, :, -319:] for x in (q, k, v)), window=64)[:, :, -256:]
    torch.testing.assert_close(whole, end)
