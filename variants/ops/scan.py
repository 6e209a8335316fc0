"""The selective scan, chunks side by side, in plain torch. Time O(T), memory O(T), state (channels, state).

    h_t = a_t h_{t-1} + step_t x_t write_t        y_t = h_t read_t        a_t = exp(step_t rate)

Every channel forgets at rates of its own, so there is no matrix product to be had: chunks are walked through token by token, all of them at
once, as if each began at 0; then what enters each chunk is known from the one before it, and is read through the product of its decays,

    y_t = (h_t + (a_1 ... a_t) h_entering) read_t

Products, not exponentials of sums: decays may be negative, and a product of numbers in (-1, 1) overflows no more than they do. In fp32 or
better whatever the input's dtype, also under autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from variants.ops import blocks
from variants.ops.chunks import LOWEST, cut
from variants.ops.precision import without_autocast

#: Tokens whose inside is alive at once: of each (channels, state) numbers.
BLOCK = 256


def selective_scan(
    x: Float[Tensor, "batch time channels"],
    step: Float[Tensor, "batch time channels"],
    rate: Float[Tensor, "channels state"],
    write: Float[Tensor, "batch time state"],
    read: Float[Tensor, "batch time state"],
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch channels state"] | None = None,
    signed: bool = False,
    chunk: int = 16,
) -> tuple[Float[Tensor, "batch time channels"], Float[Tensor, "batch channels state"]]:
    """(y, last h), both in fp32 or better: the same as `reference.selective_scan`, for any length.

    step: >= 0. rate: <= 0. before: tokens of its own segment before each token, 0 where h starts again from 0. signed: a_t = 2 exp(step_t
    rate) - 1. chunk: tokens that are walked through one after another.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x):
        x, step, rate, write, read = (part.to(dtype) for part in (x, step, rate, write, read))
        state = x.new_zeros(len(x), *rate.shape) if initial is None else initial.to(dtype)
        if x.shape[1] == 1:
            return one_step(x, step, rate, write, read, state, before=before, signed=signed)
        starts = None if before is None else before == 0
        timed = [None if part is None else part.unsqueeze(1) for part in (x, step, write, read, starts)]
        block = partial(_block, chunk=min(chunk, x.shape[1]), signed=signed)
        y, last = blocks.run(block, state.unsqueeze(1), timed, (rate,), size=max(BLOCK, chunk))
    return y.squeeze(1), last.squeeze(1)


def one_step(
    x: Float[Tensor, "batch 1 channels"],
    step: Float[Tensor, "batch 1 channels"],
    rate: Float[Tensor, "channels state"],
    write: Float[Tensor, "batch 1 state"],
    read: Float[Tensor, "batch 1 state"],
    state: Float[Tensor, "batch channels state"],
    *,
    before: Int[Tensor, "batch 1"] | None,
    signed: bool,
) -> tuple[Float[Tensor, "batch 1 channels"], Float[Tensor, "batch channels state"]]:
    """One token, as in decoding."""
    if before is not None:
        state = state.masked_fill((before == 0).unsqueeze(-1), 0)
    state = _decay(step.mT, rate, signed) * state + (step * x).mT * write
    return (state @ read.mT).mT, state


def _block(
    state: Tensor, timed: Sequence[Tensor | None], fixed: Sequence[Tensor | None], *, chunk: int, signed: bool
) -> tuple[Float[Tensor, "batch 1 time channels"], Float[Tensor, "batch 1 channels state"]]:
    """Some chunks, side by side but for what enters each."""
    x, step, write, read, starts = timed
    (rate,) = fixed
    assert x is not None and step is not None and write is not None and read is not None and rate is not None
    time = x.shape[2]
    # What fills the last chunk up has steps of 0, and changes nothing.
    x, step, write, read = (cut(part, chunk) for part in (x * step, step, write, read))
    begins = None if starts is None else cut(starts, chunk)
    inside, left = list[Tensor](), list[Tensor]()
    for t in range(chunk):
        decay = _decay(step[..., t, :, None], rate, signed)
        if begins is not None:
            decay = decay.masked_fill(begins[..., t, None, None], 0)
        own = x[..., t, :, None] * write[..., t, None, :]
        inside.append(own if t == 0 else torch.addcmul(own, decay, inside[-1]))
        left.append(decay if t == 0 else decay * left[-1])
    entering = []
    for more, kept in zip(inside[-1].unbind(2), left[-1].unbind(2), strict=True):
        entering.append(state)
        state = torch.addcmul(more, kept, state)
    arrived = torch.stack(entering, dim=2)
    states = (torch.addcmul(own, kept, arrived) for own, kept in zip(inside, left, strict=True))
    y = [(h @ read[..., t, :, None]).squeeze(-1) for t, h in enumerate(states)]
    return torch.stack(y, dim=3).flatten(2, 3)[:, :, :time], state


def _decay(step: Tensor, rate: Tensor, signed: bool) -> Tensor:
    """exp(step rate), or twice that less 1. Exponents end above the denormal numbers, which cost a hundred others each."""
    decay = (step * rate).clamp(min=LOWEST).exp()
    return 2 * decay - 1 if signed else decay
