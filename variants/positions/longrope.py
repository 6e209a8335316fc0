"""LongRoPE: every pair of a rotary model is slowed by a factor of its own, found by search.

    angle_i(p) = p f_i / lambda_i,  or p f_i for the first `unscaled` positions        lambda = short up to the trained length, long above

and what is turned grows by sqrt(1 + ln s / ln L). Ding et al. 2024, "LongRoPE"; Shang et al. 2025, "LongRoPE2". `attnlab longrope-search`
finds the factors.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from registry import positions
from variants.positions.rotary import frequencies
from variants.positions.scaling import Measured, apply_temperature


@positions.register("longrope", hooks=("rotate",), length_dependent=True)
class LongRoPE(Measured):
    """LongRoPE: a factor for each pair, one list for rows within the trained length and one for longer rows.

    Options:
        long_factors: what divides the pairs' speeds in rows longer than trained_length (default: those of `ntk`).
        short_factors: the same up to trained_length (default: all 1).
        unscaled: positions below this number keep their angles.
        attention_factor: what cosines and sines are multiplied by, in short and long rows alike (default: sqrt(1 + ln s / ln L)).
        temperature_on: apply it to what is turned, or its square to all `logits`.
    """

    def __init__(
        self,
        head_dim: int,
        heads: int,
        dim: int,
        *,
        long_factors: list[float] | None = None,
        short_factors: list[float] | None = None,
        unscaled: int = 0,
        attention_factor: float | None = None,
        temperature_on: Literal["rotation", "logits"] = "rotation",
        **options: Any,
    ):
        super().__init__(head_dim, heads, dim, **options)
        pairs = self.width // 2
        if long_factors is None:
            long_factors = [self.factor ** (i / (pairs - 1)) if pairs > 1 else self.factor for i in range(pairs)]
        short_factors = [1.0] * pairs if short_factors is None else short_factors
        for name, factors in (("long_factors", long_factors), ("short_factors", short_factors)):
            if len(factors) != pairs:
                raise ValueError(f"LongRoPE: {name} needs one number for each of the {pairs} pairs; got {len(factors)}")
            if not all(factor > 0 for factor in factors):
                raise ValueError(f"LongRoPE: {name} must be positive; got {min(factors)}")
        if unscaled < 0:
            raise ValueError(f"LongRoPE: unscaled must not be negative; got {unscaled}")
        self.long_factors, self.short_factors, self.unscaled = list(long_factors), list(short_factors), unscaled
        grown = math.sqrt(1 + math.log(self.factor) / math.log(self.trained_length))
        self.attention_factor = grown if attention_factor is None else attention_factor
        if self.attention_factor <= 0:
            raise ValueError(f"LongRoPE: attention_factor must be positive; got {attention_factor}")
        apply_temperature(self, self.attention_factor, temperature_on)

    def frequencies(
        self, lengths: Int[Tensor, " rows"] | None = None, device: torch.device | str | None = None
    ) -> Float[Tensor, "*rows pairs"]:
        """Of rows of these lengths; without any, those of the trained length. Up to trained_length, it included, the short ones."""
        found = frequencies(self.width, self.base, device)
        short, long = (found / torch.tensor(f, dtype=torch.float64, device=device) for f in (self.short_factors, self.long_factors))
        return short if lengths is None else torch.where((lengths > self.trained_length).unsqueeze(-1), long, short)

    def angles(
        self, positions: Int[Tensor, "batch time"], lengths: Int[Tensor, " #batch"] | None = None
    ) -> Float[Tensor, "rows time pairs"]:
        """position * frequency in radians, fp64, by the original frequencies below `unscaled`."""
        scaled = super().angles(positions, lengths)
        if not self.unscaled:
            return scaled
        rows = positions[: len(scaled)].unsqueeze(-1)
        return torch.where(rows < self.unscaled, rows * frequencies(self.width, self.base, positions.device), scaled)
