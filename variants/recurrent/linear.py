"""Linear attention: softmax's exponential replaced by a product of features, so that the past fits in one matrix a head.

    S_t = S_{t-1} + phi(k_t)^T v_t        z_t = z_{t-1} + phi(k_t)        o_t = phi(q_t) S_t / (phi(q_t) . z_t)

Katharopoulos et al. 2020, "Transformers are RNNs", section 3, with phi(x) = elu(x) + 1. With norm="rms" the division gives way to a
per-head RMS norm, as in Qin et al. 2022, "The Devil in Linear Transformer". A rotary scheme turns the features in the numerator only (Su
et al. 2021, "RoFormer", equation 19): turned features may be negative, and below the line their sum could cross zero. Time O(T), memory
O(T), state feature_dim * value_dim and, for the division, feature_dim numbers a head.

Taylor features, of Arora et al. 2024, "Simple linear attention language models balance the recall-throughput tradeoff" (Based), give
phi(q) . phi(k) = 1 + s + s^2 / 2 with s = q . k / sqrt(head_dim), the exponential up to its second order, positive whatever q and k: a
rotary scheme turns q and k themselves. A head then has 1 + head_dim + head_dim^2 features, of narrow queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from registry import variants
from variants import implementations
from variants.contract import Context, Mixer, State, extent
from variants.projections import Projections
from variants.recurrent.layer import DECAY, carried, empty_matrix, pairs, running

#: Width of queries and keys before Taylor features, unless told otherwise.
NARROW = 16


@variants.register("linear", time="T", state="1", hooks=("rotate",), implementations=("fla", "torch", "reference"))
class Linear(Mixer):
    """Linear attention: a running sum of key-value products, read by the query. Under a rotary scheme its rows no longer sum to one.

    Options:
        feature_map: phi: `elu` (elu + 1), `relu`, `softmax` over a head's channels, or `taylor`, the exponential up to its second order.
        norm: what bounds the output: `sum` divides by the row's sum, `rms` normalises each head's output.
        chunk: tokens handled by one matrix product.
        head_dim: width of a head's queries and keys (default: dim / heads; 16 at most for Taylor features).
        value_dim: width of a head's values (default: dim / heads, or as `head_dim` where that is given).
        short_conv: width of a depthwise convolution over time on q, k and v (0: none).
        impl: which implementation runs; `auto` takes the fastest that is usable.
    """

    implementations: tuple[str, ...]
    refused: ClassVar = {"bias": "it never writes out the logits that a bias could be added to"}
    keeps_keys: ClassVar[bool] = False
    bidirectional = True

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        feature_map: Literal["elu", "relu", "softmax", "taylor"] = "elu",
        norm: Literal["sum", "rms"] = "sum",
        head_dim: int | None = None,
        value_dim: int | None = None,
        chunk: int = 64,
        short_conv: int = 0,
        impl: str = "auto",
        **options: Any,
    ):
        if head_dim is None and feature_map == "taylor" and heads > 0 and dim % heads == 0:
            head_dim, value_dim = min(NARROW, dim // heads), dim // heads if value_dim is None else value_dim
        super().__init__(dim, heads, position, head_dim=head_dim, **options)
        if chunk < 1:
            raise ValueError(f"Linear: chunk must be at least 1; got {chunk}")
        if value_dim is not None and value_dim < 1:
            raise ValueError(f"Linear: value_dim must be positive; got {value_dim}")
        self.feature_map, self.chunk = feature_map, chunk
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.expanded = feature_map == "taylor"
        self.feature_dim = 1 + self.head_dim + self.head_dim**2 if self.expanded else self.head_dim
        self.implementation = implementations.choose("Linear", impl, self.implementations)
        self.turned = self.position is not None and "rotate" in self.position.hooks and not self.expanded
        self.normalises_rows = norm == "sum" and not self.turned
        self.projections = Projections(
            dim, heads, heads, self.head_dim, value_dim=self.value_dim, short_conv=short_conv, causal=self.causal
        )
        self.rms = nn.RMSNorm(self.value_dim, eps=1e-5) if norm == "rms" else None

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor], dict[str, Tensor]]:
        """Project, map to features, sum, read, normalise, project back."""
        before, after = extent(x, context, state, self.causal)
        q, k, v, parts = self.projections(x, context, state, before, after)
        positions = context.positions
        assert positions is not None
        if self.expanded:
            q, k = self.rotate(q, k, positions, positions)
        q, k = FEATURE_MAPS[self.feature_map](q), FEATURE_MAPS[self.feature_map](k)
        if context.valid is not None:  # the feature of nothing is not 0
            k = k.masked_fill(~context.valid[:, None, :, None], 0)
        matrix, normaliser = (None, None) if state is None else (state["matrix"], state.get("normaliser"))
        turned = (q, k) if self.expanded else self.rotate(q, k, positions, positions)
        if self.rms is not None:
            y, matrix = self.sum(*turned, v, before=before, after=after, initial=matrix, context=context)
            y = self.rms(y.to(x.dtype))
        elif self.turned:
            y, matrix = self.sum(*turned, v, before=before, after=after, initial=matrix, context=context)
            total, normaliser = self.sum(q, k, torch.ones_like(v[..., :1]), before=before, after=after, initial=normaliser, context=context)
            y = _divide(y, total)
        else:
            # The denominator is what a value of 1 would give: one more column.
            initial = None if matrix is None or normaliser is None else torch.cat([matrix, normaliser], dim=-1)
            y, last = self.sum(q, k, nn.functional.pad(v, (0, 1), value=1.0), before=before, after=after, initial=initial, context=context)
            matrix, normaliser = (None, None) if last is None else torch.split(last, [self.value_dim, 1], dim=-1)
            y, total = torch.split(y, [self.value_dim, 1], dim=-1)
            y = _divide(y, total)
        if state is not None:
            assert matrix is not None
            parts |= {"matrix": matrix} if normaliser is None else {"matrix": matrix, "normaliser": normaliser}
        return self.projections.back(y.to(x.dtype)), parts, {}

    def sum(
        self,
        q: Float[Tensor, "batch heads time feature_dim"],
        k: Float[Tensor, "batch heads time feature_dim"],
        v: Float[Tensor, "batch heads time value_dim"],
        *,
        before: Int[Tensor, "batch time"] | None,
        after: Int[Tensor, "batch time"] | None,
        initial: Float[Tensor, "batch heads feature_dim value_dim"] | None,
        context: Context | None = None,
    ) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads feature_dim value_dim"] | None]:
        """(sum_j (q_i . k_j) v_j over the keys j in sight of query i, last state)."""
        y, last = self._past(q, k, v, before, initial, context)
        if not self.causal:
            q, k, v = q.to(y.dtype), k.to(y.dtype), v.to(y.dtype)
            future, _ = self._past(q.flip(2), k.flip(2), v.flip(2), None if after is None else after.flip(1), None, context)
            y = y + future.flip(2) - (q * k).sum(-1, keepdim=True) * v  # the token itself is in both
        return y, last

    def _past(
        self, q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, initial: Tensor | None, context: Context | None
    ) -> tuple[Tensor, Tensor | None]:
        core = running(DECAY, self.implementation, self.chunk)
        return carried(core, q, k, v, {}, context or Context(), before, initial, heads=self.heads)

    def whole_rows(self) -> str | None:
        """Why rows cannot be split; None: they can."""
        return None if self.causal else "with causal=False it sums from both ends of a row"

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """Sums of 0, in fp32 or better whatever the model's dtype, and the convolution's taps."""
        parts = {"matrix": empty_matrix(batch, self.heads, self.feature_dim, self.value_dim, **like)}
        if self.rms is None:
            parts["normaliser"] = empty_matrix(batch, self.heads, self.feature_dim, 1, **like)
        return parts | self.projections.init_parts(batch, **like)

    def flops(self, time: int) -> int:
        """Projections, and for each head writing and reading the state, and the pairs in sight inside the chunks."""
        columns = self.value_dim + (self.rms is None)
        core = 4 * time * self.feature_dim * columns + 2 * pairs(time, self.chunk) * (self.feature_dim + columns)
        return self.projections.flops(time) + self.heads * core * (1 if self.causal else 2)

    def state_elements(self, time: int) -> int:
        """The matrix and, for the division, the normaliser; the convolution's taps. Whatever the length."""
        return self.heads * self.feature_dim * (self.value_dim + (self.rms is None)) + self.projections.state_elements()


def elu_plus_one(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """elu(x) + 1, x + 1 above 0 and exp(x) below, without a subtraction: exp(x) - 1 + 1 is 0 in bf16 below about -6."""
    return x.relu() + x.clamp(max=0).exp()


def softmax_features(x: Float[Tensor, "*shape channels"]) -> Float[Tensor, "*shape channels"]:
    """Softmax over the channels of a head."""
    return x.softmax(-1)


def taylor_features(x: Float[Tensor, "*shape channels"]) -> Float[Tensor, "*shape features"]:
    """[1, x / d^(1/4), x_a x_b / sqrt(2 d)] of d channels: products of two give 1 + s + s^2 / 2, s = q . k / sqrt(d)."""
    width = x.shape[-1]
    squares = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) * (2 * width) ** -0.5
    return torch.cat([torch.ones_like(x[..., :1]), x * width**-0.25, squares], dim=-1)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": elu_plus_one,
    "relu": nn.functional.relu,
    "softmax": softmax_features,
    "taylor": taylor_features,
}


def _divide(y: Tensor, total: Tensor) -> Tensor:
    """y / total; 0, with no gradient, where a query matched no key at all, as it may with relu features.

    A total that has all but vanished counts as none: the gradient, which it divides twice, would overflow.
    """
    matched = total > torch.finfo(total.dtype).tiny ** (2 / 3)
    return torch.where(matched, y / torch.where(matched, total, 1.0), 0.0)
