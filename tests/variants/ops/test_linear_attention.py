"""Linear attention: the recurrence and the chunks, against all pairs written out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.variants import oracles
from tests.variants.oracles import places, run_ids
from variants.ops import decay, reference

CHUNK = 4
IMPLEMENTATIONS = [
    pytest.param(reference.linear_attention, id="recurrence"),
    pytest.param(partial(decay.linear_attention, chunk=CHUNK), id="chunks"),
]
every_implementation = pytest.mark.parametrize("attend", IMPLEMENTATIONS)


def inputs(time: int, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(time)
    return [torch.randn(batch, 2, time, width, generator=generator, dtype=torch.float64, requires_grad=True) for width in (3, 3, 5)]


@every_implementation
@pytest.mark.parametrize("time", [1, 2, 3, 4, 5, 7, 8, 9, 17])
def test_every_length_gives_the_sum_over_all_pairs_and_its_gradients(attend, time) -> None:
    q, k, v = inputs(time)
    got, state = attend(q, k, v)
    expected = oracles.linear_attention(q, k, v, oracles.matrix(oracles.causal(time, time), 2, time, time))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(state, torch.einsum("bhtk,bhtv->bhkv", k, v))
    oracles.same_gradients(got, expected, (q, k, v))


@every_implementation
@given(time=st.integers(1, 18), lengths=st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=2, max_size=2))
def test_a_segment_sees_nothing_of_the_one_before_it(attend, time, lengths) -> None:
    ids = [run_ids(row, time) for row in lengths]
    q, k, v = inputs(time)
    got, state = attend(q, k, v, before=places(ids))
    expected = oracles.linear_attention(q, k, v, oracles.matrix(oracles.through_window(ids, time), 2, time, time))
    torch.testing.assert_close(got, expected)
    last = torch.tensor([[one == row[-1] for one in row] for row in ids])[:, None, :, None]
    torch.testing.assert_close(state, torch.einsum("bhtk,bhtv->bhkv", k * last, v))
    oracles.same_gradients(got, expected, (q, k, v))


@every_implementation
@given(time=st.integers(2, 15), cut=st.integers(1, 14), lengths=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=2, max_size=2))
def test_two_pieces_with_the_state_handed_on_are_the_whole(attend, time, cut, lengths) -> None:
    cut = min(cut, time - 1)
    before = places([run_ids(row, time) for row in lengths])
    q, k, v = inputs(time)
    whole, end = attend(q, k, v, before=before)
    first, state = attend(*(x[:, :, :cut] for x in (q, k, v)), before=before[:, :cut])
    second, state = attend(*(x[:, :, cut:] for x in (q, k, v)), before=before[:, cut:], initial=state)
    torch.testing.assert_close(torch.cat([first, second], dim=2), whole)
    torch.testing.assert_close(state, end)


def test_gradients_of_the_chunks_are_those_of_finite_differences() -> None:
    before = torch.tensor([[2, 3, 4, 0, 1, 2, 0]])
    initial = torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    attend = partial(decay.linear_attention, before=before, chunk=3)
    assert torch.autograd.gradcheck(lambda q, k, v, s: attend(q, k, v, initial=s), (*inputs(7, 1), initial))


@pytest.mark.parametrize("autocast", [False, True])
def test_sums_do_not_stop_growing_in_bf16(autocast) -> None:
    ones = torch.ones(1, 1, 4096, 1, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, state = decay.linear_attention(ones, ones, ones)
    assert y.dtype == state.dtype == torch.float32
    assert y[0, 0, :, 0].tolist() == list(range(1, 4097))
    assert state.item() == 4096
