"""Softmax attention: the layer that every variant of it shares.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim) + bias_ij) v_j        over the keys j in sight of query i

Vaswani et al. 2017, "Attention Is All You Need", section 3.2; heads that share keys and values from Shazeer 2019 and Ainslie et al. 2023.
A subclass says which keys are in sight (`sight`, `pairs`) and how many the cache keeps (`kept`, `recent`). The cache holds keys turned by
their position; a scheme whose frequencies depend on the length gets them unturned instead, and turns them at every call, as does one that
turns a key in several ways, by its distance from the query (`variants.softmax.parts`).

Options of the layer: RMS norms on queries and keys (Henry et al. 2020; Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion
Parameters"); a sigmoid gate on the heads' outputs (Qiu et al. 2025, "Gated Attention for Large Language Models"); a learned logit in every
row's denominator that has no value (OpenAI 2025, gpt-oss).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from variants import cache, implementations
from variants.cache import Slots
from variants.contract import Context, Mixer, NotApplicable, State, extent
from variants.ops import flash_attn, flex, fused, reference, softmax
from variants.ops.attention import Bias, Output, Sight
from variants.ops.ranks import Ring
from variants.ops.ring import attention as ring_attention
from variants.ops.tiling import FEWEST, window_tile
from variants.projections import Projections
from variants.softmax.parts import Relation, attend_in_parts, require_order

ATTENTION: dict[str, Callable[..., Tensor]] = {
    "flash_attn": flash_attn.attention,
    "flex": flex.attention,
    "sdpa": fused.attention,
    "torch": softmax.attention,
    "reference": reference.attention,
}
#: Those that give the log-sum-exp by which attention to several ranges of keys is joined.
ATTEND: dict[str, Callable[..., Output]] = {"torch": softmax.attend, "reference": reference.attend}


#: Why a window takes no map of distances.
WINDOWED = "a window keeps distances inside the trained length by itself"


class Softmax(Mixer):
    """Base of the softmax family. Takes rotary and additive schemes; query head h reads key/value head h // (heads / kv_heads).

    Options:
        kv_heads: key/value heads, a divisor of heads (default: heads).
        short_conv: width of a depthwise convolution over time on q, k and v (0: none).
        qk_norm: queries and keys pass an RMS norm with a learned scale, head by head, before they are turned.
        gate: sigmoid gates on the output, made from x: one a head, one an element, or none.
        sink_logit: each head learns a logit that joins every row's denominator and has no value.
        dropout: share of attention weights dropped in training.
        impl: which implementation runs; `auto` takes the fastest that is usable.
    """

    implementations: tuple[str, ...] = ("sdpa", "torch", "reference")
    normalises_rows = True
    bidirectional = True
    #: Whether one matrix makes queries, keys and values. A variant that makes them otherwise writes its own `mix`, state and costs.
    projects: ClassVar[bool] = True
    #: How many tokens are in sight, the query itself counted (None: all), and how many of a segment's first ones stay in sight for good.
    window: int | None = None
    sinks = 0

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        kv_heads: int | None = None,
        short_conv: int = 0,
        qk_norm: bool = False,
        gate: Literal["none", "head", "element"] = "none",
        sink_logit: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
        **options: Any,
    ):
        super().__init__(dim, heads, position, **options)
        self.kv_heads = self.shared_by(kv_heads)
        if not 0 <= dropout < 1:
            raise ValueError(f"{type(self).__name__}: dropout must lie in [0, 1); got {dropout}")
        self.dropout = dropout
        self.implementation = self.choose(impl)
        if self.projects:
            self.projections = Projections(dim, heads, self.kv_heads, self.head_dim, short_conv=short_conv, causal=self.causal)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None for _ in range(2))
        self.gates = None if gate == "none" else nn.Linear(dim, heads * (1 if gate == "head" else self.head_dim), bias=False)
        if self.gates is not None:
            nn.init.normal_(self.gates.weight, std=dim**-0.5)
        self.sink = nn.Parameter(0.02 * torch.randn(heads)) if sink_logit else None
        self.normalises_rows = type(self).normalises_rows and self.gates is None and not sink_logit

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor | Slots], dict[str, Tensor]]:
        """Project, turn, attend to cache and input, gate, project back."""
        positions = context.positions
        assert positions is not None
        before, after = extent(x, context, state, self.causal)
        q, k, v, parts = self.project(x, context, state, before, after)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (norm(x.to(norm.weight.dtype)).to(x.dtype) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        if not self._turns_late:
            q, k = self.rotate(q, k, positions, positions)
        new = {"keys": k.transpose(1, 2), "values": v.transpose(1, 2), **self.extra_slots(x, context, state)}
        if self._needs_positions:
            new["positions"] = positions
        slots, remembered = self.remember(new, context, state, before)
        k, v = slots["keys"].transpose(1, 2), slots["values"].transpose(1, 2)
        if self._turns_late:
            q, k = self.rotate(q, k, positions, slots["positions"])
        y = self.attend(q, k, v, slots, **self.view(context, state, before, after, slots), sink=self.sink, **self.numbers)
        return self.projections.back(self.gated(y, x).to(x.dtype)), parts | remembered, {}

    def choose(self, impl: str) -> str:
        """The implementation to run. Raises NotUsable for one asked for by name that cannot do what the options ask."""
        without = {"sdpa": f"it cannot drop weights (dropout={self.dropout}) in linear memory"} if self.dropout else {}
        if self._relates:
            reason = f"{type(self.position).__name__} attends to ranges of keys, and it gives no log-sum-exp to join them by"
            without = {name: reason for name in ATTENTION if name not in ATTEND}
        return implementations.choose(type(self).__name__, impl, self.candidates(), excluded=without)

    def candidates(self) -> tuple[str, ...]:
        """The implementations, fastest first."""
        return self.implementations

    def project(
        self,
        x: Float[Tensor, "batch time dim"],
        context: Context,
        state: State | None,
        before: Int[Tensor, "batch time"] | None,
        after: Int[Tensor, "batch time"] | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Queries, keys and values, (batch, heads, time, head_dim) each, and the parts of the new state that making them needs."""
        found: tuple[Tensor, Tensor, Tensor, dict[str, Tensor]] = self.projections(x, context, state, before, after)
        return found

    def extra_slots(self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None) -> dict[str, Tensor]:
        """What the cache holds of each new token beside its key and its value, (batch, time, ...) by name."""
        return {}

    def attend(
        self,
        q: Float[Tensor, "batch heads time head_dim"],
        k: Float[Tensor, "batch kv_heads slots head_dim"],
        v: Float[Tensor, "batch kv_heads slots head_dim"],
        slots: dict[str, Tensor],
        **told: Any,
    ) -> Float[Tensor, "batch heads time head_dim"]:
        """The heads' outputs. slots: all that is remembered, by name and newest last; `keys` are unturned there if they turn late."""
        return self.attention(q, k, v, **told)

    def gated(
        self, y: Float[Tensor, "batch heads time head_dim"], x: Float[Tensor, "batch time dim"]
    ) -> Float[Tensor, "batch heads time head_dim"]:
        """The heads' outputs times the sigmoid gates that x gives them, if there are any."""
        if self.gates is None:
            return y
        gate = rearrange(torch.sigmoid(self.gates(x)), "batch time (heads width) -> batch heads time width", heads=self.heads)
        return y * gate.to(y.dtype)

    def view(
        self,
        context: Context,
        state: State | None,
        before: Int[Tensor, "batch time"] | None,
        after: Int[Tensor, "batch time"] | None,
        slots: dict[str, Tensor],
    ) -> dict[str, Any]:
        """What attention is told of who sees whom: of whole rows where they are split, and then with the ring that does it."""
        if context.split is not None:
            whole = context.split.whole
            assert whole.positions is not None
            sight = self.sight(*extent(whole.positions, whole, None, self.causal), False)
            return {"sight": sight, "bias": self.bias(whole.positions, {"positions": whole.positions}), "ring": context.split.ring}
        assert context.positions is not None
        sight = self.sight(before, after, state is not None)
        return {"sight": sight, "bias": self.bias(context.positions, slots), **self.relation(context, slots, sight)}

    def whole_rows(self) -> str | None:
        """Why rows cannot be split; None: they can."""
        if self.dropout:
            return f"attention over several processes drops no weights; set dropout=0 instead of {self.dropout}"
        if not self.causal and (self.sinks or (self.projects and self.projections.short_conv)):
            return "with causal=False neither sinks nor a short convolution reach into the slices of other processes"
        if self._turns_late or self._relates:
            return f"position {type(self.position).__name__} must see whole rows; choose another position"
        return None

    def sight(self, before: Int[Tensor, "batch time"] | None, after: Int[Tensor, "batch time"] | None, cached: bool) -> Sight:
        """Which slots are seen. before, after: from `contract.extent`; cached: whether a state's slots stand before the new ones."""
        return Sight(self.causal, self.window, self.sinks, self.kept if cached else 0, before, after)

    def look_through(self, window: int | None, sinks: int) -> None:
        """Set the window and its sinks. Raises ValueError for those that there cannot be."""
        name = type(self).__name__
        if window is not None and self._relates:
            raise NotApplicable(f"{name} with window={window} cannot take position {type(self.position).__name__}: {WINDOWED}")
        if window is not None and window < 1:
            raise ValueError(f"{name}: window counts the query itself and must be at least 1; got {window}")
        if sinks < 0:
            raise ValueError(f"{name}: sinks must not be negative; got {sinks}")
        if sinks and window is None:
            raise ValueError(f"{name}: sinks={sinks} are what a window leaves in sight, and without one everything is; give window")
        self.window, self.sinks = window, sinks

    def pairs(self, time: int) -> int:
        """How many pairs of query and key are in sight in a sequence of `time` tokens."""
        if self.window is None:
            return time * (time + 1) // 2 if self.causal else time * time
        near = min(self.window, time)
        side = near * (near - 1) // 2 + (time - near) * (near - 1)
        sinks = range(min(self.sinks, time))
        far = sum(max(time - self.window - sink, 0) for sink in sinks)
        if self.causal:
            return time + side + far
        return time + 2 * side + far + sum(max(sink - self.window + 1, 0) for sink in sinks)

    @property
    def kept(self) -> int:
        """Slots of the cache for the first tokens of a segment."""
        return self.sinks

    def recent(self, slots: int) -> int:
        """How many of the newest slots the cache keeps, of `slots` there are: those that the next query has in sight."""
        return slots if self.window is None else self.window - 1

    def reach(self) -> int | None:
        """How many tokens back an output depends on its input; with sinks, all of them."""
        return None if self.window is None or self.sinks else self.window - 1 + self.projections.reach()

    def block_sizes(self) -> tuple[int, ...]:
        """The lengths at whose multiples something else is done."""
        own = (FEWEST,) if self.window is None else (self.window, window_tile(self.window))
        return own if self.position is None else (*own, *self.position.block_sizes())

    def remember(
        self, new: dict[str, Tensor], context: Context, state: State | None, before: Int[Tensor, "batch time"] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor | Slots]]:
        """The slots to attend to, those of the state and then the new ones; and what the next state keeps of them."""
        if state is None:
            return new, {}
        assert before is not None
        grown = {name: state.slots(name).append(part) for name, part in new.items()}
        keep = self.recent(next(iter(grown.values())).count - self.kept)
        return (
            {name: slots.tensor for name, slots in grown.items()},
            {name: cache.remember(slots, self.kept, keep, before, context.valid) for name, slots in grown.items()},
        )

    def bias(self, positions: Int[Tensor, "batch time"], slots: dict[str, Tensor]) -> Bias | None:
        """The scheme's additive bias, if it has one."""
        if self.position is None or "bias" not in self.position.hooks:
            return None
        return self.position.as_bias(positions, slots["positions"])

    def relation(self, context: Context, slots: dict[str, Tensor], sight: Sight) -> dict[str, Relation]:
        """What attention is told of a scheme that relates, if this one does. Raises ValueError for positions that decrease."""
        if self.position is None or not self._relates:
            return {}
        assert context.positions is not None
        here, there = context.positions, slots["positions"]
        before, *_ = sight.extents(here.shape[1], there.shape[1], here.device)
        require_order(self.position, there, before, context.valid)
        return {"relation": Relation(self.position, here, there)}

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, relation: Relation | None = None, ring: Ring | None = None, **told: Any
    ) -> Tensor:
        """The chosen implementation, (batch, heads, time, head_dim) each; under a scheme that relates, once for each range of keys.

        Where rows are split over a ring, its own.
        """
        if ring is not None:
            return ring_attention(q, k, v, ring, **told)
        if relation is None:
            return ATTENTION[self.implementation](q, k, v, **told)
        return attend_in_parts(ATTEND[self.implementation], relation, q, k, v, **told)

    @property
    def key_dim(self) -> int:
        """Channels of a query and of a key, by the root of whose number logits are divided."""
        return self.head_dim

    @property
    def numbers(self) -> dict[str, float]:
        """The factor on the logits, and the share of weights to drop now."""
        scale = (1.0 if self.position is None else self.position.logit_scale) / math.sqrt(self.key_dim)
        return {"scale": scale, "dropout": self.dropout if self.training else 0.0}

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """Keys and values, without slots as yet or with all of them empty, and the convolution's taps."""
        slots = self.kept + self.recent(0)
        parts = {name: torch.zeros(batch, slots, self.kv_heads, self.head_dim, **like) for name in ("keys", "values")}
        if self._needs_positions:
            parts["positions"] = torch.zeros(batch, slots, dtype=torch.long, device=like.get("device"))
        return parts | self.projections.init_parts(batch, **like)

    def flops(self, time: int) -> int:
        """Projections and gates, and 4 * head_dim a head for each pair in sight."""
        gates = 0 if self.gates is None else 2 * time * self.gates.weight.numel()
        return self.projections.flops(time) + gates + 4 * self.heads * self.head_dim * self.pairs(time)

    def state_elements(self, time: int) -> int:
        """A key and a value for each slot and key/value head, and the convolution's taps."""
        return 2 * self.kv_heads * self.head_dim * (self.kept + self.recent(time)) + self.projections.state_elements()

    @property
    def _turns_late(self) -> bool:
        return self.position is not None and self.position.length_dependent

    @property
    def _relates(self) -> bool:
        return self.position is not None and "relate" in self.position.hooks

    @property
    def _needs_positions(self) -> bool:
        return self.position is not None and ("bias" in self.position.hooks or self._relates or self.position.length_dependent)
