"""Mixture of block attention: each head chooses, for each query, the blocks whose mean key fits it best.

    s_ib = q_i . mean(k of block b)        o_i = softmax attention over the `count` - 1 best complete earlier blocks and its own block

One softmax over the union. Only blocks that are complete before the query's own are candidates, so that no mean tells of later tokens; its
own block is always attended, up to itself. Keys are turned by their position before they are averaged. Lu et al. 2025, "MoBA: Mixture of
Block Attention for Long-Context LLMs" (arXiv 2502.13189), section 2. What is chosen is not differentiable; there is nothing else to train.
Time O(T^2 / block) with a small factor for the choice and O(T count block) for attention, memory O(T), state O(T).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from registry import variants
from variants.cache import Slots
from variants.contract import Context, State, extent
from variants.ops import select
from variants.sparse.layer import Sparse, places
from variants.sparse.summaries import Summaries, mean

#: Queries that choose at once, among the blocks that the last of them may choose.
TILE = 128


@variants.register("moba", time="T^2", state="T", hooks=("rotate",), keeps_keys=False, implementations=("numba", "torch", "reference"))
class MoBA(Sparse):
    """Mixture of block attention: every head attends to the blocks that fit a query best, and to the query's own.

    Each query head chooses by itself, also where heads share keys.

    Options:
        block: tokens in a block.
        count: blocks attended by each query, its own included.
        straight_through: a block's score learns as if it were added to the logits of the block, which it is not; else nothing learns from
            the choice.
    """

    refused: ClassVar = {
        "bias": "the mean of a block's keys stands for many positions, and no bias says which",
        "relate": "blocks are attended to whole, whatever ranges a map of distances has",
    }
    normalises_rows = True

    def __init__(
        self, dim: int, heads: int, position: Any = None, *, block: int = 64, count: int = 4, straight_through: bool = False, **options: Any
    ):
        self.at_least_one(block=block, count=count)
        super().__init__(dim, heads, position, **options)
        self.block, self.count, self.summaries, self.straight_through = block, count, Summaries(block, block), straight_through
        self.exact_gradients = not straight_through

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor | Slots], dict[str, Tensor]]:
        """Project, turn, choose, attend, project back."""
        before, _ = extent(x, context, state)
        q, k, v, made = self.projections(x, context, state, before, None)
        parts: dict[str, Tensor | Slots] = dict(made)
        assert context.positions is not None
        q, k = self.rotate(q, k, context.positions, context.positions)
        before = places(x, before)
        pieces = self.pieces(x, context, state, before)
        means, kept = self.summaries.update("means", k, mean, pieces, context, state)
        slots, all_slots = self.remembered({"keys": k, "values": v}, context, state, before)
        parts |= kept | all_slots
        queries = pieces.queries(q)
        chosen = self.choose(queries, means, pieces.place)
        offsets = self.offsets(queries, means, chosen, pieces.place) if self.straight_through and torch.is_grad_enabled() else None
        keys, values = (pieces.slots(slots[name]) for name in ("keys", "values"))
        found = self.attend(queries, keys, values, chosen, pieces.place, self.block, offsets)
        return self.projections.back(pieces.back(found.y).to(x.dtype)), parts, {"blocks": pieces.back(chosen)}

    @torch.no_grad()
    def choose(
        self,
        q: Float[Tensor, "pieces heads q_time head_dim"],
        means: Float[Tensor, "pieces kv_heads blocks head_dim"],
        place: Int[Tensor, "pieces q_time"],
    ) -> Int[Tensor, "pieces heads q_time count"]:
        """The query's own block, and the best of those before it; scores in fp32 or better."""
        wide = torch.promote_types(q.dtype, torch.float32)
        means = means.to(wide).repeat_interleave(self.heads // self.kv_heads, 1)
        found = []
        for here, at in zip(q.split(TILE, dim=2), place.split(TILE, dim=1), strict=True):
            blocks = int(at.max()) // self.block + 1
            index, own = torch.arange(blocks, device=q.device), (at // self.block)[:, None, :, None]
            scored = min(blocks, means.shape[2])
            scores = pad(here.to(wide) @ means[:, :, :scored].mT, (0, blocks - scored))
            scores = scores.masked_fill(index == own, math.inf).masked_fill(index > own, -math.inf)
            found.append(select.best(scores, self.count))
        return torch.cat(found, dim=2)

    def offsets(
        self,
        q: Float[Tensor, "pieces heads q_time head_dim"],
        means: Float[Tensor, "pieces kv_heads blocks head_dim"],
        chosen: Int[Tensor, "pieces heads q_time count"],
        place: Int[Tensor, "pieces q_time"],
    ) -> Float[Tensor, "pieces heads q_time count"]:
        """0, with the gradient of the scores, as logits, by which earlier blocks were chosen."""
        if not means.shape[2]:
            return torch.zeros_like(chosen, dtype=means.dtype)
        means = means.repeat_interleave(self.heads // self.kv_heads, 1)
        parts = zip(q.split(TILE, dim=2), chosen.split(TILE, dim=2), place.split(TILE, dim=1), strict=True)
        logits = torch.cat([checkpoint(self.logits, here, means, *told, use_reentrant=False) for here, *told in parts], dim=2)
        return logits - logits.detach()

    def logits(self, q: Tensor, means: Tensor, chosen: Tensor, place: Tensor) -> Float[Tensor, "pieces heads q_time count"]:
        """Of the chosen blocks before the query's own, whose mean tells of later tokens; 0 of others."""
        index = chosen.clamp(0, means.shape[2] - 1).flatten(2).unsqueeze(-1).expand(-1, -1, -1, means.shape[3])
        found = torch.unflatten(means.gather(2, index), 2, chosen.shape[2:])
        earlier = (chosen >= 0) & (chosen < (place // self.block)[:, None, :, None])
        return ((found * q.unsqueeze(3)).sum(-1) * self.scale).masked_fill(~earlier, 0)

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """Keys, values, and the means of complete blocks."""
        parts = {name: torch.zeros(batch, 0, self.kv_heads, self.head_dim, **like) for name in ("keys", "values")}
        parts |= self.summaries.init_parts("means", batch, self.kv_heads, self.head_dim, **like)
        return parts | self.projections.init_parts(batch, **like)

    def flops(self, time: int) -> int:
        """Projections, a product with each block's mean that is a candidate, and 4 * head_dim a head for each pair attended."""
        whole = time // self.block
        candidates = self.block * (whole * (whole - 1) // 2) + (time - whole * self.block) * whole
        pairs = sum(self.block * min(self.count - 1, n) * self.block for n in range(whole))
        pairs += (time - whole * self.block) * min(self.count - 1, whole) * self.block
        rest = time - whole * self.block
        pairs += whole * (self.block * (self.block + 1) // 2) + rest * (rest + 1) // 2
        return self.projections.flops(time) + self.heads * self.head_dim * (2 * candidates + 4 * pairs)

    def state_elements(self, time: int) -> int:
        """Keys and values of all tokens, means of complete blocks, and the keys that wait for theirs."""
        slots = 2 * time + self.summaries.elements(time)
        return self.kv_heads * self.head_dim * slots + self.projections.state_elements()

    def read_elements(self, time: int) -> int:
        """Means of all complete blocks, keys that wait for theirs, and keys and values of the chosen blocks and of the query's own.

        Heads that share keys choose by themselves: they are taken to choose different blocks, as far as there are so many.
        """
        shared = self.heads // self.kv_heads
        chosen = min(shared * (self.count - 1), time // self.block) * self.block + time % self.block
        return self.kv_heads * self.head_dim * (2 * chosen + self.summaries.read(time)) + self.projections.state_elements()

    def block_sizes(self) -> tuple[int, ...]:
        """Lengths at whose multiples a new block begins."""
        return (self.block,)
