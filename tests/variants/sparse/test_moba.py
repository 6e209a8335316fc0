"""Mixture of block attention: its naive form, written afresh, and the cases in which it is full attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from registry import variants
from variants.contract import Context
from variants.ops import reference

DIM, HEADS = 16, 4


def build(**options):
    torch.manual_seed(0)
    return variants.build("moba", dim=DIM, heads=HEADS, **{"block": 4, "count": 3, **options}).double()


def tokens(time: int = 27, batch: int = 2) -> Tensor:
    return torch.randn(batch, time, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def naive(mixer, x: Tensor) -> Tensor:
    """All pairs, and a mask that says which were chosen."""
    q, k, v, _ = mixer.projections(x, Context(), None, None, None)
    k, v = (z.repeat_interleave(HEADS // mixer.kv_heads, 1) for z in (k, v))
    time, block = x.shape[1], mixer.block
    chosen = torch.zeros(*q.shape[:3], time, dtype=torch.bool)
    for b in range(len(x)):
        for h in range(HEADS):
            for t in range(time):
                own = t // block
                scores = [float(q[b, h, t] @ k[b, h, n * block : (n + 1) * block].mean(0)) for n in range(own)]
                best = sorted(range(own), key=lambda n: (-scores[n], n))[: mixer.count - 1]
                for n in [*best, own]:
                    chosen[b, h, t, n * block : min((n + 1) * block, t + 1)] = True
    logits = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~chosen, -math.inf)
    return mixer.projections.back(logits.softmax(-1) @ v)


@pytest.mark.parametrize("impl", ["numba", "torch", "reference"])
@pytest.mark.parametrize("options", [{}, {"kv_heads": 1}, {"kv_heads": 2, "block": 3, "count": 2}, {"count": 1}, {"block": 1, "count": 5}])
def test_the_layer_is_its_naive_form(options, impl) -> None:
    mixer, x = build(impl=impl, **options), tokens().requires_grad_()
    got, expected = mixer(x).y, naive(mixer, x)
    torch.testing.assert_close(got, expected)
    wanted = [x, *mixer.parameters()]
    weights = torch.randn(got.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    for a, b in zip(torch.autograd.grad(got, wanted, weights), torch.autograd.grad(expected, wanted, weights), strict=True):
        torch.testing.assert_close(a, b)


@torch.no_grad()
def test_enough_blocks_are_full_attention() -> None:
    mixer, x = build(count=7), tokens()
    q, k, v, _ = mixer.projections(x, Context(), None, None, None)
    torch.testing.assert_close(mixer(x).y, mixer.projections.back(reference.attention(q, k, v)))


@torch.no_grad()
def test_a_cache_agrees_at_every_length() -> None:
    mixer, x = build(position="rope", kv_heads=2), tokens(18)
    whole, state = mixer(x).y, mixer.init_state(2)
    for t in range(x.shape[1]):
        y, state, _ = mixer(x[:, t : t + 1], state=state)
        torch.testing.assert_close(y, whole[:, t : t + 1])
        assert state.elements == 2 * mixer.state_elements(t + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"block": 0}, "block must be at least 1; got 0"), ({"count": 0}, "count must be at least 1"), ({"kv_heads": 3}, "does not divide")],
)
def test_wrong_options_say_what_would_be_right(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)
