"""Gated linear attention: what is forgotten depends on the token, by channel of the keys or by head.

    S_t = diag(a_t) S_{t-1} + k_t^T v_t        o_t = q_t S_t / sqrt(head_dim)        ln a_t = logsigmoid(x_t W1 W2 + b) / 16

Yang et al. 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4: keys half as wide as values, gates of
rank 16 whose root of order 16 lets them start near 0.96, an RMS norm over each head's output, a swish gate. With decay="scalar" one number
a head replaces the channels' (simple GLA). Time O(T), state head_dim * value_dim a head.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from registry import variants
from variants.recurrent.layer import Gates, LowRank, Recurrent, heads_first, precisely


@variants.register("gla", time="T", state="1", hooks=("rotate",), implementations=("fla", "torch", "reference"))
class GLA(Recurrent):
    """Linear attention that forgets as each token says.

    Options:
        decay: one factor for each `channel` of the keys, or one for each head, `scalar`.
        gate_rank: width of the middle of the gates' matrix, where there is one for each channel.
        gate_root: by what the gates' logarithm is divided.
    """

    key_share: ClassVar[float] = 0.5
    value_share: ClassVar[int] = 2

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        decay: Literal["channel", "scalar"] = "channel",
        gate_rank: int = 16,
        gate_root: float = 16.0,
        **options: Any,
    ):
        super().__init__(dim, heads, position, **options)
        if gate_rank < 1 or not 0 < gate_root < math.inf:
            raise ValueError(f"GLA: gate_rank must be at least 1 and gate_root a positive number; got {gate_rank} and {gate_root}")
        self.scalar, self.gate_root = decay == "scalar", gate_root
        self.forget = nn.Linear(dim, heads) if self.scalar else LowRank(dim, gate_rank, heads * self.head_dim, bias=True)

    def gates(self, x: Float[Tensor, "batch time dim"]) -> Gates:
        """Decays by head, or by head and channel."""
        log_decay = logsigmoid(precisely(self.forget, x)) / self.gate_root
        apart = "batch time (heads head_dim) -> batch heads time head_dim"
        return {"log_decay": heads_first(log_decay) if self.scalar else rearrange(log_decay, apart, heads=self.heads)}
