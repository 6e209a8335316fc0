"""Softmax attention of every query to a prefix of the slots, the longer the later: what compressed keys need. Time O(pairs), memory O(T).

    y_i = sum_{j < visible_i} exp(s_ij - lse_i) v_j        s_ij = scale q_i . k_j

Tiles of queries, each against the slots that its last query sees; the backward pass computes the weights again from the log-sum-exp. Only
columns that part of a tile sees are masked. In fp32 or better whatever the input's dtype, also under autocast; first derivatives only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from variants.ops.attention import Output
from variants.ops.precision import without_autocast

#: Numbers in a tile of weights, all rows and heads together (4 MB in fp32); queries in one: more would look at what they do not see.
TILE, QUERIES = 2**20, 128

#: (queries of a tile, weights (batch, kv_heads, shared, tile, slots seen)) -> nothing. Called in the forward pass, without gradients.
Watch = Callable[[slice, Tensor], None]


@torch.compiler.disable  # dozens of tiles, unrolled
def attend_prefix(
    q: Float[Tensor, "batch heads q_time key_dim"],
    k: Float[Tensor, "batch kv_heads k_time key_dim"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    visible: Int[Tensor, "batch q_time"],
    *,
    scale: float | None = None,
    watch: Watch | None = None,
) -> Output:
    """y, 0 where nothing is visible, and lse, there -inf; both in fp32 or better. visible: 0 to k_time."""
    dtype, scale = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        together = torch.unflatten(q.to(dtype), 1, (k.shape[1], -1))
        y, lse = _Prefix.apply(together, k.to(dtype), v.to(dtype), visible, scale, watch)  # type: ignore[no-untyped-call]
    return Output(y.flatten(1, 2), lse.flatten(1, 2))


class _Tile(NamedTuple):
    """Queries `here`; all of them see the first `least` slots, none of them sees any from `most` on."""

    here: slice
    least: int
    most: int


class _Prefix(torch.autograd.Function):
    """`attend_prefix` for q (batch, kv_heads, shared, time, width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, watch: Watch | None) -> tuple[Tensor, Tensor]:
        y, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -torch.inf)
        for tile in _tiles(q, k, visible):
            logits = _logits(q, k, visible, tile, scale)
            largest = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).min)
            weights = logits.sub_(largest).exp_()
            norm = weights.sum(-1, keepdim=True)
            lse[..., tile.here] = (largest + norm.log()).squeeze(-1)
            weights = weights.div_(norm.clamp_(min=torch.finfo(q.dtype).tiny))
            y[..., tile.here, :] = (weights.flatten(2, 3) @ v[:, :, : tile.most]).view_as(y[..., tile.here, :])
            if watch is not None:
                watch(tile.here, weights)
        ctx.save_for_backward(q, k, v, visible, y, lse)
        ctx.scale = scale
        return y, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, visible, y, lse = ctx.saved_tensors
        delta = (y * grad_y).sum(-1) - grad_lse
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for tile in _tiles(q, k, visible):
            floor = lse[..., tile.here, None].clamp(min=torch.finfo(q.dtype).min)
            weights = _logits(q, k, visible, tile, ctx.scale).sub_(floor).exp_()
            arriving = grad_y[..., tile.here, :].flatten(2, 3)
            seen_k, seen_v = k[:, :, : tile.most], v[:, :, : tile.most]
            by_logits = (
                (arriving @ seen_v.mT).view_as(weights).sub_(delta[..., tile.here, None]).mul_(weights).mul_(ctx.scale).flatten(2, 3)
            )
            grad_q[..., tile.here, :] = (by_logits @ seen_k).view_as(grad_q[..., tile.here, :])
            grad_k[:, :, : tile.most] += by_logits.mT @ q[..., tile.here, :].flatten(2, 3)
            grad_v[:, :, : tile.most] += weights.flatten(2, 3).mT @ arriving
        return grad_q, grad_k, grad_v, None, None, None


def _tiles(q: Tensor, k: Tensor, visible: Tensor) -> Iterator[_Tile]:
    """Tiles whose queries see something; the bounds of all of them are read at once."""
    batch, groups, shared, time = q.shape[:4]
    size = max(1, min(time, QUERIES, TILE // max(1, batch * groups * shared * k.shape[2])))
    pieces = torch.split(visible, size, dim=1)
    bounds = torch.stack([torch.stack([piece.min(), piece.max()]) for piece in pieces]).tolist()
    for n, (least, most) in enumerate(bounds):
        if most:
            yield _Tile(slice(n * size, min((n + 1) * size, time)), least, most)


def _logits(q: Tensor, k: Tensor, visible: Tensor, tile: _Tile, scale: float) -> Tensor:
    """(batch, kv_heads, shared, tile, most), -inf where a slot is not visible."""
    queries = q[..., tile.here, :]
    logits = (queries.flatten(2, 3) @ k[:, :, : tile.most].mT).mul_(scale).view(*queries.shape[:-1], -1)
    if tile.least < tile.most:
        slot = torch.arange(tile.least, tile.most, device=q.device)
        hidden = slot >= visible[:, tile.here, None]
        logits[..., tile.least :].masked_fill_(hidden[:, None, None], -torch.inf)
    return logits
