"""DeepSeek sparse attention: a cheap indexer scores every earlier token, and all heads attend to the best of them.

    I_ts = sum_h w_th relu(q^I_th . k^I_s / sqrt(head_dim))        o_t = softmax attention over the `count` tokens s <= t of highest I_ts

The indexer has heads of its own and one key a token, normalised and turned by the position scheme like the others. What is chosen is not
differentiable: the mixer gives the loss `loss/indexer`, the divergence of softmax(I_t) from the attention weights summed over the heads,
over the tokens attended, whose inputs are detached, so that it teaches the indexer alone. With `stage=dense` everything is attended and the
indexer learns from all of it: the warm-up that a sparse run starts from. DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 2; there the main
attention is MLA, here heads with keys and values. Time O(T^2) for the indexer with a small factor and O(T count) for attention, memory
O(T), state O(T): keys, values and the indexer's keys.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import log_softmax, relu
from torch.utils.checkpoint import checkpoint

from registry import variants
from variants.cache import Slots
from variants.contract import Context, State, extent
from variants.ops import indexer, select
from variants.ops.precision import without_autocast
from variants.sparse.layer import Sparse, places
from variants.sparse.pieces import Pieces

#: Queries whose scores, or gathered keys, are alive at once.
TILE = 64


@variants.register("dsa", time="T^2", state="T", hooks=("rotate",), keeps_keys=False, implementations=("numba", "torch", "reference"))
class DSA(Sparse):
    """DeepSeek sparse attention: a lightning indexer picks the tokens that all heads attend to.

    Options:
        count: tokens attended by each query, if there are as many.
        index_heads: heads of the indexer.
        stage: `sparse` attends to what is chosen, `dense` to everything, while the indexer learns what matters.
    """

    refused: ClassVar = {
        "bias": "it writes no logits out that a bias could be added to",
        "relate": "the tokens that it attends to lie in no ranges",
    }
    normalises_rows = True

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        count: int = 64,
        index_heads: int = 4,
        stage: Literal["sparse", "dense"] = "sparse",
        **options: Any,
    ):
        self.at_least_one(count=count, index_heads=index_heads)
        super().__init__(dim, heads, position, **options)
        self.count, self.index_heads, self.stage = count, index_heads, stage
        self.index_queries = nn.Linear(dim, index_heads * self.head_dim, bias=False)
        self.index_keys = nn.Linear(dim, self.head_dim, bias=False)
        self.index_weights = nn.Linear(dim, index_heads, bias=False)
        for matrix in (self.index_queries, self.index_keys, self.index_weights):
            nn.init.normal_(matrix.weight, std=dim**-0.5)
        self.index_norm = nn.LayerNorm(self.head_dim, eps=1e-6)

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor | Slots], dict[str, Tensor]]:
        """Project, turn, choose, attend, project back; with gradients enabled the indexer's loss."""
        before, _ = extent(x, context, state)
        q, k, v, made = self.projections(x, context, state, before, None)
        parts: dict[str, Tensor | Slots] = dict(made)
        index_q, index_k, weight = self.indexer(x.detach())
        assert context.positions is not None
        q, k = self.rotate(q, k, context.positions, context.positions)
        index_q, index_k = self.rotate(index_q, index_k, context.positions, context.positions)
        before = places(x, before)
        pieces = self.pieces(x, context, state, before)
        slots, kept = self.remembered({"keys": k, "values": v, "index_keys": index_k}, context, state, before)
        parts |= kept
        if state is not None and torch.is_grad_enabled():  # whose inputs are detached is so also between calls
            part = parts["index_keys"]
            parts["index_keys"] = (part.tensor if isinstance(part, Slots) else part).detach()
        q, index_q, weight = pieces.queries(q), pieces.queries(index_q), pieces.queries(weight)
        k, v, index_k = (pieces.slots(slots[name]) for name in ("keys", "values", "index_keys"))
        chosen = self.choose(index_q, index_k, weight, pieces.place)
        if self.stage == "dense":  # everything is one block, which is chosen
            found = self.attend(q, k, v, torch.zeros_like(chosen[..., :1]), pieces.place, k.shape[2])
        else:
            found = self.attend(q, k, v, chosen, pieces.place, 1)
        aux = {"tokens": pieces.back(chosen)}
        if torch.is_grad_enabled():
            aux["loss/indexer"] = self.divergence((q, k, found.lse), (index_q, index_k, weight), chosen, pieces)
        return self.projections.back(pieces.back(found.y).to(x.dtype)), parts, aux

    def indexer(self, x: Float[Tensor, "batch time dim"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (batch, index_heads, time, head_dim), keys (batch, 1, time, head_dim), weights (batch, index_heads, time, 1)."""
        queries = rearrange(self.index_queries(x), "batch time (heads width) -> batch heads time width", heads=self.index_heads)
        keys = self.index_norm(self.index_keys(x)).unsqueeze(1)
        weights = rearrange(self.index_weights(x), "batch time heads -> batch heads time 1") * self.index_heads**-0.5
        return queries, keys, weights

    def looped(self, x: Tensor) -> bool:
        """Whether compiled loops run."""
        return self.implementation == "numba" and x.device.type == "cpu"

    def scored(self, q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
        """I, (pieces, q_time, keys), in fp32 or better; k: (pieces, 1, keys, head_dim), or (pieces, q_time, keys, head_dim) a query."""
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, weight = q.to(wide), k.to(wide), weight.to(wide)
        with without_autocast(q):  # what is chosen would depend on its rounding
            if k.shape[1] == 1:
                return (relu(q @ k.mT * self.head_dim**-0.5) * weight).sum(1)
            each = relu(q.transpose(1, 2) @ k.mT * self.head_dim**-0.5)  # (pieces, q_time, index_heads, keys)
            return (each * weight.transpose(1, 2)).sum(2)

    @torch.no_grad()
    def choose(self, q: Tensor, k: Tensor, weight: Tensor, place: Int[Tensor, "pieces q_time"]) -> Int[Tensor, "pieces 1 q_time count"]:
        """The tokens of highest score that do not follow."""
        wide = torch.promote_types(q.dtype, torch.float32)
        found = place.new_empty(*place.shape, self.count)  # written part by part: all of it twice would be the largest thing here
        parts = (q.split(TILE, dim=2), place.split(TILE, dim=1), weight.split(TILE, dim=2), found.split(TILE, dim=1))
        for here, at, factor, chosen in zip(*parts, strict=True):
            seen = min(int(at.max()) + 1, k.shape[2])
            if self.looped(q):
                scores = indexer.scores(here.to(wide), k[:, :, :seen].to(wide), factor.to(wide), at)
            else:
                scores = self.scored(here, k[:, :, :seen], factor)
                scores = scores.masked_fill(torch.arange(seen, device=q.device) > at.unsqueeze(-1), -math.inf)
            chosen.copy_(select.best(scores, self.count))
        return found.unsqueeze(1)

    def divergence(
        self, attention: tuple[Tensor, Tensor, Tensor], index: tuple[Tensor, Tensor, Tensor], chosen: Tensor, pieces: Pieces
    ) -> Float[Tensor, ""]:
        """KL(attention weights, mean over heads || softmax(I)) over the tokens attended, mean over valid queries; fp32 or better."""
        q, k, lse = (part.detach() for part in attention)
        index_q, index_k, weight = index
        valid = torch.arange(q.shape[2], device=q.device) < pieces.count[:, None]
        if self.looped(q) and self.stage == "sparse":
            total = indexer.divergence(q, k, lse, *index, chosen[:, 0], valid, scale=self.scale)
            return total / valid.sum().clamp(min=1)
        total = q.new_zeros((), dtype=lse.dtype)
        for first in range(0, q.shape[2], TILE):
            here = slice(first, first + TILE)
            told = (q[:, :, here], k, lse[:, :, here], index_q[:, :, here], index_k, weight[:, :, here], chosen[:, 0, here])
            # Computed again for the backward pass, so that gathered keys of one tile alone are alive.
            total = total + checkpoint(self._tile, *told, pieces.place[:, here], valid[:, here], use_reentrant=False)
        return total / valid.sum().clamp(min=1)

    def _tile(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        weight: Tensor,
        chosen: Tensor,
        place: Tensor,
        valid: Tensor,
    ) -> Tensor:
        """The sum of the divergences of one tile of queries."""
        if self.stage == "dense":
            slot = torch.arange(k.shape[2], device=k.device)
            seen = slot <= place.unsqueeze(-1)
            keys, index_keys = k, index_k
        else:
            seen, row = chosen >= 0, torch.arange(len(k), device=k.device)[:, None, None]
            picked = chosen.clamp(min=0)
            keys = k.transpose(1, 2)[row, picked].permute(0, 3, 1, 2, 4)  # (pieces, kv_heads, q_time, count, head_dim)
            index_keys = index_k[:, 0][row, picked]
        wide = lse.dtype
        together = torch.unflatten(q.to(wide), 1, (k.shape[1], -1))
        if self.stage == "dense":
            logits = together @ keys.to(wide).mT.unsqueeze(2)
        else:
            logits = (together.movedim(2, 3) @ keys.to(wide).mT).movedim(3, 2)
        shares = (logits.flatten(1, 2) * self.scale - lse.clamp(min=torch.finfo(wide).min).unsqueeze(-1)).exp()
        shares = shares.masked_fill(~seen.unsqueeze(1), 0).mean(1)
        scores = self.scored(index_q, index_keys, weight).masked_fill(~seen, -math.inf)
        scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0)
        wanted = log_softmax(scores, dim=-1).masked_fill(~seen, 0)
        each = torch.xlogy(shares, shares) - shares * wanted
        return each.sum(-1).masked_fill(~valid, 0).sum()

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """Keys, values and the indexer's keys."""
        heads = {"keys": self.kv_heads, "values": self.kv_heads, "index_keys": 1}
        parts = {name: torch.zeros(batch, 0, count, self.head_dim, **like) for name, count in heads.items()}
        return parts | self.projections.init_parts(batch, **like)

    def flops(self, time: int) -> int:
        """Projections, a product a pair and head of the indexer, and 4 * head_dim a head for each pair attended."""
        index = sum(matrix.weight.numel() for matrix in (self.index_queries, self.index_keys, self.index_weights))
        every = time * (time + 1) // 2
        near = min(self.count, time)
        pairs = every if self.stage == "dense" else near * (near + 1) // 2 + (time - near) * near
        return self.projections.flops(time) + 2 * time * index + self.head_dim * (2 * self.index_heads * every + 4 * self.heads * pairs)

    def state_elements(self, time: int) -> int:
        """Keys, values and the indexer's key of every token."""
        return (2 * self.kv_heads + 1) * self.head_dim * time + self.projections.state_elements()

    def read_elements(self, time: int) -> int:
        """The indexer's keys of all tokens, and keys and values of the chosen ones, which all heads share."""
        chosen = time if self.stage == "dense" else min(self.count, time)
        return (2 * self.kv_heads * chosen + time) * self.head_dim + self.projections.state_elements()

    def block_sizes(self) -> tuple[int, ...]:
        """The length from which on there is something to choose."""
        return (self.count,)
