"""The short convolution, against torch's conv1d."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d, pad

from tests.variants import oracles
from tests.variants.oracles import places, run_ids
from variants.ops.conv import reach, short_convolution


def inputs(time: int, width: int, channels: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * time + width)
    shapes = (2, time, channels), (channels, width)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return x, weight


def oracle(x: Tensor, weight: Tensor, back: int) -> Tensor:
    """A padded grouped conv1d with `back` taps to the left."""
    ahead = weight.shape[1] - 1 - back
    return conv1d(pad(x.transpose(1, 2), (back, ahead)), weight.unsqueeze(1), groups=len(weight)).transpose(1, 2)


@given(time=st.integers(1, 9), width=st.integers(1, 5), causal=st.booleans())
def test_it_is_a_depthwise_conv1d_causal_or_centred(time, width, causal) -> None:
    x, weight = inputs(time, width)
    got, expected = short_convolution(x, weight, causal=causal), oracle(x, weight, width - 1 if causal else width // 2)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (x, weight))


@given(time=st.integers(2, 9), width=st.integers(1, 5), cut=st.integers(1, 8))
def test_the_last_inputs_carry_it_over_a_cut(time, width, cut) -> None:
    cut = min(cut, time - 1)
    x, weight = inputs(time, width)
    past = pad(x, (0, 0, width - 1, 0))[:, cut : cut + width - 1]
    torch.testing.assert_close(short_convolution(x[:, cut:], weight, taps=past), short_convolution(x, weight)[:, cut:])


@given(time=st.integers(1, 12), width=st.integers(1, 5), causal=st.booleans(), lengths=st.lists(st.integers(1, 6), max_size=4))
def test_it_does_not_reach_into_another_segment(time, width, causal, lengths) -> None:
    ids = run_ids(lengths, time)
    x, weight = inputs(time, width)
    before, after = (places([row]).expand(2, -1) for row in (ids, ids[::-1]))
    got = short_convolution(x, weight, before=before, after=after.flip(1), causal=causal)
    sizes = [ids.count(one) for one in sorted(set(ids))]
    alone = torch.cat([short_convolution(part, weight, causal=causal) for part in x.split(sizes, dim=1)], dim=1)
    torch.testing.assert_close(got, alone)
    oracles.same_gradients(got, alone, (x, weight))


@pytest.mark.parametrize(("width", "causal", "expected"), [(4, True, (3, 0)), (3, False, (1, 1)), (4, False, (2, 1)), (1, True, (0, 0))])
def test_its_reach_is_declared(width, causal, expected) -> None:
    assert reach(width, causal) == expected
