"""Softmax attention through the flash-attn package (Dao 2023), for half precision on CUDA; whatever it cannot do goes through `fused`.

Its windows do not count the query itself, its layout is (batch, time, heads, head_dim), and its causal mask is anchored bottom right.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from variants.ops import fused
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
    sight = sight.within(q.shape[2], k.shape[2])
    half = q.dtype in (torch.float16, torch.bfloat16)
    simple = sight.rows == 0 and not sight.sinks and not sight.kept and bias is None and fade is None and sink is None
    if not (half and simple and q.shape[-1] == v.shape[-1] <= 256):
        return fused.attention(q, k, v, sight=sight, bias=bias, fade=fade, sink=sink, scale=scale, dropout=dropout)
    from flash_attn import flash_attn_func

    beyond = -1 if sight.window is None else sight.window - 1
    y: Tensor = flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)),
        dropout_p=dropout,
        softmax_scale=scale,
        causal=sight.causal,
        window_size=(beyond, 0 if sight.causal and sight.window is not None else beyond),
    )
    return y.transpose(1, 2)
