"""The delta rule: a token writes over what the state holds under its key, instead of adding to it.

    S_t = S_{t-1} + beta_t k_t^T (v_t - k_t S_{t-1})        o_t = q_t S_t / sqrt(head_dim)        beta_t = sigmoid(x_t W)

Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight Programmers"; Yang et al. 2024, "Parallelizing Linear Transformers with
the Delta Rule over Sequence Length": q, k and v behind a convolution of width 4 and SiLU, q and k of length 1, an RMS norm over each head's
output. The transition I - beta k^T k has the eigenvalues 1 and 1 - beta. With `allow_negative_eigenvalues` beta reaches to 2 and they to
-1, without which no state can be flipped (Grazzi et al. 2024, "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues").
Several `reflections` a token make its transition a product of such factors (Siems et al. 2025, "DeltaProduct"). Time O(T reflections),
state head_dim * value_dim a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad, sigmoid, silu

from registry import variants
from variants.recurrent.layer import DELTA, Gates, Recurrent, heads_first, pairs, precisely, unit


class Delta(Recurrent):
    """Base of the delta rule's mixers.

    Options:
        allow_negative_eigenvalues: beta in (0, 2) instead of (0, 1).
        reflections: how often a token writes, each time under another key, with another beta and another value.
    """

    cores: ClassVar[Mapping[str, Callable[..., tuple[Tensor, Tensor]]]] = DELTA
    activation: ClassVar[Callable[[Tensor], Tensor] | None] = staticmethod(silu)
    erases: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        allow_negative_eigenvalues: bool = False,
        reflections: int = 1,
        short_conv: int = 4,
        **options: Any,
    ):
        if reflections < 1:
            raise ValueError(f"{type(self).__name__}: reflections must be at least 1; got {reflections}")
        self.writes = reflections  # before the projections are made
        super().__init__(dim, heads, position, short_conv=short_conv, **options)
        self.largest = 2.0 if allow_negative_eigenvalues else 1.0
        self.strength = nn.Linear(dim, heads * reflections, bias=False)

    def prepare(
        self, q: Float[Tensor, "batch heads time head_dim"], k: Float[Tensor, "batch kv_heads time head_dim"]
    ) -> tuple[Float[Tensor, "batch heads time head_dim"], Float[Tensor, "batch kv_heads time head_dim"]]:
        """Both of length 1: then I - beta k^T k stretches nothing for beta in (0, 2)."""
        return unit(q) * self.head_dim**-0.5, unit(k)

    def gates(self, x: Float[Tensor, "batch time dim"]) -> Gates:
        """beta for each write, and what is left of the state before the first."""
        return {"beta": self.largest * heads_first(sigmoid(precisely(self.strength, x))), "log_decay": self.log_decay(x)}

    def log_decay(self, x: Float[Tensor, "batch time dim"]) -> Tensor | None:
        """How the state decays; None: not at all."""
        return None

    def core(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The core that runs, with a token of its own for each write."""
        core = super().core()
        return core if self.writes == 1 else partial(_one_after_another, core, self.writes)

    def core_flops(self, time: int) -> int:
        """Of one head: reading, correcting and writing the state; in a chunk, keys on keys, queries on keys, the solution, its reading."""
        key, value, time = self.head_dim, self.value_dim, time * self.writes
        return 6 * time * key * value + 2 * pairs(time, self.chunk) * (3 * key + 2 * value)


@variants.register("deltanet", time="T", state="1", hooks=("rotate",), unit_keys=True, implementations=("fla", "torch", "reference"))
class DeltaNet(Delta):
    """Linear attention that writes over what it finds under a key."""

    def __init__(self, dim: int, heads: int, position: Any = None, *, gate: Literal["swish", "sigmoid", "none"] = "none", **options: Any):
        super().__init__(dim, heads, position, gate=gate, **options)


def _one_after_another(
    core: Callable[..., tuple[Tensor, Tensor]],
    writes: int,
    q: Float[Tensor, "batch heads time head_dim"],
    k: Float[Tensor, "batch kv_heads time head_dim"],
    v: Float[Tensor, "batch kv_heads time value_dim"],
    *,
    beta: Float[Tensor, "batch kv_heads time"],
    log_decay: Tensor | None,
    before: Int[Tensor, "batch time"] | None,
    initial: Tensor | None,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Tensor]:
    """`core` over tokens that write several times: the state decays before the first write, and is read after the last."""
    k, v, beta = (rearrange(x, "batch (heads writes) time ... -> batch heads (time writes) ...", writes=writes) for x in (k, v, beta))
    q = pad(q.unsqueeze(3), (0, 0, writes - 1, 0)).flatten(2, 3)
    if log_decay is not None:
        log_decay = pad(log_decay.unsqueeze(3), (0, 0) * (log_decay.ndim - 3) + (0, writes - 1)).flatten(2, 3)
    if before is not None:
        before = (before.unsqueeze(-1) * writes + torch.arange(writes, device=before.device)).flatten(1)
    o, last = core(q, k, v, beta=beta, log_decay=log_decay, before=before, initial=initial)
    return o[:, :, writes - 1 :: writes], last
