"""The delta rule, which writes over what it finds under a key, with or without decay, in chunks. Time O(T), memory O(T).

    S_t = (I - beta_t k_t^T k_t) diag(a_t) S_{t-1} + beta_t k_t^T v_t        o_t = q_t S_t        a_t = exp(log_decay_t)

One number a_t a token, or one a channel. Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
and 2025, "Gated Delta Networks", in their WY form: what a token really writes, x_i, is its value less what it finds, and what it finds in
its own chunk is a unit lower triangular system,

    (I + L) x = beta v - beta (k left of the start) S_entering        L_ij = beta_i (k_i . k_j left of key j), j < i
    o = (q left of the start) S_entering + (q k^T left of the keys) x    S_leaving = (left of it) S_entering + (k left at the end)^T x

The system is solved by substitution for all chunks at once. Its inverse is never made of powers of L: with keys that are alike they grow
beyond 1e9 and cancel. State (key_dim, value_dim) a head, in fp32 or better, also under autocast.
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

#: Tokens whose inside is alive at once.
BLOCK = 1024


def delta_rule(
    q: Float[Tensor, "batch heads time key_dim"],
    k: Float[Tensor, "batch heads time key_dim"],
    v: Float[Tensor, "batch heads time value_dim"],
    beta: Float[Tensor, "batch heads time"],
    log_decay: Float[Tensor, "batch heads time *key_dim"] | None = None,
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
    chunk: int = 64,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """(o, last S), both in fp32 or better: the same as `reference.delta_rule`, for any length.

    Stable for beta |k|^2 in [0, 2]. log_decay: <= 0; None forgets nothing. before: tokens of its own segment before each token, 0 where S
    starts again from 0. chunk: tokens handled by one matrix product, rounded up to a power of two.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta.unsqueeze(-1)))
        if log_decay is not None:
            log_decay = log_decay.to(dtype).unsqueeze(-1) if log_decay.ndim == 3 else log_decay.to(dtype)
        state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if initial is None else initial.to(dtype)
        timed = (q, k, v, beta, log_decay, None if before is None else before.unsqueeze(1))
        if q.shape[2] == 1:
            return _step(state, timed)
        chunk = power_of_two(min(chunk, q.shape[2]))
        o, last = blocks.run(partial(_block, chunk=chunk), state, timed, (), size=max(BLOCK, chunk))
    return o, last


def _block(
    state: Tensor, timed: Sequence[Tensor | None], fixed: Sequence[Tensor | None], *, chunk: int
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """Some chunks, one after another in what depends on the state alone."""
    q, k, v, beta, log_decay, before = timed
    assert q is not None and k is not None and v is not None and beta is not None
    time = q.shape[2]
    q, k, v, beta = (cut(x, chunk) for x in (q, k, v, beta))
    left = Left(log_decay, before, chunk, q.dtype)
    erasing = beta * k
    system, scores = left.products([erasing, q], k)
    # Solved for the identity, which is half as wide as what it is then multiplied with; the diagonal counts as 1, whatever lies there.
    inverse = torch.linalg.solve_triangular(system, torch.eye(chunk, dtype=q.dtype, device=q.device), upper=False, unitriangular=True)
    written, found, keys = inverse @ (beta * v), inverse @ left.of_start(erasing), left.at_end(k).transpose(-2, -1)
    entering, real, kept = [], [], left.of_state()
    heads, state = state.shape[:2], state.flatten(0, 1)
    for n, (value, finding, key) in enumerate(zip(*(x.flatten(0, 1).unbind(1) for x in (written, found, keys)), strict=True)):
        entering.append(state)
        real.append(torch.baddbmm(value, finding, state, alpha=-1))
        state = torch.baddbmm(state if kept is None else state * kept[n].expand(*heads, -1, -1).flatten(0, 1), key, real[-1])
    o = scores.flatten(0, 1) @ torch.stack(real, dim=1) + left.of_start(q).flatten(0, 1) @ torch.stack(entering, dim=1)
    return torch.unflatten(o.flatten(1, 2)[:, :time], 0, heads), torch.unflatten(state, 0, heads)


def _step(
    state: Tensor, timed: Sequence[Tensor | None]
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """One token, as in decoding."""
    q, k, v, beta, log_decay, before = timed
    assert q is not None and k is not None and v is not None and beta is not None
    if before is not None:
        state = state * (before != 0).unsqueeze(-1)
    if log_decay is not None:
        state = state * log_decay.clamp(min=LOWEST).exp().transpose(-2, -1)
    last = state + k.transpose(-2, -1) * (beta * (v - k @ state))
    return q @ last, last
