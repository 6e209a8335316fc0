"""What a mixer is told about its tokens, what it carries from one call to the next, and the counting that ties the two together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from variants.cache import Slots
from variants.ops.ranks import Ranks, Ring


@dataclass(frozen=True)
class Context:
    """What a mixer is told about its tokens. Every part is (batch, time) or None.

    positions: absolute position of each token (default: counted over the valid tokens of its segment).
    valid: False marks padding.
    segment_ids: tokens see only their own segment, a contiguous run of one id (None: all tokens continue the segment the state is in).
    split: the tokens are but a part of each row, and the rest is with other ranks; made by `split_rows`.
    """

    positions: Int[Tensor, "batch time"] | None = None
    valid: Bool[Tensor, "batch time"] | None = None
    segment_ids: Int[Tensor, "batch time"] | None = None
    split: Split | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Split:
    """ring: which tokens of each row are here. whole: what there is to tell of whole rows, valid tokens first and with positions."""

    ring: Ring
    whole: Context


class State(Mapping[str, Tensor]):
    """Everything a mixer carries from one call to the next, by name. Each part is a tensor whose first axis is the batch.

    Immutable: `replace` gives a new one, so a state may be continued twice. A part may be given as `cache.Slots`, which have room to grow.
    """

    def __init__(self, **parts: Tensor | Slots):
        self._parts = parts

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> State:
        """A state that has seen nothing: the counters alone."""
        counter = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(seen=counter, in_segment=counter)

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name]
        return part.tensor if isinstance(part, Slots) else part

    def slots(self, name: str) -> Slots:
        """A part to which more is appended."""
        part = self._parts[name]
        return part if isinstance(part, Slots) else Slots(part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"State({', '.join(f'{name}={tuple(part.shape)}' for name, part in self.items())})"

    def replace(self, **parts: Tensor | Slots) -> State:
        """The same state with some parts exchanged or added."""
        return State(**{**self._parts, **parts})

    def reorder(self, index: Int[Tensor, " new_batch"]) -> State:
        """Rows picked by `index`, as beam search wants it."""
        return State(**{name: part.index_select(0, index) for name, part in self.items()})

    def detach(self) -> State:
        """The same numbers without their history."""
        return State(**{name: part.detach() for name, part in self.items()})

    @property
    def elements(self) -> int:
        """Floating-point numbers carried, over the whole batch (counters and masks are not counted)."""
        return sum(part.numel() for part in self.values() if part.is_floating_point())

    @property
    def nbytes(self) -> int:
        """Bytes carried, over the whole batch, counters and masks included; room to grow is not."""
        return sum(part.numel() * part.element_size() for part in self.values())


def valid_lengths(x: Tensor, context: Context) -> Int[Tensor, " batch"]:
    """The number of valid tokens in each row."""
    if context.valid is None:
        return torch.full((x.shape[0],), x.shape[1], dtype=torch.long, device=x.device)
    return context.valid.sum(1)


def left_align(x: Tensor, context: Context) -> tuple[Tensor, Context, Int[Tensor, "batch time"]]:
    """Rows with their valid tokens first, in order, and their pads last; and the permutation (its argsort undoes it)."""
    assert context.valid is not None
    order = torch.argsort((~context.valid).to(torch.int8), dim=1, stable=True)
    return _rows(x, order), Context(*(None if part is None else part.gather(1, order) for part in _parts(context))), order


def split_rows(x: Shaped[Tensor, "batch time *rest"], context: Context, ranks: Ranks) -> tuple[Shaped[Tensor, "batch here *rest"], Context]:
    """What this process has of rows that are split over ranks, and what it is told of them.

    Valid tokens come first in each row, and positions are given. Raises ValueError for rows with less than a token for each slice.
    """
    ring = Ring(ranks, x.shape[1])
    here = (None if part is None else ring.part(part) for part in _parts(context))
    return ring.part(x), Context(*here, split=Split(ring, context))


def default_positions(x: Tensor, context: Context, state: State | None) -> Context:
    """The context with positions: where none are given, each token's place among the valid tokens of its segment, counted on from `state`.

    Pads must be at the end of their row; they get position 0 and the segment of the token before them. A context without segments
    continues the segment that `state` is in.
    """
    positions, valid, segment_ids = _parts(context)
    if segment_ids is None and state is not None and "segment" in state:
        segment_ids = state["segment"].unsqueeze(1).expand(x.shape[:2])
    elif segment_ids is not None and valid is not None:
        last = segment_ids.gather(1, (valid.sum(1, keepdim=True) - 1).clamp(min=0))
        if state is not None:
            last = torch.where(valid[:, :1], last, _last_segment(segment_ids, state))
        segment_ids = torch.where(valid, segment_ids, last)
    if positions is None:
        positions = _places(x, segment_ids, state)
    if valid is not None:
        positions = positions.masked_fill(~valid, 0)
    return Context(positions, valid, segment_ids)


def extent(
    x: Tensor, context: Context, state: State | None, causal: bool = True
) -> tuple[Int[Tensor, "batch time"] | None, Int[Tensor, "batch time"] | None]:
    """How many tokens of its own segment lie before and after each token; those of earlier calls count.

    Segments are contiguous and pads are at the end, so this pair says all that segments, padding and a half-filled cache hide: token i may
    look at tokens i - before_i to i + after_i. (None, None) where the shape says as much; `after` is None for a causal mixer.
    """
    if context.split is not None:  # a row's tokens lie before and after each other wherever they are
        ring, whole = context.split.ring, context.split.whole
        assert whole.positions is not None
        found = extent(whole.positions, whole, None, causal)
        return tuple(None if part is None else ring.part(part) for part in found)  # type: ignore[return-value]
    if context.segment_ids is None and state is None and (causal or context.valid is None):
        return None, None
    before = _places(x, context.segment_ids, state)
    if causal:
        return before, None
    time = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    end = valid_lengths(x, context).unsqueeze(1).expand_as(time)
    if context.segment_ids is not None:
        closes = (before == 0).roll(-1, dims=1)
        closing = torch.where(closes, time + 1, x.shape[1]).flip(1).cummin(1).values.flip(1)
        end = torch.minimum(end, closing)
    return before, end - 1 - time


def _places(x: Tensor, segment_ids: Tensor | None, state: State | None) -> Int[Tensor, "batch time"]:
    """How many tokens of its own segment lie before each token."""
    time = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    if segment_ids is None:
        return time if state is None else time + state["in_segment"].unsqueeze(1)
    places = time - time.masked_fill(~_segment_starts(segment_ids, state), 0).cummax(1).values
    if state is not None:
        places = places + torch.where(_continues(segment_ids, state), state["in_segment"].unsqueeze(1), 0)
    return places


def _segment_starts(segment_ids: Tensor, state: State | None) -> Tensor:
    """True where a token opens a segment."""
    first = segment_ids[:, :1] if state is None else _last_segment(segment_ids, state)
    return segment_ids != torch.cat([first, segment_ids[:, :-1]], 1)


def _last_segment(segment_ids: Tensor, state: State) -> Tensor:
    """The segment the state stopped in; tokens seen before any segment was named belong to one that no id names."""
    unnamed = torch.full_like(segment_ids[:, :1], torch.iinfo(segment_ids.dtype).min)
    return state["segment"].unsqueeze(1) if "segment" in state else unnamed


def _continues(segment_ids: Tensor, state: State) -> Tensor:
    """True at tokens that belong to the segment the state stopped in."""
    return ~_segment_starts(segment_ids, state).cummax(1).values


def advance(state: State, context: Context, time: int) -> State:
    """The state with its counters moved over these tokens: tokens seen, tokens seen in the current segment, and its id."""
    seen, segment_ids = state["seen"], context.segment_ids
    length = torch.full_like(seen, time) if context.valid is None else context.valid.sum(1)
    if segment_ids is None:
        return state.replace(seen=seen + length, in_segment=state["in_segment"] + length)
    last = (length - 1).clamp(min=0).unsqueeze(1)
    index = torch.arange(time, device=seen.device).expand_as(segment_ids)
    start = index.masked_fill(~_segment_starts(segment_ids, state), 0).cummax(1).values
    carried = torch.where(_continues(segment_ids, state), state["in_segment"].unsqueeze(1), 0)
    in_segment = length + (carried - start).gather(1, last).squeeze(1)
    segment = segment_ids.gather(1, last).squeeze(1)
    return state.replace(
        seen=seen + length,
        in_segment=torch.where(length > 0, in_segment, state["in_segment"]),
        segment=torch.where(length > 0, segment, _last_segment(segment_ids, state).squeeze(1)),
    )


def _parts(context: Context) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return context.positions, context.valid, context.segment_ids


def _rows(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order if x.ndim == 2 else order.unsqueeze(-1).expand_as(x))
