"""Grouped-query attention: query heads share key/value heads in groups.

    o_h,i = sum_{j <= i} softmax_j(q_h,i . k_g,j / sqrt(head_dim)) v_g,j        g = h // (heads / kv_heads)

Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints". Time O(T^2) as full attention;
the state is smaller by heads / kv_heads. One group is multi-query attention, one head a group is full attention.
"""

from __future__ import annotations

from typing import Any

from registry import variants
from variants.softmax.layer import Softmax


@variants.register("gqa", time="T^2", state="T", hooks=("rotate", "relate", "bias"), implementations=("sdpa", "torch", "reference"))
class GroupedQuery(Softmax):
    """Grouped-query attention: groups of query heads share a key/value head.

    Options:
        kv_heads: key/value heads, a divisor of heads (default: the largest below heads itself, half of them if heads is even).
    """

    def __init__(self, dim: int, heads: int, position: Any = None, *, kv_heads: int | None = None, **options: Any):
        if kv_heads is None:
            kv_heads = max((n for n in range(1, heads) if heads % n == 0), default=1)
        super().__init__(dim, heads, position, kv_heads=kv_heads, **options)
