"""Rows that are split over processes: who holds which tokens, and how processes tell each other what they hold.

Of P ranks, rank p holds the slices p and 2P - 1 - p of the 2P that a row is cut into ("zigzag"): under a causal mask the tokens in sight of
an early and of a late slice add up to the same for all. Slices differ by one token at most where 2P does not divide the row.

What is written with `held` and the exchanges below runs unchanged whether the ranks are processes of a `torch.distributed` group, each of
which holds its own part, or are all in one process, one after another, which is what tests and single machines have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

#: What a rank passes on: tensors (batch, heads, its tokens, ...).
Parcel = Sequence[Tensor]


class Ranks(ABC):
    """The processes that share rows. All of them make the same exchanges in the same order."""

    size: int
    #: The ranks whose part of the rows is in this process.
    held: tuple[int, ...]

    @abstractmethod
    def pass_on(self, parcels: Sequence[Parcel], times: Sequence[int]) -> Callable[[], list[Parcel]]:
        """Start to give each held rank's parcel to the rank behind it; the call that comes back waits for those from before them.

        times: how many tokens each parcel that arrives has, on the third axis; all else is as in what is given away.
        """

    @abstractmethod
    def gather(self, parts: Sequence[Tensor], *, replicated: bool = False) -> list[Tensor]:
        """What all ranks hold, of equal shapes, in the order of the ranks; differentiable, as if the ranks' losses were added up.

        replicated: all ranks compute the same loss of it, so that no gradient need be exchanged.
        """


class Simulated(Ranks):
    """All ranks in one process."""

    def __init__(self, size: int):
        self.size, self.held = size, tuple(range(size))

    def pass_on(self, parcels: Sequence[Parcel], times: Sequence[int]) -> Callable[[], list[Parcel]]:
        return lambda: [parcels[-1], *parcels[:-1]]

    def gather(self, parts: Sequence[Tensor], *, replicated: bool = False) -> list[Tensor]:
        return list(parts)


class Processes(Ranks):
    """The processes of a `torch.distributed` group (None: the default one), a rank each."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.size, self.held = dist.get_world_size(group), (dist.get_rank(group),)

    def pass_on(self, parcels: Sequence[Parcel], times: Sequence[int]) -> Callable[[], list[Parcel]]:
        (parcel,), (time,), (rank,) = parcels, times, self.held
        if self.size == 1:
            return lambda: [parcel]
        given = [x.contiguous() for x in parcel]
        taken = [x.new_empty(*x.shape[:2], time, *x.shape[3:]) for x in given]
        behind, ahead = (_global(self.group, (rank + step) % self.size) for step in (1, -1))
        # In one batch: NCCL would wait for ever where every process sends first and then receives.
        operations = [dist.P2POp(dist.isend, x, behind, self.group) for x in given]
        operations += [dist.P2POp(dist.irecv, x, ahead, self.group) for x in taken]
        works = dist.batch_isend_irecv(operations)

        def arrived() -> list[Parcel]:
            for work in works:
                work.wait()
            del given[:]  # until here what is sent must not be freed
            return [taken]

        return arrived

    def gather(self, parts: Sequence[Tensor], *, replicated: bool = False) -> list[Tensor]:
        (part,) = parts
        found: tuple[Tensor, ...] = _Gather.apply(part, self, replicated)  # type: ignore[no-untyped-call]
        return list(found)


class _Gather(torch.autograd.Function):
    """What all processes hold. The gradient of the sum of their losses is that of P of them where they are all the same."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Processes, replicated: bool) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.replicated = ranks, replicated
        part = part.contiguous()
        found = [torch.empty_like(part) for _ in range(ranks.size)]
        dist.all_gather(found, part, group=ranks.group)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks = ctx.ranks
        if ctx.replicated:
            return grads[ranks.held[0]] * ranks.size, None, None
        total = torch.stack(grads)
        dist.all_reduce(total, group=ranks.group)
        return total[ranks.held[0]], None, None


class Ring:
    """Rows of `time` tokens split over ranks.

    What this process has of them are the slices of the ranks that it holds, one rank after another. Raises ValueError for rows with less
    than a token for each slice.
    """

    def __init__(self, ranks: Ranks, time: int):
        slices = 2 * ranks.size
        if time < slices:
            raise ValueError(
                f"rows of {time} tokens cannot be split over {ranks.size} processes, two slices each; give {slices} tokens or more"
            )
        self.ranks, self.time = ranks, time
        self.bounds = [time * n // slices for n in range(slices + 1)]

    def slices(self, rank: int) -> tuple[int, int]:
        """The numbers of the two slices of a rank, the earlier first."""
        return rank, 2 * self.ranks.size - 1 - rank

    def span(self, number: int) -> slice:
        """Where a slice lies in the row."""
        return slice(self.bounds[number], self.bounds[number + 1])

    def length(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(self.span(number).stop - self.span(number).start for number in self.slices(rank))

    @cached_property
    def here(self) -> tuple[tuple[int, slice], ...]:
        """The slices in this process, in the order in which it has them: number, and where the slice lies in what it has."""
        numbers = [number for rank in self.ranks.held for number in self.slices(rank)]
        sizes = [self.span(number).stop - self.span(number).start for number in numbers]
        return tuple((n, slice(end - size, end)) for n, size, end in zip(numbers, sizes, accumulate(sizes), strict=True))

    def part(self, x: Shaped[Tensor, "batch time *rest"]) -> Shaped[Tensor, "batch here *rest"]:
        """What this process has of whole rows."""
        return torch.cat([x[:, self.span(number)] for number, _ in self.here], dim=1)

    def pieces(self, x: Tensor, axis: int) -> list[Tensor]:
        """What this process has, slice by slice, in the order of `here`."""
        return [x.narrow(axis, place.start, place.stop - place.start) for _, place in self.here]

    def everywhere(self, pieces: Sequence[Tensor], *, replicated: bool = False) -> list[Tensor]:
        """Something of each slice in this process, of equal shapes: the same of all slices, in their order in the row. Differentiable."""
        pairs = [torch.stack(list(pieces[i : i + 2])) for i in range(0, len(pieces), 2)]
        found = self.ranks.gather(pairs, replicated=replicated)
        order = {number: pair[i] for rank, pair in enumerate(found) for i, number in enumerate(self.slices(rank))}
        return [order[number] for number in sorted(order)]

    def whole(self, x: Shaped[Tensor, "batch here *rest"], *, replicated: bool = False) -> Shaped[Tensor, "batch time *rest"]:
        """Whole rows, of what each process has of them."""
        longest = max(self.span(n).stop - self.span(n).start for n in range(2 * self.ranks.size))
        filled = [_longer(piece, longest) for piece in self.pieces(x, 1)]
        found = self.everywhere(filled, replicated=replicated)
        return torch.cat([piece[:, : self.span(n).stop - self.span(n).start] for n, piece in enumerate(found)], dim=1)

    def marked(
        self, parts: Sequence[Tensor], marks: Bool[Tensor, "batch time"], numbers: Int[Tensor, "batch time"]
    ) -> Shaped[Tensor, "marked width"]:
        """What all ranks have of the marked tokens of whole rows, in the order of their numbers.

        parts: of each rank in this process, row by row. Every rank is to compute the same loss of it.
        """
        rows = {rank: torch.cat([torch.arange(self.time)[self.span(n)] for n in self.slices(rank)]) for rank in range(self.ranks.size)}
        found = [numbers[:, of][marks[:, of]] for of in (index.to(marks.device) for index in rows.values())]
        most = max(len(mine) for mine in found)
        if not most:
            return torch.cat(list(parts))
        filled = [torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])]) for part in parts]
        everyone = self.ranks.gather(filled, replicated=True)
        together = torch.cat([part[: len(mine)] for part, mine in zip(everyone, found, strict=True)])
        return together[torch.cat(found).argsort()]

    def by_rank(self, x: Shaped[Tensor, "batch here *rest"]) -> tuple[Shaped[Tensor, "batch part *rest"], ...]:
        """What each rank in this process has."""
        return torch.split(x, [self.length(rank) for rank in self.ranks.held], dim=1)

    def ahead(self, x: Shaped[Tensor, "batch here *rest"], count: int) -> list[Shaped[Tensor, "batch count *rest"]]:
        """For each slice in this process the `count` tokens that come before it in the row, 0 where there are none. Differentiable."""
        if not count:
            return [piece[:, :0] for piece in self.pieces(x, 1)]
        tails = self.everywhere([_longer(piece[:, -count:].flip(1), count).flip(1) for piece in self.pieces(x, 1)])
        found = []
        for number, _ in self.here:
            before = [tail[:, count - min(count, self.span(n).stop - self.span(n).start) :] for n, tail in enumerate(tails[:number])]
            found.append(_longer(torch.cat([x[:, :0], *before], dim=1)[:, -count:].flip(1), count).flip(1))
        return found

    def sums(self, x: Float[Tensor, "batch here *rest"]) -> Float[Tensor, "batch here *rest"]:
        """The running sum over the row, the token itself included. Differentiable."""
        pieces = self.pieces(x, 1)
        before = torch.stack(self.everywhere([piece.sum(1) for piece in pieces])).cumsum(0)
        found = [piece.cumsum(1) + (before[n - 1].unsqueeze(1) if n else 0) for piece, (n, _) in zip(pieces, self.here, strict=True)]
        return torch.cat(found, dim=1)


def _longer(x: Tensor, time: int) -> Tensor:
    """x with zeros behind it."""
    missing = time - x.shape[1]
    return x if not missing else torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], dim=1)


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
