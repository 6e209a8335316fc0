"""Sliding-window attention with sinks: a query attends the last few tokens and the first ones of its segment.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim)) v_j        over j with 0 <= i - j < window, or j < sinks

The window counts the query itself: a window of 1 returns the value. With causal=False it reaches window - 1 to both sides. Windows: Beltagy
et al. 2020, "Longformer", section 3.1; sinks: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks". Unlike there,
positions are those of the tokens, not of the cache's slots. Time O(T window), memory O(T), state window - 1 + sinks keys and values.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Int
from torch import Tensor

from registry import variants
from variants.ops.attention import Sight
from variants.ops.tiling import window_tile
from variants.softmax.layer import Softmax


@variants.register("sliding_window", time="T W", state="W", hooks=("rotate", "bias"), implementations=("torch", "sdpa", "reference"))
class SlidingWindow(Softmax):
    """Sliding-window attention: the last `window` tokens, the query among them, and the first `sinks` are in sight.

    Options:
        window: how many tokens are in sight, the query itself counted.
        sinks: how many of a segment's first tokens stay in sight for good.
    """

    def __init__(self, dim: int, heads: int, position: Any = None, *, window: int = 64, sinks: int = 0, **options: Any):
        super().__init__(dim, heads, position, **options)
        if window < 1:
            raise ValueError(f"SlidingWindow: window counts the query itself and must be at least 1; got {window}")
        if sinks < 0:
            raise ValueError(f"SlidingWindow: sinks must not be negative; got {sinks}")
        self.window, self.sinks, self.kept = window, sinks, sinks

    def sight(self, before: Int[Tensor, "batch time"] | None, after: Int[Tensor, "batch time"] | None, cached: bool) -> Sight:
        """The window and the sinks; a cache has the sinks in its first slots."""
        kept = self.kept if cached else 0
        return Sight(self.causal, window=self.window, sinks=self.sinks, kept=kept, before=before, after=after)

    def pairs(self, time: int) -> int:
        """How many pairs of query and key are in sight in a sequence of `time` tokens."""
        near = min(self.window, time)
        side = near * (near - 1) // 2 + (time - near) * (near - 1)
        sinks = range(min(self.sinks, time))
        far = sum(max(time - self.window - sink, 0) for sink in sinks)
        if self.causal:
            return time + side + far
        return time + 2 * side + far + sum(max(sink - self.window + 1, 0) for sink in sinks)

    def recent(self, slots: int) -> int:
        """How many of the newest slots the cache keeps: those that the next query has in its window."""
        return self.window - 1

    def reach(self) -> int | None:
        """How many tokens back an output depends on its input; with sinks, all of them."""
        return None if self.sinks else self.window - 1 + self.projections.reach()

    def block_sizes(self) -> tuple[int, ...]:
        """The lengths at whose multiples something else is done."""
        return (self.window, window_tile(self.window))
