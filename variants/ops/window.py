"""Sliding-window attention in blocks. Time O(T W), memory O(T) beside the blocks' own keys, exact.

Queries go in blocks; each block attends one slice of keys, from window - 1 before its first query to its last, or if not causal as far
beyond. A mask over the whole square would cost as much as full attention, because torch skips no masked tile.

Sinks need no more than one extra group of keys a block: a segment that begins inside the slice has its sinks there, so only the segment
of the block's first query can have sinks outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from variants.ops import reference, softmax

#: Below this many window widths of keys, one masked square is faster than blocks.
DENSE_WIDTHS = 3
#: Blocks smaller than this make the products too thin.
SMALLEST_BLOCK = 32

Bias = Callable[[Tensor, Tensor], Tensor]


def attention(
    q: Float[Tensor, "batch heads q_time head_dim"],
    k: Float[Tensor, "batch kv_heads k_time head_dim"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    *,
    window: int,
    sinks: int = 0,
    kept: int = 0,
    causal: bool = True,
    before: Int[Tensor, "batch q_time"] | None = None,
    after: Int[Tensor, "batch q_time"] | None = None,
    bias: Bias | None = None,
    positions: tuple[Int[Tensor, "batch q_time"], Int[Tensor, "batch k_time"]] | None = None,
    scale: float | None = None,
    inner: Callable[..., Tensor] = softmax.attention,
    blocked: bool | None = None,
) -> Float[Tensor, "batch heads q_time value_dim"]:
    """Attention to the keys less than `window` away, and to the first `sinks` of each segment (`reference.window_in_sight`).

    kept: how many leading keys are the sinks of the segment in which a cache stopped; the last window - 1 keys before the queries follow.
    before, after: tokens of its own segment around each query (default: all keys are one segment).
    bias: (q_positions, k_positions) -> (heads, q, k) or (batch, heads, q, k), given `positions` of queries and keys.
    inner: the attention run on each block, with the signature of `softmax.attention`.
    blocked: cut the queries into blocks (default: where that is faster than a mask over all of them).
    """
    q_time, k_time = q.shape[2], k.shape[2]
    if blocked is None:
        blocked = k_time > DENSE_WIDTHS * window + kept
    if not blocked:
        dense = None if bias is None or positions is None else bias(*positions)
        if before is None and q_time == k_time <= window:  # the window hides nothing
            return inner(q, k, v, causal=causal, bias=dense, scale=scale)
        before, after = _extent(before, after, q, k_time - kept, causal)
        visible = reference.window_in_sight(before, after, k_time, window=window, sinks=sinks, kept=kept)
        return inner(q, k, v, causal=False, visible=visible, bias=dense, scale=scale)

    before, after = _extent(before, after, q, k_time - kept, causal)
    blocks = _Blocks(before, after, k_time, window=window, sinks=sinks, kept=kept)
    dense = None if bias is None or positions is None else bias(blocks.queries(positions[0]), blocks.keys(positions[1]))
    y = inner(
        blocks.queries(q.transpose(1, 2)).transpose(1, 2),
        blocks.keys(k.transpose(1, 2)).transpose(1, 2),
        blocks.keys(v.transpose(1, 2)).transpose(1, 2),
        causal=False,
        visible=blocks.visible(q.shape[0]),
        bias=dense,
        scale=scale,
    )
    return y.transpose(1, 2).reshape(q.shape[0], -1, q.shape[1], v.shape[-1])[:, :q_time].transpose(1, 2)


class _Blocks:
    """Which queries and keys meet in which block. Indices count from the first query; keys of the cache are negative."""

    def __init__(
        self,
        before: Int[Tensor, "rows q_time"],
        after: Int[Tensor, "rows q_time"] | None,
        k_time: int,
        *,
        window: int,
        sinks: int,
        kept: int,
    ):
        time, device = before.shape[1], before.device
        self.time, self.sinks, self.kept, self.window = time, sinks, kept, window
        self.cached = k_time - kept - time
        self.block = min(block_size(window), time)
        self.count = -(-time // self.block)
        self.first = torch.arange(self.count, device=device) * self.block
        self.query = self.first[:, None] + torch.arange(self.block, device=device)
        ahead = 0 if after is None else max(window, sinks) - 1
        width = window - 1 + self.block + ahead
        self.key = self.first[:, None] - (window - 1) + torch.arange(width, device=device)
        last = self.query.clamp(max=time - 1)
        self.before = before[:, last]
        self.after = torch.zeros_like(self.before) if after is None else after[:, last]
        #: Where the segment of each block's first query begins.
        self.origin = self.first - self.before[:, :, 0]

    def queries(self, x: Shaped[Tensor, "batch q_time *rest"]) -> Shaped[Tensor, "batch_blocks block *rest"]:
        """x cut into blocks, the blocks of a row one after another on the first axis."""
        missing = self.count * self.block - self.time
        if missing:
            x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
        return x.reshape(-1, self.block, *x.shape[2:])

    def keys(self, x: Shaped[Tensor, "batch k_time *rest"]) -> Shaped[Tensor, "batch_blocks keys *rest"]:
        """What of x each block may look at: its sinks, then its slice."""
        slots = (self.key + self.kept + self.cached).clamp(0, x.shape[1] - 1)
        found = x.index_select(1, slots.flatten()).reshape(len(x), *slots.shape, *x.shape[2:])
        if self.sinks:
            rows = torch.arange(x.shape[0], device=x.device)[:, None, None]
            found = torch.cat([x[rows, self._sink_slots().clamp(max=x.shape[1] - 1)], found], dim=2)
        return found.flatten(0, 1)

    def visible(self, batch: int) -> Bool[Tensor, "batch_blocks 1 block keys"]:
        """Which keys each query sees."""
        query, before, after = self.query[..., None], self.before[..., None], self.after[..., None]
        distance = query - self.key[:, None, :]
        near = (distance.abs() < self.window) | (before - distance < self.sinks)
        seen = near & (distance <= before) & (distance >= -after)
        if self.sinks:
            sink = self._sinks()[:, :, None, :]
            own = query - before == self.origin[..., None, None]
            seen = torch.cat([own & (sink < self.key[:, None, :1]), seen], dim=-1)
        return seen.expand(batch, -1, -1, -1).flatten(0, 1).unsqueeze(1)

    def _sinks(self) -> Int[Tensor, "rows blocks sinks"]:
        """The index of each sink of the segment of each block's first query."""
        return self.origin[..., None] + torch.arange(self.sinks, device=self.origin.device)

    def _sink_slots(self) -> Int[Tensor, "rows blocks sinks"]:
        """Where they lie: among the keys, or, if the cache has let them go, in the kept slots."""
        sink = self._sinks()
        slots = self.kept + self.cached + sink
        return torch.where(sink < -self.cached, torch.arange(self.sinks, device=sink.device), slots)


def _extent(
    before: Tensor | None, after: Tensor | None, q: Tensor, k_time: int, causal: bool
) -> tuple[Int[Tensor, "rows q_time"], Int[Tensor, "rows q_time"] | None]:
    """`before` and `after` as given, else those of queries whose segment is all of the keys."""
    q_time = q.shape[2]
    time = torch.arange(q_time, device=q.device)[None]
    before = time + k_time - q_time if before is None else before
    if causal:
        return before, None
    return before, (q_time - 1 - time).expand_as(before) if after is None else after


def block_size(window: int) -> int:
    """Queries in a block: half a window keeps the slices' overlap small."""
    return max(SMALLEST_BLOCK, window // 2)
