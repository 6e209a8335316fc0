"""Rotary positions: each pair of a query's and a key's channels is turned by an angle that grows with the position.

    (a, b) -> (a cos(p f_i) - b sin(p f_i), b cos(p f_i) + a sin(p f_i))        f_i = base^(-2i / width)

so that the product of a query at p and a key at p' depends on p - p' alone. Su et al. 2021, "RoFormer", section 3.2. No parameters, no
state. Public models pair channels in two ways, equal up to a permutation of the weights: halves (i, i + width/2), and interleaved
neighbours (2i, 2i + 1).

Angles are made in fp64 at every call, outside autocast and from no buffer, and their cosines are cast last: in bf16 the positions 4096 to
4112 are one number, and a buffer is rounded when the model is cast.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from registry import positions
from variants.positions.contract import Scheme

Layout = Literal["half", "interleaved"]


def frequencies(width: int, base: float, device: torch.device | str | None = None) -> Float[Tensor, " pairs"]:
    """base^(-2i / width) for i = 0 .. width/2 - 1, in radians a token, fp64."""
    exponents: Tensor = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    return base**-exponents


def turn(
    x: Float[Tensor, "batch heads time head_dim"],
    angles: Float[Tensor, "#batch time pairs"],
    layout: Layout = "half",
    magnitude: float = 1.0,
) -> Float[Tensor, "batch heads time head_dim"]:
    """x with its first 2 * pairs channels turned by `angles` (radians) and multiplied by `magnitude`; the others pass through."""
    width = 2 * angles.shape[-1]
    cos, sin = (magnitude * table.unsqueeze(1) for table in (angles.cos(), angles.sin()))
    turned, rest = x[..., :width], x[..., width:]
    if layout == "half":
        partner = turned.roll(width // 2, dims=-1)
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    else:
        partner = turned.reshape(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
        cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    turned = torch.addcmul(turned * cos.to(x.dtype), partner, sin.to(x.dtype))
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


@positions.register("rope", hooks=("rotate",))
class Rotary(Scheme):
    """Rotary positions (RoPE): products of queries and keys depend on their distance.

    Options:
        base: slowest turn takes about 2 pi * base tokens.
        layout: which channels form a pair, `half` (i, i + width/2) or `interleaved` (2i, 2i + 1).
        fraction: turn only the first int(fraction * head_dim) channels.
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, base: float = 10000.0, layout: Layout = "half", fraction: float = 1.0):
        super().__init__(head_dim, heads, dim)
        self.base, self.layout, self.width = base, layout, int(fraction * head_dim)
        if not 0 < fraction <= 1:
            raise ValueError(f"Rotary: fraction must lie above 0 and not above 1; got {fraction}")
        if base <= 0:
            raise ValueError(f"Rotary: base must be positive; got {base}")
        if self.width < 2 or self.width % 2:
            raise ValueError(
                f"Rotary: channels are turned in pairs, but fraction={fraction} of head_dim={head_dim} is {self.width}; "
                "choose an even width of at least 2"
            )

    def rotate(
        self,
        q: Float[Tensor, "batch heads q_time head_dim"],
        k: Float[Tensor, "batch kv_heads k_time head_dim"],
        q_positions: Int[Tensor, "batch q_time"],
        k_positions: Int[Tensor, "batch k_time"],
    ) -> tuple[Float[Tensor, "batch heads q_time head_dim"], Float[Tensor, "batch kv_heads k_time head_dim"]]:
        """Queries and keys, each turned by its own position."""
        q_angles = self.angles(q_positions)
        k_angles = q_angles if k_positions is q_positions else self.angles(k_positions)
        return turn(q, q_angles, self.layout), turn(k, k_angles, self.layout)

    def angles(self, positions: Int[Tensor, "batch time"]) -> Float[Tensor, "rows time pairs"]:
        """position * frequency in radians, fp64; one row for all where all rows are one expanded row."""
        rows = positions[:1] if positions.stride(0) == 0 else positions
        return rows.unsqueeze(-1) * frequencies(self.width, self.base, positions.device)
