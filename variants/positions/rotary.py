"""Rotary positions: each pair of a query's and a key's channels is turned by an angle that grows with the position.

    (a, b) -> (a cos(p f_i) - b sin(p f_i), b cos(p f_i) + a sin(p f_i))        f_i = base^(-2i / width)

so that the product of a query at p and a key at p' depends on p - p' alone. Su et al. 2021, "RoFormer", section 3.2. No parameters, no
state. Public models pair channels in two ways, equal up to a permutation of the weights: halves (i, i + width/2), and interleaved
neighbours (2i, 2i + 1).

Angles are made in fp64 at every call, outside autocast and from no buffer, and their cosines are cast last: in bf16 the positions 4096 to
4112 are one number, and a buffer is rounded when the model is cast.
"""

from __future__ import annotations

import math
from typing import Any, Literal

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

    #: A factor on what is turned, queries and keys alike: logits grow by its square.
    magnitude: float = 1.0

    def __init__(self, head_dim: int, heads: int, dim: int, *, base: float = 10000.0, layout: Layout = "half", fraction: float = 1.0):
        super().__init__(head_dim, heads, dim)
        name = type(self).__name__
        self.base, self.layout, self.width = base, layout, int(fraction * head_dim)
        if not 0 < fraction <= 1:
            raise ValueError(f"{name}: fraction must lie above 0 and not above 1; got {fraction}")
        if base <= 0:
            raise ValueError(f"{name}: base must be positive; got {base}")
        if self.width < 2 or self.width % 2:
            raise ValueError(
                f"{name}: channels are turned in pairs, but fraction={fraction} of head_dim={head_dim} is {self.width}; "
                "choose an even width of at least 2"
            )

    def frequencies(
        self, lengths: Int[Tensor, " rows"] | None = None, device: torch.device | str | None = None
    ) -> Float[Tensor, "*rows pairs"]:
        """Radians a token of every pair, fp64; where they depend on the length, a row for each of `lengths`."""
        return frequencies(self.width, self.base, device)

    def rotate(
        self,
        q: Float[Tensor, "batch heads q_time head_dim"],
        k: Float[Tensor, "batch kv_heads k_time head_dim"],
        q_positions: Int[Tensor, "batch q_time"],
        k_positions: Int[Tensor, "batch k_time"],
    ) -> tuple[Float[Tensor, "batch heads q_time head_dim"], Float[Tensor, "batch kv_heads k_time head_dim"]]:
        """Queries and keys, each turned by its own position."""
        keys = k_positions[:1] if k_positions.stride(0) == 0 else k_positions
        lengths = keys.amax(1) + 1 if self.length_dependent and k_positions.shape[1] else None
        q_angles = self.angles(q_positions, lengths)
        k_angles = q_angles if k_positions is q_positions else self.angles(k_positions, lengths)
        return turn(q, q_angles, self.layout, self.magnitude), turn(k, k_angles, self.layout, self.magnitude)

    def angles(
        self, positions: Int[Tensor, "batch time"], lengths: Int[Tensor, " #batch"] | None = None
    ) -> Float[Tensor, "rows time pairs"]:
        """position * frequency in radians, fp64; one row for all where all rows are one expanded row, of one length."""
        rows = positions[:1] if positions.stride(0) == 0 else positions
        turning = self.frequencies(lengths, positions.device)
        return rows.unsqueeze(-1) * (turning if turning.ndim == 1 else turning.unsqueeze(1))


@positions.register("p_rope", hooks=("rotate",))
class Proportional(Rotary):
    """Rotary positions on the fastest pairs alone (p-RoPE): the slowest ones carry no position.

    Pairs keep their place and speed in the full width, unlike those of `rope` with a fraction, which are fewer and spread anew. Barbero et
    al. 2024, "Round and Round We Go! What makes Rotary Positional Encodings useful?", section 6.

    Options:
        proportion: share of the pairs that turn, the fastest first: 1 is `rope`, 0 is `none`.
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, proportion: float = 0.75, **options: Any):
        super().__init__(head_dim, heads, dim, **options)
        if not 0 <= proportion <= 1:
            raise ValueError(f"Proportional: proportion must lie between 0 and 1; got {proportion}")
        self.turning = int(proportion * self.width // 2)

    def frequencies(
        self, lengths: Int[Tensor, " rows"] | None = None, device: torch.device | str | None = None
    ) -> Float[Tensor, "*rows pairs"]:
        """As `rope`, 0 behind the fastest."""
        found = super().frequencies(lengths, device)
        return torch.where(torch.arange(len(found), device=device) < self.turning, found, 0.0)


@positions.register("xpos", hooks=("rotate",), isometric=False)
class XPos(Rotary):
    """Rotary positions whose pairs fade with the distance, the fastest first (xPos).

        logit_n = sum_i zeta_i^(n / scale_base) (q_i . k_i turned)        zeta_i = (2i / width + 0.4) / 1.4

    Queries take the factor of their own position and keys its inverse, so that only the distance n counts; the factors themselves grow
    without bound, and positions so far from the center that the dtype of queries and keys could not hold them are refused: in fp16, whose
    range is narrow, much nearer ones. For causal mixers. Sun et al. 2022, "A Length-Extrapolatable Transformer", section 3.2.

    Options:
        scale_base: tokens over which a pair fades by its zeta.
        center: the position whose factor is 1.
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, scale_base: float = 512.0, center: int = 0, **options: Any):
        super().__init__(head_dim, heads, dim, **options)
        if scale_base <= 0:
            raise ValueError(f"XPos: scale_base must be positive; got {scale_base}")
        self.scale_base, self.center = scale_base, center
        self.max_positions = center + self.reach(torch.float32) + 1

    def rotate(
        self,
        q: Float[Tensor, "batch heads q_time head_dim"],
        k: Float[Tensor, "batch kv_heads k_time head_dim"],
        q_positions: Int[Tensor, "batch q_time"],
        k_positions: Int[Tensor, "batch k_time"],
    ) -> tuple[Float[Tensor, "batch heads q_time head_dim"], Float[Tensor, "batch kv_heads k_time head_dim"]]:
        """Queries and keys, each turned and scaled by its own position. Raises ValueError for one out of range."""
        reach = self.reach(q.dtype)
        for given in (q_positions, k_positions):
            for position in map(int, given.aminmax()) if given.numel() else ():
                if abs(position - self.center) > reach:
                    raise ValueError(
                        f"XPos: at position {position} the factors leave the range of {q.dtype}; with scale_base={self.scale_base:g} "
                        f"positions may lie up to {reach} from center={self.center}"
                    )
        q, k = super().rotate(q, k, q_positions, k_positions)
        return q * self.factors(q_positions, q, 1.0), k * self.factors(k_positions, k, -1.0)

    def reach(self, dtype: torch.dtype) -> int:
        """How far from the center the fastest pair's factors stay within nine tenths of the dtype's exponents, in fp64 of those of fp32."""
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        return int(0.9 * math.log(largest) * self.scale_base / math.log(1.4 / 0.4))

    def factors(self, positions: Int[Tensor, "batch time"], x: Tensor, sign: float) -> Float[Tensor, "batch 1 time head_dim"]:
        """What the channels at each position are multiplied by; 1 for those that are not turned."""
        zeta = (torch.arange(0, self.width, 2, dtype=torch.float64, device=x.device) / self.width + 0.4) / 1.4
        powers = zeta ** (sign * (positions.unsqueeze(-1) - self.center) / self.scale_base)
        powers = torch.cat([powers, powers], -1) if self.layout == "half" else powers.repeat_interleave(2, -1)
        rest = powers.new_ones(*powers.shape[:2], x.shape[-1] - self.width)
        return torch.cat([powers, rest], -1).unsqueeze(1).to(x.dtype)
