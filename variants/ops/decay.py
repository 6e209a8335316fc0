"""Linear attention that forgets, in chunks. Time O(T), memory O(T), state (key_dim, value_dim) a head.

    S_t = diag(a_t) S_{t-1} + k_t^T v_t        o_t = q_t S_t        a_t = exp(log_decay_t), one number a token or one a channel

With a bonus u, a query reads before its own token's decay, and weighs its own token apart (RWKV-6):

    o_t = q_t (S_{t-1} + diag(u) k_t^T v_t)

Inside a chunk the products are those of attention without softmax; chunks meet only in the state that one hands to the next:

    o = (q left of the start) S_entering + (q k^T left of the keys) v        S_leaving = (left of it) S_entering + (k left at the end)^T v

Computed in fp32 or better whatever the input's dtype, also under autocast: a running sum in bf16 stops growing after a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from variants.ops import blocks
from variants.ops.chunks import LOWEST, Left, cut, power_of_two
from variants.ops.precision import without_autocast

#: Tokens whose inside is alive at once; fewer make products too small, more fall out of the caches.
BLOCK = 1024


def gated_linear_attention(
    q: Float[Tensor, "batch heads time key_dim"],
    k: Float[Tensor, "batch heads time key_dim"],
    v: Float[Tensor, "batch heads time value_dim"],
    log_decay: Float[Tensor, "batch heads time *key_dim"] | None = None,
    *,
    bonus: Float[Tensor, "heads key_dim"] | None = None,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
    chunk: int = 64,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """(o, last S), both in fp32 or better: the same as `reference.gated_linear_attention`, for any length.

    log_decay: <= 0; None forgets nothing. before: tokens of its own segment before each token, 0 where S starts again from 0. chunk: tokens
    handled by one matrix product, rounded up to a power of two.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        q, k, v = (x.to(dtype) for x in (q, k, v))
        if log_decay is not None:
            log_decay = log_decay.to(dtype).unsqueeze(-1) if log_decay.ndim == 3 else log_decay.to(dtype)
        state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if initial is None else initial.to(dtype)
        bonus = None if bonus is None else bonus.to(dtype)
        timed = (q, k, v, log_decay, None if before is None else before.unsqueeze(1))
        if q.shape[2] == 1:
            return _step(state, timed, (bonus,))
        chunk = power_of_two(min(chunk, q.shape[2]))
        o, last = blocks.run(partial(_block, chunk=chunk), state, timed, (bonus,), size=max(BLOCK, chunk))
    return o, last


def _block(
    state: Tensor, timed: Sequence[Tensor | None], fixed: Sequence[Tensor | None], *, chunk: int
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """Some chunks, all at once but for the states that they hand on."""
    q, k, v, log_decay, before = timed
    (bonus,) = fixed
    assert q is not None and k is not None and v is not None
    time = q.shape[2]
    q, k, v = (cut(x, chunk) for x in (q, k, v))
    left = Left(log_decay, before, chunk, q.dtype, exclusive=bonus is not None)
    (scores,) = left.products([q], k, bonus)
    added = (left.at_end(k).transpose(-2, -1) @ v).unbind(2)
    kept = left.of_state()
    entering = []
    for n, more in enumerate(added):
        entering.append(state)
        state = state + more if kept is None else torch.addcmul(more, state, kept[n])
    o = scores @ v + left.of_start(q) @ torch.stack(entering, dim=2)
    return o.flatten(2, 3)[:, :, :time], state


def _step(
    state: Tensor, timed: Sequence[Tensor | None], fixed: Sequence[Tensor | None]
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """One token, as in decoding."""
    q, k, v, log_decay, before = timed
    (bonus,) = fixed
    assert q is not None and k is not None and v is not None
    if before is not None:
        state = state * (before != 0).unsqueeze(-1)
    own = k.transpose(-2, -1) * v
    last = own + (state if log_decay is None else state * log_decay.clamp(min=LOWEST).exp().transpose(-2, -1))
    return q @ (last if bonus is None else state + bonus.unsqueeze(-1) * own), last
