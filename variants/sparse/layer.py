"""What sparse mixers share: projections, keys and values kept of every token, rows taken apart by segment, attention to chosen blocks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from variants import cache, implementations
from variants.cache import Slots
from variants.contract import Context, Mixer, State, valid_lengths
from variants.ops import gathered, reference
from variants.ops.attention import Output
from variants.ops.straight_through import lifted
from variants.projections import Projections
from variants.sparse.pieces import Pieces


class Sparse(Mixer):
    """Base of mixers that attend to what they choose. Takes rotary schemes; query head h reads key/value head h // (heads / kv_heads).

    Options:
        kv_heads: key/value heads, a divisor of heads (default: heads).
        short_conv: width of a depthwise convolution over time on q, k and v (0: none).
        impl: which implementation runs; `auto` takes the fastest that is usable.
    """

    hooks: ClassVar[tuple[str, ...]] = ("rotate",)
    implementations: tuple[str, ...]
    #: A block is no matter of speed here.
    chunk_options: ClassVar[tuple[str, ...]] = ()
    #: How many keys and values a key/value head has for each token.
    branches: ClassVar[int] = 1

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        kv_heads: int | None = None,
        short_conv: int = 0,
        impl: str = "auto",
        **options: Any,
    ):
        super().__init__(dim, heads, position, **options)
        self.kv_heads = self.shared_by(kv_heads)
        self.implementation = implementations.choose(type(self).__name__, impl, self.implementations)
        self.projections = Projections(dim, heads, self.branches * self.kv_heads, self.head_dim, short_conv=short_conv)

    def pieces(self, x: Tensor, context: Context, state: State | None, before: Int[Tensor, "batch time"]) -> Pieces:
        """The sequences that the rows are made of."""
        return Pieces(before, 0 if state is None else state.slots("keys").count, valid_lengths(x, context))

    def remembered(
        self,
        new: dict[str, Float[Tensor, "batch kv_heads time head_dim"]],
        context: Context,
        state: State | None,
        before: Int[Tensor, "batch time"],
        recent: int | None = None,
    ) -> tuple[dict[str, Float[Tensor, "batch kv_heads slots head_dim"]], dict[str, Tensor | Slots]]:
        """What to attend to, and what the next state keeps of it: the `recent` newest, or all."""
        if state is None:
            return new, {}
        grown = {name: state.slots(name).append(part.transpose(1, 2)) for name, part in new.items()}
        kept = {
            name: cache.remember(slots, 0, slots.count if recent is None else recent, before, context.valid)
            for name, slots in grown.items()
        }
        return {name: slots.tensor.transpose(1, 2) for name, slots in grown.items()}, kept

    def attend(self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, place: Tensor, size: int, offsets: Tensor | None = None) -> Output:
        """Attention to the chosen blocks of `size` slots, by the implementation that runs.

        offsets: of each chosen block, 0 in value: what is to learn from how much more of a block would have changed.
        """
        told: dict[str, Any] = {"size": size, "scale": self.scale}
        if self.implementation == "reference":
            return reference.attend_blocks(q, k, v, chosen, place, **told, offsets=offsets)
        found = gathered.attend_blocks(q, k, v, chosen, place, **told, loops=self.implementation == "numba")
        return found if offsets is None else lifted(found, offsets, q, k, v, chosen, place, **told)

    @property
    def scale(self) -> float:
        """The factor on logits of turned queries and keys."""
        return (1.0 if self.position is None else self.position.logit_scale) * self.head_dim**-0.5


def places(x: Tensor, before: Int[Tensor, "batch time"] | None) -> Int[Tensor, "batch time"]:
    """How many tokens of its segment lie before each, also where `extent` leaves that to the shape."""
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) if before is None else before
