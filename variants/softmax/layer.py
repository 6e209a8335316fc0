"""Softmax attention: the layer that every variant of it shares.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim) + bias_ij) v_j        over the keys j in sight of query i

Vaswani et al. 2017, "Attention Is All You Need", section 3.2; heads that share keys and values from Shazeer 2019 and Ainslie et al. 2023.
A subclass says which keys are in sight (`attend`, `pairs`) and how many the cache keeps (`kept`, `recent`). The cache holds keys turned by
their position; a scheme whose frequencies depend on the length gets them unturned instead, and turns them at every call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from variants import cache, implementations
from variants.contract import Context, Mixer, State, extent
from variants.ops import reference, softmax
from variants.projections import Projections

Positions = tuple[Int[Tensor, "batch q_time"], Int[Tensor, "batch k_time"]]


class Softmax(Mixer):
    """Base of the softmax family. Takes rotary and additive schemes; query head h reads key/value head h // (heads / kv_heads).

    Options:
        kv_heads: key/value heads, a divisor of heads (default: heads).
        short_conv: width of a depthwise convolution over time on q, k and v (0: none).
        dropout: share of attention weights dropped in training; needs the weights written out, so it rules the fused kernel out.
        impl: which implementation runs; `auto` takes the fastest that is usable.
    """

    implementations: tuple[str, ...] = ("sdpa", "reference")
    normalises_rows = True
    bidirectional = True
    #: Slots of the cache for the first tokens of a segment.
    kept = 0

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        kv_heads: int | None = None,
        short_conv: int = 0,
        dropout: float = 0.0,
        impl: str = "auto",
        **options: Any,
    ):
        super().__init__(dim, heads, position, **options)
        name = type(self).__name__
        self.kv_heads = heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"{name}: kv_heads={self.kv_heads} does not divide heads={heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"{name}: dropout must lie in [0, 1); got {dropout}")
        self.dropout = dropout
        without = {"sdpa": f"it cannot drop weights (dropout={dropout}) in linear memory"} if dropout else {}
        self.implementation = implementations.choose(name, impl, self.implementations, excluded=without)
        self.projections = Projections(dim, heads, self.kv_heads, self.head_dim, short_conv=short_conv, causal=self.causal)

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor], dict[str, Tensor]]:
        """Project, turn, attend to cache and input, project back."""
        positions = context.positions
        assert positions is not None
        before, after = extent(x, context, state, self.causal)
        q, k, v, parts = self.projections(x, context, state, before, after)
        if not self._turns_late:
            q, k = self.rotate(q, k, positions, positions)
        slots = {"keys": k.transpose(1, 2), "values": v.transpose(1, 2)}
        if self._needs_positions:
            slots["positions"] = positions
        if state is not None:
            assert before is not None
            slots = {name: torch.cat([state[name], new], dim=1) for name, new in slots.items()}
            parts |= {name: self._remember(slot, context, before) for name, slot in slots.items()}
        k, v = slots["keys"].transpose(1, 2), slots["values"].transpose(1, 2)
        both = (positions, slots["positions"]) if self._needs_positions else None
        if self._turns_late and both:
            q, k = self.rotate(q, k, *both)
        y = self.attend(q, k, v, before=before, after=after, positions=both)
        return self.projections.back(y.to(x.dtype)), parts, {}

    def attend(
        self,
        q: Float[Tensor, "batch heads q_time head_dim"],
        k: Float[Tensor, "batch kv_heads k_time head_dim"],
        v: Float[Tensor, "batch kv_heads k_time head_dim"],
        *,
        before: Int[Tensor, "batch q_time"] | None,
        after: Int[Tensor, "batch q_time"] | None,
        positions: Positions | None,
    ) -> Float[Tensor, "batch heads q_time head_dim"]:
        """Attention to every key of a query's segment. before, after: from `contract.extent`. positions: given where a bias needs them."""
        bias = None if self.bias is None or positions is None else self.bias(*positions)
        visible = None if before is None else reference.in_sight(before, after, k.shape[2])
        return self.attention(q, k, v, causal=self.causal and visible is None, visible=visible, bias=bias, scale=self.scale)

    def pairs(self, time: int) -> int:
        """How many pairs of query and key a sequence of `time` tokens has."""
        return time * (time + 1) // 2 if self.causal else time * time

    def recent(self, slots: int) -> int:
        """How many of the newest slots the cache keeps, of `slots` there are."""
        return slots

    @property
    def attention(self) -> Callable[..., Tensor]:
        """The chosen implementation of attention under a mask."""
        if self.implementation == "sdpa":
            return softmax.attention
        return functools.partial(reference.attention, dropout=self.dropout if self.training else 0.0)

    @property
    def bias(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The scheme's additive bias, if it has one."""
        return self.position.bias if self.position is not None and "bias" in self.position.hooks else None

    @property
    def scale(self) -> float:
        """The factor on the logits."""
        return (1.0 if self.position is None else self.position.logit_scale) / math.sqrt(self.head_dim)

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """Keys and values, without slots as yet or with all of them empty, and the convolution's taps."""
        slots = self.kept + self.recent(0)
        parts = {name: torch.zeros(batch, slots, self.kv_heads, self.head_dim, **like) for name in ("keys", "values")}
        if self._needs_positions:
            parts["positions"] = torch.zeros(batch, slots, dtype=torch.long, device=like.get("device"))
        return parts | self.projections.init_parts(batch, **like)

    def flops(self, time: int) -> int:
        """Projections, and 4 * head_dim a head for each pair in sight."""
        return self.projections.flops(time) + 4 * self.heads * self.head_dim * self.pairs(time)

    def state_elements(self, time: int) -> int:
        """A key and a value for each slot and key/value head, and the convolution's taps."""
        return 2 * self.kv_heads * self.head_dim * (self.kept + self.recent(time)) + self.projections.state_elements()

    @property
    def _turns_late(self) -> bool:
        return self.position is not None and self.position.length_dependent

    @property
    def _needs_positions(self) -> bool:
        return self._turns_late or self.bias is not None

    def _remember(self, slots: Tensor, context: Context, before: Tensor) -> Tensor:
        recent = cache.newest(slots, self.recent(slots.shape[1] - self.kept), context.valid)
        return torch.cat([cache.oldest(slots, self.kept, before, context.valid), recent], dim=1) if self.kept else recent
