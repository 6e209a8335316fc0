"""What is checked and what the checks share: building a variant, its inputs, and what counts as equal.

A check takes a Subject and returns, in words, what it verified. It raises Failed with the smallest counter-example it found, or
NotApplicable with the reason. Equality within a tolerance is judged in fp64 (`TOLERANCE`, relative to the largest number compared, at
least 1), bitwise equality in fp32: a leak of the future is a leak in any precision, and only bitwise equality is blind to its size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from registry import options, variants
from variants.contract import Context, Mixer, MixerOutput, State

TOLERANCE = 1e-9
#: Added to every parameter, so that what starts at zero (biases, gates) cannot hide what it would do after training.
JITTER = 0.1
#: Attributes that hold a block size, where a mixer has no method `block_sizes() -> tuple[int, ...]`; options that a fast check makes small.
BLOCK_ATTRIBUTES = ("block", "chunk", "window", "compress_block", "compress_stride")
#: Larger blocks are not crossed: a check must stay a matter of seconds.
LARGEST_BLOCK = 128
#: Up to here every length from 1 to twice the block is tried; above, those next to its multiples.
SMALL_BLOCK = 16


class Failed(AssertionError):
    """A property does not hold; the message is the counter-example."""


@dataclass(frozen=True)
class Subject:
    """A registered variant and the arguments of `variants.build` to build it with. `label` names them; `fast` asks for fewer lengths.

    given: the form that was asked for, not one in which a choice left open was made.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    fast: bool = False
    given: bool = True

    def build(self, dtype: torch.dtype = torch.float64, **changed: Any) -> Mixer:
        """A fresh mixer in eval mode; equal calls give equal parameters."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            # A copy: a scheme given as an instance would be shared by all mixers, and changed once for each.
            mixer: Mixer = variants.build(self.name, **copy.deepcopy({**self.arguments, **changed}))
            for parameter in mixer.parameters():
                parameter.add_(JITTER * torch.randn_like(parameter))
        return mixer.to(dtype).eval()

    def takes(self, option: str) -> bool:
        """Whether the variant has an option of this name."""
        return option in (known.name for known in options(variants.get(self.name)))

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """The lengths at whose multiples the variant does something else, ascending."""
        mixer = self.build()
        declared = getattr(mixer, "block_sizes", None)
        sizes = declared() if callable(declared) else (getattr(mixer, name, None) for name in BLOCK_ATTRIBUTES)
        return tuple(sorted({size for size in sizes if isinstance(size, int) and size > 0}))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of tokens to try, ascending: the short ones, and those around every block size."""
        tried = {1, 2, 3, 7, 17} if self.fast else set(range(1, 18))
        for block in self.block_sizes:
            if block > LARGEST_BLOCK:
                continue
            if self.fast:
                tried |= {block - 1, block, block + 1, 2 * block + 1}
            elif block <= SMALL_BLOCK:
                tried |= set(range(1, 2 * block + 2))
            else:
                tried |= {block - 1, block, block + 1, block + (block + 1) // 2, 2 * block - 1, 2 * block, 2 * block + 1}
        return tuple(sorted(tried - {0}))

    @property
    def longest(self) -> int:
        """The most tokens any check uses."""
        return self.lengths[-1]

    def lengths_in_words(self) -> str:
        """The lengths tried, and the blocks that were too large to cross."""
        uncrossed = [size for size in self.block_sizes if size > LARGEST_BLOCK]
        note = f" (blocks of {', '.join(map(str, uncrossed))} not crossed: check again with smaller ones)" if uncrossed else ""
        return f"{len(self.lengths)} lengths from 1 to {self.longest}{note}"


def tokens(batch: int, time: int, dim: int, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Float[Tensor, "batch time dim"]:
    """Standard normal inputs; the first `n` tokens of a row do not depend on `time`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(time, batch, dim, generator=generator, dtype=torch.float64).transpose(0, 1).to(dtype)


def run_in_pieces(
    mixer: Mixer,
    x: Float[Tensor, "batch time dim"],
    pieces: Sequence[int],
    context: Context | None = None,
    state: State | None = None,
) -> MixerOutput:
    """A cached run over pieces of the given lengths, from `state` or from an empty one: the outputs joined, the state after the last."""
    state, outputs, start = state or mixer.init_state(x.shape[0]), [], 0
    assert sum(pieces) == x.shape[1], "the pieces make up the sequence"
    for piece in pieces:
        here = slice(start, start + piece)
        y, after, _ = mixer(x[:, here], None if context is None else cut(context, here), state)
        state, start = kept(after), start + piece
        outputs.append(y)
    return MixerOutput(torch.cat(outputs, 1), state, {})


def kept(state: State | None) -> State:
    """The state after a call that was given one; Failed where the mixer dropped it."""
    if state is None:
        raise Failed("a call with a state gave none back")
    return state


def cut(context: Context, here: slice) -> Context:
    """The same facts about a stretch of the tokens."""
    parts = (context.positions, context.valid, context.segment_ids)
    return Context(*(None if part is None else part[:, here] for part in parts))


def first_line(error: BaseException) -> str:
    """One line about an exception."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest number in `b` or to 1; infinite where one side alone is NaN or infinite."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    a, b = a.detach(), b.detach()
    gap = (a.double() - b.double()).abs().masked_fill(a == b, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
    size = b.double().abs().nan_to_num(posinf=0.0).max().clamp(min=1.0)
    return float(gap.max() / size)


def expect_close(a: Tensor, b: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Failed, saying by how much, unless `a` equals `b`."""
    if a.shape != b.shape:
        raise Failed(f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    gap = difference(a, b)
    if not gap <= tolerance:
        raise Failed(f"{what} by {gap:.2g} (allowed {tolerance:.0e})")


def changed(a: Tensor, b: Tensor) -> Bool[Tensor, ...]:
    """True where two tensors are not the same bitwise; two NaNs count as the same."""
    return (a != b) & ~(a.isnan() & b.isnan())
