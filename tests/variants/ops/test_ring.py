"""Attention of rows that are split over ranks, all of them in this process, against attention of whole rows in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from variants.ops import reference, ring
from variants.ops.attention import CAUSAL, Bias, Sight
from variants.ops.ranks import Ring, Simulated


def problem(time: int, *, heads: int = 4, kv_heads: int = 2, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v with value heads of a width of their own."""
    torch.manual_seed(0)
    shapes = (batch, heads, time, 8), (batch, kv_heads, time, 8), (batch, kv_heads, time, 6)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def split(x: Tensor, held: Ring) -> Tensor:
    """The part of whole rows (batch, heads, time, ...)."""
    return held.part(x.transpose(1, 2)).transpose(1, 2)


def whole(x: Tensor, held: Ring) -> Tensor:
    return held.whole(x.transpose(1, 2)).transpose(1, 2)


def segments(time: int) -> dict[str, Tensor]:
    """before and after of two rows: one of segments of 1, 5 and the rest, one that ends in a pad."""
    before = torch.tensor([[0, *range(5), *range(time - 6)], [*range(time - 1), 0]])
    after = torch.tensor([[0, *range(4, -1, -1), *range(time - 7, -1, -1)], [*range(time - 2, -1, -1), 0]])
    return {"before": before, "after": after}


def distances(table: Tensor) -> Bias:
    time = 40
    positions = (torch.arange(time) * 3).expand(2, time)
    return Bias(
        lambda q, k, weights: weights[((q[..., :, None] - k[..., None, :]).abs() // 3).clamp(max=7)].movedim(-1, -3),
        (positions, positions),
        (table,),
    )


SIGHTS = {
    "causal": CAUSAL,
    "everything": Sight(causal=False),
    "window": Sight(window=7),
    "window of one": Sight(window=1),
    "window that spans slices": Sight(window=23),
    "window to both sides": Sight(causal=False, window=6),
    "sinks": Sight(window=5, sinks=3),
    "segments": Sight(before=segments(40)["before"]),
    "segments, window": Sight(window=9, before=segments(40)["before"]),
    "segments, sinks": Sight(window=4, sinks=2, before=segments(40)["before"]),
    "segments to both sides": Sight(causal=False, **segments(40)),
    "segments to both sides, window": Sight(causal=False, window=8, **segments(40)),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SIGHTS)
def test_equals_attention_of_whole_rows_with_all_gradients(name: str, size: int, unchecked: None) -> None:
    tensors, held = problem(40), Ring(Simulated(size), 40)
    arriving = torch.randn(2, 4, 40, 6, dtype=torch.float64), torch.randn(2, 4, 40, dtype=torch.float64)
    expected = reference.attend(*tensors, sight=SIGHTS[name])
    seen = expected.lse > -torch.inf
    y, lse = (whole(x, held) for x in ring.attend(*(split(x, held) for x in tensors), held, sight=SIGHTS[name]))
    torch.testing.assert_close(y, expected.y, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-11, atol=1e-11)
    for given in ((y, lse), expected):
        loss = (given[0] * arriving[0]).sum() + (given[1][seen] * arriving[1][seen]).sum()
        grads = torch.autograd.grad(loss, tensors)
        if given[0] is y:
            found = grads
    for mine, right in zip(found, grads, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)
