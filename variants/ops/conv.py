"""Short depthwise convolution over time: each channel mixes with its own last few values. Time O(T width), state width - 1 values each.

    y_t = sum_i w_i * x_{t - width + 1 + i}

Written as a sum of shifted products: as fast as torch's depthwise conv1d on a CPU, and each term can be masked where it would reach into
another segment. First derivatives only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def reach(width: int, causal: bool) -> tuple[int, int]:
    """How many tokens back and ahead an output depends on: all back if causal, else centred (an even width leans back)."""
    return (width - 1, 0) if causal else (width // 2, width - 1 - width // 2)


def short_convolution(
    x: Float[Tensor, "batch time channels"],
    weight: Float[Tensor, "channels width"],
    *,
    taps: Float[Tensor, "batch taps channels"] | None = None,
    before: Int[Tensor, "batch time"] | None = None,
    after: Int[Tensor, "batch time"] | None = None,
    causal: bool = True,
) -> Float[Tensor, "batch time channels"]:
    """The convolution of x, with `taps` (the width - 1 values before x; default 0) to its left and 0 to its right.

    before, after: tokens of its own segment around each token; nothing from further away enters.
    """
    back, ahead = reach(weight.shape[1], causal)
    left = x.new_zeros(x.shape[0], back, x.shape[2]) if taps is None else taps.to(x.dtype)
    row = torch.cat([left, x, x.new_zeros(x.shape[0], ahead, x.shape[2])], dim=1)
    y: Tensor = _Convolution.apply(row, weight.to(x.dtype), before, after, back)  # type: ignore[no-untyped-call]
    return y


class _Convolution(torch.autograd.Function):
    """The sum over taps of a row that has all of them around it. Gradients are added in place: autograd would fill a row for each tap."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, weight: Tensor, before: Tensor | None, after: Tensor | None, back: int) -> Tensor:
        y = None
        for i, hidden in _taps(weight, before, after, back):
            term = _cut(row, i, weight.shape[1], hidden)
            y = term * weight[:, i] if y is None else y.addcmul_(term, weight[:, i])
        ctx.save_for_backward(row, weight, before, after)
        ctx.back = back
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        row, weight, before, after = ctx.saved_tensors
        by_row, by_weight = torch.zeros_like(row), torch.empty_like(weight)
        for i, hidden in _taps(weight, before, after, ctx.back):
            arriving = grad if hidden is None else grad.masked_fill(hidden, 0)
            _cut(by_row, i, weight.shape[1]).addcmul_(arriving, weight[:, i])
            by_weight[:, i] = (arriving * _cut(row, i, weight.shape[1])).sum((0, 1))
        return by_row, by_weight, None, None, None


def _taps(weight: Tensor, before: Tensor | None, after: Tensor | None, back: int) -> Iterator[tuple[int, Tensor | None]]:
    """Each tap, and where it would reach into another segment, (batch, time, 1)."""
    for i in range(weight.shape[1]):
        limit, distance = (before, back - i) if i < back else (after, i - back)
        yield i, None if limit is None or not distance else (limit < distance).unsqueeze(-1)


def _cut(row: Tensor, i: int, width: int, hidden: Tensor | None = None) -> Tensor:
    """What tap i sees, for each token; 0 where it may see nothing."""
    term = row[:, i : i + row.shape[1] - width + 1]
    return term if hidden is None else term.masked_fill(hidden, 0)
