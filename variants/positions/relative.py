"""Relative position maps: a rotary model as it was trained, read over a longer row by turning far keys as if they were nearer.

A key n = p - p' tokens before the query is met at the distance D, by turning the query by one number and the key by another, D less. Which
numbers these are depends on the pair, so that keys fall into two or three ranges:

    self_extend    D = n                                                       n < window
                   D = p // group + window - window // group - p' // group     beyond
    rerope         D = min(n, window), or window + (n - window) / slowdown beyond the window
    dual_chunk     D = n                                                       query and key in one block of c = chunk - local positions
                   D = min(p mod c + c, chunk) - p' mod c                      key in the block before
                   D = chunk - p' mod c                                        key in an older one

Jin et al. 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning"; Su 2023, "Rectified Rotary Position Embeddings" (ReRoPE
and its leaky form, published as code); An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models" (dual chunk).

They have no parameters, so that the weights of a model trained with `rope` fit as they are. Maps are by position: a gap between two tokens'
positions counts as tokens, and blocks begin at its multiples wherever a row begins. In a segment positions must not decrease.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from registry import positions
from variants.positions.contract import Part
from variants.positions.rotary import Rotary, turn


class Range(NamedTuple):
    """The numbers that queries and keys are turned by for each other (None: not turned), and the position at which such keys begin."""

    at_queries: Shaped[Tensor, "#batch q_time"]
    at_keys: Shaped[Tensor, "#batch k_time"] | None
    since: Int[Tensor, "#batch q_time"] | None


class Relative(Rotary):
    """Base of the schemes that map distances."""

    def ranges(self, q_positions: Int[Tensor, "#batch q_time"], k_positions: Int[Tensor, "#batch k_time"]) -> list[Range]:
        """The map, from the nearest keys to the farthest."""
        raise NotImplementedError(f"{type(self).__name__} must define ranges(q_positions, k_positions)")

    def relate(
        self,
        q: Float[Tensor, "batch heads q_time head_dim"],
        k: Float[Tensor, "batch kv_heads k_time head_dim"],
        q_positions: Int[Tensor, "batch q_time"],
        k_positions: Int[Tensor, "batch k_time"],
    ) -> Iterator[Part]:
        """Queries and keys turned for each range of the map, one after another: where no key is far, none is turned as a far one."""
        q_positions, k_positions = (x[:1] if x.stride(0) == 0 else x for x in (q_positions, k_positions))
        for at_queries, at_keys, since in self.ranges(q_positions, k_positions):
            yield Part(self.turned(q, at_queries), self.turned(k, at_keys), since)

    def turned(
        self, x: Float[Tensor, "batch heads time head_dim"], by: Shaped[Tensor, "#batch time"] | None
    ) -> Float[Tensor, "batch heads time head_dim"]:
        """x, each token turned by its number of positions, which may be a fraction. Angles are fp64."""
        if by is None:
            return x
        return turn(x, by.unsqueeze(-1) * self.frequencies(device=by.device), self.layout, self.magnitude)


@positions.register("self_extend", hooks=("relate",))
class SelfExtend(Relative):
    """Self-extend: near keys at their distance, far ones at that between groups of tokens. For a `rope` model.

    A model trained on L tokens can read (L - window) * group + window of them.

    Options:
        group: tokens that share a position where they are far away.
        window: keys nearer than this number of positions keep their distance.
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, group: int = 8, window: int = 256, **options: Any):
        super().__init__(head_dim, heads, dim, **options)
        require_whole(self, group=group, window=window)
        self.group, self.window = group, window

    def ranges(self, q_positions: Int[Tensor, "#batch q_time"], k_positions: Int[Tensor, "#batch k_time"]) -> list[Range]:
        """Inside the window, and beyond it."""
        # Whole numbers, also where the group does not divide the window: no model was trained between two positions.
        shift = self.window - self.window // self.group
        return [
            Range(q_positions, k_positions, q_positions - self.window + 1),
            Range(q_positions // self.group + shift, k_positions // self.group, None),
        ]

    def block_sizes(self) -> tuple[int, ...]:
        """The window."""
        return (self.window,)


@positions.register("rerope", hooks=("relate",))
class ReRoPE(Relative):
    """Rectified rotary positions (ReRoPE): beyond a window all keys are at one distance, or distances grow slowly. For a `rope` model.

    Options:
        window: keys nearer than this number of positions keep their distance.
        slowdown: beyond the window distances grow this many times more slowly (leaky ReRoPE); None: not at all.
        log_scaled: multiply the logits of a query at position p by max(1, ln(p + 1) / ln(trained_length)).
        trained_length: tokens in the sequences that the model was trained on, where log_scaled asks for it.
    """

    def __init__(
        self,
        head_dim: int,
        heads: int,
        dim: int,
        *,
        window: int = 512,
        slowdown: float | None = None,
        log_scaled: bool = False,
        trained_length: int = 2048,
        **options: Any,
    ):
        super().__init__(head_dim, heads, dim, **options)
        require_whole(self, window=window)
        if slowdown is not None and not 1 <= slowdown < math.inf:
            raise ValueError(f"ReRoPE: slowdown must be at least 1, and None where distances do not grow at all; got {slowdown}")
        if trained_length < 2:
            raise ValueError(f"ReRoPE: trained_length must be at least 2; got {trained_length}")
        self.window, self.slowdown, self.log_scaled, self.trained_length = window, slowdown, log_scaled, trained_length

    def ranges(self, q_positions: Int[Tensor, "#batch q_time"], k_positions: Int[Tensor, "#batch k_time"]) -> list[Range]:
        """Inside the window, and beyond it."""
        near = Range(q_positions, k_positions, q_positions - self.window + 1)
        if self.slowdown is None:
            return [near, Range(torch.full_like(q_positions, self.window), None, None)]
        slowly = [x.to(torch.float64) / self.slowdown for x in (q_positions, k_positions)]
        return [near, Range(slowly[0] + (self.window - self.window / self.slowdown), slowly[1], None)]

    def sharpen(self, q_positions: Int[Tensor, "batch q_time"]) -> Float[Tensor, "batch q_time"] | None:
        """max(1, ln(p + 1) / ln(trained_length)), in fp64, if it was asked for."""
        if not self.log_scaled:
            return None
        return ((q_positions.to(torch.float64).clamp(min=0) + 1).log() / math.log(self.trained_length)).clamp(min=1)

    def block_sizes(self) -> tuple[int, ...]:
        """The window."""
        return (self.window,)


@positions.register("dual_chunk", hooks=("relate",))
class DualChunk(Relative):
    """Dual chunk attention (DCA): positions in blocks, with distances of their own between them, none above a chunk. For a `rope` model.

    Options:
        trained_length: tokens in the sequences that the model was trained on.
        chunk: the largest distance (default: three quarters of trained_length).
        local: queries up to so far into a block keep their distances to the block before (default: an eighth of trained_length).
    """

    def __init__(
        self,
        head_dim: int,
        heads: int,
        dim: int,
        *,
        trained_length: int = 2048,
        chunk: int | None = None,
        local: int | None = None,
        **options: Any,
    ):
        super().__init__(head_dim, heads, dim, **options)
        self.trained_length = trained_length
        self.chunk = 3 * trained_length // 4 if chunk is None else chunk
        self.local = trained_length // 8 if local is None else local
        if not 0 <= self.local < self.chunk < trained_length:
            raise ValueError(
                "DualChunk: a chunk is larger than what of it is local, and smaller than the trained length, beyond which no distance is "
                f"known; got local={self.local}, chunk={self.chunk}, trained_length={trained_length}"
            )
        self.block = self.chunk - self.local

    def ranges(self, q_positions: Int[Tensor, "#batch q_time"], k_positions: Int[Tensor, "#batch k_time"]) -> list[Range]:
        """The query's own block, the one before, and all older ones."""
        at_queries, at_keys = (x.remainder(self.block) for x in (q_positions, k_positions))
        begins = q_positions - at_queries
        return [
            Range(at_queries, at_keys, begins),
            Range((at_queries + self.block).clamp(max=self.chunk), at_keys, begins - self.block),
            Range(torch.full_like(q_positions, self.chunk), at_keys, None),
        ]

    def block_sizes(self) -> tuple[int, ...]:
        """The block of positions."""
        return (self.block,)


def require_whole(scheme: Rotary, **options: int) -> None:
    """Raises ValueError for one that is not at least 1."""
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"{type(scheme).__name__}: {name} must be at least 1; got {value}")
