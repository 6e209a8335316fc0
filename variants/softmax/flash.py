"""Flash attention: full or windowed attention in tiles, whose weights are never all in memory.

    m = max_j s_j        y_i = sum_j exp(s_ij - m) v_j / sum_j exp(s_ij - m)        tile by tile, with a running m and a running sum

Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2". The function is that of `full` or, with a window, of `sliding_window`; what
is its own is the choice of the kernel: flash-attn where it is installed, torch's fused kernel where that is right and linear in memory, and
else tiles of our own (`variants.ops.softmax`), forward and backward. Time O(T^2), or O(T window); memory O(T); state as `full`, or as
`sliding_window`.
"""

from __future__ import annotations

from typing import Any

from registry import variants
from variants.softmax.layer import Softmax


@variants.register(
    "flash", time="T^2", state="T", hooks=("rotate", "relate", "bias"), implementations=("flash_attn", "sdpa", "flex", "torch", "reference")
)
class Flash(Softmax):
    """Flash attention: full or windowed attention in linear memory, by the fastest kernel that is right.

    Options:
        window: how many tokens are in sight, the query itself counted (default: all).
        sinks: how many of a segment's first tokens stay in sight for good, beside a window.
    """

    def __init__(self, dim: int, heads: int, position: Any = None, *, window: int | None = None, sinks: int = 0, **options: Any):
        super().__init__(dim, heads, position, **options)
        self.look_through(window, sinks)
