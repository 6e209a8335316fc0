"""What a token mixer must satisfy, and nothing else.

    mixer(x, context=None, state=None) -> MixerOutput(y, state, aux)        x, y: (batch, time, dim)

`state=None` is the full pass. `mixer.init_state(batch)` starts a cache; then any split of the sequence into pieces, one token at a time
included, gives the outputs of the full pass. What lies in a padded slot never reaches a valid output, and a state stands still on pads.

A variant subclasses Mixer and writes `mix`. By the time `mix` runs, Mixer has moved each row's padded slots to its end and emptied them
(so that to a causal mixer they do not exist, and only its state must skip them), filled in positions, and checked shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from registry import positions as position_schemes
from variants.cache import Slots
from variants.context import Context, State, advance, default_positions, extent, left_align, valid_lengths
from variants.positions.contract import NotApplicable, Scheme

__all__ = [
    "Context",
    "Mixer",
    "MixerOutput",
    "NotApplicable",
    "State",
    "advance",
    "default_positions",
    "extent",
    "left_align",
    "valid_lengths",
]


class MixerOutput(NamedTuple):
    """y: (batch, time, dim). state: None after a full pass. aux: named scalar losses under `loss/...`, anything else to look at."""

    y: Tensor
    state: State | None
    aux: dict[str, Tensor]


class Mixer(nn.Module):
    """Base of every variant.

    Options:
        head_dim: width of one head (default: dim / heads).
        causal: outputs depend on the past alone; False gives the bidirectional form, where there is one.
    """

    #: Position hooks that the variant can apply, out of "rotate", "relate" and "bias". ("embed" is applied to x itself and always works.)
    hooks: ClassVar[tuple[str, ...]] = ()
    #: Why it cannot apply one of the others: hook -> reason.
    refused: ClassVar[Mapping[str, str]] = {}
    #: Whether the weights of a row sum to one, so that constant values come out unchanged.
    normalises_rows: bool = False
    #: Whether gradients are the slopes of the outputs; not where what is chosen learns as if choosing were smooth.
    exact_gradients: bool = True
    #: Whether keys are kept one by one, so that a scheme may turn them again when the length of their row changes its frequencies.
    keeps_keys: ClassVar[bool] = True
    #: Whether keys must be of length 1: a scheme that makes them longer would let the state grow without end.
    unit_keys: ClassVar[bool] = False
    #: Whether `causal=False` has a meaning.
    bidirectional: ClassVar[bool] = False

    def __init__(self, dim: int, heads: int, position: Any = None, *, head_dim: int | None = None, causal: bool = True):
        super().__init__()
        name = type(self).__name__
        if dim < 1 or heads < 1:
            raise ValueError(f"{name}: dim and heads must be positive; got dim={dim}, heads={heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"{name}: heads={heads} does not divide dim={dim}; choose heads that do, or give head_dim")
        if head_dim is not None and head_dim < 1:
            raise ValueError(f"{name}: head_dim must be positive; got {head_dim}")
        if not causal and not self.bidirectional:
            raise NotApplicable(f"{name} has no bidirectional form; causal=False is not applicable")
        self.dim, self.heads, self.causal = dim, heads, causal
        self.head_dim = head_dim if head_dim is not None else dim // heads
        self.position: Scheme | None = self.resolve_position(position, self.head_dim)

    def resolve_position(self, position: Any, head_dim: int) -> Scheme | None:
        """The scheme that `position` stands for; it sees `head_dim` channels of queries and keys.

        Raises NotApplicable for one that needs a hook which the variant lacks, ValueError for one that turns another number of channels.
        """
        name = type(self).__name__
        scheme: Scheme | None = position_schemes.resolve(position, head_dim=head_dim, heads=self.heads, dim=self.dim)
        missing = sorted(set(scheme.hooks) - {"embed"} - set(self.hooks)) if scheme is not None else []
        if missing:
            reason = f": {self.refused[missing[0]]}" if missing[0] in self.refused else ""
            raise NotApplicable(
                f"position {type(scheme).__name__} needs the hook {missing[0]!r}, which {name} does not have{reason}; "
                "choose another position"
            )
        if scheme is not None and scheme.length_dependent and not self.keeps_keys:
            raise NotApplicable(
                f"{name} keeps its keys turned or summed up, and cannot turn them again when the length of a row changes the frequencies "
                f"of {type(scheme).__name__}; choose another position"
            )
        if scheme is not None and self.unit_keys and not scheme.isometric:
            raise NotApplicable(
                f"{name} needs keys of length 1, and {type(scheme).__name__} makes them longer with their position; choose another position"
            )
        if scheme is not None and "relate" in scheme.hooks and not self.causal:
            raise NotApplicable(
                f"position {type(scheme).__name__} maps distances to keys that came before their query, and says nothing of later ones: "
                f"{name} with causal=False cannot take it; choose another position"
            )
        if scheme is not None and {"rotate", "relate"} & set(scheme.hooks) and scheme.head_dim != head_dim:
            raise ValueError(f"{name}: its position turns {head_dim} channels; {type(scheme).__name__} has head_dim={scheme.head_dim}")
        return scheme

    def forward(self, x: Float[Tensor, "batch time dim"], context: Context | None = None, state: State | None = None) -> MixerOutput:
        """Mix tokens over time. Raises ValueError for shapes that do not fit and for what the variant cannot honour."""
        context = context or Context()
        self._check(x, context, state)
        if not x.numel():  # nothing came, and nothing changes
            return MixerOutput(x, state, {})
        order = None
        if context.valid is not None:
            if context.split is None:
                x, context, order = left_align(x, context)
            # Not x * valid: a pad may hold NaN, and zero times NaN is NaN.
            x = x.masked_fill(~context.valid.unsqueeze(-1), 0)  # type: ignore[union-attr]
        if context.split is None:
            context = default_positions(x, context, state)
        if self.position is not None and "embed" in self.position.hooks:
            assert context.positions is not None
            x = self.position.embed(x, context.positions)
        y, parts, aux = self.mix(x, context, state)
        if state is not None:
            state = advance(state.replace(**parts), context, x.shape[1])
        if context.valid is not None:
            y = y.masked_fill(~context.valid.unsqueeze(-1), 0)
        if order is not None:
            y = y.gather(1, order.argsort(dim=1).unsqueeze(-1).expand_as(y))
        return MixerOutput(y, state, aux)

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], Mapping[str, Tensor | Slots], dict[str, Tensor]]:
        """The variant itself: (y, parts of the new state, aux). Valid tokens come first in each row; positions are given.

        With `state=None` the parts are dropped. `valid_lengths(x, context)` gives each row's number of valid tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} must define mix(x, context, state)")

    def rotate(
        self,
        q: Float[Tensor, "batch heads q_time head_dim"],
        k: Float[Tensor, "batch kv_heads k_time head_dim"],
        q_positions: Int[Tensor, "batch q_time"],
        k_positions: Int[Tensor, "batch k_time"],
    ) -> tuple[Float[Tensor, "batch heads q_time head_dim"], Float[Tensor, "batch kv_heads k_time head_dim"]]:
        """Queries and keys turned by the position scheme, if it turns any."""
        if self.position is None or "rotate" not in self.position.hooks:
            return q, k
        return self.position.rotate(q, k, q_positions, k_positions)

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """The parts of an empty state, made with the keywords `like` (device and dtype)."""
        raise NotImplementedError(f"{type(self).__name__} must define init_parts(batch, **like)")

    def init_state(self, batch: int) -> State:
        """An empty cache for `batch` rows, on the parameters' device and in their dtype."""
        if not self.causal:
            raise ValueError(f"{type(self).__name__} with causal=False has no cache: every output depends on the future")
        weight = next(self.parameters(), torch.empty(0))
        return State.empty(batch, weight.device).replace(**self.init_parts(batch, device=weight.device, dtype=weight.dtype))

    def flops(self, time: int) -> int:
        """Forward floating-point operations for one sequence of `time` tokens, 2 a multiply-add, projections included."""
        raise NotImplementedError(f"{type(self).__name__} must define flops(time)")

    def state_elements(self, time: int) -> int:
        """Floating-point numbers in the state of one sequence after `time` tokens."""
        raise NotImplementedError(f"{type(self).__name__} must define state_elements(time)")

    def read_elements(self, time: int) -> int:
        """The most floating-point numbers of that state that the next token reads; all of them, unless the mixer chooses.

        A number that several heads share counts once if any of them reads it: what is counted is what has to be moved.
        """
        return self.state_elements(time)

    def whole_rows(self) -> str | None:
        """Why each row must be in one process; None: `mix` honours `Context.split`.

        A subclass in another package has to say it anew: what it changes may look past the rows' parts.
        """
        return f"{type(self).__name__} has no form for rows that are split over processes"

    def must_be_whole(self) -> str | None:
        """`whole_rows`, where it was said of this class or in its package."""
        said = next(cls for cls in type(self).__mro__ if "whole_rows" in vars(cls))
        if said is Mixer or said.__module__.partition(".")[0] == type(self).__module__.partition(".")[0]:
            return self.whole_rows()
        name = type(self).__name__
        return f"{name} inherits whole_rows() from {said.__name__}; define it in {name} if what that changes honours context.split"

    def reach(self) -> int | None:
        """How many tokens back an output depends on its input; None: all of them."""
        return None

    def undecayed(self) -> Iterable[nn.Parameter]:
        """Parameters that weight decay must leave alone, besides biases and norms (anything with fewer than two axes)."""
        return ()

    def shared_by(self, kv_heads: int | None) -> int:
        """The number of key/value heads, by default one a head. Raises ValueError for one that does not divide the heads."""
        found = self.heads if kv_heads is None else kv_heads
        if found < 1 or self.heads % found:
            raise ValueError(f"{type(self).__name__}: kv_heads={found} does not divide heads={self.heads}")
        return found

    def at_least_one(self, **options: int | None) -> None:
        """Raises ValueError for an option below 1."""
        for option, value in options.items():
            if value is not None and value < 1:
                raise ValueError(f"{type(self).__name__}: {option} must be at least 1; got {value}")

    def _check(self, x: Tensor, context: Context, state: State | None) -> None:
        name = type(self).__name__
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"{name}: x must be (batch, time, {self.dim}); got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name}: x must be floating point; got {x.dtype}")
        for kind in ("positions", "valid", "segment_ids"):
            part = getattr(context, kind)
            if part is not None and part.shape != x.shape[:2]:
                raise ValueError(f"{name}: {kind} must be (batch, time) = {tuple(x.shape[:2])}; got {tuple(part.shape)}")
        for part, kind in ((context.positions, "positions"), (context.segment_ids, "segment_ids")):
            if part is not None and part.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name}: {kind} must be int32 or int64; got {part.dtype}")
        if context.valid is not None and context.valid.dtype != torch.bool:
            raise ValueError(f"{name}: valid must be boolean, True at real tokens; got {context.valid.dtype}")
        if context.segment_ids is not None and self.position is not None and self.position.length_dependent:
            scheme = type(self.position).__name__
            raise ValueError(
                f"{name}: {scheme} depends on the length of a row, and packed segments have lengths of their own; give one a row"
            )
        if context.split is not None:
            reason = self.must_be_whole() or ("a cache is of whole rows" if state is not None else None)
            if reason is not None:
                raise NotApplicable(f"{name}: {reason}")
        if state is not None and not self.causal:
            raise ValueError(f"{name} with causal=False takes no state")
        if state is not None and state["seen"].shape[0] != x.shape[0]:
            raise ValueError(f"{name}: the state has {state['seen'].shape[0]} rows, x has {x.shape[0]}")
