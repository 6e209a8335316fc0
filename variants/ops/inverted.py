"""Attention to chosen blocks, block by block: the queries that chose a block are gathered, and torch's fused kernel attends to it for all.

    y_i = sum_b exp(l_ib - l_i) y_ib        l_i = log sum_b exp(l_ib)        over the blocks b that query i chose

y_ib and l_ib are attention to block b alone. The queries that see a block whole stand in tiles of `ROWS` places, the last of which is
filled up; the block in which a query stands has a place for each of its slots. So the shape of a product never depends on how many chose,
and what later queries choose changes no digit of an earlier one. The kernel's backward pass takes the log-sum-exp of the union and gives
each block's part of the gradients, which are added up block after block. Memory is that of `TILE` numbers and of an index for each choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from variants.ops import cpu_kernel

#: Numbers of queries gathered at once (2 MB in fp32).
TILE = 2**19
#: Places in a tile, at most. More are filled up with more, and in fewer the kernel is no slower.
ROWS = 256
#: The smallest block, and the fewest queries that choose a block on average, for which the kernel is faster than a loop over queries.
SMALLEST, FEWEST = 64, 128


def suits(q: Tensor, k: Tensor, chosen: Tensor, place: Tensor, size: int) -> bool:
    """Whether this is the faster way: on a CPU, with large blocks that many choose, and queries that stand side by side."""
    if q.device.type != "cpu" or not cpu_kernel.usable() or size < SMALLEST or q.shape[3] < size or _rows(q, k, chosen, size) < FEWEST:
        return False
    in_line = (place == place[:, :1] + torch.arange(place.shape[1])).all() & (place[:, 0] >= 0).all() & (place[:, -1] < k.shape[2]).all()
    return bool(in_line)


def forward(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, place: Tensor, size: int, scale: float) -> tuple[Tensor, Tensor]:
    """y and lse for q (batch, groups, shared, time, width)."""
    out = v.shape[-1]
    queries, keys, values = _even(q.flatten(0, 3), _blocks(k, size), _blocks(v, size))
    # One place more than there are queries: what fills up a tile goes there.
    y, lse = q.new_zeros(len(queries) + 1, out), q.new_full((len(queries) + 1,), -torch.inf)
    for tile in _tiles(q, k, chosen, place, size):
        found, norm = cpu_kernel.attend(tile.of(queries), tile.looks(keys), tile.looks(values), causal=tile.own, scale=scale)
        found, norm, at = found[..., :out].flatten(0, 2), norm.flatten(), tile.target.flatten()
        if not tile.own:  # those came first
            before = lse[at]
            both = torch.logaddexp(before, norm)
            found = found.mul_((norm - both).exp_().unsqueeze(-1)).addcmul_(y.index_select(0, at), (before - both).exp_().unsqueeze(-1))
            norm = both
        y.index_copy_(0, at, found)
        lse.index_copy_(0, at, norm)
    return y[:-1].view(*q.shape[:-1], out), lse[:-1].view(q.shape[:-1])


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    place: Tensor,
    size: int,
    scale: float,
    y: Tensor,
    lse: Tensor,
    grad_y: Tensor,
    grad_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v."""
    width = q.shape[-1]
    keys, values = _blocks(k, size), _blocks(v, size)
    queries, y, arriving = (x.flatten(0, 3) for x in (q, y, grad_y))
    if grad_lse.any():  # one more channel: values 1, outputs 0, and what arrives is the gradient by lse
        values, y, arriving = pad(values, (0, 1), value=1.0), pad(y, (0, 1)), torch.cat([arriving, grad_lse.reshape(-1, 1)], -1)
    queries, keys, values, y, arriving = _even(queries, keys, values, y, arriving)
    # No weight is left where a tile is filled up.
    norm = pad(lse.flatten(), (0, 1), value=torch.inf)
    grad_q = q.new_zeros(len(queries) + 1, width)
    grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
    for tile in _tiles(q, k, chosen, place, size):
        told = (tile.of(arriving), tile.of(queries), tile.looks(keys), tile.looks(values), tile.of(y), norm[tile.target])
        by_q, by_k, by_v = cpu_kernel.gradients(*told, causal=tile.own, scale=scale)
        at, by_q = tile.target.flatten(), by_q[..., :width].flatten(0, 2)
        grad_q.index_copy_(0, at, by_q if tile.own else by_q.add_(grad_q.index_select(0, at)))
        grad_k.index_add_(0, tile.block, by_k.squeeze(1))
        grad_v.index_add_(0, tile.block, by_v.squeeze(1))
    return grad_q[:-1].view(q.shape), _slots(grad_k, k), _slots(grad_v, v)


class _Tile(NamedTuple):
    """Queries that look at one block each, (tiles, shared, rows): which, and where what is found for them belongs.

    block: (tiles,), of those of all rows and heads. own: the queries stand in the block, one at each slot.
    """

    source: Tensor
    target: Tensor
    block: Tensor
    own: bool

    def of(self, x: Tensor) -> Tensor:
        """(tiles, shared, rows, width)."""
        return x.index_select(0, self.source.flatten()).view(*self.source.shape, -1)

    def looks(self, x: Tensor) -> Tensor:
        """Keys or values, (tiles, 1, size, width)."""
        return x.index_select(0, self.block).unsqueeze(1)


def _rows(q: Tensor, k: Tensor, chosen: Tensor, size: int) -> int:
    """Places in a tile: as many queries as choose a block on average, if all choose, up to 512; from the shapes alone."""
    return min(ROWS, chosen.shape[-1] * size * q.shape[3] // k.shape[2])


def _tiles(q: Tensor, k: Tensor, chosen: Tensor, place: Tensor, size: int) -> Iterator[_Tile]:
    """First the blocks that queries stand in, then the others in order; in one of these tiles no query stands twice."""
    batch, groups, shared, time, width = q.shape
    blocks, rows, nobody = -(-k.shape[2] // size), _rows(q, k, chosen, size), batch * groups * shared * time
    chosen = chosen.repeat_interleave(groups // chosen.shape[1], 1)
    place = place[:, None].expand(batch, groups, time)
    own = ((chosen == (place // size).unsqueeze(-1)) & (place % size < size - 1).unsqueeze(-1)).any(-1)
    whole = (chosen >= 0) & (chosen * size + size - 1 <= place.unsqueeze(-1))
    group = torch.arange(batch * groups).view(batch, groups, 1)
    number = group * (shared * time) + torch.arange(time)  # of the first of the queries that share a choice
    together = torch.arange(shared).unsqueeze(-1) * time

    def tiles(members: Tensor, group: Tensor, block: Tensor, own: bool) -> Iterator[_Tile]:
        """From the numbers of queries, (tiles, rows), `nobody` where there is none."""
        if not len(members):
            return
        head = group // groups * k.shape[1] + group % groups * k.shape[1] // groups
        most = max(1, TILE // (shared * members.shape[1] * width))
        for part, block_ in zip(torch.split(members, most), torch.split(head * blocks + block, most), strict=True):
            some = part < nobody
            source = torch.where(some, part, part.amin(-1, keepdim=True)).unsqueeze(1) + together
            yield _Tile(source, source.masked_fill(~some.unsqueeze(1), nobody), block_, own)

    at = (group * blocks + place // size) * size + place % size
    members = torch.full((batch * groups * blocks * size,), nobody).index_copy_(0, at[own], number[own]).view(-1, size)
    some = (members < nobody).any(-1).nonzero().squeeze(1)
    yield from tiles(members[some], some // blocks, some % blocks, True)

    # Blocks in order, of each the groups in order, of each the queries in order.
    key, order = (chosen * (batch * groups) + group.unsqueeze(-1))[whole].sort(stable=True)
    count = key.bincount(minlength=blocks * batch * groups)
    needed = (count + rows - 1) // rows
    first, before = needed.cumsum(0) - needed, count.cumsum(0) - count
    at = torch.arange(len(key)) - before[key] + first[key] * rows
    queries = number.unsqueeze(-1).expand_as(chosen)[whole][order]
    members = torch.full((int(needed.sum()) * rows,), nobody).index_copy_(0, at, queries).view(-1, rows)
    label = torch.arange(len(needed)).repeat_interleave(needed)
    ends = needed.view(blocks, -1).sum(1).tolist()
    for part, label_ in zip(torch.split(members, ends), torch.split(label, ends), strict=True):
        yield from tiles(part, label_ % (batch * groups), label_ // (batch * groups), False)


def _blocks(x: Tensor, size: int) -> Tensor:
    """(batch, heads, slots, width) -> (batch * heads * blocks, size, width), filled up with 0."""
    return pad(x, (0, 0, 0, -x.shape[2] % size)).view(-1, size, x.shape[-1])


def _slots(blocks: Tensor, like: Tensor) -> Tensor:
    """The inverse, without what was filled up."""
    return blocks.view(*like.shape[:2], -1, blocks.shape[-1])[:, :, : like.shape[2], : like.shape[3]].contiguous()


def _even(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All as wide as the widest: the kernel has one width."""
    widest = max(x.shape[-1] for x in tensors)
    return tuple(pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in tensors)
