"""What a cache keeps of the tokens it has seen.

Slots are (batch, time, ...), newest last, with no gap before the newest: a row that has seen fewer tokens than there are slots has its
empty ones in front. So the distance between two slots is the distance between their tokens, whatever padding a row had.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


def newest(
    slots: Shaped[Tensor, "batch slots *rest"], keep: int, valid: Bool[Tensor, "batch time"] | None
) -> Shaped[Tensor, "batch keep *rest"]:
    """The last `keep` slots of each row. `valid` says which of the last slots are pads, at the end of their row: they are passed over."""
    count = slots.shape[1]
    if valid is None:
        # A copy, because a view would keep the storage of every slot alive.
        return slots if keep == count else slots.narrow(1, count - keep, keep).clone()
    index = torch.arange(count - keep, count, device=slots.device) - (~valid).sum(1, keepdim=True)
    return _pick(slots, index.clamp(min=0))


def oldest(
    slots: Shaped[Tensor, "batch slots *rest"], keep: int, before: Int[Tensor, "batch time"], valid: Bool[Tensor, "batch time"] | None
) -> Shaped[Tensor, "batch keep *rest"]:
    """The first `keep` tokens of the segment that the last slot is in, which has `before[:, -1]` tokens before it.

    The first `keep` slots are what an earlier call found; tokens that came since are looked up in the others. What has not come yet is 0.
    """
    place = torch.arange(keep, device=slots.device)
    last = slots.shape[1] - 1 - (0 if valid is None else (~valid).sum(1, keepdim=True))
    index = slots.shape[1] - 1 - before[:, -1:] + place
    found = _pick(slots, torch.where(index < keep, place, index.clamp(max=slots.shape[1] - 1)))
    return found.masked_fill((index > last).reshape(*index.shape, *(1 for _ in slots.shape[2:])), 0)


def _pick(slots: Tensor, index: Int[Tensor, "batch keep"]) -> Tensor:
    return slots[torch.arange(len(slots), device=slots.device).unsqueeze(1), index]
