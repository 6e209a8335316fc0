"""Attention of every query to the blocks of keys that were chosen for it: work proportional to what was chosen, forward and backward.

    y_i = sum_j exp(s_ij - lse_i) v_j        s_ij = scale q_i . k_j        over the slots j <= place_i of the blocks chosen for query i

On a CPU large blocks are attended to one after another, by the queries that chose them (`variants.ops.inverted`); for others compiled loops
read keys and values where they lie, for several heads at once where they share them (`variants.ops.lane_loops`). Elsewhere, and without
numba, the blocks of a tile of queries are gathered, and memory is that of one tile. What is not chosen is neither computed nor given a
gradient. The backward pass computes the weights again from the log-sum-exp. In fp32 or better whatever the input's dtype, also under
autocast; first derivatives only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from variants.ops import inverted
from variants.ops.attention import Output
from variants.ops.precision import without_autocast
from variants.ops.threads import spread

#: Numbers of gathered keys alive at once where they are gathered (16 MB in fp32).
TILE = 2**22
#: Into how many parts all queries are cut for the backward pass, each with gradients of keys and values of its own, which are added up in
#: one order whatever the number of threads.
PARTS = 8
#: Query heads that share keys from which on they are worth registers of their own.
SHARED = 3
#: Products below which a second thread costs more than it brings.
WORTH = 2**18

GIVEN = "Tensor q, Tensor k, Tensor v, Tensor chosen, Tensor place, int size, float scale, bool loops"


def attend_blocks(
    q: Float[Tensor, "batch heads q_time key_dim"],
    k: Float[Tensor, "batch kv_heads k_time key_dim"],
    v: Float[Tensor, "batch kv_heads k_time value_dim"],
    chosen: Int[Tensor, "batch groups q_time count"],
    place: Int[Tensor, "batch q_time"],
    *,
    size: int,
    scale: float | None = None,
    loops: bool = False,
) -> Output:
    """The same as `reference.attend_blocks`, for blocks that are all different; y and lse in fp32 or better.

    groups divide heads, and kv_heads divide groups or groups kv_heads. loops: run the compiled loops, which need numba and a CPU.
    """
    heads, dtype = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    batch, _, _, width = k.shape
    fits = q.shape[0] == batch and q.shape[3] == width and v.shape[:3] == k.shape[:3]
    if not fits or chosen.shape[:3] != (batch, chosen.shape[1], q.shape[2]) or place.shape != (batch, q.shape[2]):
        raise ValueError(f"attend_blocks: shapes do not go together: {', '.join(str(tuple(x.shape)) for x in (q, k, v, chosen, place))}")
    with without_autocast(q):
        together = torch.unflatten(q.to(dtype), 1, (max(k.shape[1], chosen.shape[1]), -1)).contiguous()
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        given = (together, k.to(dtype).contiguous(), v.to(dtype).contiguous(), chosen.contiguous(), place.contiguous())
        y, lse = _attend(*given, size, scale, loops and q.device.type == "cpu")
    assert y.shape[1] * y.shape[2] == heads
    return Output(y.flatten(1, 2), lse.flatten(1, 2))


@torch.library.custom_op("attnlab::attend_blocks", mutates_args=(), schema=f"({GIVEN}) -> (Tensor, Tensor)")
def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, place: Tensor, size: int, scale: float, loops: bool) -> tuple[Tensor, Tensor]:
    """q, and the y that comes back, (batch, groups, shared, time, width)."""
    if inverted.suits(q, k, chosen, place, size):
        return inverted.forward(q, k, v, chosen, place, size, scale)
    y, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    if loops:
        from variants.ops import gather_loops

        if q.shape[2] >= SHARED:
            return _in_lanes(q, k, v, chosen, place, size, scale)
        given = [x.detach().numpy() for x in (q, k, v, chosen, place)]
        told = (*given, size, q.new_tensor(scale).numpy()[()], y.numpy(), lse.numpy())
        tasks = q.shape[0] * q.shape[1] * q.shape[3]
        spread(lambda first, end: gather_loops.forward(first, end, *told), tasks, parallel=_worth(q, chosen, size))
        return y, lse
    for tile in tiles(q, k, chosen, size):
        part = Gathered(q, k, v, chosen, place, size, tile)
        logits = part.logits(scale)
        lse[..., tile] = part.alone(logits.logsumexp(-1))
        y[..., tile, :] = part.alone(part.weights(logits, logits.logsumexp(-1)) @ part.values)
    return y, lse


def _in_lanes(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, place: Tensor, size: int, scale: float) -> tuple[Tensor, Tensor]:
    """The compiled loops for heads that share keys."""
    from variants.ops import lane_loops

    shared, out = q.shape[2], v.shape[3]
    wide, parallel = filled(q), _worth(q, chosen, size)
    y, lse = wide.new_empty(*wide.shape[:-1], out + -out % 32), wide.new_empty(wide.shape[:-1])
    told = (*_laned(wide, k, v, chosen, place, size, scale), y.numpy(), lse.numpy())
    tasks = q.shape[0] * q.shape[1] * -(-q.shape[3] // lane_loops.QUERIES)
    spread(lambda first, end: lane_loops.forward(first, end, *told), tasks, parallel=parallel)
    return y[:, :, :shared, :, :out].contiguous(), lse[:, :, :shared].contiguous()


def _laned(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, place: Tensor, size: int, scale: float) -> tuple[Any, ...]:
    """What both loops are told, of which q is filled up."""
    tables = (filled(x).detach().flatten().numpy() for x in (k, v))
    return q.detach().numpy(), *tables, k.shape[1], chosen.numpy(), place.numpy(), size, q.new_tensor(scale).numpy()[()]


def _backward_in_lanes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    place: Tensor,
    size: int,
    scale: float,
    lse: Tensor,
    delta: Tensor,
    grad_y: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Their gradients."""
    from variants.ops import lane_loops

    wide, parts = filled(q), -(-PARTS // (q.shape[0] * q.shape[1]))
    sums = (pad(x, (0, 0, 0, wide.shape[2] - q.shape[2])).numpy() for x in (lse, delta))
    grad_q, grad_k, grad_v = torch.empty_like(wide), *(_copies(x, parts * (q.shape[1] // k.shape[1])) for x in (k, v))
    grads = (x.numpy() for x in (grad_q, grad_k.flatten(1), grad_v.flatten(1)))
    told = (*_laned(wide, k, v, chosen, place, size, scale), *sums, filled(grad_y).numpy(), *grads)
    tasks = q.shape[0] * q.shape[1] * parts
    spread(lambda first, end: lane_loops.backward(first, end, parts, *told), tasks, parallel=_worth(q, chosen, size))
    by_k, by_v = (total.sum(0)[..., : x.shape[3]].contiguous() for total, x in ((grad_k, k), (grad_v, v)))
    return grad_q[:, :, : q.shape[2], :, : q.shape[4]].contiguous(), by_k, by_v


def filled(x: Tensor) -> Tensor:
    """Widths filled up with 0 to a multiple of what two registers hold, and the heads that share keys, if there are, to one of four."""
    return pad(x, (0, -x.shape[-1] % 32, *((0, 0, 0, -x.shape[2] % 4) if x.ndim == 5 else ()))).contiguous()


def _copies(x: Tensor, count: int) -> Tensor:
    """So many gradients of a filled table, 0."""
    return x.new_zeros(count, *x.shape[:-1], x.shape[-1] + -x.shape[-1] % 32)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, place: Tensor, size: int, scale: float, loops: bool) -> Any:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])


@torch.library.custom_op(
    "attnlab::attend_blocks_backward",
    mutates_args=(),
    schema=f"({GIVEN}, Tensor y, Tensor lse, Tensor grad_y, Tensor grad_lse) -> (Tensor, Tensor, Tensor)",
)
def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    place: Tensor,
    size: int,
    scale: float,
    loops: bool,
    y: Tensor,
    lse: Tensor,
    grad_y: Tensor,
    grad_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v."""
    if inverted.suits(q, k, chosen, place, size):
        return inverted.backward(q, k, v, chosen, place, size, scale, y, lse, grad_y, grad_lse)
    # Where nothing is seen, there is nothing to differentiate; -inf would make NaN of it.
    lse, delta = lse.clamp(min=torch.finfo(lse.dtype).min), (y * grad_y).sum(-1) - grad_lse
    grad_q = torch.zeros_like(q)
    if loops:
        from variants.ops import gather_loops

        if q.shape[2] >= SHARED:
            return _backward_in_lanes(q, k, v, chosen, place, size, scale, lse, delta, grad_y)
        parts = -(-PARTS // (q.shape[0] * q.shape[1]))
        copies = parts * (q.shape[1] // k.shape[1])
        grad_k, grad_v = (x.new_zeros(copies, *x.shape) for x in (k, v))
        given = [x.detach().numpy() for x in (q, k, v, chosen, place)]
        told = (*given, size, q.new_tensor(scale).numpy()[()], *(x.detach().numpy() for x in (lse, delta, grad_y, grad_q, grad_k, grad_v)))
        tasks = q.shape[0] * q.shape[1] * parts
        spread(lambda first, end: gather_loops.backward(first, end, parts, *told), tasks, parallel=_worth(q, chosen, size))
        return grad_q, grad_k.sum(0), grad_v.sum(0)
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for tile in tiles(q, k, chosen, size):
        part = Gathered(q, k, v, chosen, place, size, tile)
        arriving, weights = part.cut(grad_y), part.weights(part.logits(scale), part.cut(lse))
        by_logits = weights * (arriving @ part.values.mT - part.cut(delta).unsqueeze(-1)) * scale
        grad_q[..., tile, :] = part.alone(by_logits @ part.keys)
        part.add(grad_k, by_logits.mT @ part.queries)
        part.add(grad_v, weights.mT @ arriving)
    return grad_q, grad_k, grad_v


@_attend_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, size, scale, loops = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.told = (size, scale, loops)


def _differentiate(ctx: Any, grad_y: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    *given, y, lse = ctx.saved_tensors
    grads = _attend_backward(*given, *ctx.told, y, lse, grad_y.contiguous(), grad_lse.contiguous())
    return *grads, None, None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.attnlab.attend_blocks)
def _flops(q: Any, k: Any, v: Any, chosen: Any, place: Any, size: int, *_: Any, **__: Any) -> int:
    """Products with the slots of the chosen blocks, forward; from shapes."""
    return 2 * _pairs(q, k, chosen, size) * int(q[-1] + v[-1])


@register_flop_formula(torch.ops.attnlab.attend_blocks_backward)
def _backward_flops(q: Any, k: Any, v: Any, chosen: Any, place: Any, size: int, *_: Any, **__: Any) -> int:
    """Logits again, and the gradients by weights, queries, keys and values."""
    return 2 * _pairs(q, k, chosen, size) * int(3 * q[-1] + 2 * v[-1])


def _pairs(q: Any, k: Any, chosen: Any, size: int) -> int:
    """Pairs of a query and a slot that it chose, of which the first queries have fewer; the last query stands at the last slot."""
    batch, groups, shared, time, _ = q
    most, before = chosen[-1] * size, k[2] - time
    short = min(time, max(0, most - before))
    return int(batch * groups * shared * (short * before + short * (short + 1) // 2 + (time - short) * most))


class Gathered:
    """The blocks of one tile of queries, (batch, groups, tile, keys, width), and the queries that share them, (..., shared, width)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, place: Tensor, size: int, tile: slice):
        groups, self.tile = q.shape[1], tile
        here = chosen[:, :, tile].repeat_interleave(groups // chosen.shape[1], 1)
        slots = (here.unsqueeze(-1) * size + torch.arange(size, device=q.device)).flatten(-2)
        self.seen = (here >= 0).repeat_interleave(size, -1) & (slots <= place[:, None, tile, None]) & (slots < k.shape[2])
        # Rows and key heads are counted through, so that one index picks out of all of them.
        heads = torch.arange(groups, device=q.device) * k.shape[1] // groups
        first = (torch.arange(len(q), device=q.device)[:, None] * k.shape[1] + heads) * k.shape[2]
        self.index = slots.clamp(0, k.shape[2] - 1) + first[:, :, None, None]
        self.keys, self.values = (x.flatten(0, 2)[self.index] for x in (k, v))
        self.queries = self.cut(q)

    def cut(self, x: Tensor) -> Tensor:
        """The tile of something (batch, groups, shared, time, ...), those that share a choice side by side."""
        return x[:, :, :, self.tile].movedim(2, 3)

    def alone(self, x: Tensor) -> Tensor:
        """The inverse of `cut`."""
        return x.movedim(3, 2)

    def logits(self, scale: float) -> Tensor:
        """-inf where a key is not seen."""
        return (self.queries @ self.keys.mT * scale).masked_fill(~self.seen.unsqueeze(3), -torch.inf)

    def weights(self, logits: Tensor, lse: Tensor) -> Tensor:
        """0 where a key is not seen."""
        return (logits - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()

    def add(self, total: Tensor, x: Tensor) -> None:
        """Add to the keys or values where these were taken from; in place."""
        total.view(-1, total.shape[-1]).index_add_(0, self.index.flatten(), x.flatten(0, 3))


def tiles(q: Tensor, k: Tensor, chosen: Tensor, size: int) -> Iterator[slice]:
    """So many queries that their gathered keys are TILE numbers at most, at least one."""
    batch, groups, _, time, width = q.shape
    tile = max(1, TILE // (batch * groups * chosen.shape[-1] * size * width))
    for first in range(0, time, tile):
        yield slice(first, min(first + tile, time))


def _worth(q: Tensor, chosen: Tensor, size: int) -> bool:
    """Whether there is work for several threads."""
    return q.numel() * chosen.shape[-1] * size >= WORTH
