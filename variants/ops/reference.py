"""The mathematics, line by line, in any dtype: what every fast core is compared with.

Layout (batch, heads, time, head_dim). With fewer key/value heads than query heads, query head h reads key/value head
h // (heads / kv_heads).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from variants.ops.attention import CAUSAL, Bias, Fade, Output, Sight


def attend(
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
) -> Output:
    """Attention over the slots in `sight`: `variants.ops.attention` has the equation.

    sink: one more logit for each head, which has no value. scale: default head_dim^-1/2. dropout: share of the weights to drop, always:
    pass 0 to evaluate.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    logits = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.dense()
    if fade is not None:
        logits = logits + (fade.at_queries.unsqueeze(-1) - fade.at_keys.unsqueeze(-2)).to(logits.dtype)
    seen = sight.mask(q.shape[2], k.shape[2], q.device)
    logits = logits.masked_fill(~seen, -math.inf)
    if sink is not None:
        logits = torch.cat([logits, sink.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)], dim=-1)
    # A row of -inf alone gives NaN, here and in its gradient; the second mask clears the one, and the first mask's gradient the other.
    weights = logits.softmax(-1)[..., : k.shape[2]].masked_fill(~seen, 0)
    weights = torch.nn.functional.dropout(weights, dropout)
    return Output(weights.to(v.dtype) @ v, logits.logsumexp(-1))


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Float[Tensor, "batch heads q_time value_dim"]:
    """`attend` without the log-sum-exp."""
    return attend(q, k, v, **options).y


def attend_blocks(
    q: Float[Tensor, "batch heads q_time key_dim"],
    k: Float[Tensor, "batch kv_heads k_time key_dim"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    chosen: Int[Tensor, "batch groups q_time count"],
    place: Int[Tensor, "batch q_time"],
    *,
    size: int,
    scale: float | None = None,
    offsets: Float[Tensor, "batch groups q_time count"] | None = None,
) -> Output:
    """Attention of each query to the blocks chosen for it: block n is the slots n size, ..., n size + size - 1; -1 is none.

    place: the slot that a query stands at; no later one is seen. Query head h reads the choice of group h // (heads / groups). A block
    chosen twice counts once. offsets: added to the logits of each chosen block.
    """
    batch, heads, q_time = q.shape[:3]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    chosen = chosen.repeat_interleave(heads // chosen.shape[1], dim=1)
    slot = torch.arange(k.shape[2], device=k.device)
    seen = slot <= place[:, None, :, None]
    picked = torch.zeros(batch, heads, q_time, k.shape[2], dtype=torch.bool, device=k.device)
    lifts = torch.zeros_like(picked, dtype=torch.promote_types(q.dtype, torch.float32))
    for n in range(chosen.shape[-1]):
        here = slot // size == chosen[..., n, None]
        picked = picked | here
        if offsets is not None:
            lifts = lifts + here * offsets.repeat_interleave(heads // offsets.shape[1], dim=1)[..., n, None]
    logits = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = (logits + lifts).masked_fill(~(seen & picked), -math.inf)
    weights = logits.softmax(-1).masked_fill(~(seen & picked), 0)
    return Output(weights.to(v.dtype) @ v, logits.logsumexp(-1))


def gated_linear_attention(
    q: Float[Tensor, "batch heads time key_dim"],
    k: Float[Tensor, "batch heads time key_dim"],
    v: Float[Tensor, "batch heads time value_dim"],
    log_decay: Float[Tensor, "batch heads time *key_dim"] | None = None,
    *,
    bonus: Float[Tensor, "heads key_dim"] | None = None,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t, o_t = q_t S_t: (o, last S).

    With a bonus u, o_t = q_t (S_{t-1} + diag(u) k_t^T v_t). S starts from `initial` (default 0) and again from 0 where `before` is 0. In
    fp32 or better, whatever the inputs are in.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    decay = None if log_decay is None else _by_channel(log_decay.to(dtype)).exp()
    state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if initial is None else initial.to(dtype)
    outputs = []
    for t in range(q.shape[2]):
        if before is not None:
            state = state.masked_fill((before[:, t] == 0)[:, None, None, None], 0)
        own = k[:, :, t, :, None] * v[:, :, t, None, :]
        read = None if bonus is None else state + bonus.to(dtype)[:, :, None] * own
        state = (state if decay is None else decay[:, :, t, :, None] * state) + own
        outputs.append((q[:, :, t, None, :] @ (state if read is None else read)).squeeze(-2))
    return torch.stack(outputs, dim=2), state


def delta_rule(
    q: Float[Tensor, "batch heads time key_dim"],
    k: Float[Tensor, "batch heads time key_dim"],
    v: Float[Tensor, "batch heads time value_dim"],
    beta: Float[Tensor, "batch heads time"],
    log_decay: Float[Tensor, "batch heads time *key_dim"] | None = None,
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """S_t = (I - beta_t k_t^T k_t) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t^T v_t, o_t = q_t S_t: (o, last S).

    S starts from `initial` (default 0) and again from 0 where `before` is 0. In fp32 or better, whatever the inputs are in.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    decay = None if log_decay is None else _by_channel(log_decay.to(dtype)).exp()
    state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if initial is None else initial.to(dtype)
    outputs = []
    for t in range(q.shape[2]):
        if before is not None:
            state = state.masked_fill((before[:, t] == 0)[:, None, None, None], 0)
        if decay is not None:
            state = decay[:, :, t, :, None] * state
        key = k[:, :, t, None, :]
        found = key @ state
        state = state + beta[:, :, t, None, None] * key.transpose(-2, -1) @ (v[:, :, t, None, :] - found)
        outputs.append((q[:, :, t, None, :] @ state).squeeze(-2))
    return torch.stack(outputs, dim=2), state


def selective_scan(
    x: Float[Tensor, "batch time channels"],
    step: Float[Tensor, "batch time channels"],
    rate: Float[Tensor, "channels state"],
    write: Float[Tensor, "batch time state"],
    read: Float[Tensor, "batch time state"],
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch channels state"] | None = None,
    signed: bool = False,
) -> tuple[Float[Tensor, "batch time channels"], Float[Tensor, "batch channels state"]]:
    """h_t = a_t h_{t-1} + step_t x_t write_t, y_t = h_t read_t, a_t = exp(step_t rate): (y, last h).

    Gu and Dao 2023 name these u, delta, A, B and C. signed: a_t = 2 exp(step_t rate) - 1, in (-1, 1). h starts from `initial` (default 0)
    and again from 0 where `before` is 0. In fp32 or better, whatever the inputs are in.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, step, rate, write, read = (part.to(dtype) for part in (x, step, rate, write, read))
    state = x.new_zeros(len(x), *rate.shape) if initial is None else initial.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        if before is not None:
            state = state.masked_fill((before[:, t] == 0)[:, None, None], 0)
        decay = (step[:, t, :, None] * rate).exp()
        if signed:
            decay = 2 * decay - 1
        state = decay * state + (step[:, t] * x[:, t]).unsqueeze(-1) * write[:, t, None, :]
        outputs.append((state @ read[:, t, :, None]).squeeze(-1))
    return torch.stack(outputs, dim=1), state


def _by_channel(log_decay: Tensor) -> Tensor:
    """(batch, heads, time, 1 or key_dim)."""
    return log_decay.unsqueeze(-1) if log_decay.ndim == 3 else log_decay
