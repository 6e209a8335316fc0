"""Softmax attention in tiles, forward and backward written out. Exact; memory O(T) both ways; tiles that nothing sees are skipped.

    s_ij = scale q_i . k_j + ...        y_i = sum_j exp(s_ij - lse_i) v_j        lse_i = log sum_j exp(s_ij)

A tile of queries walks over tiles of keys with a running maximum and sum (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention",
algorithm 1); backward computes each tile of weights anew from the saved log-sum-exp (Dao 2023, "FlashAttention-2", section 3.1). A window's
tiles all look the same number of slots back, so that many of them go into one matrix product.

What decides the speed on a CPU: torch's exp takes 20 to 80 times longer where its result is not a normal number, and masked_fill_ 40 times
longer than an addition (measured: 2 threads, AVX-512). So logits are kept above FLOOR, where a weight is too small to matter, masks are
added before the exponential, and what they hide is multiplied by 0 after it. The products then take most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from variants.ops.attention import CAUSAL, Bias, Fade, Output, Sight
from variants.ops.precision import without_autocast
from variants.ops.tiling import TILE, Group, Step, Tiling, tiling

#: The least logit, after the row's maximum is subtracted; the exponential of any lower one is raised to that of this. So small a weight is
#: lost in the sum, and yet so large that its product with a small gradient is still a normal number.
FLOOR = {torch.float32: -40.0, torch.float64: -100.0}


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Float[Tensor, "batch heads q_time value_dim"]:
    """`attend` without the log-sum-exp."""
    y: Tensor = attend(q, k, v, **options).y
    return y


@torch.compiler.disable  # hundreds of tiles, unrolled, would take minutes to compile
def attend(
    q: Float[Tensor, "batch heads q_time head_dim"],
    k: Float[Tensor, "batch kv_heads k_time head_dim"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    *,
    sight: Sight = CAUSAL,
    bias: Bias | None = None,
    fade: Fade | None = None,
    sink: Float[Tensor, " heads"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Output:
    """The same as `reference.attend`. Raises ValueError for empty inputs, and for a bias trained by tensors it does not name.

    dropout: draws one number from the global generator if it is not 0.
    """
    if not q.numel() or not k.numel():
        raise ValueError(f"attention needs at least one query and one key; got q {tuple(q.shape)} and k {tuple(k.shape)}")
    plan = planned(q, k, sight=sight, bias=bias, scale=scale, dropout=dropout)
    at_queries, at_keys = fade or (None, None)
    with without_autocast(q):
        inputs = plan, q, k, v, at_queries, at_keys, sink, *(bias.parameters if bias else ())
        return Output(*_Attend.apply(*inputs))  # type: ignore[no-untyped-call]


def planned(q: Tensor, k: Tensor, *, sight: Sight, bias: Bias | None, scale: float | None, dropout: float = 0.0) -> Plan:
    """What `forward` and `backward` are told. Draws one number from the global generator if dropout is not 0."""
    return Plan(
        sight=sight.within(q.shape[2], k.shape[2]),
        bias=bias,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        dropout=dropout,
        seed=int(torch.randint(2**62, ())) if dropout else 0,
    )


#: q, k, v, and the two sides of a fade.
Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Plan:
    """What is the same for all tiles and no tensor to differentiate by."""

    sight: Sight
    bias: Bias | None
    scale: float
    dropout: float
    seed: int


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> tuple[Tensor, Tensor]:
        at_queries, at_keys, sink, *parameters = more
        y, lse = forward(plan, (q, k, v, at_queries, at_keys), sink, parameters)
        ctx.save_for_backward(q, k, v, *more, y, lse)
        ctx.plan = plan
        return y, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, at_queries, at_keys, sink, *parameters, y, lse = ctx.saved_tensors
        wide = _wide(q)
        # ds = p (dp - D): what lse is asked for enters like one more term of D.
        excess = (dy.to(wide) * y).sum(-1) - dlse
        by, grown = backward(ctx.plan, (q, k, v, at_queries, at_keys), parameters, dy, lse, excess)
        dsink = None if sink is None else -((sink.to(wide)[:, None] - lse).exp() * excess).sum((0, 2)).to(sink.dtype)
        dq, dk, dv, da, db = (None if x is None else x.to(of.dtype) for x, of in zip(by, (q, k, v, at_queries, at_keys), strict=True))
        return None, dq, dk, dv, da, db, dsink, *(g.to(x.dtype) for g, x in zip(grown, parameters, strict=True))


def forward(plan: Plan, tensors: Tensors, sink: Tensor | None, parameters: Sequence[Tensor | None]) -> Output:
    """Outputs, in the dtype of q, and the log-sum-exp; not differentiable."""
    q, _, v, _, _ = tensors
    batch, heads, time = q.shape[:3]
    # Heads lie inside time, as the projection that follows wants them.
    y = q.new_empty(batch, time, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, time, heads, dtype=_wide(q)).transpose(1, 2)
    for part in _parts(plan, tensors, parameters):
        part.forward(sink, y, lse)
    return Output(y, lse)


def backward(
    plan: Plan, tensors: Tensors, parameters: Sequence[Tensor | None], dy: Tensor, lse: Tensor, excess: Tensor
) -> tuple[Tensors, list[Tensor]]:
    """Gradients of q, k, v and the fade, and of the bias's parameters.

    lse: of all the keys that the queries attended to, of which these may be some. excess: y . dy, y over all of them too, less the gradient
    by lse.
    """
    q, k, v, at_queries, at_keys = tensors
    dq, da = torch.empty_like(q), None if at_queries is None else torch.empty_like(at_queries)
    # Contiguous, because products are added into them.
    dk, dv = (torch.zeros(x.shape, dtype=_wide(q), device=x.device) for x in (k, v))
    db = None if at_keys is None else torch.zeros(at_keys.shape, dtype=_wide(q), device=k.device)
    grown = [torch.zeros_like(x, dtype=_wide(x)) for x in parameters if x is not None]
    for part in _parts(plan, tensors, parameters):
        part.backward(dy, lse, excess, (dq, dk, dv, da, db), grown)
    return (dq, dk, dv, da, db), grown


def _parts(plan: Plan, tensors: Tensors, parameters: Sequence[Tensor | None]) -> Iterator[_Part]:
    """The batch and its heads, so many at a time that a tile of weights fits into the cache."""
    q, k = tensors[:2]
    batch, groups, shared = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    tiled = tiling(plan.sight, q.shape[2], k.shape[2], shared, q.device)
    # Tiles of one head make one product without copies of the slots; heads fill up what is left of the cache.
    tiles = max(group.last - group.first for group in tiled.groups)
    fit = max(1, TILE // (shared * tiled.tile * tiled.width * tiles))
    rows, together = max(1, fit // groups), min(fit, groups)
    generator = torch.Generator(q.device).manual_seed(plan.seed) if plan.dropout else None
    trained = [p for p in parameters if p is not None]
    for row in range(0, batch, rows):
        for group in range(0, groups, together):
            here = slice(row, min(row + rows, batch)), slice(group, min(group + together, groups))
            yield _Part(plan, tiled, shared, *here, tensors, trained, generator)


class _Part:
    """Some rows and some key/value heads of a problem, laid out for products.

    Weights are (tiles * rows * groups, shared * tile, slots): the queries of the heads that share a key/value head stand one below another.
    """

    def __init__(
        self,
        plan: Plan,
        tiled: Tiling,
        shared: int,
        rows: slice,
        groups: slice,
        tensors: Tensors,
        parameters: Sequence[Tensor],
        generator: torch.Generator | None,
    ):
        self.plan, self.tiled, self.shared, self.rows, self.groups = plan, tiled, shared, rows, groups
        self.heads = slice(groups.start * shared, groups.stop * shared)
        self.size = rows.stop - rows.start, groups.stop - groups.start
        self.parameters, self.generator = parameters, generator
        q, k, v, a, b = tensors
        self.dtype = _wide(q)
        self.floor = FLOOR[self.dtype]
        self.q = self.tiles(q)
        self.k, self.v = (self.slots(x, groups) for x in (k, v))
        self.at_queries = None if a is None else tiled.queries(a[rows, self.heads, :, None], self.size[1])
        self.at_keys = None if b is None else b[rows, self.heads, :, None].contiguous()
        if plan.bias is not None:
            alike = plan.bias.alike and len(tiled.before) == 1
            at_queries, at_keys = (x[:1] if alike else x[rows] for x in plan.bias.positions)
            self.q_positions = tiled.queries(at_queries[:, None, :, None], 1).flatten(2)
            self.k_positions = at_keys[:, None, :, None]

    def tiles(self, x: Tensor) -> Float[Tensor, "tiles rows groups queries channels"]:
        """The queries' part of a tensor (batch, heads, q_time, channels)."""
        return self.tiled.queries(x[self.rows, self.heads].to(self.dtype), self.size[1])

    def slots(self, x: Tensor, groups: slice) -> Float[Tensor, "rows groups slots channels"]:
        """The part of keys or values; as it lies in memory where rows and groups can be taken as one axis without a copy."""
        x = x[self.rows, groups].to(self.dtype)
        return x if self.size[0] == 1 else x.contiguous()

    def forward(self, sink: Tensor | None, y: Tensor, lse: Tensor) -> None:
        """Write this part of the outputs."""
        for group in self.tiled.groups:
            q = self.of(self.q, group)
            top = q.new_full((*q.shape[:2], 1), torch.finfo(q.dtype).min)
            total, out = torch.zeros_like(top), q.new_empty(*q.shape[:2], self.v.shape[-1])
            number = -1
            for number, step in enumerate(self.tiled.steps(group, self.rows)):
                mask = step.mask(self.dtype)
                weights = self.logits(q, group, step, self.parameters)
                if mask is not None:
                    self.spread(weights, group).add_(mask.added)
                last, top = top, torch.maximum(top, weights.amax(-1, keepdim=True))
                weights.sub_(top).clamp_(min=self.floor).exp_()
                if mask is not None:
                    self.spread(weights, group).mul_(mask.kept)
                if number:
                    fading = (last - top).clamp_(min=self.floor).exp_()
                    total.mul_(fading).add_(weights.sum(-1, keepdim=True))
                    out.mul_(fading)
                else:
                    total = weights.sum(-1, keepdim=True)
                if self.generator is not None:
                    weights.mul_(self.dropped(weights))
                out.baddbmm_(weights, step.take(self.v), beta=1 if number else 0)
            if number < 0:  # nothing in sight
                out.zero_()
            out.div_(total.clamp(min=torch.finfo(total.dtype).tiny))
            found = top + total.log()
            if sink is not None:
                extra = sink[self.heads].to(self.dtype).view(1, self.size[1], self.shared, 1, 1)
                spread = found.view(-1, self.size[1], self.shared, self.tiled.tile, 1)
                out.view(*spread.shape[:-1], -1).mul_(torch.sigmoid(spread - extra))
                found = torch.logaddexp(spread, extra)
            span = self.tiled.span(group)
            y[self.rows, self.heads, span] = self.untiled(out, group)
            lse[self.rows, self.heads, span] = self.untiled(found, group).squeeze(-1)

    def backward(self, dy: Tensor, lse: Tensor, excess: Tensor, gradients: tuple[Tensor | None, ...], grown: Sequence[Tensor]) -> None:
        """Write this part of the gradients of q, k, v and the fade; add to those of the bias's parameters."""
        dq, dk, dv, da, db = gradients
        assert dq is not None and dk is not None and dv is not None
        tiled, rows, heads = self.tiled, self.rows, self.heads
        dys, excesses = self.tiles(dy), self.tiles(excess.unsqueeze(-1))
        lses = self.tiles(lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1))  # of a row that sees nothing, all is masked
        dk, dv = dk[rows, self.groups], dv[rows, self.groups]
        db = None if db is None else db[rows, heads].unsqueeze(-1)
        for group in tiled.groups:
            span = tiled.span(group)
            q, dy_, d, norm = (self.of(x, group) for x in (self.q, dys, excesses, lses))
            dq_, da_ = torch.empty_like(q), None if db is None else torch.zeros_like(d)
            number = -1
            for number, step in enumerate(tiled.steps(group, rows)):
                mask = step.mask(self.dtype)
                k, v = step.take(self.k), step.take(self.v)
                weights = self.logits(q, group, step, self.parameters).sub_(norm).clamp_(self.floor, 0).exp_()
                if mask is not None:
                    self.spread(weights, group).mul_(mask.kept)
                grad = torch.bmm(dy_, v.transpose(1, 2))
                if self.generator is None:
                    step.give(dv, weights, dy_)
                else:
                    dropped = self.dropped(weights)
                    grad.mul_(dropped)
                    step.give(dv, dropped.mul_(weights), dy_)
                grad.sub_(d).mul_(weights)
                dq_.baddbmm_(grad, k, beta=1 if number else 0, alpha=self.plan.scale)
                step.give(dk, grad, q, self.plan.scale)
                if db is not None and da_ is not None:
                    da_ += grad.sum(-1, keepdim=True)
                    by_head = grad.view(-1, self.tiled.tile, grad.shape[-1])
                    step.give(db, by_head, by_head.new_full((len(by_head), self.tiled.tile, 1), -1))
                self.grow(grown, grad, group, step)
            if number < 0:
                dq_.zero_()
            dq[rows, heads, span] = self.untiled(dq_, group)
            if da is not None and da_ is not None:
                da[rows, heads, span] = self.untiled(da_, group).squeeze(-1)

    def of(self, tiles: Tensor, group: Group) -> Float[Tensor, "tiles_rows_groups queries channels"]:
        """The tiles of one group, one product after another."""
        return tiles[group.first : group.last].flatten(0, 2)

    def untiled(self, x: Tensor, group: Group) -> Float[Tensor, "rows heads queries channels"]:
        """Outputs of one group as (rows, heads, queries, channels)."""
        return self.tiled.untiled(x.view(-1, *self.size, self.shared * self.tiled.tile, x.shape[-1]), group, self.shared)

    def spread(self, weights: Tensor, group: Group) -> Float[Tensor, "tiles rows groups shared queries slots"]:
        """Weights with every axis to itself."""
        return weights.view(group.last - group.first, *self.size, self.shared, self.tiled.tile, -1)

    def logits(self, q: Tensor, group: Group, step: Step, parameters: Sequence[Tensor]) -> Float[Tensor, "tiles_rows_groups queries slots"]:
        """Scores of a group's queries with the slots of a step; what is hidden is not hidden yet."""
        k = step.take(self.k).transpose(1, 2)
        if self.at_queries is None or self.at_keys is None:
            scores = q.new_empty(*q.shape[:2], k.shape[2]).baddbmm_(q, k, beta=0, alpha=self.plan.scale)
        else:
            at_queries = self.of(self.at_queries, group).view(len(q), self.shared, -1, 1)
            at_keys = step.take(self.at_keys).view(len(q), self.shared, 1, -1)
            here = at_queries[:, :, :1]  # sums that have grown large are near each other where it matters
            fade = (at_queries - here).to(self.dtype) - (at_keys - here).to(self.dtype)
            scores = fade.flatten(1, 2).baddbmm_(q, k, alpha=self.plan.scale)
        if self.plan.bias is not None:
            self.spread(scores, group).add_(self.bias(group, step, parameters))
        return scores

    def bias(self, group: Group, step: Step, parameters: Sequence[Tensor]) -> Float[Tensor, "tiles rows_or_1 groups shared queries slots"]:
        """The bias of a group's queries with the slots of a step."""
        assert self.plan.bias is not None
        tiles, rows = group.last - group.first, self.q_positions.shape[1]
        at_queries = self.q_positions[group.first : group.last].flatten(0, 1)
        with torch.set_grad_enabled(torch.is_grad_enabled() or not parameters):
            hook, at_keys = self.plan.bias.hook, step.take(self.k_positions).squeeze(-1)
            found = hook(at_queries, at_keys, *parameters)
            if found.ndim == 3:  # for rows with equal positions, and those of tiles are not
                found = torch.stack([hook(at_queries[i : i + 1], at_keys[i : i + 1], *parameters) for i in range(len(at_queries))])
        if found.requires_grad and not parameters:
            raise ValueError("the bias is trained by tensors that it does not name: give them as Bias.parameters")
        found = found.to(self.dtype)
        here = found[:, self.heads] if found.shape[1] > 1 else found.expand(-1, self.size[1] * self.shared, -1, -1)
        return here.reshape(tiles, rows, self.size[1], self.shared, *here.shape[2:])

    def grow(self, grown: Sequence[Tensor], grad: Tensor, group: Group, step: Step) -> None:
        """Add what the logits' gradient means for the bias's parameters."""
        if not grown:
            return
        copies = [p.detach().requires_grad_() for p in self.parameters]
        with torch.enable_grad():
            bias = self.bias(group, step, copies)
        grad = self.spread(grad, group).sum_to_size(bias.shape)
        for total, part in zip(grown, torch.autograd.grad(bias, copies, grad, allow_unused=True), strict=True):
            if part is not None:
                total.add_(part)

    def dropped(self, weights: Tensor) -> Tensor:
        """0 for the weights to drop, and for the others what makes up for them. Forward and backward ask in the same order."""
        keep = 1 - self.plan.dropout
        return torch.empty_like(weights).bernoulli_(keep, generator=self.generator).div_(keep)


def _wide(x: Tensor) -> torch.dtype:
    """fp32 or better, whatever x is in."""
    return torch.promote_types(x.dtype, torch.float32)
