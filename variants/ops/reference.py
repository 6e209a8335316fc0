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


def linear_attention(
    q: Float[Tensor, "batch heads time key_dim"],
    k: Float[Tensor, "batch heads time key_dim"],
    v: Float[Tensor, "batch heads time value_dim"],
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """S_t = S_{t-1} + k_t^T v_t, o_t = q_t S_t, starting from `initial` (default 0) and again from 0 where `before` is 0: (o, last S).

    In fp32 or better, whatever the inputs are in.
    """
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if initial is None else initial
    outputs = []
    for t in range(q.shape[2]):
        if before is not None:
            state = state.masked_fill((before[:, t] == 0)[:, None, None, None], 0)
        state = state + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((q[:, :, t, None, :] @ state).squeeze(-2))
    return torch.stack(outputs, dim=2), state
