"""Recurrences over blocks of time, whose inside is computed again for the backward pass.

A recurrent core is a function of one block: (state, inputs of the block) -> (outputs of the block, state). Between blocks only the state is
kept, so that training takes the memory of one block and of one state a block, whatever autograd would keep of the inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

#: (state, inputs that have a time axis, inputs that have none) -> (outputs, state).
Block = Callable[[Tensor, Sequence[Tensor | None], Sequence[Tensor | None]], tuple[Tensor, Tensor]]


@torch.compiler.disable  # dozens of blocks, unrolled, would take minutes to compile
def run(
    block: Block,
    state: Float[Tensor, "batch heads key_dim value_dim"],
    timed: Sequence[Tensor | None],
    fixed: Sequence[Tensor | None],
    *,
    size: int,
) -> tuple[Float[Tensor, "batch heads time out_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """(outputs, last state) of `block` over consecutive blocks of `size` tokens. Time is the third axis of every input in `timed`.

    What fits one block is left to autograd; beyond, there are first derivatives only, and no
    transforms of `torch.func`.
    """
    first = next(x for x in timed if x is not None)
    if first.shape[2] <= size:
        return block(state, timed, fixed)
    o, last = _Blocks.apply(block, size, len(timed), state, *timed, *fixed)  # type: ignore[no-untyped-call]
    return o, last


class _Blocks(torch.autograd.Function):
    """`run`, one block after another, then backwards from the last."""

    @staticmethod
    def forward(ctx: Any, block: Block, size: int, count: int, state: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        timed, fixed = inputs[:count], inputs[count:]
        states, outputs = [], []
        for part in _blocks(timed, size):
            states.append(state)
            o, state = block(state, part, fixed)
            outputs.append(o)
        ctx.block, ctx.size, ctx.count = block, size, count
        ctx.save_for_backward(*inputs, *states)
        return torch.cat(outputs, dim=2), state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: what is checkpointed is computed again for the first reading, and given up
        inputs: tuple[Tensor | None, ...] = saved[: len(ctx.needs_input_grad) - 4]
        states: tuple[Tensor, ...] = saved[len(inputs) :]
        needed = ctx.needs_input_grad[4:]
        grads = [None if x is None or not wanted else torch.zeros_like(x) for x, wanted in zip(inputs, needed, strict=True)]
        timed, fixed = inputs[: ctx.count], inputs[ctx.count :]
        parts, sums = _blocks(timed, ctx.size), _blocks(grads[: ctx.count], ctx.size, len(states))
        for part, total, arriving, state in reversed([*zip(parts, sums, torch.split(grad, ctx.size, dim=2), states, strict=True)]):
            leaves = [_leaf(x, wanted) for x, wanted in zip((*part, *fixed), needed, strict=True)]
            entering = _leaf(state, True)
            assert entering is not None
            with torch.enable_grad():
                outcome = ctx.block(entering, leaves[: ctx.count], leaves[ctx.count :])
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            grad_state, *found = torch.autograd.grad(outcome, [entering, *wanted], [arriving, grad_state], materialize_grads=True)
            for grown, more in zip((x for x in (*total, *grads[ctx.count :]) if x is not None), found, strict=True):
                grown.add_(more)
        return None, None, None, grad_state, *grads


def _blocks(timed: Sequence[Tensor | None], size: int, count: int | None = None) -> list[list[Tensor | None]]:
    """The inputs of each block, views; `count` says how many there are where no input does."""
    count = count or -(-next(x.shape[2] for x in timed if x is not None) // size)
    pieces = [[None] * count if x is None else torch.split(x, size, dim=2) for x in timed]
    return [list(part) for part in zip(*pieces, strict=True)]


def _leaf(x: Tensor | None, wanted: bool) -> Tensor | None:
    return x if x is None else x.detach().requires_grad_(wanted and x.is_floating_point())
