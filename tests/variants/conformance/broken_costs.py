"""Mixers broken on purpose in what they cost and in how they cut their work: `Running` is sound, the others misstate one thing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.variants.conformance.toys import Mean
from variants.contract import Mixer


class Running(Mixer):
    """y_t = out(sum_s w_s v_s / sum_s w_s) by running sums, in chunks. It knows neither pads nor segments.

    Options:
        chunk: tokens summed at once.
    """

    time, state = "T", "1"

    def __init__(self, dim: int, heads: int, position: Any = None, *, chunk: int = 16, **options: Any):
        super().__init__(dim, heads, position, **options)
        self.gate, self.value, self.out = nn.Linear(dim, 1), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.chunk = chunk

    def mix(self, x, context, state):
        weights = torch.exp(torch.tanh(self.gate(x)))
        total, sums = x.new_zeros(len(x), self.dim + 1) if state is None else state["total"], []
        for piece in torch.cat([weights * self.value(x), weights], -1).split(self.chunk, dim=1):
            sums.append(self.carried(total).unsqueeze(1) + piece.cumsum(1))
            total = sums[-1][:, -1]
        means = torch.cat(sums, 1)
        return self.out(means[..., :-1] / means[..., -1:]), {"total": total}, {}

    def carried(self, total):
        """What a chunk hands to the next."""
        return total

    def init_parts(self, batch, **like):
        return {"total": torch.zeros(batch, self.dim + 1, **like)}

    def state_elements(self, time):
        return self.dim + 1

    def flops(self, time):
        return 2 * time * self.dim * (2 * self.dim + 1)


class TimeUnderstated(Running):
    """Compares every token with every other."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y + 0 * (x[..., :1] * x[..., 0].unsqueeze(1)).sum(2, keepdim=True), parts, aux


class TimeUnderstatedInBackward(Running):
    """Picks tokens out one by one: each pick's gradient is as long as the sequence."""

    def mix(self, x, context, state):
        return super().mix(torch.stack([x[:, t] for t in range(x.shape[1])], dim=1), context, state)


class TimeUnreadable(Running):
    """Says in words what should be a formula."""

    time = "linear in T"


class MemoryUnderstated(Running):
    """Needs a square of the length at once, though `memory` is left at T."""

    time = "T^2"

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y + 0 * (x[..., :1] - x[..., 0].unsqueeze(1)).amax((1, 2), keepdim=True), parts, aux


class Tiled(Running):
    """Sound: a workspace as large as the square of the length, up to a size that is fixed."""

    time, most = "T^2", 1500

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        square = min(x.shape[1], self.most)
        return y + 0 * x.new_ones(square, square).amax(), parts, aux


class FlopsNotDoubled(Running):
    """Takes a multiply-add for one operation."""

    def flops(self, time):
        return super().flops(time) // 2


class FlopsOverstated(Running):
    """Twice what it does."""

    def flops(self, time):
        return 2 * super().flops(time)


class PairsHalved(Mean):
    """A quarter of the square that it computes, where half is in sight."""

    def flops(self, time):
        return super().flops(time) - 3 * 2 * time * time * (self.dim + 1) // 4


class FlopsGrowTooSlowly(Mean):
    """Near enough at each length tried, but drifting away."""

    def flops(self, time):
        return 1056 + int(221 * time**1.65)


class StateOverstated(Running):
    """Says that its state grows."""

    state = "T"


class StateGrows(Running):
    """Says that its state does not grow, and keeps the tokens."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y, parts | ({} if state is None else {"tokens": torch.cat([state["tokens"], x], 1)}), aux

    def init_parts(self, batch, **like):
        return super().init_parts(batch, **like) | {"tokens": torch.zeros(batch, 0, self.dim, **like)}


class ChunkChangesOutputs(Running):
    """Forgets a little between chunks."""

    def carried(self, total):
        return 0.999 * total


class ChunkChangesGradients(Running):
    """The right sums, but no gradient from a chunk to the one before."""

    def carried(self, total):
        return total.detach()


class ChunkChangesState(Running):
    """Leaves a trace of its chunks in the state, which no output shows."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y, parts | ({} if state is None else {"chunks": state["chunks"] + self.chunk}), aux

    def init_parts(self, batch, **like):
        return super().init_parts(batch, **like) | {"chunks": torch.zeros(batch, **like)}
