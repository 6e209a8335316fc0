"""The sizes that a person may choose."""

from __future__ import annotations

from dataclasses import dataclass, fields

from registry import UserError


@dataclass(frozen=True)
class Sizes:
    """heads of width head_dim at core level, heads out of dim at layer level; window: of the group of that name.

    processes: at layer level, how many share each row in candidates beside those of one process.
    """

    batch: int = 1
    heads: int = 4
    head_dim: int = 64
    dim: int = 256
    window: int = 256
    processes: int = 1

    def __post_init__(self) -> None:
        for part in fields(self):
            if getattr(self, part.name) < 1:
                raise UserError(f"--{part.name.replace('_', '-')} must be at least 1; got {getattr(self, part.name)}")
