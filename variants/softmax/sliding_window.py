"""Sliding-window attention with sinks: a query attends the last few tokens and the first ones of its segment.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim)) v_j        over j with 0 <= i - j < window, or j < sinks

The window counts the query itself: a window of 1 returns the value. With causal=False it reaches window - 1 to both sides. Windows: Beltagy
et al. 2020, "Longformer", section 3.1; sinks: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks". Unlike there,
positions are those of the tokens, not of the cache's slots. Time O(T window), memory O(T), state window - 1 + sinks keys and values.
"""

from __future__ import annotations

from typing import Any, ClassVar

from registry import variants
from variants.softmax.layer import WINDOWED, Softmax


@variants.register("sliding_window", time="T W", state="W", hooks=("rotate", "bias"), implementations=("torch", "sdpa", "reference"))
class SlidingWindow(Softmax):
    """Sliding-window attention: the last `window` tokens, the query among them, and the first `sinks` are in sight.

    Options:
        window: how many tokens are in sight, the query itself counted.
        sinks: how many of a segment's first tokens stay in sight for good.
    """

    refused: ClassVar = {"relate": WINDOWED}

    def __init__(self, dim: int, heads: int, position: Any = None, *, window: int = 64, sinks: int = 0, **options: Any):
        super().__init__(dim, heads, position, **options)
        self.look_through(window, sinks)
