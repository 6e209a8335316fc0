"""Full attention: every query attends every key before it and itself.

    o_i = sum_{j <= i} softmax_j(q_i . k_j / sqrt(head_dim)) v_j

Vaswani et al. 2017, "Attention Is All You Need", section 3.2. Time O(T^2), memory O(T) with the fused kernel, state a key and a value for
each token and key/value head.
"""

from __future__ import annotations

from registry import variants
from variants.softmax.layer import Softmax


@variants.register("full", time="T^2", state="T", hooks=("rotate", "relate", "bias"), implementations=("sdpa", "torch", "reference"))
class Full(Softmax):
    """Full softmax attention: every token before it is in sight of a query."""
