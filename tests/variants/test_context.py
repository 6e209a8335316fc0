"""How tokens are counted: places in segments, positions, and what a state remembers of both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from variants.cache import newest, oldest
from variants.context import Context, State, advance, default_positions, extent, left_align

Rows = list[list[tuple[int, bool]]]
rows_of_tokens = st.integers(1, 12).flatmap(
    lambda time: st.lists(st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=time, max_size=time), min_size=1, max_size=3)
)


def runs(ids: list[int]) -> list[int]:
    """The lengths of runs of equal ids."""
    lengths: list[int] = []
    for i, one in enumerate(ids):
        if i and ids[i - 1] == one:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


@given(rows=rows_of_tokens, cut=st.integers(0, 12))
def test_tokens_are_counted_within_their_segment_over_pads_and_calls(rows: Rows, cut: int) -> None:
    ids, valid = (torch.tensor([[token[part] for token in row] for row in rows]) for part in (0, 1))
    state, before, positions = State.empty(len(rows), torch.device("cpu")), [], []
    for here in (slice(0, cut), slice(cut, None)):
        context = Context(valid=valid[:, here], segment_ids=ids[:, here])
        if not valid[:, here].numel():
            continue
        x, context, _ = left_align(torch.zeros(*valid[:, here].shape, 1), context)
        context = default_positions(x, context, state)
        reach, _ = extent(x, context, state)
        assert reach is not None and context.valid is not None and context.positions is not None
        before.append([row[keep].tolist() for row, keep in zip(reach, context.valid, strict=True)])
        positions.append([row[keep].tolist() for row, keep in zip(context.positions, context.valid, strict=True)])
        assert not context.positions[~context.valid].any()
        state = advance(state, context, x.shape[1])
    for r, row in enumerate(rows):
        lengths = runs([one for one, real in row if real])
        expected = [place for length in lengths for place in range(length)]
        assert [place for call in before for place in call[r]] == expected
        assert [place for call in positions for place in call[r]] == expected
        assert state["seen"][r] == sum(lengths)
        assert state["in_segment"][r] == (lengths[-1] if lengths else 0)


@given(rows=rows_of_tokens, named=st.booleans())
def test_without_causality_the_tokens_that_follow_are_counted_too(rows: Rows, named: bool) -> None:
    ids, valid = (torch.tensor([[token[part] for token in row] for row in rows]) for part in (0, 1))
    context = Context(valid=valid, segment_ids=ids if named else None)
    x, context, _ = left_align(torch.zeros(*valid.shape, 1), context)
    before, after = extent(x, default_positions(x, context, None), None, causal=False)
    assert before is not None and after is not None
    for r, row in enumerate(rows):
        lengths = runs([one if named else 0 for one, real in row if real])
        assert before[r, : sum(lengths)].tolist() == [place for length in lengths for place in range(length)]
        assert after[r, : sum(lengths)].tolist() == [place for length in lengths for place in reversed(range(length))]


@pytest.mark.parametrize("causal", [True, False])
def test_a_plain_full_pass_needs_no_counting(causal) -> None:
    x = torch.zeros(2, 3, 1)
    assert extent(x, Context(), None, causal) == (None, None)
    positions = default_positions(x, Context(), None).positions
    assert positions is not None and positions.tolist() == [[0, 1, 2]] * 2
    assert positions.stride(0) == 0, "one expanded row, so that rotary angles are computed once"


def test_given_positions_are_kept_at_tokens_and_cleared_at_pads() -> None:
    context = Context(positions=torch.tensor([[5, 9, -1]]), valid=torch.tensor([[True, True, False]]))
    filled = default_positions(torch.zeros(1, 3, 1), context, None)
    assert filled.positions is not None and filled.positions.tolist() == [[5, 9, 0]]


def test_the_newest_slots_of_a_row_are_those_before_its_pads() -> None:
    slots = torch.arange(12).view(2, 6)
    assert newest(slots, 3, None).tolist() == [[3, 4, 5], [9, 10, 11]]
    assert newest(slots, 3, torch.tensor([[True, False], [False, False]])).tolist() == [[2, 3, 4], [7, 8, 9]]
    assert newest(slots, 0, None).shape == (2, 0)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_newest_slots_do_not_keep_the_others_alive(batch) -> None:
    slots = torch.zeros(batch, 100)
    assert newest(slots, 3, None).untyped_storage().nbytes() == batch * 3 * 4
    assert newest(slots, 100, None) is slots, "a cache of everything is not copied once more"


def test_the_oldest_tokens_are_found_among_kept_and_new_slots() -> None:
    slots = torch.tensor([[50, 51, 0, 0, 10, 11, 12]] * 4)  # two kept, five recent
    before = torch.tensor(
        [[7, 8, 9], [0, 1, 2], [4, 5, 0], [1, 2, 3]]
    )  # kept from before; all in the recent ones; only one so far; pads at the end
    valid = torch.tensor([[True, True, True]] * 3 + [[True, False, False]])
    assert oldest(slots, 2, before, valid).tolist() == [[50, 51], [10, 11], [12, 0], [0, 10]]


def test_a_state_counts_numbers_and_bytes_apart_and_follows_an_index() -> None:
    state = State(keys=torch.randn(2, 3, requires_grad=True), seen=torch.tensor([4, 5]))
    assert (state.elements, state.nbytes) == (6, 6 * 4 + 2 * 8)
    assert state.reorder(torch.tensor([1, 1, 0]))["seen"].tolist() == [5, 5, 4]
    assert not state.detach()["keys"].requires_grad
    assert set(state.replace(taps=torch.zeros(2, 1))) == {"keys", "seen", "taps"}
    assert "keys=(2, 3)" in repr(state)
