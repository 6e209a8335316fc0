"""Multi-head latent attention: the cache holds one short latent a token, from which every head's keys and values are made.

    c_j  = RMSNorm(W_DKV x_j)            r_j = turn(W_KR x_j, j)             what is cached: kv_rank and rope_dim numbers
    k_hj = [W_UK_h c_j, r_j]             v_hj = W_UV_h c_j                   the rotary key r is shared by all heads
    q_hi = [q^C_hi, turn(q^R_hi, i)]     [q^C, q^R] = W_Q x_i, or W_UQ RMSNorm(W_DQ x_i)
    o_hi = sum_{j <= i} softmax_j(q_hi . k_hj / sqrt(nope_dim + rope_dim)) v_hj

Expanded, keys and values are made of every latent. Absorbed, they never are, because q^C . (W_UK c) = (W_UK^T q^C) . c and
sum_j p_j (W_UV c_j) = W_UV (sum_j p_j c_j): queries move into the space of the latents, which all heads share, and the heads' outputs
come back from it. A pair of query and key costs more then, but a latent costs nothing. Both are the same function; whichever takes fewer
operations runs: with the usual ranks a full pass is expanded and decoding absorbed.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C; 2024, "DeepSeek-V3", section 2.1.1. Time O(T^2), memory O(T) with the fused
kernel, state kv_rank + rope_dim numbers a token, whatever the number of heads. There are no norms on queries and keys, as other softmax
layers have them: the norm of a head's key cannot be had from its latent without making the key.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from registry import variants
from variants.cache import Slots
from variants.contract import Context, State, extent
from variants.softmax.layer import Softmax


@variants.register("mla", time="T^2", state="T", hooks=("rotate", "relate", "bias"), implementations=("sdpa", "torch", "reference"))
class LatentAttention(Softmax):
    """Multi-head latent attention: one low-rank latent and one rotary key a token serve all heads.

    A rotary scheme turns the last rope_dim channels of queries and keys, and those alone (one that sharpens logits sharpens them whole).
    Without one they are channels like any others, except that all heads share their keys.

    Options:
        kv_rank: width of the latent that keys and values are made of (default: 4 * head_dim).
        q_rank: width of the latent that queries are made of (default: none, queries are made of x).
        nope_dim: channels of queries and keys that are not turned (default: head_dim).
        rope_dim: channels that are, whose keys the heads share (default: half of head_dim, as an even number).
        gate: sigmoid gates on the output, made from x: one a head, one an element, or none.
        sink_logit: each head learns a logit that joins every row's denominator and has no value.
        dropout: share of attention weights dropped in training.
        head_dim: width of a head's values (default: dim / heads).
        causal: outputs depend on the past alone; False lets every token see all others.
        impl: which implementation runs; `auto` takes the fastest that is usable.
    """

    projects = False

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        kv_rank: int | None = None,
        q_rank: int | None = None,
        nope_dim: int | None = None,
        rope_dim: int | None = None,
        gate: Literal["none", "head", "element"] = "none",
        sink_logit: bool = False,
        dropout: float = 0.0,
        head_dim: int | None = None,
        causal: bool = True,
        impl: str = "auto",
    ):
        # Another implementation is chosen below, where the position is known.
        super().__init__(dim, heads, gate=gate, sink_logit=sink_logit, dropout=dropout, impl="reference", head_dim=head_dim, causal=causal)
        self.kv_rank = 4 * self.head_dim if kv_rank is None else kv_rank
        self.nope_dim = self.head_dim if nope_dim is None else nope_dim
        self.rope_dim = 2 * max(1, self.head_dim // 4) if rope_dim is None else rope_dim
        for option, width in {"kv_rank": kv_rank, "q_rank": q_rank, "nope_dim": nope_dim, "rope_dim": rope_dim}.items():
            if width is not None and width < 1:
                raise ValueError(f"LatentAttention: {option} must be at least 1; got {width}")
        self.position = self.resolve_position(position, self.rope_dim)
        self.implementation = self.choose(impl)
        queries = heads * self.key_dim
        self.widths = queries if q_rank is None else q_rank, self.kv_rank, self.rope_dim
        self.inward = nn.Linear(dim, sum(self.widths), bias=False)
        self.q_latent_norm = None if q_rank is None else nn.RMSNorm(q_rank, eps=1e-6)
        self.q_up = None if q_rank is None else nn.Linear(q_rank, queries, bias=False)
        self.kv_latent_norm = nn.RMSNorm(self.kv_rank, eps=1e-6)
        self.kv_up = nn.Linear(self.kv_rank, heads * (self.nope_dim + self.head_dim), bias=False)
        self.outward = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices keep the variance of what they are given."""
        for matrix in (self.inward, self.q_up, self.kv_up, self.outward):
            if matrix is not None:
                nn.init.normal_(matrix.weight, std=matrix.in_features**-0.5)

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor | Slots], dict[str, Tensor]]:
        """Project down, remember latents and rotary keys, attend to those of cache and input in the cheaper form, gate, project back."""
        positions = context.positions
        assert positions is not None
        before, after = extent(x, context, state, self.causal)
        q, latents, rotary = self.inward(x).split(self.widths, dim=-1)
        if self.q_up is not None and self.q_latent_norm is not None:
            q = self.q_up(self.q_latent_norm(q))
        q = rearrange(q, "batch time (heads channels) -> batch heads time channels", heads=self.heads)
        q, turning = q.split([self.nope_dim, self.rope_dim], dim=-1)
        if not self._turns_late:
            turning, rotary = self.turned(turning, rotary, positions, positions)
        # Side by side, because the absorbed form reads them so.
        new = {"latents": torch.cat([self.kv_latent_norm(latents), rotary], dim=-1)}
        if self._needs_positions:
            new["positions"] = positions
        slots, remembered = self.remember(new, context, state, before)
        cached = slots["latents"]
        if self._turns_late:
            latents, rotary = cached.split(self.widths[1:], dim=-1)
            turning, rotary = self.turned(turning, rotary, positions, slots["positions"])
            cached = torch.cat([latents, rotary], dim=-1)
        expanded, absorbed = self.operations(x.shape[1], cached.shape[1])
        attend = self.expanded if expanded <= absorbed else self.absorbed
        y = attend(q, turning, cached, **self.view(context, state, before, after, slots), sink=self.sink, **self.numbers)
        y = rearrange(self.gated(y, x), "batch heads time head_dim -> batch time (heads head_dim)")
        return self.outward(y.to(x.dtype)), remembered, {}

    def turned(
        self, q: Float[Tensor, "batch heads q_time rope"], k: Float[Tensor, "batch k_time rope"], q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Float[Tensor, "batch heads q_time rope"], Float[Tensor, "batch k_time rope"]]:
        """Rotary channels of queries, and the key of a token that all heads share, turned by the position scheme."""
        q, k = self.rotate(q, k.unsqueeze(1), q_positions, k_positions)
        return q, k.squeeze(1)

    def expanded(
        self,
        q: Float[Tensor, "batch heads q_time nope"],
        turned: Float[Tensor, "batch heads q_time rope"],
        cached: Float[Tensor, "batch k_time latent_and_rope"],
        **options: Any,
    ) -> Float[Tensor, "batch heads q_time head_dim"]:
        """Every latent becomes a key and a value of each head."""
        latents, rotary = cached.split(self.widths[1:], dim=-1)
        made = rearrange(self.kv_up(latents), "batch time (heads channels) -> batch heads time channels", heads=self.heads)
        k, v = made.split([self.nope_dim, self.head_dim], dim=-1)
        k = torch.cat([k, rotary.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=-1)
        return self.attention(torch.cat([q, turned], dim=-1), k, v, **options)

    def absorbed(
        self,
        q: Float[Tensor, "batch heads q_time nope"],
        turned: Float[Tensor, "batch heads q_time rope"],
        cached: Float[Tensor, "batch k_time latent_and_rope"],
        **options: Any,
    ) -> Float[Tensor, "batch heads q_time head_dim"]:
        """Queries go where the latents are, and the heads' outputs come back: multi-query attention to what is cached, as it is."""
        up = self.kv_up.weight.view(self.heads, self.nope_dim + self.head_dim, self.kv_rank)
        to_keys, to_values = up.split([self.nope_dim, self.head_dim], dim=1)
        shared = cached.unsqueeze(1)
        # Rotary channels are no part of a value. Cut off before, values would be copied at every step by kernels that want them as wide
        # as the keys.
        y = self.attention(torch.cat([q @ to_keys, turned], dim=-1), shared, shared, **options)[..., : self.kv_rank]
        return y @ to_values.mT

    def operations(self, q_time: int, k_time: int) -> tuple[int, int]:
        """From latents to the heads' outputs, expanded and absorbed, for the last `q_time` of `k_time` tokens; 2 a multiply-add.

        One form applies `kv_up` to every slot, the other to every query; and a pair has so many channels to multiply, twice.
        """
        pairs = self.heads * (self.pairs(k_time) - self.pairs(k_time - q_time))
        up = self.kv_up.weight.numel()
        return (
            2 * (up * k_time + pairs * (self.key_dim + self.head_dim)),
            2 * (up * q_time + pairs * 2 * (self.kv_rank + self.rope_dim)),
        )

    @property
    def key_dim(self) -> int:
        """Channels of an expanded key. Absorbed keys are longer, but their products with queries are the same numbers."""
        return self.nope_dim + self.rope_dim

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """No slots as yet for latents and rotary keys."""
        parts = {"latents": torch.zeros(batch, 0, self.kv_rank + self.rope_dim, **like)}
        if self._needs_positions:
            parts["positions"] = torch.zeros(batch, 0, dtype=torch.long, device=like.get("device"))
        return parts

    def flops(self, time: int) -> int:
        """Projections and gates, and the cheaper form of what lies between latents and outputs."""
        matrices = sum(m.weight.numel() for m in (self.inward, self.q_up, self.outward, self.gates) if m is not None)
        return 2 * time * matrices + min(self.operations(time, time))

    def state_elements(self, time: int) -> int:
        """A latent and a rotary key for each token."""
        return (self.kv_rank + self.rope_dim) * time
