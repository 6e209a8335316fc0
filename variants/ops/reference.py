"""The mathematics, line by line, in any dtype: what every fast core is compared with.

Layout (batch, heads, time, head_dim). With fewer key/value heads than query heads, query head h reads key/value head
h // (heads / kv_heads). With unequal lengths the last query stands at the last key. A row that sees nothing gives 0.

Queries may be told how many tokens of their segment lie `before` and `after` them. Segments being contiguous, key j is then in sight of
query i if and only if -after_i <= i - j <= before_i: that one rule covers packed segments, padded rows and half-filled caches.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def attention(
    q: Float[Tensor, "batch heads q_time head_dim"],
    k: Float[Tensor, "batch kv_heads k_time head_dim"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    *,
    causal: bool = True,
    visible: Bool[Tensor, "#batch #heads q_time k_time"] | None = None,
    bias: Float[Tensor, "*#batch_heads q_time k_time"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads q_time value_dim"]:
    """softmax(scale * q k^T + bias) v over the keys in sight; scale defaults to head_dim^-1/2.

    visible: keys that may be seen, besides what `causal` hides. dropout: share of the weights to drop, always: pass 0 to evaluate.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    logits = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias
    q_time, k_time = logits.shape[-2:]
    sight = torch.ones(q_time, k_time, dtype=torch.bool, device=q.device)
    if causal:
        sight = sight.tril(k_time - q_time)
    if visible is not None:
        sight = sight & visible
    logits = logits.masked_fill(~sight, -math.inf)
    # A row of -inf alone gives NaN, here and in its gradient; the second mask clears the one, and the first mask's gradient the other.
    weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).masked_fill(~sight, 0)
    weights = torch.nn.functional.dropout(weights, dropout)
    return weights.to(v.dtype) @ v


def in_sight(
    before: Int[Tensor, "batch q_time"], after: Int[Tensor, "batch q_time"] | None, k_time: int
) -> Bool[Tensor, "batch 1 q_time k_time"]:
    """Which keys each query sees: those of its own segment; none that follow it if `after` is None."""
    distance = _distance(before.shape[1], k_time, before.device)
    ahead = torch.zeros_like(before) if after is None else after
    return ((distance <= before[:, None, :, None]) & (distance >= -ahead[:, None, :, None])).contiguous()


def window_in_sight(
    before: Int[Tensor, "batch q_time"],
    after: Int[Tensor, "batch q_time"] | None,
    k_time: int,
    *,
    window: int,
    sinks: int = 0,
    kept: int = 0,
) -> Bool[Tensor, "batch 1 q_time k_time"]:
    """Which keys each query sees through a window: of its own segment, those less than `window` away and the first `sinks`.

    The first `kept` of the k_time keys are the sinks of the segment in which the cache stopped; one that also lies among the keys after
    them is not seen twice.
    """
    recent = k_time - kept
    distance = _distance(before.shape[1], recent, before.device)
    before_, place = before[:, None, :, None], torch.arange(kept, device=before.device)
    near = (distance.abs() < window) | (before_ - distance < sinks)
    # Kept sink p lies before_i - p tokens behind query i, which is itself `reach` tokens into the recent keys.
    reach = torch.arange(before.shape[1], device=before.device)[:, None] + recent - before.shape[1]
    out_of_recent = before_ - place > reach
    return torch.cat([out_of_recent, in_sight(before, after, recent) & near], dim=-1)


def linear_attention(
    q: Float[Tensor, "batch heads time key_dim"],
    k: Float[Tensor, "batch heads time key_dim"],
    v: Float[Tensor, "batch heads time value_dim"],
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """S_t = S_{t-1} + k_t^T v_t, o_t = q_t S_t, starting from `initial` (default 0) and again from 0 where `before` is 0: (o, last S)."""
    state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if initial is None else initial
    outputs = []
    for t in range(q.shape[2]):
        if before is not None:
            state = state.masked_fill((before[:, t] == 0)[:, None, None, None], 0)
        state = state + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((q[:, :, t, None, :] @ state).squeeze(-2))
    return torch.stack(outputs, dim=2), state


def _distance(q_time: int, k_time: int, device: torch.device) -> Int[Tensor, "q_time k_time"]:
    """i - j, the last query standing at the last key."""
    return torch.arange(k_time - q_time, k_time, device=device)[:, None] - torch.arange(k_time, device=device)
