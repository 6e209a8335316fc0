"""Softmax attention through torch's FlexAttention: any sight in linear memory on a GPU, where loops over tiles are slow.

It skips blocks that a function of (row, head, query, slot) hides whole. It gives no gradient on a CPU, nor to a trained bias, and drops no
weights; those go in tiles of our own. A sink has no slot: it takes its share afterwards, by the log-sum-exp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from variants.ops import softmax
from variants.ops.attention import CAUSAL, Bias, Fade, Sight


def attention(
    q: Float[Tensor, "batch heads q_time head_dim"],
    k: Float[Tensor, "batch kv_heads k_time head_dim"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    *,
    sight: Sight = CAUSAL,
    bias: Bias | None = None,
    fade: Fade | None = None,
    sink: Float[Tensor, " heads"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads q_time value_dim"]:
    """The same as `reference.attention`."""
    from torch.nn.attention.flex_attention import AuxRequest

    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if dropout or (bias is not None and bias.parameters) or (recorded and not q.is_cuda):
        return softmax.attention(q, k, v, sight=sight, bias=bias, fade=fade, sink=sink, scale=scale, dropout=dropout)
    y: Tensor
    y, aux = _flex(q.is_cuda)(
        q,
        k,
        v,
        score_mod=_score(bias, fade),
        block_mask=_blocks(sight, q, k.shape[2]),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sink is not None:
        y = y * torch.sigmoid(aux.lse - sink[:, None].to(aux.lse.dtype)).unsqueeze(-1).to(y.dtype)
    return y


def _score(bias: Bias | None, fade: Fade | None) -> Callable[..., Tensor] | None:
    """What is added to the score of one query and one slot."""
    if bias is None and fade is None:
        return None
    dense = None if bias is None else bias.dense().expand(len(bias.positions[0]), -1, -1, -1)
    # Lambdas, because FlexAttention tells the kinds of functions apart by their signatures, which decorators hide.
    added: list[Callable[..., Tensor]] = []
    if fade is not None:
        added.append(lambda row, head, query, slot: fade.at_queries[row, head, query] - fade.at_keys[row, head, slot])
    if dense is not None:
        added.append(lambda row, head, query, slot: dense[row, head, query, slot])
    return lambda score, row, head, query, slot: score + sum(term(row, head, query, slot).to(score.dtype) for term in added)


def _blocks(sight: Sight, q: Tensor, k_time: int) -> Any:
    """Which blocks hold a slot that is seen."""
    from torch.nn.attention.flex_attention import create_block_mask

    time = q.shape[2]
    extents = sight.extents(time, k_time, q.device)
    before, after, beyond = (None if x is None else x.expand(len(q), -1).contiguous() for x in extents)
    assert before is not None

    return create_block_mask(
        lambda row, head, query, slot: sight.sees(
            query, slot, before[row, query], _at(after, row, query), _at(beyond, row, query), time, k_time
        ),
        len(q),
        None,
        time,
        k_time,
        device=q.device,
    )


def _at(extent: Tensor | None, row: Tensor, query: Tensor) -> Tensor | None:
    """The extent of one query, where there is one."""
    return None if extent is None else extent[row, query]


@functools.cache
def _flex(compiled: bool) -> Callable[..., Any]:
    """FlexAttention; uncompiled it writes the whole square out."""
    from torch.nn.attention.flex_attention import flex_attention

    chosen: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return chosen  # type: ignore[no-any-return]
