"""Native sparse attention: a query looks at summaries of everything, at the blocks that they say matter, and at what is near.

    o_i = g_c Attn(q_i, K~, V~) + g_s Attn(q_i, K of the chosen blocks) + g_w Attn(q_i, K of a window)        g = sigmoid(x_i W)

K~ has one key for every `compress_stride` tokens, made of `compress_block` of them by an MLP over keys and their places in the block, or by
their mean; a query sees those that are complete. Its weights on them, summed over the heads that share keys, are the importance of
selection blocks, in proportion to the overlap; the best `count` blocks are attended token by token, the first and the query's own and
previous ones always among them. Each branch has keys and values of its own. Yuan et al. 2025, "Native Sparse Attention" (arXiv 2502.11089),
section 3. What is chosen is not differentiable: the compression learns through its own branch, unless `straight_through` is on. Rotary
schemes turn queries and keys of the selection and the window; compression, whose keys stand for many places, takes them unturned. Time
O(T^2 / compress_stride) with a small factor, memory O(T), state O(T) keys and values, of which a step reads the summaries, the chosen
blocks and the window.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from registry import variants
from variants.cache import Slots
from variants.contract import Context, State, extent
from variants.ops import reference, select, softmax
from variants.ops.attention import Output, Sight
from variants.ops.prefix import attend_prefix
from variants.sparse.layer import Sparse, places
from variants.sparse.pieces import Pieces
from variants.sparse.summaries import Compression, Summaries, mean

#: Queries whose importance is computed at once, where it learns.
TILE = 128


@variants.register("nsa", time="T^2", state="T", hooks=("rotate",), keeps_keys=False, implementations=("numba", "torch", "reference"))
class NSA(Sparse):
    """Native sparse attention: compressed, selected and near keys, in three gated branches.

    Options:
        kv_heads: key/value heads, a divisor of heads; the heads that share one choose blocks together.
        compress_block: tokens in a compressed key.
        compress_stride: tokens from one compressed key to the next, a divisor of compress_block and of block.
        compression: how tokens become one: `mlp` over keys with learned places, or their `mean`.
        block: tokens in a block that is chosen as a whole, at least compress_block.
        count: blocks chosen by each query, the forced ones included.
        first_blocks: blocks at the beginning that are always chosen.
        local_blocks: the query's own block and those before it that are always chosen.
        window: tokens in sight of the third branch, the query itself counted.
        straight_through: a block's importance learns as if it were added to the logits of the block, which it is not; else the compression
            learns through its own branch alone.
    """

    refused: ClassVar = {
        "bias": "its compressed keys stand for many positions, and no bias says which",
        "relate": "blocks are attended to whole, whatever ranges a map of distances has",
    }
    branches: ClassVar[int] = 3

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        kv_heads: int = 1,
        compress_block: int = 32,
        compress_stride: int = 16,
        compression: Literal["mlp", "mean"] = "mlp",
        block: int = 32,
        count: int = 8,
        first_blocks: int = 1,
        local_blocks: int = 2,
        window: int = 128,
        straight_through: bool = False,
        **options: Any,
    ):
        self.at_least_one(compress_stride=compress_stride, local_blocks=local_blocks, window=window)
        super().__init__(dim, heads, position, kv_heads=kv_heads, **options)
        for name, value in (("compress_block", compress_block), ("block", block)):
            if value < compress_stride or value % compress_stride:
                raise ValueError(f"NSA: {name}={value} must be a multiple of compress_stride={compress_stride}")
        if block < compress_block:
            raise ValueError(f"NSA: block={block} must be at least compress_block={compress_block}")
        if first_blocks < 0 or count < first_blocks + local_blocks:
            raise ValueError(
                f"NSA: count={count} must leave room for what is always chosen: first_blocks={first_blocks} and local_blocks={local_blocks}"
            )
        self.block, self.count, self.window, self.straight_through = block, count, window, straight_through
        self.exact_gradients = not straight_through
        self.first_blocks, self.local_blocks = first_blocks, local_blocks
        self.summaries = Summaries(compress_block, compress_stride)
        self.compress_k, self.compress_v = (
            Compression(kv_heads, compress_block, self.head_dim) if compression == "mlp" else None for _ in range(2)
        )
        self.gates = nn.Linear(dim, 3 * heads)
        nn.init.normal_(self.gates.weight, std=dim**-0.5)
        nn.init.zeros_(self.gates.bias)

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor | Slots], dict[str, Tensor]]:
        """Project, attend in three branches, gate, project back."""
        before, _ = extent(x, context, state)
        q, k, v, parts = self.projections(x, context, state, before, None)
        (k_c, k_s, k_w), (v_c, v_s, v_w) = k.chunk(3, dim=1), v.chunk(3, dim=1)
        assert context.positions is not None
        turned, keys = self.rotate(q, torch.cat([k_s, k_w], dim=1), context.positions, context.positions)
        k_s, k_w = keys.chunk(2, dim=1)
        before = places(x, before)
        pieces = self.pieces(x, context, state, before)

        compressed = []
        for name, new, module in (("compressed_keys", k_c, self.compress_k), ("compressed_values", v_c, self.compress_v)):
            found, kept = self.summaries.update(name, new, mean if module is None else module, pieces, context, state)
            compressed.append(found)
            parts |= kept
        near, slots = self.remembered({"near_keys": k_w, "near_values": v_w}, context, state, before, self.window - 1)
        far, all_slots = self.remembered({"keys": k_s, "values": v_s}, context, state, before)

        summary, chosen = self.summarise(pieces, q, *compressed)
        offsets = None
        if self.straight_through and torch.is_grad_enabled():
            offsets = self.offsets(pieces.queries(q), compressed[0], summary.lse, chosen, pieces.place)
        keys, values = (pieces.slots(far[name]) for name in ("keys", "values"))
        selected = self.attend(pieces.queries(turned), keys, values, chosen, pieces.place, self.block, offsets).y
        windowed = self.windowed(turned, near, before, state is not None)
        gate = rearrange(torch.sigmoid(self.gates(x)), "batch time (branch heads) -> branch batch heads time 1", branch=3)
        y = gate[0] * pieces.back(summary.y) + gate[1] * pieces.back(selected) + gate[2] * windowed
        return self.projections.back(y.to(x.dtype)), parts | slots | all_slots, {"blocks": pieces.back(chosen)}

    def summarise(self, pieces: Pieces, q: Tensor, k: Tensor, v: Tensor) -> tuple[Output, Int[Tensor, "pieces kv_heads q_time count"]]:
        """(attention to the compressed keys, the blocks that it chooses)."""
        q, place = pieces.queries(q), pieces.place
        blocks = -(-int((pieces.place0 + pieces.count).max().clamp(min=1)) // self.block)
        chosen = torch.empty(len(q), self.kv_heads, q.shape[2], self.count, dtype=torch.int64, device=q.device)

        def choose(here: slice, weights: Tensor | None) -> None:
            within = min(blocks, int(place[:, here].max()) // self.block + 1)  # no later one may be chosen here
            chosen[:, :, here] = select.best(self.scores(place[:, here], weights, within), self.count)

        visible = self.summaries.complete(place + 1).clamp(max=k.shape[2])
        blind = int((visible == 0).all(0).sum())  # the first queries see no compressed key, and nobody watches them
        if blind:
            choose(slice(0, blind), None)
        if self.implementation == "reference":
            summary = self.plainly(q, k, v, visible, choose if blind < q.shape[2] else None)
        else:
            summary = attend_prefix(q, k, v, visible, watch=lambda here, weights: self.watched(here, weights, blind, choose))
        return summary, chosen

    @staticmethod
    def watched(here: slice, weights: Tensor, blind: int, choose: Any) -> None:
        """Weights of a tile, without the queries that saw nothing."""
        skipped = max(blind - here.start, 0)
        choose(slice(here.start + skipped, here.stop), weights[..., skipped:, :])

    def plainly(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, choose: Any) -> Output:
        """Attention to the compressed keys with all its weights written out, and the choice of all but the blind queries at once."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        seen = (torch.arange(k.shape[2], device=q.device) < visible.unsqueeze(-1)).unsqueeze(1)
        logits = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~seen, -math.inf)
        weights = logits.softmax(-1).masked_fill(~seen, 0)
        if choose is not None:
            blind = int((visible == 0).all(0).sum())
            choose(slice(blind, q.shape[2]), torch.unflatten(weights, 1, (self.kv_heads, -1))[..., blind:, :].detach())
        return Output(weights.to(v.dtype) @ v, logits.logsumexp(-1))

    def offsets(
        self,
        q: Float[Tensor, "pieces heads q_time head_dim"],
        k: Float[Tensor, "pieces kv_heads keys head_dim"],
        lse: Float[Tensor, "pieces heads q_time"],
        chosen: Int[Tensor, "pieces kv_heads q_time count"],
        place: Int[Tensor, "pieces q_time"],
    ) -> Float[Tensor, "pieces kv_heads q_time count"]:
        """0, with the gradient of the importance of the blocks that were chosen for it."""
        visible, found = self.summaries.complete(place + 1).clamp(max=k.shape[2]), []
        for start in range(0, q.shape[2] if k.shape[2] else 0, TILE):
            here = slice(start, start + TILE)
            told = (q[:, :, here], k, lse[:, :, here], chosen[:, :, here], visible[:, here])
            found.append(checkpoint(self.importance, *told, use_reentrant=False))  # gathered keys of one tile alone are alive
        if not found:
            return torch.zeros_like(chosen, dtype=lse.dtype)
        block, own = chosen, (place // self.block)[:, None, :, None]
        forced = (block < self.first_blocks) | ((block <= own) & (block > own - self.local_blocks))
        importance = torch.cat(found, dim=2).masked_fill(forced, 0)
        return importance - importance.detach()

    def importance(
        self, q: Tensor, k: Tensor, lse: Tensor, chosen: Tensor, visible: Tensor
    ) -> Float[Tensor, "pieces kv_heads q_time count"]:
        """That of chosen blocks, as `overlaps` has it of all: from the weights on the few compressed keys that reach into them."""
        ahead, back = self.block // self.summaries.stride, self.summaries.block // self.summaries.stride
        reach = torch.arange(-(back - 1), ahead, device=q.device)
        times = sum(((reach + n >= 0) & (reach + n < ahead)).to(lse.dtype) for n in range(back))
        index = ahead * chosen.unsqueeze(-1) + reach  # pieces kv_heads q_time count reach
        seen = (chosen >= 0).unsqueeze(-1) & (index >= 0) & (index < visible[:, None, :, None, None])
        index = index.clamp(0, k.shape[2] - 1).flatten(2)
        keys = k.to(lse.dtype).gather(2, index.unsqueeze(-1).expand(*index.shape, k.shape[-1]))
        keys = torch.unflatten(keys, 2, seen.shape[2:])
        queries = torch.unflatten(q.to(lse.dtype), 1, (k.shape[1], -1))
        logits = torch.einsum("bghtd,bgtnrd->bghtnr", queries, keys) * q.shape[-1] ** -0.5
        norm = torch.unflatten(lse.clamp(min=torch.finfo(lse.dtype).min), 1, (k.shape[1], -1))[..., None, None]
        weights = (logits.masked_fill(~seen.unsqueeze(2), -math.inf) - norm).exp()
        return (weights.sum(2) * times).sum(-1)

    def scores(
        self, place: Int[Tensor, "pieces q_time"], weights: Tensor | None, blocks: int
    ) -> Float[Tensor, "pieces kv_heads q_time blocks"]:
        """The importance of each block, from weights on compressed keys (pieces, kv_heads, shared, q_time, seen)."""
        block = torch.arange(blocks, device=place.device)
        own = (place // self.block).unsqueeze(-1)
        forced = (block < self.first_blocks) | ((block <= own) & (block > own - self.local_blocks))
        if weights is None:
            importance = torch.zeros(len(place), self.kv_heads, place.shape[1], blocks, device=place.device)
        else:
            importance = self.overlaps(weights.sum(2), blocks)
        importance = importance.masked_fill(forced.unsqueeze(1), math.inf)
        return importance.masked_fill((block > own).unsqueeze(1), -math.inf)

    def overlaps(
        self, weights: Float[Tensor, "pieces kv_heads q_time seen"], blocks: int
    ) -> Float[Tensor, "pieces kv_heads q_time blocks"]:
        """With r = block / stride, for block j the sum over m < r and n < compress_block / stride of the weights on key r j + m - n."""
        ahead, back = self.block // self.summaries.stride, self.summaries.block // self.summaries.stride
        padded = pad(weights, (back - 1, max(0, ahead * blocks - weights.shape[-1])))
        total = weights.new_zeros(*weights.shape[:-1], blocks)
        for offset in range(-(back - 1), ahead):
            times = sum(0 <= offset + n < ahead for n in range(back))
            start = offset + back - 1
            total += times * padded[..., start : start + ahead * (blocks - 1) + 1 : ahead]
        return total

    def windowed(
        self, q: Tensor, slots: dict[str, Tensor], before: Int[Tensor, "batch time"], cached: bool
    ) -> Float[Tensor, "batch heads time head_dim"]:
        """Attention to what is near."""
        attention = reference.attention if self.implementation == "reference" else softmax.attention
        sight = Sight(window=self.window, before=before if cached or before.stride(0) else None)
        return attention(q, slots["near_keys"], slots["near_values"], sight=sight, scale=self.scale)

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """Keys and values of each branch, compressed ones, and the last tokens that wait for their compressed key to be complete."""
        lengths = {"keys": 0, "values": 0, "near_keys": self.window - 1, "near_values": self.window - 1}
        parts = {name: torch.zeros(batch, slots, self.kv_heads, self.head_dim, **like) for name, slots in lengths.items()}
        for name in ("compressed_keys", "compressed_values"):
            parts |= self.summaries.init_parts(name, batch, self.kv_heads, self.head_dim, **like)
        return parts | self.projections.init_parts(batch, **like)

    def flops(self, time: int) -> int:
        """Projections, gates, compression, and 4 * head_dim a head for each pair of a query and a key that it attends."""
        weights = self.gates.weight.numel()
        keys = self.summaries.count(time)
        compression = sum(0 if module is None else module.flops(keys) for module in (self.compress_k, self.compress_v))
        pairs = 2 * self.pairs(time)
        if self.straight_through:  # the keys that reach into a chosen block, once more
            pairs += time * self.count * (self.block + self.summaries.block - self.summaries.stride) // self.summaries.stride
        return self.projections.flops(time) + 2 * time * weights + compression + 2 * self.heads * self.head_dim * pairs

    def pairs(self, time: int) -> int:
        """Pairs of a query and a key in the three branches."""
        near = min(self.window, time)
        windowed = near * (near + 1) // 2 + (time - near) * near
        keys = self.summaries.count(time)
        first = self.summaries.block - 1  # compressed key n is seen by all from token first + n stride on
        summarised = sum(time - first - n * self.summaries.stride for n in range(keys))
        whole = time // self.block * self.block
        chosen = sum(min((self.count - 1) * self.block, start) * self.block for start in range(0, whole, self.block))
        chosen += (time - whole) * min((self.count - 1) * self.block, whole)
        own = whole // self.block * (self.block * (self.block + 1) // 2) + (time - whole) * (time - whole + 1) // 2
        return windowed + summarised + chosen + own

    def state_elements(self, time: int) -> int:
        """Keys and values of all tokens for the selection, those of the window, the compressed ones, and what waits to be compressed."""
        slots = time + self.window - 1 + self.summaries.elements(time)
        return 2 * self.kv_heads * self.head_dim * slots + self.projections.state_elements()

    def read_elements(self, time: int) -> int:
        """Keys and values of the chosen blocks and the window, the compressed ones, and what waits, whether or not it becomes complete.

        The heads that share keys choose together.
        """
        chosen = min(self.count - 1, time // self.block) * self.block + time % self.block
        slots = chosen + min(self.window - 1, time) + self.summaries.read(time)
        return 2 * self.kv_heads * self.head_dim * slots + self.projections.state_elements()

    def block_sizes(self) -> tuple[int, ...]:
        """Lengths at whose multiples a branch does something else."""
        return (self.summaries.stride, self.summaries.block, self.block, self.window)
