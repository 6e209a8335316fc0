"""Attention under a scheme that relates: each range of keys is attended to by itself, and what comes out is joined.

    y_i = sum_r exp(lse_ir - lse_i) y_ir        lse_i = log sum_r exp(lse_ir)        r: ranges of keys, each with its own turned q and k

A range is told by the positions at which its keys begin. In a segment positions do not decrease, so that it is a stretch of slots, which
ends where the segment does: every pair in sight is in one range, and no pair is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from variants.ops.attention import Output, Sight, merge
from variants.positions.contract import Part, Scheme


class Relation(NamedTuple):
    """A scheme that relates, and where the queries and the slots are. It transforms the last channels, as many as it is made for."""

    scheme: Scheme
    q_positions: Int[Tensor, "batch q_time"]
    k_positions: Int[Tensor, "batch k_time"]

    def parts(self, q: Float[Tensor, "batch heads q_time width"], k: Float[Tensor, "batch kv_heads k_time width"]) -> Iterator[Part]:
        """Queries and keys of each range, near to far, whole."""
        factor = self.scheme.sharpen(self.q_positions)
        if factor is not None:
            q = q * factor[:, None, :, None].to(q.dtype)
        rest = q.shape[-1] - self.scheme.head_dim
        for part in self.scheme.relate(q[..., rest:], k[..., rest:], self.q_positions, self.k_positions):
            if not rest:
                yield part
                continue
            whole_q, whole_k = (torch.cat([x[..., :rest], turned], dim=-1) for x, turned in ((q, part.q), (k, part.k)))
            yield Part(whole_q, whole_k, part.since)


def attend_in_parts(
    attend: Callable[..., Output],
    relation: Relation,
    q: Float[Tensor, "batch heads q_time width"],
    k: Float[Tensor, "batch kv_heads k_time width"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    *,
    sight: Sight,
    sink: Float[Tensor, " heads"] | None = None,
    **options: Any,
) -> Float[Tensor, "batch heads q_time value_dim"]:
    """Attention with queries and keys that the relation transforms. `attend` gives the outputs and the log-sum-exp of one range.

    A sink is one logit, whatever the ranges, and joins the first.
    """
    before = _one_row(sight.extents(q.shape[2], k.shape[2], q.device)[0])
    joined: Output | None = None
    for part in relation.parts(q, k):
        reached = before if part.since is None else reach(part.since, _one_row(relation.k_positions), before)
        found = attend(part.q, part.k, v, sight=replace(sight, before=reached), sink=sink, **options)
        found = Output(found.y.to(found.lse.dtype), found.lse)  # joined in fp32 or better
        joined = found if joined is None else merge(joined, found)
        if part.since is None or bool((reached == before).all()):  # nothing is farther
            break
        sight, sink = replace(sight, beyond=reached), None
    assert joined is not None, "a scheme has at least one part"
    return joined.y.to(v.dtype)


def reach(
    since: Int[Tensor, "rows_of_since q_time"],
    k_positions: Int[Tensor, "rows_of_keys k_time"],
    before: Int[Tensor, "rows_of_before q_time"],
) -> Int[Tensor, "rows q_time"]:
    """How many tokens back the farthest slot of each query's segment lies whose position is `since` or later; -1: not even its own is.

    By bisection, in memory that grows with the number of queries alone.
    """
    q_time, k_time = before.shape[1], k_positions.shape[1]
    rows = max(len(since), len(k_positions), len(before))
    since, k_positions, before = (x.expand(rows, -1) for x in (since, k_positions, before))
    slot = torch.arange(k_time - q_time, k_time, device=before.device)
    low, high = slot - before, (slot + 1).expand(rows, -1)
    for _ in range(k_time.bit_length()):
        middle = (low + high) // 2
        early = (low < high) & (k_positions.gather(1, middle.clamp(0, k_time - 1)) < since)
        low, high = torch.where(early, middle + 1, low), torch.where(early, high, middle)
    return slot - low


def require_order(
    scheme: Scheme,
    k_positions: Int[Tensor, "batch k_time"],
    before: Int[Tensor, "rows q_time"],
    valid: Bool[Tensor, "batch q_time"] | None,
) -> None:
    """Raises ValueError where a token's position is lower than that of the token before it in its segment."""
    q_time = before.shape[1]
    positions = k_positions[:, -q_time:]
    previous = torch.cat([k_positions[:, :1], k_positions[:, :-1]], dim=1)[:, -q_time:]
    falls = (positions < previous) & (before > 0)
    if valid is not None:
        falls = falls & valid
    if falls.any():
        row, token = falls.nonzero()[0].tolist()
        raise ValueError(
            f"{type(scheme).__name__} maps distances to earlier tokens, so that positions must not decrease inside a segment; in row "
            f"{row} position {int(positions[row, token])} follows {int(previous[row, token])}"
        )


def _one_row(x: Int[Tensor, "batch time"]) -> Int[Tensor, "rows time"]:
    """x, or its first row where all are that one."""
    return x[:1] if x.stride(0) == 0 else x
