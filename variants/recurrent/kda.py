"""Kimi delta attention: the gated delta rule with a decay for each channel of the keys.

    S_t = (I - beta_t k_t^T k_t) diag(a_t) S_{t-1} + beta_t k_t^T v_t        o_t = q_t S_t / sqrt(head_dim)

    decay="softplus"    ln a_t = -A_h softplus(x_t W1 W2 + b)               A starts uniform in (1, 16)
    decay="bounded"     ln a_t = -5 sigmoid(A_h (x_t W1 W2 + b))            A starts at 1

Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 3; the bounded form is that of its later kernels.
The two are different functions, and weights of one mean nothing to the other. Gates' matrices have the rank of a head's values; each head's
output passes an RMS norm and a sigmoid gate. Time O(T), state head_dim * value_dim a head.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import sigmoid, softplus

from registry import variants
from variants.recurrent.deltanet import Delta
from variants.recurrent.gated_deltanet import steps
from variants.recurrent.layer import Gate, LowRank, precisely

#: The least log-decay of the bounded form: 16 tokens of it stay within fp32.
LEAST = -5.0


@variants.register("kda", time="T", state="1", hooks=("rotate",), unit_keys=True, implementations=("fla", "torch", "reference"))
class KDA(Delta):
    """The delta rule on a state each channel of which decays at a rate of its own.

    Options:
        decay: how it is made from x: `softplus`, as in Mamba-2 and without a bound, or `bounded` to e^-5 a token.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        decay: Literal["softplus", "bounded"] = "softplus",
        gate: Literal["swish", "sigmoid", "none"] = "sigmoid",
        **options: Any,
    ):
        super().__init__(dim, heads, position, gate=gate, **options)
        self.bounded = decay == "bounded"
        self.forget = LowRank(dim, self.value_dim, heads * self.head_dim, bias=False)
        self.log_rate = nn.Parameter(torch.zeros(heads) if self.bounded else torch.empty(heads).uniform_(1, 16).log())
        self.bias = nn.Parameter(steps(heads * self.head_dim))

    def gating(self, kind: str) -> Gate | None:
        """A gate of the rank of a head's values."""
        return None if kind == "none" else Gate(self.dim, self.heads, self.value_dim, kind, rank=self.value_dim)

    def log_decay(self, x: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch heads time head_dim"]:
        """One number for each channel of each head."""
        logits = rearrange(
            precisely(self.forget, x) + self.bias, "batch time (heads head_dim) -> batch heads time head_dim", heads=self.heads
        )
        logits = logits.contiguous()  # a compiled backward pass of softplus trips over other strides at a second length
        rate = self.log_rate.to(logits.dtype).exp()[:, None, None]
        return LEAST * sigmoid(rate * logits) if self.bounded else -rate * softplus(logits)
