"""Two small mixers that satisfy the contract. `broken.py` breaks them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from variants.contract import Context, Mixer, State, valid_lengths
from variants.positions.contract import Scheme


class Mean(Mixer):
    """y_t = out(sum_s m_ts w_s v_s / sum_s m_ts w_s) with w = exp(tanh(gate x)) and v_t = value(x_t + tap * x_{t-1}), m a mask.

    Options:
        short_conv: 2 adds the token before, 0 does not.
        dropout: on the values.
    """

    time, memory, state = "T^2", "T^2", "1"
    normalises_rows = True
    bidirectional = True
    block = 4

    def __init__(self, dim: int, heads: int, position: Any = None, *, short_conv: int = 0, dropout: float = 0.0, **options: Any):
        super().__init__(dim, heads, position, **options)
        self.gate, self.value, self.out = nn.Linear(dim, 1), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.tap = nn.Parameter(torch.ones(dim)) if short_conv else None
        self.dropout = nn.Dropout(dropout)

    def mix(self, x: Tensor, context: Context, state: State | None) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        number = self.segment_numbers(x, context, state)
        y, parts = self.average(self.values(x, number, state), self.weights(x), number, context, state)
        if self.tap is not None and state is not None:
            parts["last"] = at_last(x, context, state["last"])
        return self.out(y), parts, {}

    def segment_numbers(self, x: Tensor, context: Context, state: State | None) -> Tensor:
        """0 for tokens that continue the state, then 1, 2, ..."""
        ids = context.segment_ids
        if ids is None:
            return torch.zeros(x.shape[:2], dtype=torch.long)
        first = ids[:, :1]
        if state is not None:
            first = state["segment"].unsqueeze(1) if "segment" in state else torch.full_like(first, -99)
        return (ids != torch.cat([first, ids[:, :-1]], 1)).cumsum(1)

    def values(self, x: Tensor, number: Tensor, state: State | None) -> Tensor:
        if self.tap is not None:
            first = torch.zeros_like(x[:, 0]) if state is None else state["last"]
            before = torch.cat([first.unsqueeze(1), x[:, :-1]], 1)
            starts = number != torch.cat([torch.zeros_like(number[:, :1]), number[:, :-1]], 1)
            x = x + self.tap * before.masked_fill(starts.unsqueeze(-1), 0)
        return self.dropout(self.value(x))

    def weights(self, x: Tensor) -> Tensor:
        return torch.exp(torch.tanh(self.gate(x)))

    def mask(self, number: Tensor, context: Context) -> Tensor:
        """(batch, t, s): whether output t sees token s of the same call."""
        time = number.shape[1]
        same = number.unsqueeze(2) == number.unsqueeze(1)
        if context.valid is not None:
            same = same & context.valid.unsqueeze(1)
        return same.tril() if self.causal else same.expand(-1, time, time)

    def average(self, v: Tensor, w: Tensor, number: Tensor, context: Context, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The running sums, and what is left of them after the last token."""
        mask = self.mask(number, context).to(v.dtype)
        total, weight = mask @ (w * v), mask @ w
        if state is None:
            return total / weight.clamp(min=1e-30), {}
        carried = (number == 0).unsqueeze(-1)
        total, weight = total + carried * state["total"].unsqueeze(1), weight + carried * state["weight"].unsqueeze(1)
        parts = {"total": at_last(total, context, state["total"]), "weight": at_last(weight, context, state["weight"])}
        return total / weight.clamp(min=1e-30), parts

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        parts = {"total": torch.zeros(batch, self.dim, **like), "weight": torch.zeros(batch, 1, **like)}
        return parts | ({} if self.tap is None else {"last": torch.zeros(batch, self.dim, **like)})

    def state_elements(self, time: int) -> int:
        return (self.dim + 1) + (0 if self.tap is None else self.dim)

    def flops(self, time: int) -> int:
        return 2 * time * self.dim * (2 * self.dim + 1) + 2 * time * time * (self.dim + 1)


class WindowMean(Mean):
    """The same over the last `window` tokens. The state is those tokens; a slot nobody wrote has weight 0."""

    state = "W"
    window = 4

    def mask(self, number: Tensor, context: Context) -> Tensor:
        distance = torch.arange(number.shape[1]).unsqueeze(1) - torch.arange(number.shape[1])
        return super().mask(number, context) & (distance.abs() < self.window)

    def average(self, v: Tensor, w: Tensor, number: Tensor, context: Context, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        if state is None:
            return super().average(v, w, number, context, None)
        history = self.window - 1
        v, w = torch.cat([state["values"], v], 1), torch.cat([state["weights"], w], 1)
        numbers = functional.pad(number, (history, 0))
        longer = Context(valid=None if context.valid is None else functional.pad(context.valid, (history, 0), value=True))
        mask = self.mask(numbers, longer)[:, history:].to(v.dtype)
        length = valid_lengths(number, context)
        slots = length.unsqueeze(1) + torch.arange(history)
        last = numbers.gather(1, (length + history - 1).unsqueeze(1))
        current = (numbers.gather(1, slots) == last).unsqueeze(-1)
        parts = {"values": rows_at(v, slots) * current, "weights": rows_at(w, slots) * current}
        return (mask @ (w * v)) / (mask @ w).clamp(min=1e-30), parts

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        history = self.window - 1
        parts = {"values": torch.zeros(batch, history, self.dim, **like), "weights": torch.zeros(batch, history, 1, **like)}
        return parts | ({} if self.tap is None else {"last": torch.zeros(batch, self.dim, **like)})

    def state_elements(self, time: int) -> int:
        return (self.window - 1) * (self.dim + 1) + (0 if self.tap is None else self.dim)

    def reach(self) -> int | None:
        return self.window - 1 + (0 if self.tap is None else 1)


class Ramp(Scheme):
    """Adds the position itself."""

    hooks = ("embed",)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + positions.unsqueeze(-1)


def at_last(x: Tensor, context: Context, otherwise: Tensor) -> Tensor:
    """x at each row's last valid token, or `otherwise` where there is none."""
    length = valid_lengths(x, context)
    found = rows_at(x, (length - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where((length > 0).unsqueeze(1), found, otherwise)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
