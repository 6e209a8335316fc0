"""Loops over single tokens: registers by name, more slots than fit into the cache, and what an indexer learns from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, relu

from tests.variants import oracles
from variants.ops import gathered, indexer, reference, select

lanes = pytest.importorskip("variants.ops.lanes")

#: More than one stretch of slots, of keys and values or of both kinds of keys.
SLOTS = 4500


def made(queries: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v of 6 heads that share two keys, chosen tokens with gaps, places: the last ones, and in the second row the first."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, queries, 40), (2, SLOTS, 40), (2, SLOTS, 33))
    tensors = [torch.randn(2, *shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    place = torch.stack([torch.arange(SLOTS - queries, SLOTS), torch.arange(queries)])
    scores = torch.randn(2, 1, queries, SLOTS, generator=generator)
    scores = scores.masked_fill(torch.arange(SLOTS) > place[:, None, :, None], -torch.inf)
    chosen = select.best(scores, 301)
    chosen[0, 0, 3] = -1
    chosen[0, 0, 4, 7:50] = -1
    return tensors, chosen, place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("queries", [1, 19])
def test_tokens_from_everywhere_are_attended_by_all_heads(dtype, queries) -> None:
    tensors, chosen, place = made(max(queries, 5), dtype)
    got, expected = (attend(*tensors, chosen, place, size=1) for attend in (gathered_loops, reference.attend_blocks))
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(got.y, expected.y, **close)
    torch.testing.assert_close(got.lse, expected.lse, **close)
    assert not got.y[0, :, 3].any()
    weights, more, seen = torch.randn(got.y.shape, dtype=dtype), torch.randn(got.lse.shape, dtype=dtype), expected.lse > -torch.inf
    sums = ((out.y * weights).sum() + (out.lse * more)[seen].sum() for out in (got, expected))
    for a, b in zip(*(torch.autograd.grad(total, tensors) for total in sums), strict=True):
        torch.testing.assert_close(a, b, **close)


def gathered_loops(*given: Tensor, size: int):
    return gathered.attend_blocks(*given, size=size, loops=True)


def test_an_indexer_learns_from_the_tokens_that_were_chosen() -> None:
    (q, k, _), chosen, _ = made(19)
    generator = torch.Generator().manual_seed(1)
    index = [torch.randn(2, *shape, generator=generator, dtype=q.dtype) for shape in ((3, 19, 40), (1, SLOTS, 40), (3, 19, 1))]
    index_q, index_k, weight = index = [x.requires_grad_() for x in index]
    valid = torch.arange(19) < torch.tensor([[19], [11]])
    chosen, scale = chosen[:, 0], 0.3
    seen = torch.zeros(2, 19, SLOTS + 1, dtype=torch.bool).scatter_(2, chosen.where(chosen >= 0, SLOTS), True)[..., :-1]
    logits = torch.einsum("bgstc,bgjc->bgstj", torch.unflatten(q, 1, (2, 3)), k).flatten(1, 2) * scale
    logits = logits.masked_fill(~seen.unsqueeze(1), -torch.inf)
    lse = logits.logsumexp(-1)
    shares = (logits - lse.clamp(min=-1e9).unsqueeze(-1)).exp().mean(1).detach()
    scores = (relu(index_q @ index_k.mT * 40**-0.5) * weight).sum(1).masked_fill(~seen, -torch.inf)
    told = log_softmax(scores.masked_fill(~seen.any(-1, keepdim=True), 0), -1).masked_fill(~seen, 0)
    expected = ((torch.xlogy(shares, shares) - shares * told).sum(-1) * valid).sum()
    got = indexer.divergence(q.detach(), k.detach(), lse.detach(), *index, chosen, valid, scale=scale)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got * 2, expected * 2, index)


def test_one_thread_or_many_teach_the_same() -> None:
    (q, k, v), chosen, place = (x if isinstance(x, Tensor) else [y.detach().float() for y in x] for x in made(200))
    lse = gathered_loops(q, k, v, chosen, place, size=1).lse
    runs, before = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            index = [q[:, :3].clone().requires_grad_(), k[:, :1].clone().requires_grad_(), q[:, :3, :, :1].clone().requires_grad_()]
            loss = indexer.divergence(q, k, lse, *index, chosen[:, 0], place >= 0, scale=0.3)
            runs.append([loss, *torch.autograd.grad(loss, index)])
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_is_found_wherever_it_is(dtype) -> None:
    spare = np.empty(lanes.LANES, dtype)
    for count in (1, 2, 15, 16, 17, 31, 33, 64):
        for at in range(count):
            x = np.full(count + 4, 7, dtype)
            x[2 : 2 + count] = -np.arange(count) - 1
            x[2 + at] = 3
            assert lanes.largest(x, 2, count, spare) == 3


def test_logarithms_are_precise_to_the_last_digits() -> None:
    from numba import njit

    from variants.ops.loops import log

    of = njit(lambda x: [log(x)])
    for x in np.concatenate([np.geomspace(1e-37, 1e37, 999), np.linspace(0.5, 2, 999)]).astype(np.float32):
        assert abs(of(x)[0] - np.log(np.float64(x))) <= 2e-7 * max(abs(np.log(np.float64(x))), 1e-1), x
