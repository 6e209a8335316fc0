"""Positions told by a bias on the logits: how much a key counts falls with its distance n.

    alibi      -slope_h n                                          Press et al. 2022, "Train Short, Test Long", section 3
    t5_bias    B[bucket(n), h], near distances one bucket each     Raffel et al. 2020, "Exploring the Limits of Transfer Learning ...", 2.1

Where keys may follow the query, n is the distance in either direction.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from registry import positions
from variants.positions.contract import Scheme


@positions.register("alibi", hooks=("bias",))
class ALiBi(Scheme):
    """ALiBi: far keys lose logits in proportion to their distance, at a fixed slope a head."""

    def bias(
        self, q_positions: Int[Tensor, "rows q_time"], k_positions: Int[Tensor, "rows k_time"]
    ) -> Float[Tensor, "rows heads q_time k_time"]:
        """-slope * distance; 0 where query and key are one token, never above."""
        distance = (q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)).abs()
        # In fp32 whatever the model's dtype: in bf16 distances from 256 on are rounded.
        falling = -torch.tensor(slopes(self.heads), dtype=torch.float32, device=distance.device)
        return falling[:, None, None] * distance.unsqueeze(1)


def slopes(heads: int) -> list[float]:
    """2^(-8 (h + 1) / heads); for a number that is no power of two those of the last one before it, then every second of twice as many."""
    power = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return found + slopes(2 * power)[::2][: heads - power] if power != heads else found


@positions.register("t5_bias", hooks=("bias",))
class T5Bias(Scheme):
    """T5's relative bias: a trained number for each head and bucket of distances.

    T5 itself adds it to logits that are not divided by the root of the width, and its layers share one table; here they are divided, and
    each layer has its own.

    Options:
        buckets: how many; half of them for one distance each, the others for distances that grow geometrically.
        max_distance: distances from here on share the last bucket.
        bidirectional: one half of the buckets for keys before the query, the other for those after it (False: distance alone counts).
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = False):
        super().__init__(head_dim, heads, dim)
        sides = 2 if bidirectional else 1
        if buckets < 2 * sides or buckets % (2 * sides):
            raise ValueError(f"T5Bias: buckets must be a multiple of {2 * sides}; got {buckets}")
        if max_distance <= buckets // (2 * sides):
            raise ValueError(f"T5Bias: max_distance must lie above {buckets // (2 * sides)}, where exact buckets end; got {max_distance}")
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.table = nn.Parameter(torch.empty(buckets, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with the standard deviation of T5, dim^-1/2."""
        nn.init.normal_(self.table, std=self.dim**-0.5)

    def bias(
        self, q_positions: Int[Tensor, "rows q_time"], k_positions: Int[Tensor, "rows k_time"]
    ) -> Float[Tensor, "rows heads q_time k_time"]:
        """The table's numbers for each distance."""
        ahead = k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1)
        return self.table[self.bucket(ahead)].permute(0, 3, 1, 2)

    def bucket(self, ahead: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bucket of a key that lies `ahead` of the query, or behind it if negative."""
        count = self.buckets // 2 if self.bidirectional else self.buckets
        exact, distance = count // 2, ahead.abs()
        ratio = torch.log(distance.clamp(min=1).to(torch.float64) / exact) / math.log(self.max_distance / exact)
        # Where a bucket begins at a whole distance, its logarithm may fall a hair short of a whole number.
        far = (exact + (ratio * (count - exact) + 1e-9).long()).clamp(max=count - 1)
        found = torch.where(distance < exact, distance, far)
        return found + count * (ahead > 0) if self.bidirectional else found
