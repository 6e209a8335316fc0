"""The selective scan on CPUs: compiled loops over time, channels in the vector registers, forward and backward.

A task is one row of the batch and LANES channels, whose states stay in the caches while time goes by. The forward pass
keeps the states at the borders of SEGMENT tokens, and the backward pass walks through the segments from the last to the first, computing
what is inside again: memory is O(T) with no (time, channels, state) tensor. The loops stand behind `torch.library` operators, so that
autograd, `torch.compile` and fake tensors see through them; first derivatives in reverse mode alone, and no transforms of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from variants.ops import scan, scan_loops
from variants.ops.precision import without_autocast
from variants.ops.scan_loops import LANES, SEGMENT
from variants.ops.threads import spread

#: State updates below which a second thread costs more than it brings (about a third of a millisecond).
WORTH = 2**18
#: What both operators take first.
GIVEN = "Tensor x, Tensor step, Tensor rate, Tensor write, Tensor read, Tensor starts"


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
) -> tuple[Float[Tensor, "batch time channels"], Float[Tensor, "batch channels state"]]:
    """The same as `reference.selective_scan`. Single tokens, and tensors that are on no CPU, are left to plain torch."""
    if x.shape[1] == 1 or x.device.type != "cpu":
        return scan.selective_scan(x, step, rate, write, read, before=before, initial=initial, signed=signed)
    _require_shapes(x, step, rate, write, read, before, initial)
    dtype = torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x):
        x, step, write, read = (part.to(dtype).contiguous() for part in (x, step, write, read))
        rate = rate.to(dtype)
        state = x.new_zeros(len(x), *rate.shape) if initial is None else initial.to(dtype)
        starts = torch.zeros(x.shape[:2], dtype=torch.bool) if before is None else before == 0
        # Inside, channels are last.
        y, last, _ = _scan(x, step, rate.mT.contiguous(), write, read, starts, state.mT.contiguous(), signed)
    return y, last.mT


def _require_shapes(
    x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, before: Tensor | None, initial: Tensor | None
) -> None:
    """Raises ValueError: the loops would read beyond the end of what does not fit."""
    (batch, time, channels), size = x.shape, rate.shape[-1]
    right = {
        "step": (step, (batch, time, channels)),
        "rate": (rate, (channels, size)),
        "write": (write, (batch, time, size)),
        "read": (read, (batch, time, size)),
        "before": (before, (batch, time)),
        "initial": (initial, (batch, channels, size)),
    }
    for name, (part, shape) in right.items():
        if part is not None and part.shape != shape:
            raise ValueError(f"selective_scan: {name} must be {shape}; got {tuple(part.shape)}")


@torch.library.custom_op(
    "attnlab::selective_scan",
    mutates_args=(),
    device_types="cpu",
    schema=f"({GIVEN}, Tensor initial, bool signed) -> (Tensor, Tensor, Tensor)",
)
def _scan(
    x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, starts: Tensor, initial: Tensor, signed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, last state, states at the borders of segments); rate (state, channels), states (batch, state, channels)."""
    y, last, borders = _empty(x, initial)
    given = (x, step, rate, write, read, starts, initial)
    _run(scan_loops.forward, x, rate, [*map(_array, (*given, y, last, borders)), 1 if signed else 0])
    return y, last, borders


@_scan.register_fake
def _(x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, starts: Tensor, initial: Tensor, signed: bool) -> Any:
    return _empty(x, initial)


def _empty(x: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, time, _ = x.shape
    return torch.empty_like(x), torch.empty_like(initial), x.new_empty(batch, -(-time // SEGMENT), *initial.shape[1:])


@torch.library.custom_op(
    "attnlab::selective_scan_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"({GIVEN}, Tensor borders, Tensor grad_y, Tensor grad_last, bool signed) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _scan_backward(
    x: Tensor,
    step: Tensor,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    starts: Tensor,
    borders: Tensor,
    grad_y: Tensor,
    grad_last: Tensor,
    signed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, step, rate, write, read and the initial state."""
    grads = _empty_grads(x, step, rate, write, read, borders)
    given = (x, step, rate, write, read, starts, borders, grad_y, grad_last)
    # What several tasks add to has a place for each, so that the sum never depends on who comes first.
    groups = -(-x.shape[2] // LANES)
    by_rate, by_write, by_read = (
        x.new_empty(len(x), *rate.shape),
        write.new_empty(groups, *write.shape),
        read.new_empty(groups, *read.shape),
    )
    results = (grads[0], grads[1], by_rate, by_write, by_read, grads[5])
    _run(scan_loops.backward, x, rate, [*map(_array, (*given, *results)), 1 if signed else 0])
    for total, parts in zip(grads[2:5], (by_rate, by_write, by_read), strict=True):
        torch.sum(parts, 0, out=total)
    return grads


@_scan_backward.register_fake
def _(
    x: Tensor,
    step: Tensor,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    starts: Tensor,
    borders: Tensor,
    grad_y: Tensor,
    grad_last: Tensor,
    signed: bool,
) -> Any:
    return _empty_grads(x, step, rate, write, read, borders)


def _empty_grads(
    x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, borders: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, step, rate, write, read = (torch.empty_like(part) for part in (x, step, rate, write, read))
    return x, step, rate, write, read, torch.empty_like(borders[:, 0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, _, signed = inputs
    ctx.signed = signed
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx: Any, grad_y: Tensor, grad_last: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _scan_backward(*ctx.saved_tensors, grad_y.contiguous(), grad_last.contiguous(), ctx.signed)
    return *grads[:5], None, grads[5], None


_scan.register_autograd(_differentiate, setup_context=_keep)


def _array(x: Tensor) -> Any:
    """The same memory, as numba takes it."""
    return x.detach().numpy()


def _run(loop: Callable[..., None], x: Tensor, rate: Tensor, arguments: Sequence[Any]) -> None:
    """The loop over all tasks."""
    tasks = len(x) * -(-x.shape[2] // LANES)
    spread(lambda first, end: loop(first, end, *arguments), tasks, parallel=x.numel() * rate.shape[0] >= WORTH)
