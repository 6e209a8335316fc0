"""Softmax attention through torch's fused kernels, wherever they are right and take linear memory.

Else FlexAttention has it on CUDA, and tiles of our own on other devices. torch's `scaled_dot_product_attention` leaves its fused kernels
without a word, and takes O(T^2) memory, for attention dropout, for a trained bias, and for values of another width than the keys; a mask is
quadratic itself; `is_causal` is anchored top left and serves square problems only. Values of another width are padded. What is one number
a key, or one logit a head, rides along as a channel:

    q' = [a, 1, scale q, 0]    k' = [1, -b, k, 0]    so that q' . k' = a_i - b_j + scale q . k
    one more key [0, 0, 0, sink] with value 0, read by a 1 in every query's last channel

A single query, as in decoding, has no quadratic memory to avoid: its weights are written out, and nothing of the cache is copied.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import dropout as dropout_
from torch.nn.functional import pad, scaled_dot_product_attention

from variants.ops import flex, softmax
from variants.ops.attention import CAUSAL, Bias, Fade, Sight
from variants.ops.precision import without_autocast

#: A mask of more numbers than this is not written out (4 MB in fp32), nor one that lets less than a third of the slots through.
MASK, WIDTHS = 2**20, 3


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
    q_time, k_time = q.shape[2], k.shape[2]
    sight = sight.within(q_time, k_time)
    if q_time == 1:
        return _one(q, k, v, sight, bias, fade, sink, scale, dropout)
    plain = sight.plain and bias is None and (not sight.causal or q_time == k_time)
    narrow = sight.window is not None and k_time > WIDTHS * sight.window + sight.kept
    written = (max(sight.rows, 1) if bias is None else q.shape[0] * q.shape[1]) * q_time * k_time
    trained = bias is not None and any(p.requires_grad for p in bias.parameters) and torch.is_grad_enabled()
    if dropout or trained or (not plain and (narrow or written > MASK)):
        other = flex.attention if q.is_cuda else softmax.attention
        return other(q, k, v, sight=sight, bias=bias, fade=fade, sink=sink, scale=scale, dropout=dropout)
    mask = None if plain else _mask(q, k, sight, bias)
    causal = plain and sight.causal
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    width = v.shape[-1]
    with without_autocast(q):  # it would round the channels
        k, v = k.to(q.dtype), v.to(q.dtype)
        if fade is not None or sink is not None:
            q, k, v = _with_channels(q, k, v, fade, sink, scale)
            scale = 1.0
            if sink is not None and causal:  # the kernel's diagonal begins at the first query, which must be the sink's
                q = pad(q, (0, 0, 1, 0))
            if sink is not None and mask is not None:
                mask = pad(mask, (1, 0), value=mask.dtype == torch.bool)
        widest = max(v.shape[-1], q.shape[-1])
        q, k, v = (x if x.shape[-1] == widest else pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y[:, :, -q_time:, :width]


def _one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    bias: Bias | None,
    fade: Fade | None,
    sink: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Attention of one query a head. The heads that share keys stand below each other, so that every key is read once for all of them."""
    batch, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        together = q.reshape(batch, groups, heads // groups, -1).to(k.dtype)
        # Scaled before the product, which half precision may not hold.
        logits = (together * (q.shape[-1] ** -0.5 if scale is None else scale) @ k.mT).to(wide)
        logits = logits.view(batch, heads, 1, -1)
        if bias is not None:
            logits = logits + bias.dense().to(wide)
        if fade is not None:
            logits = logits + (fade.at_queries.unsqueeze(-1) - fade.at_keys.unsqueeze(-2)).to(wide)
        seen = None if sight.plain else sight.mask(1, k.shape[2], q.device)
        if seen is not None:
            logits = logits.masked_fill(~seen, -math.inf)
        if sink is not None:
            logits = torch.cat([logits, sink.to(wide)[:, None, None].expand(batch, -1, 1, 1)], dim=-1)
        weights = logits.softmax(-1)[..., : k.shape[2]]
        if seen is not None:  # of a row that sees nothing the softmax is NaN
            weights = weights.masked_fill(~seen, 0)
        weights = dropout_(weights, dropout).to(v.dtype).view(batch, groups, heads // groups, -1)
        return (weights @ v).reshape(batch, heads, 1, -1).to(q.dtype)


def _mask(q: Tensor, k: Tensor, sight: Sight, bias: Bias | None) -> Tensor:
    """What is seen, or the bias where it is seen and -inf elsewhere."""
    seen = sight.mask(q.shape[2], k.shape[2], q.device)
    if bias is None:
        return seen
    return bias.dense().to(q.dtype).masked_fill(~seen, -math.inf)


def _with_channels(q: Tensor, k: Tensor, v: Tensor, fade: Fade | None, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the channels, and the key, that stand for a fade and a sink."""
    shared = q.shape[1] // k.shape[1]
    # A fade and a sink differ between the query heads that share a key.
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    q, ones = q * scale, torch.ones_like
    if fade is not None:
        # Counted from the first query: so the sums are small at first, and tell nothing of what comes later. They stand in front, term by
        # term, where a product adds them up before anything else: what two large sums have in common is gone before it can cost digits.
        a, b = (_terms((x - fade.at_queries[..., :1].detach()).unsqueeze(-1), q.dtype) for x in fade)
        q = torch.cat([torch.stack([a, ones(a)], -1).flatten(-2), q], -1)
        k = torch.cat([torch.stack([ones(b), -b], -1).flatten(-2), k], -1)
    if sink is not None:
        key = pad(sink.to(k.dtype)[None, :, None, None], (k.shape[-1], 0)).expand(len(k), -1, -1, -1)
        q = pad(q, (0, 1), value=1.0)
        k, v = torch.cat([key, pad(k, (0, 1))], dim=2), pad(v, (0, 0, 1, 0))
    return q, k, v


def _terms(x: Float[Tensor, "*shape 1"], dtype: torch.dtype) -> Float[Tensor, "*shape terms"]:
    """Numbers of `dtype` that sum to x, so many that more than the digits of fp32 are kept."""
    terms: list[Tensor] = []
    for _ in range({torch.float64: 1, torch.float32: 2}.get(dtype, 3)):
        terms.append(x.to(dtype))
        x = x - terms[-1]
    return torch.cat(terms, -1)
