"""One key or value for many: blocks of tokens made into one each, once they are complete, in a full pass and token by token alike.

Block n of a piece is its tokens n stride, ..., n stride + block - 1. A state keeps what has been made, and the last block - 1 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from variants import cache
from variants.cache import Slots
from variants.contract import Context, State
from variants.sparse.pieces import Pieces

#: Tokens (pieces, kv_heads, blocks, block, width) -> (pieces, kv_heads, blocks, width).
Make = Callable[[Tensor], Tensor]


def mean(tokens: Float[Tensor, "pieces kv_heads blocks block width"]) -> Float[Tensor, "pieces kv_heads blocks width"]:
    """Their mean, summed up in fp32 or better."""
    return tokens.mean(-2, dtype=torch.promote_types(tokens.dtype, torch.float32)).to(tokens.dtype)


class Summaries:
    """Blocks of `block` tokens, one beginning every `stride` tokens."""

    def __init__(self, block: int, stride: int):
        self.block, self.stride = block, stride

    def complete(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """How many blocks so many tokens complete."""
        return ((tokens - self.block) // self.stride + 1).clamp(min=0)

    def count(self, time: int) -> int:
        """The same for a number."""
        return max(0, (time - self.block) // self.stride + 1)

    def update(
        self,
        name: str,
        new: Float[Tensor, "batch kv_heads time width"],
        make: Make,
        pieces: Pieces,
        context: Context,
        state: State | None,
    ) -> tuple[Float[Tensor, "pieces kv_heads summaries width"], dict[str, Tensor | Slots]]:
        """(what stands for all complete blocks of each piece, parts of the new state)."""
        old, total = self.complete(pieces.place0), self.complete(pieces.place0 + pieces.count)
        fresh = torch.arange(int((total - old).max()), device=new.device)
        places = ((old[:, None] + fresh) * self.stride)[..., None] + torch.arange(self.block, device=new.device)
        kept, parts, raw = self.block - 1, dict[str, Tensor | Slots](), new
        if state is not None:
            raw = torch.cat([state[f"{name}_waiting"].transpose(1, 2), new], dim=2)
            parts[f"{name}_waiting"] = cache.newest(raw.transpose(1, 2), kept, context.valid)
        tokens = pieces.tokens(raw, 0 if state is None else kept, places.flatten(1))
        made = make(torch.unflatten(tokens, 2, (len(fresh), self.block)))
        if state is None:
            return made, parts
        earlier = state.slots(name)
        if pieces.trivial and bool((old == earlier.count).all()) and bool((total == total[0]).all()):
            parts[name] = grown = earlier.append(made.transpose(1, 2)) if len(fresh) else earlier
            return grown.tensor.transpose(1, 2), parts
        # Rows have come to different numbers: of each, what was made before and then what was made now.
        both = torch.cat([earlier.tensor.transpose(1, 2)[pieces.row], made], dim=2)
        index = torch.arange(int(total.max()), device=new.device).expand(len(pieces), -1)
        index = torch.where(index < old[:, None], index, index - old[:, None] + earlier.count).clamp(max=max(both.shape[2] - 1, 0))
        joined = both.gather(2, index[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3]))
        parts[name] = joined[pieces.last].transpose(1, 2)[:, : int(total[pieces.last].max())].contiguous()
        return joined, parts

    def init_parts(self, name: str, batch: int, kv_heads: int, width: int, **like: Any) -> dict[str, Tensor]:
        """Nothing made yet, and nothing waiting."""
        return {
            name: torch.zeros(batch, 0, kv_heads, width, **like),
            f"{name}_waiting": torch.zeros(batch, self.block - 1, kv_heads, width, **like),
        }

    def elements(self, time: int) -> int:
        """How many keys or values a state holds for one name and head after so many tokens."""
        return self.count(time) + self.block - 1

    def read(self, time: int) -> int:
        """How many of them hold something, all of which the next token may need."""
        return self.count(time) + min(self.block - 1, time)


class Compression(nn.Module):
    """The keys or values of a block with learned places, side by side, through an MLP to one: W2 silu(W1 [k_1 + p_1, ..., k_l + p_l])."""

    def __init__(self, kv_heads: int, block: int, head_dim: int):
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(kv_heads, block, head_dim))
        self.inward, self.outward = nn.Linear(block * head_dim, head_dim), nn.Linear(head_dim, head_dim)

    def forward(self, tokens: Float[Tensor, "pieces kv_heads blocks block head_dim"]) -> Float[Tensor, "pieces kv_heads blocks head_dim"]:
        """One for each block."""
        found: Tensor = self.outward(silu(self.inward((tokens + self.places[:, None]).flatten(-2))))
        return found

    def flops(self, blocks: int) -> int:
        """Operations for so many blocks of every head."""
        return 2 * blocks * len(self.places) * (self.inward.weight.numel() + self.outward.weight.numel())
