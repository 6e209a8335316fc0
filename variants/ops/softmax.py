"""Softmax attention through torch's fused kernel. Time O(T^2), memory O(T): the weights are never written out.

torch's `scaled_dot_product_attention` leaves the fused kernel silently for attention dropout and for a bias that is trained; the first is
not offered here (`reference.attention` has it), the second is right but takes O(T^2) memory. Its `is_causal` is anchored top left, so it
serves square problems only.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: Float[Tensor, "batch heads q_time head_dim"],
    k: Float[Tensor, "batch kv_heads k_time head_dim"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    *,
    causal: bool = True,
    visible: Bool[Tensor, "#batch #heads q_time k_time"] | None = None,
    bias: Float[Tensor, "*#batch_heads q_time k_time"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "batch heads q_time value_dim"]:
    """The same as `reference.attention`."""
    q_time, k_time = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if causal and visible is None and bias is None and q_time == k_time:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    if causal and q_time > 1:
        triangle = torch.ones(q_time, k_time, dtype=torch.bool, device=q.device).tril(k_time - q_time)
        visible = triangle if visible is None else triangle & visible
    mask = visible
    if bias is not None:
        mask = bias.to(q.dtype).reshape(-1, *bias.shape[-3:])  # with three axes it would leave the fused kernel
        mask = mask if visible is None else mask.masked_fill(~visible, -math.inf)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
