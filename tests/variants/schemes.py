"""Position schemes that exercise the hooks which no shipped scheme has yet."""

from __future__ import annotations

import torch
from torch import Tensor

from variants.positions.contract import Scheme
from variants.positions.rotary import frequencies, turn


class Slopes(Scheme):
    """Minus a slope a head times the distance, and a temperature."""

    hooks = ("bias",)
    logit_scale = 1.7

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = (q_positions[:, None, :, None] - k_positions[:, None, None, :]).abs()
        return -distance * 0.3 * torch.arange(1, self.heads + 1, dtype=torch.float64)[:, None, None]


class SharedSlopes(Slopes):
    """The same for all rows, without a batch axis."""

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return super().bias(q_positions[:1], k_positions[:1])[0]


class Stretched(Scheme):
    """Turns more slowly the longer the row: what a cache of turned keys gets wrong."""

    hooks = ("rotate",)
    length_dependent = True

    def rotate(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        length = k_positions.amax(1).double()[:, None, None] + 1
        turning = frequencies(self.head_dim, 10.0) * 8 / length
        return turn(q, q_positions.unsqueeze(-1) * turning), turn(k, k_positions.unsqueeze(-1) * turning)
