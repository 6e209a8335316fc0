"""Forgetting attention: softmax attention whose logits fade with every forget gate that lies between a key and the query.

    o_i = sum_{j <= i} softmax_j(q_i . k_j / sqrt(head_dim) + c_i - c_j) v_j
    c_t = sum_{l <= t} log f_l        f_t = sigmoid(w . x_t + b)        one gate a head

Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate" (FoX). It needs no position scheme, and takes any. Only
differences of the sums count, so that segments need no reset; sums are kept in fp64, in which they may run on without end. Time O(T^2),
memory O(T), state a key and a value for each token and key/value head, and a sum for each token and head.

The paper's "Pro" block adds four parts, each an option here: qk_norm, output_norm, gate="element", and kv_shift, in which a share of the
token before enters each key and value:

    k_t = a k'_{t-1} + (1 - a) k'_t        a = sigmoid(w_k . x_t)        v_t likewise; k', v' as projected

There is no bidirectional form: no gate says how what lies ahead of a query fades.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from registry import variants
from variants.cache import newest
from variants.contract import Context, NotApplicable, State
from variants.ops.attention import Fade
from variants.ops.precision import flushes_denormals, without_autocast
from variants.projections import previous
from variants.softmax.layer import Softmax


@variants.register("forgetting", time="T^2", state="T", hooks=("rotate", "relate", "bias"), implementations=("sdpa", "torch", "reference"))
class Forgetting(Softmax):
    """Forgetting attention (FoX): a learned gate a head and token says how much of all that came before fades.

    Options:
        min_horizon: tokens over which the first head at first forgets all but 1/e; with max_horizon (default: gates start at one half).
        max_horizon: the same of the last head; those between are spaced evenly in their logarithms.
        output_norm: each head's output passes an RMS norm with a learned scale, before it is gated.
        kv_shift: a share of the token before enters each key and value, by a gate a head.
    """

    bidirectional: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        min_horizon: float | None = None,
        max_horizon: float | None = None,
        output_norm: bool = False,
        kv_shift: bool = False,
        **options: Any,
    ):
        if not options.get("causal", True):
            raise NotApplicable("Forgetting has no bidirectional form: no gate says how what lies ahead of a query fades")
        super().__init__(dim, heads, position, **options)
        self.forget = nn.Linear(dim, heads)
        nn.init.normal_(self.forget.weight, std=0.02)  # so small that at first the bias alone sets how far a head looks back
        with torch.no_grad():
            self.forget.bias.copy_(_biases(heads, min_horizon, max_horizon))
        self.shift = TokenShift(dim, self.kv_heads, self.head_dim) if kv_shift else None
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-6) if output_norm else None
        # With a shift, the first of equal tokens has another value than the rest.
        self.normalises_rows = self.normalises_rows and not output_norm and not kv_shift

    def candidates(self) -> tuple[str, ...]:
        """Tiles first where denormals are slow: gates push the weights of a whole band of keys below the least normal number.

        At 4,096 tokens and gates of 0.95, forward and backward, the fused kernel takes 1,054 ms there and the tiles 288; where denormals
        are flushed, 227 and 314 (4 heads of 64, 2 threads).
        """
        return self.implementations if flushes_denormals() else ("torch", "sdpa", "reference")

    def project(
        self,
        x: Float[Tensor, "batch time dim"],
        context: Context,
        state: State | None,
        before: Int[Tensor, "batch time"] | None,
        after: Int[Tensor, "batch time"] | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Queries, keys and values, the latter two mixed with those of the token before if there is a shift."""
        q, k, v, parts = super().project(x, context, state, before, after)
        if self.shift is not None:
            k, v, last = self.shift(x, k, v, context, state, before)
            parts = parts | {"shift": last}
        return q, k, v, parts

    def extra_slots(self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None) -> dict[str, Tensor]:
        """The running sums c_t, in fp64, from where the state's stopped. Those of pads are in nobody's sight, and not remembered."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x):
            logits = nn.functional.linear(x.to(wide), self.forget.weight.to(wide), self.forget.bias.to(wide))
        log_forget = nn.functional.logsigmoid(logits).double()
        if context.split is not None:
            return {"sums": context.split.ring.sums(log_forget)}
        # The last sum so far, if there is one, is one more term; so pieces give the very sums of the whole.
        terms = log_forget if state is None else torch.cat([state["sums"][:, -1:], log_forget], dim=1)
        return {"sums": terms.cumsum(1)[:, -x.shape[1] :]}

    def attend(
        self,
        q: Float[Tensor, "batch heads time head_dim"],
        k: Float[Tensor, "batch kv_heads slots head_dim"],
        v: Float[Tensor, "batch kv_heads slots head_dim"],
        slots: dict[str, Tensor],
        **told: Any,
    ) -> Float[Tensor, "batch heads time head_dim"]:
        """Attention whose logits fade, and the output's norm."""
        sums = slots["sums"].transpose(1, 2)
        y = self.attention(q, k, v, fade=Fade(sums[..., -q.shape[2] :], sums), **told)
        return y if self.norm is None else self.norm(y.to(self.norm.weight.dtype))

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """Those of the family, the sums, and the shift's last token if there is one."""
        parts = super().init_parts(batch, **like)
        sums = torch.zeros(batch, parts["keys"].shape[1], self.heads, device=like.get("device"), dtype=torch.float64)
        return parts | {"sums": sums} | ({} if self.shift is None else self.shift.init_parts(batch, **like))

    def flops(self, time: int) -> int:
        """Those of full attention, and the gates' matrices."""
        gates = self.forget.weight.numel() + (0 if self.shift is None else self.shift.gates.weight.numel())
        return super().flops(time) + 2 * time * gates

    def state_elements(self, time: int) -> int:
        """Those of full attention, a sum for each slot and head, and one token's keys and values for the shift."""
        sums = self.heads * (self.kept + self.recent(time))
        return super().state_elements(time) + sums + (0 if self.shift is None else 2 * self.kv_heads * self.head_dim)


class TokenShift(nn.Module):
    """Keys and values that a share of those of the token before enters, by one gate for each head of either."""

    def __init__(self, dim: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.shape = 2 * kv_heads, head_dim
        self.gates = nn.Linear(dim, 2 * kv_heads, bias=False)
        nn.init.normal_(self.gates.weight, std=dim**-0.5)

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        k: Float[Tensor, "batch kv_heads time head_dim"],
        v: Float[Tensor, "batch kv_heads time head_dim"],
        context: Context,
        state: State | None,
        before: Int[Tensor, "batch time"] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(keys, values, what the next call takes for the token before its first). Before a segment's first token lies 0."""
        new = torch.cat([k, v], dim=1).transpose(1, 2)
        past = new.new_zeros(new.shape[0], 1, *self.shape) if state is None else state["shift"]
        share = torch.sigmoid(self.gates(x)).unsqueeze(-1)
        mixed = rearrange(
            torch.lerp(new, previous(new, past, context, before), share),
            "batch time (two heads) width -> two batch heads time width",
            two=2,
        )
        return mixed[0], mixed[1], newest(torch.cat([past, new], dim=1), 1, context.valid)

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """The token before the first, which is 0."""
        return {"shift": torch.zeros(batch, 1, *self.shape, **like)}


def _biases(heads: int, shortest: float | None, longest: float | None) -> Float[Tensor, " heads"]:
    """b with sigmoid(b) = exp(-1 / T), for T from the shortest horizon to the longest in even steps of log T; 0 where none are given."""
    if shortest is None and longest is None:
        return torch.zeros(heads)
    if shortest is None or longest is None or not 0 < shortest <= longest < math.inf:
        raise ValueError(f"Forgetting: horizons are two numbers of tokens, 0 < min_horizon <= max_horizon; got {shortest} and {longest}")
    rates = torch.logspace(-math.log10(shortest), -math.log10(longest), heads, dtype=torch.float64)
    return (-rates - torch.log(-torch.expm1(-rates))).float()
