"""Selection: from the scores of what could be looked at to the places of the best, by one rule for every sparse mixer.

Of equal scores the one with the lowest index wins. What scores -inf may not be chosen; where fewer than `count` candidates are left, the
places behind them hold -1. A score of +inf is a choice that was made beforehand. Scores that are not numbers are refused: whatever is
larger than NaN depends on who asks. Time O(candidates) a row, no gradients: what is chosen is not differentiable.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from variants import implementations

#: The most that are kept in order by insertion.
INSERTED = 64


def best(scores: Float[Tensor, "*shape candidates"], count: int) -> Int[Tensor, "*shape count"]:
    """The indices of the `count` highest scores, ascending, then -1. Raises ValueError for NaN."""
    if count < 1:
        raise ValueError(f"count must be at least 1; got {count}")
    scores = scores.detach()
    looped = scores.device.type == "cpu" and type(scores) is Tensor and scores.dtype in (torch.float32, torch.float64)
    if looped and (loops := _loops()) is not None:
        found, broken = _in_loops(scores, count, loops)
    else:
        found, broken = _by_threshold(scores, count), bool(scores.isnan().any())
    if broken:
        raise ValueError("a score to select by is NaN; what is chosen would depend on the order of comparison")
    return found


def _in_loops(scores: Float[Tensor, "*shape candidates"], count: int, loops: Any) -> tuple[Int[Tensor, "*shape count"], bool]:
    """What is chosen, and whether a score is NaN."""
    from variants.ops.threads import spread

    rows = scores.reshape(-1, scores.shape[-1]).contiguous()
    chosen = torch.empty(len(rows), count, dtype=torch.int64)
    parallel = rows.numel() >= 2**18
    if count <= INSERTED:
        broken = bool(scores.isnan().any())
        told = (rows.numpy(), chosen.numpy())
        spread(lambda first, end: loops.best(first, end, *told), len(rows), parallel=parallel)
    else:
        wrong = torch.zeros(len(rows), dtype=torch.uint8)
        bits = rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int64)
        more = (rows.numpy(), bits.numpy(), chosen.numpy(), wrong.numpy())
        spread(lambda first, end: loops.best_of_many(first, end, *more), len(rows), parallel=parallel)
        broken = bool(wrong.any())
    return chosen.view(*scores.shape[:-1], count), broken


def _by_threshold(scores: Float[Tensor, "*shape candidates"], count: int) -> Int[Tensor, "*shape count"]:
    """Everything above the count-th score, and of what equals it the first ones."""
    candidates = scores.shape[-1]
    count_here = min(count, candidates)
    index = torch.arange(candidates, device=scores.device)
    if count_here < candidates:
        least = scores.topk(count_here, dim=-1).values[..., -1:]
        above, equal = scores > least, scores == least
        taken = above | (equal & (equal.cumsum(-1) <= count_here - above.sum(-1, keepdim=True)))
        # Ascending, by one more search over numbers that are all different.
        found = torch.where(taken, index, candidates).topk(count_here, dim=-1, largest=False, sorted=True).values
    else:
        found = index.expand_as(scores)
    allowed = scores.gather(-1, found) > -torch.inf
    found = torch.where(allowed, found, candidates).sort(-1).values
    found = found.masked_fill(found == candidates, -1)
    return torch.nn.functional.pad(found, (0, count - count_here), value=-1)


@functools.cache
def _loops() -> Any:
    """The compiled searches, if numba is usable."""
    if implementations.usable("numba") is not None:
        return None
    from variants.ops import gather_loops

    return gather_loops
