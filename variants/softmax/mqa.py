"""Multi-query attention: all query heads read one key head and one value head.

    o_h,i = sum_{j <= i} softmax_j(q_h,i . k_j / sqrt(head_dim)) v_j

Shazeer 2019, "Fast Transformer Decoding: One Write-Head is All You Need". Time O(T^2) as full attention; the state, and what decoding
reads at each step, is smaller by the number of heads.
"""

from __future__ import annotations

from typing import Any

from registry import variants
from variants.softmax.layer import Softmax


@variants.register("mqa", time="T^2", state="T", hooks=("rotate", "relate", "bias"), implementations=("sdpa", "torch", "reference"))
class MultiQuery(Softmax):
    """Multi-query attention: one key/value head for all query heads.

    Options:
        kv_heads: 1, by definition.
    """

    def __init__(self, dim: int, heads: int, position: Any = None, *, kv_heads: int = 1, **options: Any):
        if kv_heads != 1:
            raise ValueError(f"MultiQuery: multi-query attention has one key/value head; got kv_heads={kv_heads}; use gqa for more")
        super().__init__(dim, heads, position, kv_heads=kv_heads, **options)
