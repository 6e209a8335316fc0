"""A gradient for what was chosen: the logits of a chosen block are lifted by a number that is 0 and yet has one.

    y_i = sum_b e^(o_ib) sum_{j in b} exp(s_ij - lse_i) v_j        do_ib = sum_{j in b} p_ij (dy_i . v_j - dy_i . y_i + dlse_i)

over the blocks b chosen for query i. The number says by how much the outputs would change if a block counted more, so that whatever it is
made from learns to choose, as if choosing were smooth (Bengio et al. 2013, "Estimating or Propagating Gradients Through Stochastic Neurons
for Conditional Computation"). Memory is that of one tile of gathered blocks; first derivatives only.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from variants.ops.attention import Output
from variants.ops.gathered import Gathered, tiles
from variants.ops.precision import without_autocast


def lifted(
    found: Output,
    offsets: Float[Tensor, "batch groups q_time count"],
    q: Float[Tensor, "batch heads q_time key_dim"],
    k: Float[Tensor, "batch kv_heads k_time key_dim"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    chosen: Int[Tensor, "batch groups q_time count"],
    place: Int[Tensor, "batch q_time"],
    *,
    size: int,
    scale: float,
) -> Output:
    """What `attend_blocks` found for the same arguments, unchanged; backward, `offsets` get the gradient they would have if they were 0."""
    dtype = found.lse.dtype
    with without_autocast(q):
        together = torch.unflatten(q.detach().to(dtype), 1, (max(k.shape[1], chosen.shape[1]), -1))
        given = (together, k.detach().to(dtype), v.detach().to(dtype), chosen, place)
        y, lse = _Lifted.apply(offsets, *found, *given, size, scale)  # type: ignore[no-untyped-call]
    return Output(y, lse)


class _Lifted(torch.autograd.Function):
    """The identity of y and lse."""

    @staticmethod
    def forward(ctx: Any, offsets: Tensor, y: Tensor, lse: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, size, scale = given
        ctx.save_for_backward(offsets, y, lse, *tensors)
        ctx.told = size, scale
        return y.view_as(y), lse.view_as(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        offsets, y, lse, q, k, v, chosen, place = ctx.saved_tensors
        size, scale = ctx.told
        groups, count = q.shape[1], chosen.shape[-1]
        arriving, norm, excess = (torch.unflatten(x, 1, (groups, -1)) for x in (grad_y, lse, (y * grad_y).sum(-1) - grad_lse))
        grad = torch.zeros_like(offsets, dtype=lse.dtype)
        for tile in tiles(q, k, chosen, size):
            part = Gathered(q, k, v, chosen, place, size, tile)
            weights = part.weights(part.logits(scale), part.cut(norm))
            by_logits = weights * (part.cut(arriving) @ part.values.mT - part.cut(excess).unsqueeze(-1))
            by_blocks = torch.unflatten(by_logits.sum(3), -1, (count, size)).sum(-1)  # (batch, groups, tile, count)
            grad[:, :, tile] = torch.unflatten(by_blocks, 1, (chosen.shape[1], -1)).sum(2)
        return grad.to(offsets.dtype), grad_y, grad_lse, *(None for _ in range(7))
