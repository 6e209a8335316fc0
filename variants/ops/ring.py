"""Exact softmax attention of rows that are split over processes: keys and values go round, queries stay. Memory O(T / P) each.

    y_i = sum_r exp(lse_ir - lse_i) y_ir        lse_i = log sum_r exp(lse_ir)        r: the slices of the row that query i sees

At each of P steps a process attends from the slices of queries that it has to those of the keys that it has got, and passes the keys on
while it does. Backward they go round once more, and their gradients with them, each step adding its share; weights are those of the whole
row, from the log-sum-exp of all slices and the whole outputs. Slices that nothing sees are skipped. Liu et al. 2023, "Ring Attention with
Blockwise Transformers for Near-Infinite Context".

Two slices lie at one distance from each other, so that what is seen between them is told by two numbers a query: how far back, and how far
ahead. Partial outputs and travelling gradients are in fp32 or better; first derivatives only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from variants.ops import cpu_kernel, softmax
from variants.ops.attention import CAUSAL, Bias, Fade, Output, Sight, merge
from variants.ops.precision import without_autocast
from variants.ops.ranks import Parcel, Ring


def attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring, **options: Any) -> Float[Tensor, "batch heads here value_dim"]:
    """`attend` without the log-sum-exp, in the dtype of q."""
    y: Tensor = attend(q, k, v, ring, **options).y
    return y.to(q.dtype)


@torch.compiler.disable  # what it exchanges with other processes is no graph
def attend(
    q: Float[Tensor, "batch heads here head_dim"],
    k: Float[Tensor, "batch kv_heads here head_dim"],
    v: Float[Tensor, "batch kv_heads here value_dim"],
    ring: Ring,
    *,
    sight: Sight = CAUSAL,
    bias: Bias | None = None,
    fade: Fade | None = None,
    sink: Float[Tensor, " heads"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Output:
    """`reference.attend` for the queries, keys and values of whole rows, of which each process gives and gets those that it has.

    sight and bias tell of whole rows, fade of what is here. y and lse are in fp32 or better. Raises ValueError for dropout, a cache, ranges
    of keys, and sinks where keys may follow their query.
    """
    if dropout or sight.kept or sight.beyond is not None or (sight.sinks and not sight.causal):
        raise ValueError("attention of rows that are split knows no dropout, cache, ranges of keys, nor sinks without causality")
    with without_autocast(q):
        plan = _Plan(ring, sight, bias, q.shape[-1] ** -0.5 if scale is None else scale)
        given = plan, q, k, v, *(fade or (None, None)), *(bias.parameters if bias else ())
        y, lse = _Ring.apply(*given)  # type: ignore[no-untyped-call]
        if sink is not None:  # one more logit, which has no value
            extra = sink.to(lse.dtype)[:, None]
            y, lse = y * torch.sigmoid(lse - extra).unsqueeze(-1), torch.logaddexp(lse, extra)
    return Output(y, lse)


@dataclass(frozen=True)
class _Plan:
    """What is the same for all pairs of slices."""

    ring: Ring
    sight: Sight
    bias: Bias | None
    scale: float

    def between(self, pair: _Pair, device: torch.device) -> Iterator[softmax.Plan]:
        """How the queries attend to the keys: nothing, or one or two disjoint parts of them."""
        at, of = self.ring.span(pair.queries), self.ring.span(pair.keys)
        bias = self.bias
        if bias is not None:
            at_queries, at_keys = bias.positions
            bias = bias._replace(positions=(at_queries[:, at], at_keys[:, of]))
        for sight in _between(self.sight, at, of, device):
            yield softmax.Plan(sight, bias, self.scale, 0.0, 0)


def _between(sight: Sight, at: slice, of: slice, device: torch.device) -> Iterator[Sight]:
    """What the queries `at` see of the keys `of`, in slots of these alone."""
    if sight.causal and at.start < of.start:
        return
    before, after = (None if x is None else x[:, at] for x in (sight.before, sight.after))
    if at == of:
        yield Sight(sight.causal, sight.window, 0, 0, before, after)
    elif sight.window is None and before is None and after is None:
        yield Sight(causal=False)
        return
    if before is None:
        before = torch.arange(at.start, at.stop, device=device).unsqueeze(0)
    # Queries count the distance to a slot from where the last of both stand one upon the other.
    window, apart = sight.window, at.stop - of.stop
    if at != of:
        limit, ahead = before, after
        if window is not None:
            limit = before.clamp(max=window - 1)
            ahead = torch.full_like(before, window - 1) if after is None else after.clamp(max=window - 1)
        if window is None or at.start - of.stop + 1 < window:
            yield Sight(causal=False, before=limit - apart, after=None if sight.causal or ahead is None else ahead + apart)
    if sight.sinks and window is not None and at.stop - 1 - of.start >= window:  # some slot is out of the window
        beyond = (before - sight.sinks).clamp(min=window - 1)
        yield Sight(causal=False, before=before - apart, beyond=beyond - apart)


class _Pair(NamedTuple):
    """Slices of queries and keys, by number; which of those in this process the queries are, and where the keys lie in which parcel."""

    queries: int
    place: int
    keys: int
    parcel: int
    span: slice


def _pairs(ring: Ring, step: int) -> Iterator[_Pair]:
    """All pairs that meet in this process after the keys have been passed on `step` times."""
    for n, rank in enumerate(ring.ranks.held):
        source, start = (rank - step) % ring.ranks.size, 0
        for keys in ring.slices(source):
            span = ring.span(keys)
            end = start + span.stop - span.start
            for i, queries in enumerate(ring.slices(rank)):
                yield _Pair(queries, 2 * n + i, keys, n, slice(start, end))
            start = end


def _round(ring: Ring, parcels: list[Parcel]) -> Iterator[tuple[int, list[Parcel]]]:
    """(step, what each held rank has then), once for every rank that there is; passed on while the caller computes."""
    for step in range(ring.ranks.size):
        last = step == ring.ranks.size - 1
        arrive = None if last else ring.ranks.pass_on(parcels, _times(ring, step + 1))
        yield step, parcels
        if arrive is not None:
            parcels = arrive()


def _times(ring: Ring, step: int) -> list[int]:
    """How many tokens what has been passed on `step` times has."""
    return [ring.length((rank - step) % ring.ranks.size) for rank in ring.ranks.held]


def _parcels(ring: Ring, *tensors: Tensor) -> list[Parcel]:
    """What each held rank has of some tensors."""
    lengths = [ring.length(rank) for rank in ring.ranks.held]
    return [list(parcel) for parcel in zip(*(torch.split(x, lengths, dim=2) for x in tensors), strict=True)]


class _Ring(torch.autograd.Function):
    """`attend`, for all slices in this process."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, b: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ring = plan.ring
        queries, fades = ring.pieces(q.to(torch.promote_types(q.dtype, torch.float32)), 2), _faded(ring, a)
        found: list[Output | None] = [None] * len(queries)
        for step, parcels in _round(ring, _parcels(ring, k, v, *_there(b))):
            for pair in _pairs(ring, step):
                tensors = _tensors(queries[pair.place], fades[pair.place], parcels[pair.parcel], pair.span)
                for part in plan.between(pair, q.device):
                    seen = _forward(part, tensors, parameters)
                    before = found[pair.place]
                    found[pair.place] = seen if before is None else merge(before, seen)
        y, lse = (torch.cat(parts, dim=2) for parts in zip(*(part for part in found if part is not None), strict=True))
        ctx.save_for_backward(q, k, v, a, b, y, lse, *parameters)
        ctx.plan = plan
        return y, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, a, b, y, lse, *parameters = ctx.saved_tensors
        plan: _Plan = ctx.plan
        ring, wide = plan.ring, y.dtype
        fades, moving = _faded(ring, a), [k, v, *_there(b)]
        queries, arriving, norms, excesses = (ring.pieces(x, 2) for x in (q.to(wide), dy, lse, (dy * y).sum(-1) - dlse))
        # The kernel makes the excess of the outputs, and knows no gradient by the log-sum-exp.
        outputs = [None for _ in queries] if dlse.any() else ring.pieces(y, 2)
        grown = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, wide)) for x in parameters]
        dq, da = torch.zeros_like(q, dtype=wide), None if a is None else torch.zeros_like(a)
        by_queries, by_fades = ring.pieces(dq, 2), _faded(ring, da)
        # What has been added up for the keys that are here goes on with them, and in the end is where they came from.
        totals = _parcels(ring, *(torch.zeros_like(x, dtype=torch.promote_types(x.dtype, wide)) for x in moving))
        for step, parcels in _round(ring, _parcels(ring, *moving)):
            for pair in _pairs(ring, step):
                here = pair.place
                tensors = _tensors(queries[here], fades[here], parcels[pair.parcel], pair.span)
                for part in plan.between(pair, q.device):
                    by, more = _backward(part, tensors, parameters, outputs[here], arriving[here], norms[here], excesses[here])
                    sums = (by_queries[here], *(x[:, :, pair.span] for x in totals[pair.parcel]), *_there(by_fades[here]), *grown)
                    for total, share in zip(sums, (by[0], by[1], by[2], *_there(by[4]), *_there(by[3]), *more), strict=True):
                        assert share is not None
                        total.add_(share)
            totals = ring.ranks.pass_on(totals, _times(ring, step + 1))()
        dk, dv, *db = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in zip(*totals, strict=True))
        by_parameters = (g.to(x.dtype) for g, x in zip(grown, parameters, strict=True))
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), da, db[0] if db else None, *by_parameters


def _forward(plan: softmax.Plan, tensors: softmax.Tensors, parameters: Sequence[Tensor]) -> Output:
    """Attention between two slices, by torch's kernel where that has all it takes."""
    q, k, v, *_ = tensors
    if not _plain(plan, tensors):
        return softmax.forward(plan, tensors, None, parameters)
    return cpu_kernel.attend(q, k.to(q.dtype), v.to(q.dtype), causal=plan.sight.causal, scale=plan.scale)


def _backward(
    plan: softmax.Plan,
    tensors: softmax.Tensors,
    parameters: Sequence[Tensor],
    y: Tensor | None,
    dy: Tensor,
    lse: Tensor,
    excess: Tensor,
) -> tuple[softmax.Tensors, list[Tensor]]:
    """`softmax.backward`, by torch's kernel where that has all it takes."""
    q, k, v, *_ = tensors
    if y is None or not _plain(plan, tensors):
        return softmax.backward(plan, tensors, parameters, dy, lse, excess)
    by = cpu_kernel.gradients(dy, q, k.to(q.dtype), v.to(q.dtype), y, lse, causal=plan.sight.causal, scale=plan.scale)
    return (*by, None, None), []


def _plain(plan: softmax.Plan, tensors: softmax.Tensors) -> bool:
    q, _, v, fade, _ = tensors
    wanted = plan.bias is not None or fade is not None or not plan.sight.plain or v.shape[-1] != q.shape[-1]
    return q.device.type == "cpu" and not wanted and cpu_kernel.usable()


def _there(x: Tensor | None) -> list[Tensor]:
    """x, if there is one."""
    return [] if x is None else [x]


def _faded(ring: Ring, x: Tensor | None) -> list[Tensor | None]:
    """A fade's side at the queries, slice by slice."""
    return [None for _ in ring.here] if x is None else list(ring.pieces(x, 2))


def _tensors(q: Tensor, at_queries: Tensor | None, parcel: Parcel, span: slice) -> softmax.Tensors:
    """What one slice of queries attends with to one of a parcel."""
    keys, values, *at_keys = (x[:, :, span] for x in parcel)
    return q, keys, values, at_queries, at_keys[0] if at_keys else None
