"""Recurrences over rows that are split over ranks: each slice begins with the state in which the slices before it end.

    S_n = M_n S_{n-1} + E_n        E_n: the end of slice n if it begins at 0        M_n: what it leaves of what it begins with

A slice finds its E and M by itself, all exchange them, which is one state and its decay a slice whatever its length, and every slice then
runs from the state that it begins with. So a core runs twice, and all processes at once; states that were passed on from one to the next
would keep the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from variants.ops.ranks import Ring

#: (q, k, v, more by name, `before` and `initial` among it) -> (o, last state), as the decay and delta cores are called.
Core = Callable[..., tuple[Tensor, Tensor]]


def entering(ring: Ring, ends: Sequence[Tensor], left: Sequence[Tensor], *, erases: bool) -> list[Tensor]:
    """The state with which each slice in this process begins.

    ends, left: of each slice in this process. left: what multiplies the state, number by number, or as a matrix where the core erases.
    """
    state, states = torch.zeros_like(ends[0]), []
    for end, factor in zip(ring.everywhere(ends), ring.everywhere(left), strict=True):
        states.append(state)
        state = end + (factor @ state if erases else factor * state)
    return [states[number] for number, _ in ring.here]


def run(
    core: Core,
    ring: Ring,
    q: Float[Tensor, "batch q_heads here key_dim"],
    k: Float[Tensor, "batch k_heads here key_dim"],
    v: Float[Tensor, "batch v_heads here value_dim"],
    timed: Mapping[str, Tensor | None],
    fixed: Mapping[str, Tensor | None],
    *,
    heads: int,
    before: Tensor | None,
    erases: bool = False,
) -> Float[Tensor, "batch o_heads here value_dim"]:
    """The core's outputs for what is here of each row. timed: named inputs that have a time axis, the third. fixed: those that have none.

    heads: those of the state. erases: what is left of a state is a matrix times it, and not a factor for each row of it.
    """
    pieces = [ring.pieces(x, 2) for x in (q, k, v)]
    more = [{name: None if x is None else ring.pieces(x, 2)[n] for name, x in timed.items()} for n in range(len(ring.here))]
    starts = [None for _ in ring.here] if before is None else ring.pieces(before, 1)
    slices = [(inputs, {**named, **fixed, "before": start}) for *inputs, named, start in zip(*pieces, more, starts, strict=True)]
    # What is left of a state shows in columns of their own, to which nothing is written and which begin as ones, or as the identity.
    width = k.shape[-1] if erases else 1
    ends, left = [], []
    for (queries, keys, values), named in slices:
        probe = torch.eye(width, device=v.device) if erases else v.new_ones(keys.shape[-1], 1)
        probe = probe.to(torch.promote_types(v.dtype, torch.float32)).expand(len(v), heads, -1, -1)
        initial = torch.cat([probe.new_zeros(*probe.shape[:3], values.shape[-1]), probe], dim=-1)
        empty = values.new_zeros(*values.shape[:3], width)
        _, last = core(queries, keys, torch.cat([values, empty], dim=-1), **named, initial=initial)
        ends.append(last[..., : values.shape[-1]])
        left.append(last[..., values.shape[-1] :])
    states = entering(ring, ends, left, erases=erases)
    return torch.cat([core(*inputs, **named, initial=state)[0] for (inputs, named), state in zip(slices, states, strict=True)], dim=2)


def scan(
    core: Core,
    ring: Ring,
    x: Float[Tensor, "batch here channels"],
    step: Float[Tensor, "batch here channels"],
    write: Float[Tensor, "batch here state"],
    read: Float[Tensor, "batch here state"],
    *,
    before: Tensor | None,
) -> Float[Tensor, "batch here channels"]:
    """y of a selective scan for what is here of each row. core: (x, step, write, read, `before` and `initial` by name) -> (y, last h)."""
    starts = [None for _ in ring.here] if before is None else ring.pieces(before, 1)
    slices = [*zip(*(ring.pieces(part, 1) for part in (x, step, write, read)), starts, strict=True)]
    whole = step.new_ones(len(x), x.shape[2], write.shape[2])
    ends = [core(*inputs, before=start, initial=None)[1] for *inputs, start in slices]
    left = [core(torch.zeros_like(inputs[0]), *inputs[1:], before=start, initial=whole)[1] for *inputs, start in slices]
    states = entering(ring, ends, left, erases=False)
    return torch.cat([core(*inputs, before=start, initial=state)[0] for (*inputs, start), state in zip(slices, states, strict=True)], dim=1)
