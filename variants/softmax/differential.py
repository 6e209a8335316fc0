"""Differential attention: one map of weights minus a share of another, so that what both of them see without need cancels.

    o_i = (1 - lambda_init) RMSNorm(sum_j (softmax_j(q1_i . k1_j / sqrt(head_dim)) - lambda softmax_j(q2_i . k2_j / sqrt(head_dim))) v_j)
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init        lambda_init = 0.8 - 0.6 exp(-0.3 layer)

Ye et al. 2024, "Differential Transformer". `heads` counts maps: maps 2p and 2p + 1 are pair p, whose value is 2 * head_dim wide, so that
parameters and state are those of full attention, but for the four vectors of lambda, which all pairs share, and the norm's scale. Each map
attends by itself, both to the one value, and the outputs are subtracted: the difference of the maps is never written out. Time O(T^2), half
as much again as full attention, because values are twice as wide; memory O(T); state as full attention.

transformers' DiffLlama pairs map p with map heads / 2 + p, so that its weights fit in another order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from registry import variants
from variants.contract import Context, State
from variants.ops.attention import Bias
from variants.softmax.layer import Softmax


@variants.register(
    "differential", time="T^2", state="T", hooks=("rotate", "relate", "bias"), implementations=("sdpa", "torch", "reference")
)
class Differential(Softmax):
    """Differential attention: heads work in pairs, and one head's weights are subtracted from the other's.

    Key/value heads are shared pair by pair. Each map has a sink logit of its own and drops weights by itself; to the gates, a pair's output
    is that of two heads.

    Options:
        layer: the layer's index in its stack, from 0: lambda starts higher the deeper it is (default: the model says; else 0).
    """

    # Weights of a row sum to 1 - lambda, and the norm makes their size meaningless.
    normalises_rows = False

    def __init__(self, dim: int, heads: int, position: Any = None, *, layer: int | None = None, **options: Any):
        super().__init__(dim, heads, position, **options)
        if heads % 2 or self.kv_heads % 2:
            raise ValueError(f"Differential: heads work in pairs; got heads={heads} and kv_heads={self.kv_heads}; choose even numbers")
        layer = 0 if layer is None else layer
        if layer < 0:
            raise ValueError(f"Differential: layer is an index from 0; got {layer}")
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (nn.Parameter(0.1 * torch.randn(self.head_dim)) for _ in range(4))
        self.norm = nn.RMSNorm(2 * self.head_dim, eps=1e-5)

    def project(
        self,
        x: Float[Tensor, "batch time dim"],
        context: Context,
        state: State | None,
        before: Int[Tensor, "batch time"] | None,
        after: Int[Tensor, "batch time"] | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Queries and keys of every map, values of every pair: so the cache holds them, and no step has to put them together."""
        q, k, v, parts = super().project(x, context, state, before, after)
        return q, k, rearrange(v, "batch (pairs two) time width -> batch pairs time (two width)", two=2), parts

    def attend(
        self,
        q: Float[Tensor, "batch heads time head_dim"],
        k: Float[Tensor, "batch kv_heads slots head_dim"],
        v: Float[Tensor, "batch kv_pairs slots value_dim"],
        slots: dict[str, Tensor],
        *,
        bias: Bias | None = None,
        sink: Float[Tensor, " heads"] | None = None,
        **told: Any,
    ) -> Float[Tensor, "batch heads time head_dim"]:
        """Attend once with the first maps and once with the second, subtract, normalise."""
        # Two calls, because one for all maps would need each pair's value twice: a copy of the whole cache at every step.
        maps = zip(*(x.unflatten(1, (-1, 2)).unbind(2) for x in (q, k)), strict=True)
        first, second = (
            self.attention(q, k, v, bias=_of_map(bias, number), sink=None if sink is None else sink[number::2], **told)
            for number, (q, k) in enumerate(maps)
        )
        difference = (first - self.share() * second).to(self.norm.weight.dtype)
        y = (1 - self.lambda_init) * self.norm(difference)
        return rearrange(y, "batch pairs time (two width) -> batch (pairs two) time width", two=2)

    def share(self) -> Float[Tensor, ""]:
        """lambda, in fp32 or better."""
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        first = torch.sum(self.lambda_q1 * self.lambda_k1, dtype=wide).exp()
        second = torch.sum(self.lambda_q2 * self.lambda_k2, dtype=wide).exp()
        return first - second + self.lambda_init

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """Those of the family, values pair by pair."""
        parts = super().init_parts(batch, **like)
        return parts | {"values": parts["values"].reshape(*parts["values"].shape[:2], self.kv_heads // 2, 2 * self.head_dim)}

    def flops(self, time: int) -> int:
        """Those of full attention, and 2 * head_dim more a head for each pair in sight, because values are twice as wide."""
        return super().flops(time) + 2 * self.heads * self.head_dim * self.pairs(time)


def _of_map(bias: Bias | None, number: int) -> Bias | None:
    """What is added to the logits of every pair's first map (0) or second (1)."""
    if bias is None:
        return None
    whole = bias.hook

    def hook(*given: Tensor) -> Tensor:
        return whole(*given)[..., number::2, :, :]

    return bias._replace(hook=hook)
