"""torch's fused attention kernel for CPUs, with the log-sum-exp that `scaled_dot_product_attention` keeps to itself.

What attends to a part of the keys at a time needs it: to join the parts, and to go back through each of them with the weights of the whole.
The operator is torch's own but not public, so that it is tried on a small problem before it is relied on.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor

from variants.ops.attention import Output


@functools.cache
def usable() -> bool:
    """Whether this torch has the operators, and they compute what is said here: of two heads that share keys, a pass and its gradients."""
    generator = torch.Generator().manual_seed(0)
    q, dy = (torch.randn(1, 2, 5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, 1, 5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    # Written out, because it may be asked from where nothing is differentiated.
    logits = (0.3 * q @ k.mT).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    p = logits.softmax(-1)
    by_logits = 0.3 * p * (dy @ v.mT - (dy * (p @ v)).sum(-1, keepdim=True))
    right = p @ v, logits.logsumexp(-1), by_logits @ k, (by_logits.mT @ q).sum(1, keepdim=True), (p.mT @ dy).sum(1, keepdim=True)
    try:
        with torch.no_grad():
            y, lse = attend(q, k, v, causal=True, scale=0.3)
            found = (y, lse, *gradients(dy, q, k, v, y, lse, causal=True, scale=0.3))
    except Exception:  # another version's operator, or none
        return False
    return all(torch.allclose(mine, theirs) for mine, theirs in zip(found, right, strict=True))


def attend(
    q: Float[Tensor, "batch heads q_time width"],
    k: Float[Tensor, "batch kv_heads k_time width"],
    v: Float[Tensor, "batch kv_heads k_time width"],
    *,
    causal: bool,
    scale: float,
) -> Output:
    """Attention to all keys or, of as many queries as keys, to those that do not follow. One width and dtype; no gradients."""
    return Output(*torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale))


def gradients(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By q, k and v. y and lse: of all the keys that the queries attended to, of which these may be some."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, k, v, y, lse, 0.0, causal, scale=scale
    )
    return found
