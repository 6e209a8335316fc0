"""What a cache keeps of the tokens it has seen.

Slots are (batch, time, ...), newest last, with no gap before the newest: a row that has seen fewer tokens than there are slots has its
empty ones in front. So the distance between two slots is the distance between their tokens, whatever padding a row had.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


class Slots:
    """Slots with room behind them, so that one more token is written in its place and no old one is copied.

    Immutable to whoever holds it: `append` gives new slots. Several may share a buffer; only those that end where the buffer has been
    filled write on in it, and any others copy theirs first, so that a state may be continued twice.
    """

    def __init__(self, tensor: Shaped[Tensor, "batch slots *rest"]):
        self._buffer, self.count, self._filled = tensor, tensor.shape[1], [tensor.shape[1]]

    @property
    def tensor(self) -> Shaped[Tensor, "batch slots *rest"]:
        """The slots that hold something."""
        return self._buffer[:, : self.count]

    def append(self, new: Shaped[Tensor, "batch new *rest"]) -> Slots:
        """These slots and `new` ones behind them; in place unless gradients may be recorded, which need the slots as they were."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return Slots(torch.cat([self.tensor, new.to(self._buffer.dtype)], dim=1))
        end = self.count + new.shape[1]
        locked = self._buffer.is_inference() and not torch.is_inference_mode_enabled()
        grown = object.__new__(Slots)
        if locked or end > self._buffer.shape[1] or self._filled[0] != self.count:
            # Heads outside slots, as products take them: then rows and heads are one axis without a copy.
            batch, _, *rest = self._buffer.shape
            grown._buffer = (
                self._buffer.new_empty(batch, *rest[:-1], 2 * end, *rest[-1:]).movedim(len(rest), 1)
                if rest
                else self._buffer.new_empty(batch, 2 * end)
            )
            grown._buffer[:, : self.count] = self.tensor
            grown._filled = [end]
        else:
            grown._buffer, grown._filled = self._buffer, self._filled
            grown._filled[0] = end
        grown._buffer[:, self.count : end] = new
        grown.count = end
        return grown


def remember(
    slots: Slots, kept: int, recent: int, before: Int[Tensor, "batch time"], valid: Bool[Tensor, "batch time"] | None
) -> Slots | Tensor:
    """The first `kept` tokens of the segment that the last slot is in, then the `recent` newest slots."""
    if not kept and recent == slots.count and valid is None:
        return slots
    latest = newest(slots.tensor, recent, valid)
    return torch.cat([oldest(slots.tensor, kept, before, valid), latest], dim=1) if kept else latest


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
