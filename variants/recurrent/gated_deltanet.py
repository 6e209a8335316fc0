"""The gated delta rule: the state decays before a token writes over what it holds under its key.

    S_t = a_t (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t        o_t = q_t S_t / sqrt(head_dim)
    ln a_t = -A_h softplus(x_t W_a + b_h)        beta_t = sigmoid(x_t W)

Yang et al. 2025, "Gated Delta Networks: Improving Mamba2 with Delta Rule", section 3: q and k take three quarters of the model's width and
values twice as much, an RMS norm over each head's output, then a swish gate. A starts uniform in (0, 16), softplus(b) log-uniform in
(0.001, 0.1), as in Mamba-2. Time O(T), state head_dim * value_dim a head.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from registry import variants
from variants.recurrent.deltanet import Delta
from variants.recurrent.layer import heads_first, precisely


@variants.register("gated_deltanet", time="T", state="1", hooks=("rotate",), unit_keys=True, implementations=("fla", "torch", "reference"))
class GatedDeltaNet(Delta):
    """The delta rule on a state that decays at a rate of each token and head."""

    key_share: ClassVar[float] = 0.75
    value_share: ClassVar[int] = 2

    def __init__(self, dim: int, heads: int, position: Any = None, **options: Any):
        super().__init__(dim, heads, position, **options)
        self.forget = nn.Linear(dim, heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1e-3, 16).log())
        self.bias = nn.Parameter(steps(heads))

    def log_decay(self, x: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch heads time"]:
        """-A softplus(x W + b)."""
        rate = self.log_rate.to(torch.promote_types(x.dtype, torch.float32)).exp()
        return -rate[:, None] * softplus(heads_first(precisely(self.forget, x) + self.bias))


def steps(*shape: int) -> Float[Tensor, "*shape"]:
    """Numbers whose softplus is log-uniform in (0.001, 0.1)."""
    size = torch.empty(*shape).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return size + torch.log(-torch.expm1(-size))
