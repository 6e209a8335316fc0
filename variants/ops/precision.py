"""What keeps its precision, whatever the model around it is run in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Inside, nothing is rounded to the dtype of an autocast around it. For x on any device, meta among them, which knows no autocast."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Inside, numbers below the least normal one count as 0, in this thread and in those that start here."""
    before = flushes_denormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def flushes_denormals() -> bool:
    """Whether numbers below the least normal one count as 0 here (`torch.set_flush_denormal`): elsewhere each costs a hundred others."""
    return float(torch.tensor(1e-38, device="cpu") * torch.tensor(1e-3, device="cpu")) == 0.0
