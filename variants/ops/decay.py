"""Linear attention in chunks. Time O(T), memory O(T), state (key_dim, value_dim) a head.

    S_t = S_{t-1} + k_t^T v_t        o_t = q_t S_t

Inside a chunk the products are those of attention without softmax; chunks meet only in the state that one hands to the next:

    o = q S_entering + tril(q k^T) v        S_leaving = S_entering + k^T v

Four places know that nothing is forgotten but at a segment's start: what of a query meets the entering state, what of a key reaches the
leaving one, how much of the state survives a chunk, and the mask inside a chunk. A decay is four factors there.

Computed in fp32 or better whatever the input's dtype, also under autocast: a running sum in bf16 stops growing after a few hundred tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from variants.ops.precision import without_autocast


def linear_attention(
    q: Float[Tensor, "batch heads time key_dim"],
    k: Float[Tensor, "batch heads time key_dim"],
    v: Float[Tensor, "batch heads time value_dim"],
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
    chunk: int = 64,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """The same as `reference.linear_attention`, for any length and any chunk >= 1: (o, last S), both in fp32 or better."""
    time, chunk = q.shape[2], min(chunk, q.shape[2])
    dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        q, k, v = (_chunks(x.to(dtype), chunk) for x in (q, k, v))
        segments = None if before is None else _Segments(_longer(before, q.shape[2] * chunk), chunk)
        leaving = (k if segments is None else k * segments.reaches_end).transpose(-2, -1) @ v
        state = torch.zeros_like(leaving[:, :, 0]) if initial is None else initial.to(dtype)
        entering = []
        # Unbound, because the gradient of one slice is as large as all of them.
        for n, added in enumerate(leaving.unbind(2)):
            entering.append(state)
            state = added + (state if segments is None else state * segments.survives[:, :, n])
        scores = q @ k.transpose(-2, -1)
        scores = scores.tril() if segments is None else scores * segments.inside
        o = scores @ v + (q if segments is None else q * segments.meets_state) @ torch.stack(entering, dim=2)
    return o.flatten(2, 3)[:, :, :time], state


class _Segments:
    """The four factors, 0 or 1, of tokens that have `before` tokens of their segment before them; each (batch, 1, chunks, ...)."""

    def __init__(self, before: Int[Tensor, "batch time"], chunk: int):
        before = before.reshape(len(before), 1, -1, chunk)
        index = torch.arange(chunk, device=before.device)
        distance = index[:, None] - index
        last = before[..., -1:]
        self.meets_state = (before > index).unsqueeze(-1)
        self.reaches_end = (chunk - 1 - index <= last).unsqueeze(-1)
        self.survives = (last >= chunk).unsqueeze(-1)
        self.inside = (distance >= 0) & (distance <= before.unsqueeze(-1))


def _chunks(x: Float[Tensor, "batch heads time d"], chunk: int) -> Float[Tensor, "batch heads chunks chunk d"]:
    """x cut into chunks, the last one filled up with zeros, which add nothing to any sum."""
    missing = -x.shape[2] % chunk
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.reshape(*x.shape[:2], -1, chunk, x.shape[-1])


def _longer(before: Int[Tensor, "batch time"], time: int) -> Int[Tensor, "batch longer"]:
    """`before` counted on up to `time` tokens: what fills up the last chunk starts no segment."""
    more = torch.arange(1, time - before.shape[1] + 1, device=before.device)
    return torch.cat([before, before[:, -1:] + more], dim=1)
