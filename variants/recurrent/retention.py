"""Retention: linear attention that forgets at one fixed rate a head.

    S_t = g_h S_{t-1} + k_t^T v_t        o_t = q_t S_t / sqrt(head_dim)        g_h = 1 - 2^(-5-h)

Sun et al. 2023, "Retentive Network", section 2: values twice as wide as keys, an RMS norm over each head's output, a swish gate. The paper
turns q and k by xPos; here that is the position scheme's affair (`position=rope` or `xpos`). Time O(T), state head_dim * value_dim a head.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from registry import variants
from variants.recurrent.layer import Gates, Recurrent


@variants.register("retention", time="T", state="1", hooks=("rotate",), implementations=("fla", "torch", "reference"))
class Retention(Recurrent):
    """Linear attention that forgets at a fixed rate, slower from head to head; values are twice as wide as keys."""

    value_share: ClassVar[int] = 2

    def __init__(self, dim: int, heads: int, position: Any = None, **options: Any):
        super().__init__(dim, heads, position, **options)
        self.rates = tuple(_log_rate(head) for head in range(heads))

    def gates(self, x: Float[Tensor, "batch time dim"]) -> Gates:
        """The fixed rates, in logarithms."""
        wide = torch.promote_types(x.dtype, torch.float32)
        rates = torch.tensor(self.rates, dtype=wide, device=x.device)
        return {"log_decay": rates[None, :, None].expand(x.shape[0], -1, x.shape[1])}


def _log_rate(head: int) -> float:
    """ln(1 - 2^(-5-head)), exact where the difference would round to 1."""
    return math.log1p(-(2.0 ** (-5 - head)))
