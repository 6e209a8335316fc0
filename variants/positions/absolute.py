"""Positions told by the embedding, or not at all.

    none:        x
    learned:     x + E[position]
    sinusoidal:  x + (sin(position f_i), cos(position f_i))        f_i = base^(-2i / dim)

Haviv et al. 2022, "Transformer Language Models without Positional Encodings Still Learn Positional Information"; Gehring et al. 2017,
"Convolutional Sequence to Sequence Learning", section 3.1; Vaswani et al. 2017, "Attention Is All You Need", section 3.5.

Without positions a causal mask is the only sign of order; without that mask too, attention cannot tell one order from another.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from registry import positions
from variants.positions.contract import Scheme


@positions.register("none", hooks=())
class NoPosition(Scheme):
    """No position: order shows through the causal mask alone."""


@positions.register("learned", hooks=("embed",))
class Learned(Scheme):
    """A trained vector for each position, added to the embedding.

    Options:
        max_positions: length of the table; a longer sequence is refused.
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, max_positions: int = 2048):
        super().__init__(head_dim, heads, dim)
        if max_positions < 1:
            raise ValueError(f"Learned: max_positions must be positive; got {max_positions}")
        self.max_positions = max_positions
        self.table = nn.Parameter(torch.empty(max_positions, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 0.02, small beside the embedding."""
        nn.init.normal_(self.table, std=0.02)

    def embed(self, x: Float[Tensor, "batch time dim"], positions: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time dim"]:
        """x + E[position]. Raises ValueError for a position outside the table, before it looks anything up."""
        if positions.numel():
            low, high = (int(bound) for bound in positions.aminmax())
            if low < 0 or high >= len(self.table):
                raise ValueError(
                    f"Learned: position {high if low >= 0 else low} is outside the table of max_positions={len(self.table)}; "
                    f"positions run from 0 to {len(self.table) - 1}"
                )
        return x + self.table[positions].to(x.dtype)


@positions.register("sinusoidal", hooks=("embed",))
class Sinusoidal(Scheme):
    """Sines and cosines of the position added to the embedding, at wavelengths from 2 pi to 2 pi base.

    Options:
        base: the slowest wave takes about 2 pi * base tokens.
        layout: `interleaved` (sine, cosine, sine, ...), as in the paper, or `half`: all sines, then all cosines.
        scale: what the waves are multiplied by; the embeddings themselves are not.
    """

    def __init__(
        self,
        head_dim: int,
        heads: int,
        dim: int,
        *,
        base: float = 10000.0,
        layout: Literal["interleaved", "half"] = "interleaved",
        scale: float = 1.0,
    ):
        super().__init__(head_dim, heads, dim)
        if base <= 0:
            raise ValueError(f"Sinusoidal: base must be positive; got {base}")
        self.base, self.layout, self.scale = base, layout, scale

    def embed(self, x: Float[Tensor, "batch time dim"], positions: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time dim"]:
        """x + waves; of an odd number of channels the last is a sine. Angles are fp64, whatever x is in."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device=x.device) / self.dim
        angles = positions.unsqueeze(-1) * self.base**-exponents
        sines, cosines = angles.sin(), angles[..., : self.dim // 2].cos()
        if self.layout == "half":
            return x + self.scale * torch.cat([sines, cosines], dim=-1).to(x.dtype)
        waves = torch.empty(*positions.shape, self.dim, dtype=torch.float64, device=x.device)
        waves[..., 0::2], waves[..., 1::2] = sines, cosines
        return x + self.scale * waves.to(x.dtype)
