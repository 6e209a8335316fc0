"""What a position scheme must satisfy: any of five hooks.

    embed(x, positions)                           added to the embeddings, once: by the model, or by a lone mixer to its x
    rotate(q, k, q_positions, k_positions)        transforms queries and keys
    relate(q, k, q_positions, k_positions)        the same for each of several ranges of keys, near to far, when products are made
    bias(q_positions, k_positions)                (heads, q, k) or (batch, heads, q, k), added to the logits
    logit_scale                                   a factor on the logits

Positions are always given, never derived from a tensor's shape, and frequencies are a pure function of the options: nothing is remembered
between calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from variants.ops.attention import Bias


class NotApplicable(ValueError):
    """A combination that has no meaning; the message says why."""


class Part(NamedTuple):
    """Queries and keys transformed for each other, where a key is at position `since` or later and belongs to no part before this one.

    since: for each query; None: all that is left.
    """

    q: Float[Tensor, "batch heads q_time head_dim"]
    k: Float[Tensor, "batch kv_heads k_time head_dim"]
    since: Int[Tensor, "batch q_time"] | None


class Scheme(nn.Module):
    """Base of every position scheme. `hooks` names what the subclass defines."""

    #: Out of "embed", "rotate", "relate", "bias".
    hooks: ClassVar[tuple[str, ...]] = ()
    #: Whether frequencies depend on the sequence's length. Keys are then cached un-rotated.
    length_dependent: ClassVar[bool] = False
    #: Whether what it turns keeps its length.
    isometric: ClassVar[bool] = True
    #: Positions at and above this raise; None: there is no end to them.
    max_positions: int | None = None
    #: A factor on the attention logits.
    logit_scale: float = 1.0

    def __init__(self, head_dim: int, heads: int, dim: int):
        super().__init__()
        self.head_dim, self.heads, self.dim = head_dim, heads, dim

    def embed(self, x: Float[Tensor, "batch time dim"], positions: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time dim"]:
        """x with the position added."""
        raise NotImplementedError(f"{type(self).__name__} has no embed hook")

    def rotate(
        self,
        q: Float[Tensor, "batch heads q_time head_dim"],
        k: Float[Tensor, "batch kv_heads k_time head_dim"],
        q_positions: Int[Tensor, "batch q_time"],
        k_positions: Int[Tensor, "batch k_time"],
    ) -> tuple[Float[Tensor, "batch heads q_time head_dim"], Float[Tensor, "batch kv_heads k_time head_dim"]]:
        """Queries and keys, each turned by its own position."""
        raise NotImplementedError(f"{type(self).__name__} has no rotate hook")

    def relate(
        self,
        q: Float[Tensor, "batch heads q_time head_dim"],
        k: Float[Tensor, "batch kv_heads k_time head_dim"],
        q_positions: Int[Tensor, "batch q_time"],
        k_positions: Int[Tensor, "batch k_time"],
    ) -> Iterator[Part]:
        """Parts from the nearest keys to the farthest, so that each pair is in one of them; the last has since=None.

        Keys come as they were made, and are kept so: how one is turned depends on the query.
        """
        raise NotImplementedError(f"{type(self).__name__} has no relate hook")

    def sharpen(self, q_positions: Int[Tensor, "batch q_time"]) -> Float[Tensor, "batch q_time"] | None:
        """A factor on all products of a query with its keys, for schemes that `relate`; None: 1."""
        return None

    def block_sizes(self) -> tuple[int, ...]:
        """The distances or positions at which something else is done."""
        return ()

    def bias(self, q_positions: Int[Tensor, "batch q_time"], k_positions: Int[Tensor, "batch k_time"]) -> Float[Tensor, ...]:
        """(heads, q, k), or (batch, heads, q, k) where rows differ; added to the scaled logits."""
        raise NotImplementedError(f"{type(self).__name__} has no bias hook")

    def as_bias(self, q_positions: Int[Tensor, "batch q_time"], k_positions: Int[Tensor, "batch k_time"]) -> Bias:
        """The bias as the cores take it: tile by tile, and trained by the scheme's parameters."""
        names, parameters = zip(*self.named_parameters(), strict=True) if any(True for _ in self.parameters()) else ((), ())
        if not names:
            return Bias(self.bias, (q_positions, k_positions))
        called = _Called(self)

        def hook(at_queries: Tensor, at_keys: Tensor, *given: Tensor) -> Tensor:
            # By value, not through the module: backward asks again, when its parameters may be others.
            found: Tensor = functional_call(
                called, {f"scheme.{name}": p for name, p in zip(names, given, strict=True)}, (at_queries, at_keys)
            )
            return found

        return Bias(hook, (q_positions, k_positions), parameters)


class _Called(nn.Module):
    """A scheme whose call is its bias."""

    def __init__(self, scheme: Scheme):
        super().__init__()
        self.scheme = scheme

    def forward(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return self.scheme.bias(q_positions, k_positions)
