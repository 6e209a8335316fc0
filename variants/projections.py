"""What most mixers have around their core: one matrix to queries, keys and values, an optional short convolution, one matrix back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from variants.cache import newest
from variants.contract import Context, State
from variants.ops import conv
from variants.ops.ranks import Ring


class Projections(nn.Module):
    """x (batch, time, dim) -> q (batch, heads, time, head_dim), k and v (batch, kv_heads, time, their width); the heads' output back to x.

    value_dim: width of a head's values (default: head_dim). short_conv: width of a depthwise convolution over time on q, k and v, without
    bias; 0 for none. activation: what q, k and v pass after it.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_conv: int = 0,
        activation: Callable[[Tensor], Tensor] | None = None,
        causal: bool = True,
    ):
        super().__init__()
        if short_conv < 0:
            raise ValueError(f"short_conv must be 0 (off) or a width; got {short_conv}")
        self.head_dim, self.value_dim = head_dim, head_dim if value_dim is None else value_dim
        self.widths = (heads * head_dim, kv_heads * head_dim, kv_heads * self.value_dim)
        self.short_conv, self.activation, self.causal = short_conv, activation, causal
        self.inward = nn.Linear(dim, sum(self.widths), bias=False)
        self.outward = nn.Linear(heads * self.value_dim, dim, bias=False)
        self.taps = nn.Parameter(torch.empty(sum(self.widths), short_conv)) if short_conv else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices keep the variance of what they are given; taps are uniform as in torch's Conv1d."""
        for matrix in (self.inward, self.outward):
            nn.init.normal_(matrix.weight, std=matrix.in_features**-0.5)
        if self.taps is not None:
            nn.init.uniform_(self.taps, -(self.short_conv**-0.5), self.short_conv**-0.5)

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        context: Context,
        state: State | None,
        before: Int[Tensor, "batch time"] | None,
        after: Int[Tensor, "batch time"] | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """(q, k, v, parts of the new state)."""
        channels, parts = self.inward(x), dict[str, Tensor]()
        if self.taps is not None:
            channels, parts = convolved(channels, self.taps, context, state, before, after, causal=self.causal)
        if self.activation is not None:
            channels = self.activation(channels)
        queries, keys, values = channels.split(self.widths, dim=-1)
        apart = "batch time (heads width) -> batch heads time width"
        q, k = (rearrange(part, apart, width=self.head_dim) for part in (queries, keys))
        return q, k, rearrange(values, apart, width=self.value_dim), parts

    def back(self, y: Float[Tensor, "batch heads time value_dim"]) -> Float[Tensor, "batch time dim"]:
        """The heads' outputs, side by side, back to the model's width."""
        return cast(Tensor, self.outward(rearrange(y, "batch heads time value_dim -> batch time (heads value_dim)")))

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """The convolution's last inputs, if there is one."""
        return {"taps": torch.zeros(batch, self.short_conv - 1, sum(self.widths), **like)} if self.short_conv else {}

    def flops(self, time: int) -> int:
        """Forward operations for `time` tokens, 2 a multiply-add."""
        matrices = self.inward.weight.numel() + self.outward.weight.numel()
        return 2 * time * (matrices + self.short_conv * sum(self.widths))

    def state_elements(self) -> int:
        """Numbers in `init_parts(1)`."""
        return max(self.short_conv - 1, 0) * sum(self.widths)

    def reach(self) -> int:
        """How many tokens back the convolution looks."""
        return conv.reach(self.short_conv, self.causal)[0] if self.short_conv else 0


def convolved(
    channels: Float[Tensor, "batch time channels"],
    taps: Float[Tensor, "channels width"],
    context: Context,
    state: State | None,
    before: Int[Tensor, "batch time"] | None,
    after: Int[Tensor, "batch time"] | None = None,
    *,
    causal: bool = True,
) -> tuple[Float[Tensor, "batch time channels"], dict[str, Tensor]]:
    """(the short convolution of channels, the part `taps` of the new state: its last inputs)."""
    past = None if state is None else state["taps"]
    if context.split is not None:
        ring = context.split.ring
        rows = zip(ring.pieces(channels, 1), ring.ahead(channels, taps.shape[1] - 1), _pieces(ring, before), strict=True)
        return torch.cat([conv.short_convolution(row, taps, taps=left, before=here) for row, left, here in rows], dim=1), {}
    y = conv.short_convolution(channels, taps, taps=past, before=before, after=after, causal=causal)
    return y, {} if past is None else {"taps": newest(torch.cat([past, channels], dim=1), past.shape[1], context.valid)}


def previous(
    x: Float[Tensor, "batch time *rest"], past: Float[Tensor, "batch 1 *rest"], context: Context, before: Int[Tensor, "batch time"] | None
) -> Float[Tensor, "batch time *rest"]:
    """For each token the one before it; `past` before the first, and 0 before that of a segment."""
    pieces, ahead = [x], [past.to(x.dtype)]
    if context.split is not None:
        pieces, ahead = context.split.ring.pieces(x, 1), context.split.ring.ahead(x, 1)
    found = torch.cat([part for piece, left in zip(pieces, ahead, strict=True) for part in (left, piece[:, :-1])], dim=1)
    if before is None:
        return found
    return found.masked_fill((before == 0).view(*before.shape, *(1 for _ in x.shape[2:])), 0)


def _pieces(ring: Ring, before: Tensor | None) -> list[Tensor | None]:
    return [None for _ in ring.here] if before is None else list(ring.pieces(before, 1))
