"""What every implementation of softmax attention is told, and what it gives back.

    y_i = sum_j exp(s_ij - lse_i) v_j        lse_i = log(exp(sink) + sum_j exp(s_ij))        s_ij = scale q_i . k_j + bias_ij + a_i - b_j

over the slots j that query i sees. Slots are counted from 0; the last query stands at the last slot. Segments being contiguous, two numbers
a query say what they hide: the slot d tokens back is of the query's own segment if and only if -after <= d <= before. That covers packed
segments, padded rows and half-filled caches. A window of W counts the query itself.

A cache that keeps the sinks of the segment in which it stopped has them in its first `kept` slots, whatever their distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

#: (q_positions, k_positions, *parameters) -> (heads, q, k), or (rows, heads, q, k) where rows differ. Finite.
Hook = Callable[..., Tensor]


class Bias(NamedTuple):
    """What is added to the logits: a function of the `positions` of queries and slots, and of the `parameters` that it is trained by."""

    hook: Hook
    positions: tuple[Int[Tensor, "batch q_time"], Int[Tensor, "batch k_time"]]
    parameters: tuple[Tensor, ...] = ()

    @property
    def alike(self) -> bool:
        """Whether all rows are one expanded row."""
        return all(x.stride(0) == 0 for x in self.positions)

    def dense(self) -> Float[Tensor, "#batch #heads q_time k_time"]:
        """All of it at once."""
        at_queries, at_keys = (x[:1] if self.alike else x for x in self.positions)
        found = self.hook(at_queries, at_keys, *self.parameters)
        return found if found.ndim == 4 else found.unsqueeze(0)


class Fade(NamedTuple):
    """a_i - b_j, added to the logits: two running sums, each (batch, heads, time), in fp64 if they may grow large."""

    at_queries: Float[Tensor, "batch heads q_time"]
    at_keys: Float[Tensor, "batch heads k_time"]


class Output(NamedTuple):
    """y: (batch, heads, q_time, value_dim), 0 where nothing is seen. lse: (batch, heads, q_time), there -inf; fp32 or better."""

    y: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Sight:
    """causal: nothing that follows. window: nothing `window` or more tokens away, but for the first `sinks` of the query's segment.

    kept: leading slots that hold sinks of an earlier call. before, after: tokens of its own segment around each query (default: all slots
    are one segment). beyond: nothing that many tokens back or nearer, for where those are attended to by themselves.
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    kept: int = 0
    before: Int[Tensor, "#rows q_time"] | None = None
    after: Int[Tensor, "#rows q_time"] | None = None
    beyond: Int[Tensor, "#rows q_time"] | None = None

    @property
    def plain(self) -> bool:
        """Whether the shape alone says what is seen: all slots, or all that do not follow."""
        return self.window is None and self.rows == 0 and not self.kept

    @property
    def rows(self) -> int:
        """How many rows are told what they see, 1 if that is the same for all; 0 where no row is told anything."""
        return max((len(x) for x in (self.before, self.after, self.beyond) if x is not None), default=0)

    def within(self, q_time: int, k_time: int) -> Sight:
        """The same without a window that is too wide to hide anything."""
        hides = self.window is not None and (max(q_time, k_time) > self.window or self.kept)
        return self if hides else replace(self, window=None, sinks=0)

    def mask(self, q_time: int, k_time: int, device: torch.device) -> Bool[Tensor, "rows 1 q_time k_time"]:
        """True where the query sees the slot; one row for all where nothing differs between rows."""
        query, slot = torch.arange(q_time, device=device)[:, None], torch.arange(k_time, device=device)
        before, after, beyond = (None if x is None else x.unsqueeze(-1) for x in self.extents(q_time, k_time, device))
        assert before is not None
        return self.sees(query, slot, before, after, beyond, q_time, k_time).unsqueeze(1)

    def sees(
        self, query: Tensor, slot: Tensor, before: Tensor, after: Tensor | None, beyond: Tensor | None, q_time: int, k_time: int
    ) -> Bool[Tensor, "*shape"]:
        """The rule, for numbered queries and slots of any shapes that go together. before, after, beyond: those of the queries."""
        distance = query + k_time - q_time - slot
        seen = distance <= before
        if self.causal:
            seen = seen & (distance >= 0)
        elif after is not None:
            seen = seen & (distance >= -after)
        if self.window is not None:
            near = distance.abs() < self.window
            seen = seen & ((near | (before - distance < self.sinks)) if self.sinks else near)
        if self.kept:
            # Kept sink p lies before - p tokens behind the query; where that is among the recent slots, it is not seen twice.
            far = before - slot > query + k_time - self.kept - q_time
            seen = torch.where(slot < self.kept, far, seen)
            distance = torch.where(slot < self.kept, before - slot, distance)
        return seen if beyond is None else seen & (distance > beyond)

    def extents(
        self, q_time: int, k_time: int, device: torch.device
    ) -> tuple[Int[Tensor, "#rows q_time"], Int[Tensor, "#rows q_time"] | None, Int[Tensor, "#rows q_time"] | None]:
        """`before`, `after` and `beyond` as given; without `before`, that of queries whose segment is all of the slots."""
        before = self.before
        if before is None:
            before = (torch.arange(q_time, device=device) + k_time - self.kept - q_time).unsqueeze(0)
        return before, self.after, self.beyond


#: What attention is told where nothing else is said.
CAUSAL = Sight()


def merge(a: Output, b: Output) -> Output:
    """Attention to the union of two disjoint sets of keys, from the attention to each; of two that saw nothing, nothing."""
    least = torch.finfo(a.lse.dtype).min / 4
    first, second = a.lse.clamp(min=least), b.lse.clamp(min=least)  # the difference of two -inf is NaN
    share = torch.sigmoid(second - first).unsqueeze(-1).to(a.y.dtype)
    nothing = (a.lse == -math.inf) & (b.lse == -math.inf)
    return Output(a.y + share * (b.y - a.y), torch.logaddexp(first, second).masked_fill(nothing, -math.inf))
