"""What a lightning indexer says of each pair of a query and a slot, and how far that is from what attention does: compiled loops.

    I_ts = sum_h w_th relu(q^I_th . k^I_s / sqrt(width))        loss = sum_t KL(mean_h exp(s_hts - lse_ht) || softmax_s I_ts)

over the slots s chosen for query t; s are the logits of attention. No gradient goes into attention. The gradient by the indexer's parts is
made in the forward pass, where all that it takes is at hand, and waits for the backward pass: it is not larger than they are.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from variants.ops.gathered import filled
from variants.ops.precision import without_autocast
from variants.ops.threads import spread

#: Queries that are scored at once, and numbers of their products with slots (1 MB in fp32).
TILE, NUMBERS = 64, 2**18
#: Into how many parts the queries of all rows are cut, each with gradients of keys of its own, which are added up in one order.
PARTS = 8


@torch.compiler.disable
def scores(
    q: Float[Tensor, "pieces index_heads q_time width"],
    k: Float[Tensor, "pieces 1 slots width"],
    weight: Float[Tensor, "pieces index_heads q_time 1"],
    place: Int[Tensor, "pieces q_time"],
) -> Float[Tensor, "pieces q_time slots"]:
    """I of all slots, -inf for those behind the place of a query."""
    (pieces, heads, queries, width), slots = q.shape, k.shape[2]
    found, factor, at = q.new_empty(pieces, queries, slots), (weight.squeeze(-1) * width**-0.5).contiguous(), place.contiguous()
    rows, span = q.reshape(pieces, heads * queries, width), max(256, NUMBERS // (pieces * heads * queries))
    with without_autocast(q):
        for start in range(0, slots, span):
            fits = (rows @ k[:, 0, start : start + span].mT).view(pieces, heads, queries, -1)
            _score(fits, factor, at, start, found)
    return found


def _score(fits: Tensor, factor: Tensor, place: Tensor, start: int, found: Tensor) -> None:
    """Write the scores of a span of slots."""
    from variants.ops import indexer_loops

    told = (fits.numpy(), factor.numpy(), place.numpy(), start, found.numpy())
    rows = found.shape[0] * found.shape[1]
    spread(lambda first, end: indexer_loops.score(first, end, *told), rows, parallel=fits.numel() >= 2**16)


@torch.compiler.disable
def divergence(
    q: Float[Tensor, "batch heads q_time key_dim"],
    k: Float[Tensor, "batch kv_heads slots key_dim"],
    lse: Float[Tensor, "batch heads q_time"],
    index_q: Float[Tensor, "batch index_heads q_time width"],
    index_k: Float[Tensor, "batch 1 slots width"],
    weight: Float[Tensor, "batch index_heads q_time 1"],
    chosen: Int[Tensor, "batch q_time count"],
    valid: Bool[Tensor, "batch q_time"],
    *,
    scale: float,
) -> Float[Tensor, ""]:
    """The sum of the divergences of the valid queries, in fp32 or better; first derivatives only."""
    with without_autocast(q):
        attention, index = ([x.to(lse.dtype) for x in some] for some in ((q, k), (index_q, index_k, weight.squeeze(-1))))
        found: Tensor = _Divergence.apply(*attention, lse, *index, chosen, valid, scale)  # type: ignore[no-untyped-call]
    return found


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        weight: Tensor,
        chosen: Tensor,
        valid: Tensor,
        scale: float,
    ) -> Tensor:
        from variants.ops import indexer_loops

        batch, kv_heads, shared, heads = len(q), k.shape[1], q.shape[1] // k.shape[1], index_q.shape[1]
        width, parts = index_q.shape[-1], -(-PARTS // batch)
        together = filled(torch.unflatten(q, 1, (kv_heads, shared)))
        keys, asked, index_keys = filled(k), filled(index_q.unsqueeze(1)).squeeze(1), filled(index_k)
        factor = pad(weight, (0, 0, 0, -heads % 4)).contiguous()
        norm = torch.unflatten(lse, 1, (kv_heads, shared)).clamp(min=torch.finfo(lse.dtype).min).contiguous()
        by_q, by_weight, by_k = torch.empty_like(asked), torch.empty_like(factor), q.new_zeros(parts, index_keys.numel())
        loss = q.new_zeros(batch * parts)
        number = q.new_tensor([scale, width**-0.5]).numpy()
        told = (
            *(together.numpy(), keys.flatten().numpy(), kv_heads, norm.numpy(), shared),
            *(asked.numpy(), index_keys.flatten().numpy(), factor.numpy(), chosen.contiguous().numpy(), valid.contiguous().numpy()),
            *(number[0], number[1], loss.numpy(), by_q.numpy(), by_k.numpy(), by_weight.numpy()),
        )
        worth = chosen.numel() * q.shape[1] * q.shape[3] >= 2**18
        spread(lambda first, end: indexer_loops.diverge(first, end, parts, *told), batch * parts, parallel=worth)
        ctx.save_for_backward(by_q[:, :heads, :, :width], by_k.sum(0).view(*index_k.shape[:3], -1)[..., :width], by_weight[:, :heads])
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        by_q, by_k, by_weight = (x * grad for x in ctx.saved_tensors)
        return None, None, None, by_q, by_k, by_weight, None, None, None
