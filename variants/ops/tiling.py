"""How attention is cut into tiles: which slices of slots each tile of queries looks at, and what of them it may not see.

A tile is `tile` queries in a row; slices of slots lie at the same distance from each tile of a group, so that one matrix product serves
them all. Full attention has one tile a group and one slice for every `width` slots in its sight; a window has many tiles a group, and one
slice as wide as the window and the tile. Sinks are slots picked one by one. What a slice holds too much is masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from variants.ops.attention import Sight

#: Numbers in a tile of weights, all rows and heads together: 4 MB in fp32. Of 1 to 4 MB the fastest at 4,096 tokens (2 threads).
TILE = 2**20
#: Queries in a tile, at most and at least; and slots in a slice, where a window does not say how many.
QUERIES, FEWEST, SLOTS = 256, 16, 512


class Mask(NamedTuple):
    """added: 0 where the slot is seen, and where not the half of the lowest number, which leaves room for the logit itself; infinity would
    make NaN. kept: 1 and 0. Both (tiles, rows, 1, 1, tile, slots), 1 where all are alike.
    """

    added: Tensor
    kept: Tensor


@runtime_checkable
class Step(Protocol):
    """The slots that a group of tiles looks at in one product."""

    def take(self, slots: Shaped[Tensor, "rows groups slots channels"]) -> Shaped[Tensor, "tiles_rows_groups taken channels"]:
        """What of the slots each tile looks at."""

    def give(
        self,
        slots: Float[Tensor, "rows groups slots channels"],
        weights: Float[Tensor, "tiles_rows_groups queries taken"],
        x: Float[Tensor, "tiles_rows_groups queries channels"],
        scale: float = 1.0,
    ) -> None:
        """Add scale weights^T x to the slots where `take` took it."""

    def mask(self, dtype: torch.dtype) -> Mask | None:
        """What the tiles may not see of it; None where they see it all."""


class Group(NamedTuple):
    """Tiles first .. last - 1. slices: (low, high) recent slots of the first tile; those of the next one lie `tile` further on."""

    first: int
    last: int
    slices: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Tiling:
    """The tiling of a problem."""

    sight: Sight
    q_time: int
    recent: int
    tile: int
    width: int
    count: int
    groups: tuple[Group, ...]
    before: Tensor
    after: Tensor | None
    beyond: Tensor | None
    #: For each tile, the lowest and the highest slot at which a segment of its queries begins, at which one ends, and from which on slots
    #: are too near to one of them.
    begins: tuple[Sequence[int], Sequence[int]] | None
    ends: tuple[Sequence[int], Sequence[int]] | None
    nears: tuple[Sequence[int], Sequence[int]] | None
    #: Masks that are the same for all rows, by what they depend on.
    masks: dict[tuple[int | None, int, int, torch.dtype], Mask] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """The recent slot at which query 0 stands."""
        return self.recent - self.q_time

    def queries(self, x: Shaped[Tensor, "rows heads q_time channels"], groups: int) -> Shaped[Tensor, "tiles rows groups queries channels"]:
        """x cut into tiles; the queries of the heads that share a key/value head lie in one tile, head by head."""
        rows, heads, time, channels = x.shape
        if time != self.count * self.tile:
            x = pad(x, (0, 0, 0, self.count * self.tile - time))
        x = x.reshape(rows, groups, heads // groups, self.count, self.tile, channels)
        return x.permute(3, 0, 1, 2, 4, 5).flatten(3, 4)

    def untiled(self, tiles: Tensor, group: Group, shared: int) -> Shaped[Tensor, "rows heads queries channels"]:
        """What `queries` did, undone for the tiles of one group: (tiles, rows, groups, queries, channels)."""
        count, rows, groups, _, channels = tiles.shape
        x = tiles.view(count, rows, groups, shared, self.tile, channels).permute(1, 2, 3, 0, 4, 5)
        x = x.reshape(rows, groups * shared, count * self.tile, channels)
        return x[:, :, : self.span(group).stop - self.span(group).start]

    def span(self, group: Group) -> slice:
        """The queries of a group."""
        return slice(group.first * self.tile, min(group.last * self.tile, self.q_time))

    def steps(self, group: Group, rows: slice) -> Iterator[Step]:
        """Everything a group looks at, in these rows of the batch."""
        for low, high in group.slices:
            yield _Slice(self, group, rows, low, high)
        if self.sight.sinks and group.slices:
            yield _Sinks(self, group, rows)

    def extents(self, rows: slice, tiles: slice) -> tuple[Tensor | None, ...]:
        """`before`, `after` and `beyond` of these rows and tiles: (rows, tiles, tile), one row where all are alike."""
        told = (self.before, self.after, self.beyond)
        return tuple(None if x is None else (x if len(x) == 1 else x[rows])[:, tiles] for x in told)


def tiling(sight: Sight, q_time: int, k_time: int, shared: int, device: torch.device) -> Tiling:
    """The tiling of `q_time` queries over `k_time` slots, where `shared` query heads read one key/value head."""
    recent = k_time - sight.kept
    offset = recent - q_time
    wanted = q_time // 8 if sight.window is None else window_tile(sight.window)
    tile = min(q_time, _power_of_two(min(max(wanted, FEWEST), max(QUERIES // shared, FEWEST))))
    count = -(-q_time // tile)
    last = torch.arange(count * tile, device=device).clamp(max=q_time - 1)
    told = sight.extents(q_time, k_time, device)
    before, after, beyond = (None if x is None else x[:, last].view(-1, count, tile) for x in told)
    assert before is not None
    slots = last.view(count, tile) + offset
    begins = None if sight.before is None else _extremes(slots - before)
    ends = None if after is None else _extremes(slots + after)
    nears = None if beyond is None else _extremes(slots - beyond)

    back, ahead = recent, 0 if sight.causal else recent + q_time
    if sight.window is not None:
        back = _multiple(sight.window - 1, tile)
        ahead = 0 if sight.causal else _multiple(max(sight.window, sight.sinks) - 1, tile)
    slices = [(i * tile + offset - back, (i + 1) * tile + offset + ahead) for i in range(count)]
    width = back + tile + ahead
    if sight.window is not None and width <= 2 * SLOTS:
        together = max(1, TILE // (shared * tile * width))
        # Tiles near the ends, whose slices reach beyond them, by themselves.
        inner = [i for i, (low, high) in enumerate(slices) if low >= sight.sinks and high <= recent] or [count, count - 1]
        starts = (range(0, inner[0], together), range(inner[0], inner[-1] + 1, together), range(inner[-1] + 1, count, together))
        cuts = [*itertools.chain(*starts), count]
    else:
        width, cuts = min(recent, max(SLOTS, SLOTS * QUERIES // (shared * tile))), [*range(count + 1)]
    groups: list[Group] = []
    for start, end in itertools.pairwise(cuts):
        low, high = slices[start]
        if end == start + 1:
            low = max(low, 0 if begins is None else max(0, begins[0][start]))
            high = min(high, recent if ends is None else min(recent, ends[1][start] + 1))
            if nears is not None and not sight.sinks:  # which may be far enough where no slot of the window is
                high = min(high, nears[1][start])
        groups.append(Group(start, end, tuple((s, min(s + width, high)) for s in range(low, high, width))))
    return Tiling(sight, q_time, recent, tile, width, count, tuple(groups), before, after, beyond, begins, ends, nears)


def window_tile(window: int) -> int:
    """Queries in a tile of a window: few, because a tile looks at their number of slots more than the window has; but not too few for a
    product (measured at windows of 8 to 256).
    """
    return min(max(window // 4, min(window // 2, 2 * FEWEST), FEWEST), QUERIES)


@dataclass(frozen=True)
class _Slice:
    """Slots low .. high - 1 of the first tile, and for each next one those `tile` further on."""

    tiling: Tiling
    group: Group
    rows: slice
    low: int
    high: int

    def take(self, slots: Shaped[Tensor, "rows groups slots channels"]) -> Shaped[Tensor, "tiles_rows_groups taken channels"]:
        reached, missing = self._reached(slots)
        if missing != (0, 0):
            reached = pad(reached, (0, 0, *missing))
        if self._tiles == 1:
            return reached.flatten(0, 1)
        slices = reached.unfold(2, self.high - self.low, self.tiling.tile)
        return slices.permute(2, 0, 1, 4, 3).reshape(-1, self.high - self.low, slots.shape[-1])

    def give(
        self,
        slots: Float[Tensor, "rows groups slots channels"],
        weights: Float[Tensor, "tiles_rows_groups queries taken"],
        x: Float[Tensor, "tiles_rows_groups queries channels"],
        scale: float = 1.0,
    ) -> None:
        (inside, missing), tiles, tile = self._reached(slots), self._tiles, self.tiling.tile
        reached = inside if missing == (0, 0) else pad(torch.zeros_like(inside), (0, 0, *missing))
        if tiles == 1:
            reached.flatten(0, 1).baddbmm_(weights.transpose(1, 2), x, alpha=scale)
        for i in range(weights.shape[-1] // tile if tiles > 1 else 0):  # slices overlap, but not the i-th pieces of them
            piece = reached[:, :, i * tile : (i + tiles) * tile]
            piece = piece.view(*piece.shape[:2], tiles, tile, -1).permute(2, 0, 1, 3, 4)
            piece_of = weights[:, :, i * tile : (i + 1) * tile].transpose(1, 2)
            if len(weights) == tiles:
                piece.flatten(0, 2).baddbmm_(piece_of, x, alpha=scale)
            else:
                piece.add_(torch.bmm(piece_of, x).view(piece.shape), alpha=scale)
        if reached is not inside:
            inside += reached[:, :, missing[0] : reached.shape[2] - missing[1]]

    def mask(self, dtype: torch.dtype) -> Mask | None:
        if self._all_seen():
            return None
        tiling, first = self.tiling, self.group.first
        # Where neither segments nor sinks nor the ends are near, only the distance counts.
        ends = self.low < tiling.sight.sinks or self.high + (self._tiles - 1) * tiling.tile > tiling.recent
        alike = tiling.sight.rows == 0 and (tiling.sight.window is None or not ends)
        key = (None if alike else first, self.low - self._here, self.high - self.low, dtype)
        if key in tiling.masks:
            return tiling.masks[key]
        tiles = torch.arange(first, first + 1 if alike else self.group.last, device=tiling.before.device)[:, None]
        query = tiles * tiling.tile + torch.arange(tiling.tile, device=tiles.device)
        slot = self._start + (tiles - first) * tiling.tile + torch.arange(self.high - self.low, device=tiles.device)
        told = tiling.extents(self.rows, slice(first, first + len(tiles)))
        before, after, beyond = (None if x is None else x.unsqueeze(-1) for x in told)
        assert before is not None
        k_time = tiling.recent + tiling.sight.kept
        seen = tiling.sight.sees(query.unsqueeze(-1), slot.unsqueeze(-2), before, after, beyond, tiling.q_time, k_time)
        found = _mask(seen & ((slot >= tiling.sight.kept) & (slot < k_time)).unsqueeze(-2), dtype)
        if tiling.sight.rows == 0:
            tiling.masks[key] = found
        return found

    @property
    def _tiles(self) -> int:
        return self.group.last - self.group.first

    @property
    def _start(self) -> int:
        """The first slot, kept ones counted."""
        return self.tiling.sight.kept + self.low

    @property
    def _here(self) -> int:
        """The slot at which the first query stands."""
        return self.group.first * self.tiling.tile + self.tiling.offset

    def _reached(self, slots: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The slots from the first tile's first to the last tile's last, as far as there are any; how many are missing at either end."""
        kept, end = self.tiling.sight.kept, self.high + (self._tiles - 1) * self.tiling.tile
        low, high = max(self.low, 0), min(end, self.tiling.recent)
        return slots[:, :, kept + low : kept + high], (low - self.low, end - high)

    def _all_seen(self) -> bool:
        """Whether every query of every tile sees every slot of its slice."""
        tiling, sight, here = self.tiling, self.tiling.sight, self._here
        for i in range(self._tiles):
            low, high, tile = self.low + i * tiling.tile, self.high + i * tiling.tile, self.group.first + i
            if tiling.begins is not None and low < tiling.begins[1][tile]:
                return False
            if tiling.ends is not None and high - 1 > tiling.ends[0][tile]:
                return False
            if tiling.nears is not None and high > tiling.nears[0][tile]:
                return False
        if sight.causal and self.high - 1 > here:
            return False
        if self.low < 0 or self.high + (self._tiles - 1) * tiling.tile > tiling.recent:
            return False
        return sight.window is None or max(here + tiling.tile - 1 - self.low, self.high - 1 - here) < sight.window


class _Sinks:
    """The first slots of the segment in which each tile begins, where no slice of the tile reaches them.

    Of a segment that begins inside the tile, the slices hold all sinks.
    """

    def __init__(self, tiling: Tiling, group: Group, rows: slice):
        first, last, slices = group
        kept, device = tiling.sight.kept, tiling.before.device
        tiles = torch.arange(first, last, device=device)[:, None]
        before, _, beyond = tiling.extents(rows, slice(first, last))
        assert before is not None
        here = tiles * tiling.tile + tiling.offset
        origin = here - before[:, :, :1]  # rows tiles 1
        place = torch.arange(tiling.sight.sinks, device=device)
        slot = origin + place
        own = here + torch.arange(tiling.tile, device=device) - before == origin
        lowest = (slices[0][0] + (tiles - first) * tiling.tile).clamp(min=0)
        self.seen = own.unsqueeze(-1) & (slot < lowest).unsqueeze(-2)
        if beyond is not None:
            self.seen = self.seen & (before.unsqueeze(-1) - place > beyond.unsqueeze(-1))
        #: Where they lie: among the recent slots, or, if the cache has let them go, in front of those.
        recent = kept + slot.clamp(max=tiling.recent - 1)
        self.slot = torch.where(slot < 0, place.clamp(max=max(kept - 1, 0)), recent)

    def take(self, slots: Shaped[Tensor, "rows groups slots channels"]) -> Shaped[Tensor, "tiles_rows_groups taken channels"]:
        found = slots.transpose(1, 2)[self._index(slots)]  # rows tiles sinks groups channels
        return found.permute(1, 0, 3, 2, 4).flatten(0, 2)

    def give(
        self,
        slots: Float[Tensor, "rows groups slots channels"],
        weights: Float[Tensor, "tiles_rows_groups queries taken"],
        x: Float[Tensor, "tiles_rows_groups queries channels"],
        scale: float = 1.0,
    ) -> None:
        tiles, sinks = self.slot.shape[1:]
        part = torch.bmm(weights.transpose(1, 2), x).mul_(scale).view(tiles, *slots.shape[:2], sinks, slots.shape[-1])
        slots.transpose(1, 2).index_put_(self._index(slots), part.permute(1, 0, 3, 2, 4), accumulate=True)

    def mask(self, dtype: torch.dtype) -> Mask | None:
        return _mask(self.seen, dtype)

    def _index(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(slots), device=slots.device)[:, None, None]
        return rows, self.slot.expand(len(slots), -1, -1)


def _mask(seen: Bool[Tensor, "rows tiles tile slots"], dtype: torch.dtype) -> Mask:
    """Both forms of a mask, laid out as weights are."""
    kept = seen.transpose(0, 1)[:, :, None, None].to(dtype)
    return Mask((kept - 1).mul_(torch.finfo(dtype).max / 2), kept)


def _extremes(x: Int[Tensor, "rows tiles tile"]) -> tuple[list[int], list[int]]:
    """The least and the greatest of each tile over all rows."""
    return x.amin((0, 2)).tolist(), x.amax((0, 2)).tolist()


def _multiple(x: int, of: int) -> int:
    """The next multiple from x on."""
    return -(-x // of) * of


def _power_of_two(x: int) -> int:
    """The last power of two up to x."""
    return 1 << (x.bit_length() - 1)
