"""What the chunked cores share: sequences cut into chunks, and how much of what one token writes is left at another.

The decays between two tokens of a chunk multiply up to e^(G_i - G_j), where G is the running sum of their logarithms. One number a token
factors out of a product of queries and keys; one for each channel stays inside,

    sum_c q_ic k_jc e^(G_ic - G_jc)

and e^(G_i) e^(-G_j), which would make one matrix product of it, overflows. So a chunk is halved again and again: a query of a second half
and a key of the first meet at the edge between the halves, where q e^(G_i - G_edge) and k e^(G_edge - G_j) both have exponents <= 0. G is
summed in fp64: what is left after a strong decay is a difference of large numbers. Exponents end at -80, above the denormal numbers, which
cost a hundred others each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

LOWEST = -80.0
#: A log-decay that leaves nothing, however much is summed up beside it; -inf would make differences of NaN.
NOTHING = -1e6


def power_of_two(chunk: int) -> int:
    """The least power of two that is not below: what can be halved down to one token."""
    return 1 << (chunk - 1).bit_length()


def cut(x: Shaped[Tensor, "batch heads time *rest"], chunk: int) -> Shaped[Tensor, "batch heads chunks chunk *rest"]:
    """x in chunks, the last one filled up with zeros, which add nothing to any sum and decay nothing."""
    missing = -x.shape[2] % chunk
    if missing:
        x = pad(x, (0, 0) * (x.ndim - 3) + (0, missing))
    return torch.unflatten(x, 2, (-1, chunk))


class Left:
    """How much is left, in each chunk, of what was written before: at the start, at one token of another, at the end.

    log_decay: (batch, heads, time, 1 or key_dim), <= 0; None: nothing is forgotten.
    before: (batch, 1, time), tokens of its own segment before each token: nothing is left of another segment. None: one segment.
    exclusive: a query looks before its own token's decay.
    """

    def __init__(
        self,
        log_decay: Float[Tensor, "batch heads time channels"] | None,
        before: Int[Tensor, "batch 1 time"] | None,
        chunk: int,
        dtype: torch.dtype,
        *,
        exclusive: bool = False,
    ):
        self.chunk, self.dtype, self.exclusive = chunk, dtype, exclusive
        self.total = self.at_queries = None
        if log_decay is not None:
            self.total = cut(log_decay, chunk).double().clamp(min=NOTHING).cumsum(-2)
            # Not the total less the token's own: rounding could lift it above the one before.
            self.at_queries = pad(self.total[..., :-1, :], (0, 0, 1, 0)) if exclusive else self.total
        self.segments = None if before is None else _Segments(before, chunk)

    def of_start(self, rows: Float[Tensor, "batch heads chunks chunk key_dim"]) -> Float[Tensor, "batch heads chunks chunk key_dim"]:
        """Rows that read the state which enters the chunk, times what is left of it there."""
        if self.at_queries is not None:
            rows = rows * self._exp(self.at_queries)
        return rows if self.segments is None else rows * self.segments.meets_start

    def at_end(self, k: Float[Tensor, "batch heads chunks chunk key_dim"]) -> Float[Tensor, "batch heads chunks chunk key_dim"]:
        """Keys times what is left of them at the end of the chunk."""
        if self.total is not None:
            k = k * self._exp(self.total[..., -1:, :] - self.total)
        return k if self.segments is None else k * self.segments.reaches_end

    def of_state(self) -> list[Float[Tensor, "batch heads channels 1"]] | None:
        """For each chunk, what is left at its end of the state that enters it; None: all."""
        kept = None
        if self.total is not None:
            kept = self._exp(self.total[..., -1, :]).unsqueeze(-1)
        if self.segments is not None:
            survives = self.segments.survives.to(self.dtype)
            kept = survives if kept is None else kept * survives
        return None if kept is None else list(kept.unbind(2))

    def products(
        self,
        rows: Sequence[Float[Tensor, "batch heads chunks chunk key_dim"]],
        k: Float[Tensor, "batch heads chunks chunk key_dim"],
        bonus: Float[Tensor, "heads key_dim"] | None = None,
    ) -> list[Float[Tensor, "batch heads chunks chunk chunk"]]:
        """For each of `rows`, its products with the keys up to its own, times what is left of them; 0 above the diagonal.

        bonus: what is left of a query's own key, by channel, where it is not everything.
        """
        if self.total is not None and self.total.shape[-1] > 1:
            found = self._by_halves(rows, k, bonus)
            return found if self.segments is None else [x * self.segments.inside for x in found]
        lower = -1 if self.exclusive else 0
        found = [x @ k.transpose(-2, -1) for x in rows]
        if self.total is not None and self.at_queries is not None:
            left = (self.at_queries - self.total.transpose(-2, -1)).to(self.dtype).clamp(LOWEST, 0).exp()
            found = [x * left for x in found]
        found = [x.tril(lower) if self.segments is None else (x * self.segments.inside).tril(lower) for x in found]
        if bonus is not None:
            found = [x + torch.diag_embed(self._own(row, k, bonus)) for x, row in zip(found, rows, strict=True)]
        return found

    def _by_halves(self, rows: Sequence[Tensor], k: Tensor, bonus: Tensor | None) -> list[Tensor]:
        """Blocks of 1, 2, 4, ... tokens, each put together from two halves and the products between them, for all rows at once."""
        assert self.total is not None and self.at_queries is not None
        every = torch.stack(list(rows), dim=-2)  # the rows of a token lie side by side, so that one product serves all
        found = self._own(every, k.unsqueeze(-2), bonus)[..., None, :, None]
        size = 1
        while size < self.chunk:
            halves = (-1, 2, size)
            total, _ = torch.unflatten(self.total, -2, halves).unbind(-3)
            _, at_queries = torch.unflatten(self.at_queries, -2, halves).unbind(-3)
            edge = total[..., -1:, :]
            keys = (torch.unflatten(k, -2, halves).unbind(-3)[0] * self._exp(edge - total)).transpose(-2, -1)
            late = torch.unflatten(every, -3, halves).unbind(-4)[1] * self._exp(at_queries - edge).unsqueeze(-2)
            between = torch.unflatten(late.flatten(-3, -2) @ keys, -2, (size, -1))
            first, second = torch.unflatten(found, -4, (-1, 2)).unbind(-4)
            upper = torch.cat([first, torch.zeros_like(between)], dim=-1)
            found = torch.cat([upper, torch.cat([between, second], dim=-1)], dim=-3)
            size *= 2
        return list(found.squeeze(-4).unbind(-2))

    def _own(self, row: Tensor, k: Tensor, bonus: Tensor | None) -> Tensor:
        """Products of queries with their own keys."""
        return (row * k if bonus is None else row * k * bonus.reshape(bonus.shape[0], *[1] * (row.ndim - 3), -1)).sum(-1)

    def _exp(self, exponent: Tensor) -> Tensor:
        return exponent.to(self.dtype).clamp(min=LOWEST).exp()


class _Segments:
    """Factors 0 or 1 of tokens that have `before` tokens of their segment before them; each (batch, 1, chunks, ...)."""

    def __init__(self, before: Int[Tensor, "batch 1 time"], chunk: int):
        before = torch.unflatten(_longer(before, chunk), 2, (-1, chunk))
        index = torch.arange(chunk, device=before.device)
        last = before[..., -1:]
        self.meets_start = (before > index).unsqueeze(-1)
        self.reaches_end = (chunk - 1 - index <= last).unsqueeze(-1)
        self.survives = (last >= chunk).unsqueeze(-1)
        self.inside = index[:, None] - index <= before.unsqueeze(-1)


def _longer(before: Int[Tensor, "batch 1 time"], chunk: int) -> Int[Tensor, "batch 1 longer"]:
    """`before` counted on to the end of the last chunk: what fills it up starts no segment."""
    more = torch.arange(1, -before.shape[2] % chunk + 1, device=before.device)
    return torch.cat([before, before[..., -1:] + more], dim=2)
