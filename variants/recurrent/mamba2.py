"""Mamba-2: a state-space model with one decay a head, which is linear attention that forgets.

    h_t = exp(d_t A) h_{t-1} + d_t B_t^T x_t        y_t = C_t h_t + D x_t        d_t = softplus(dt_t + b)        A = -exp(A_log)

x, B and C come out of one matrix and a convolution of width 4 with SiLU; a gate z multiplies y before an RMS norm. Dao and Gu 2024,
"Transformers are SSMs", section 7. In the terms of the decay core C are queries, B keys, d x values and d A log-decays. Names and shapes of
parameters are those of `mamba_ssm.Mamba2`, so that a state_dict loads both ways. With `allow_negative_eigenvalues` the decay is
2 exp(d A) - 1, in (-1, 1) (Grazzi et al. 2024, "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues"). Time O(T), state
state_dim * head_dim a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from registry import variants
from variants import implementations
from variants.contract import Context, State, extent
from variants.ops import mamba_kernels
from variants.recurrent.gated_deltanet import steps
from variants.recurrent.layer import DECAY, carried, empty_matrix, heads_first, pairs, running
from variants.recurrent.state_space import StateSpace


@variants.register("mamba2", time="T", state="1", hooks=(), implementations=("mamba_ssm", "fla", "torch", "reference"))
class Mamba2(StateSpace):
    """A selective state space with one decay a head, in chunks of matrix products.

    Options:
        expand: width of x, as a multiple of dim, shared by the heads (where head_dim is given, x is heads * head_dim wide).
        state_dim: width of B and C, the state's numbers for each channel of x.
        groups: how many B and C there are; heads of a group share them.
        short_conv: width of the convolution over time on x, B and C.
        least_step: lower limit of d.
        largest_step: upper limit of d (default: none).
        allow_negative_eigenvalues: decays in (-1, 1) instead of (0, 1).
        chunk: tokens handled by one matrix product, rounded up to a power of two.
        impl: which implementation runs; `auto` takes the fastest that is usable.
    """

    implementations: tuple[str, ...]

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        expand: int = 2,
        state_dim: int = 128,
        groups: int = 1,
        short_conv: int = 4,
        least_step: float = 0.0,
        largest_step: float | None = None,
        allow_negative_eigenvalues: bool = False,
        chunk: int = 64,
        impl: str = "auto",
        head_dim: int | None = None,
        **options: Any,
    ):
        self.at_least_one(expand=expand, state_dim=state_dim, groups=groups, short_conv=short_conv, chunk=chunk)
        if head_dim is None and heads > 0 and (expand * dim) % heads == 0:
            head_dim = expand * dim // heads
        super().__init__(dim, heads, position, head_dim=head_dim, **options)
        if heads % groups:
            raise ValueError(f"Mamba2: groups={groups} does not divide heads={heads}")
        if not 0 <= least_step < (math.inf if largest_step is None else largest_step):
            raise ValueError(f"Mamba2: least_step must be below largest_step, and neither negative; got {least_step} and {largest_step}")
        self.state_dim, self.groups, self.chunk = state_dim, groups, chunk
        self.limits, self.negative = (least_step, largest_step), allow_negative_eigenvalues
        excluded = {"mamba_ssm": "its decays are positive"} if allow_negative_eigenvalues else {}
        self.implementation = implementations.choose("Mamba2", impl, self.implementations, excluded=excluded)
        width = heads * self.head_dim
        #: z, x, B and C, dt
        self.widths = (width, width + 2 * groups * state_dim, heads)
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.conv1d = self.convolution(self.widths[1], short_conv)
        self.dt_bias = nn.Parameter(steps(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedNorm(width, groups)
        self.out_proj = nn.Linear(width, dim, bias=False)

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor], dict[str, Tensor]]:
        """Project, convolve, run the core, skip, gate and normalise, project back."""
        before, _ = extent(x, context, state)
        z, channels, dt = self.in_proj(x).split(self.widths, dim=-1)
        channels, parts = self.convolve(channels, context, state, before)
        apart = "batch time (heads width) -> batch heads time width"
        shared = self.groups * self.state_dim
        values, keys, queries = channels.split([self.heads * self.head_dim, shared, shared], dim=-1)
        values = rearrange(values, apart, heads=self.heads)
        keys, queries = (rearrange(part, apart, heads=self.groups) for part in (keys, queries))
        starts, initial = None if context.segment_ids is None else before, None if state is None else state["matrix"]
        wide = torch.promote_types(dt.dtype, torch.float32)
        step, rate = self.step_sizes(dt, context), self.rates(wide)
        matrix: Tensor | None
        if self.implementation == "mamba_ssm":
            y, matrix = mamba_kernels.state_space_duality(
                queries, keys, values, step, rate, chunk=self.chunk, before=starts, initial=initial
            )
        else:
            gates, written = {"log_decay": step * rate[:, None]}, values * step.unsqueeze(-1)
            y, matrix = carried(self.recurrence, queries, keys, written, gates, context, starts, initial, heads=self.heads)
        y = y + values * self.D[:, None, None]
        y = self.norm(rearrange(y, "batch heads time width -> batch time (heads width)"), z)
        if state is not None and matrix is not None:
            parts |= {"matrix": matrix}
        return self.out_proj(y), parts, {}

    def step_sizes(self, dt: Float[Tensor, "batch time heads"], context: Context) -> Float[Tensor, "batch heads time"]:
        """d, in fp32 or better; 0 at pads, which then write nothing and forget nothing."""
        wide = torch.promote_types(dt.dtype, torch.float32)
        step = heads_first(softplus(dt.to(wide) + self.dt_bias.to(wide))).clamp(*self.limits)
        return step if context.valid is None else step.masked_fill(~context.valid[:, None], 0)

    def recurrence(
        self,
        queries: Float[Tensor, "batch groups time state"],
        keys: Float[Tensor, "batch groups time state"],
        values: Float[Tensor, "batch heads time head_dim"],
        log_decay: Float[Tensor, "batch heads time"],
        *,
        before: Int[Tensor, "batch time"] | None,
        initial: Float[Tensor, "batch heads state head_dim"] | None,
    ) -> tuple[Float[Tensor, "batch heads time head_dim"], Float[Tensor, "batch heads state head_dim"]]:
        """(o, last state) of the decay core, for decays of either sign."""
        queries, keys = (part.repeat_interleave(self.heads // self.groups, 1) for part in (queries, keys))
        core = running(DECAY, self.implementation, self.chunk)
        if not self.negative:
            return core(queries, keys, values, log_decay, before=before, initial=initial)
        decay = 2 * log_decay.exp() - 1
        # What has been flipped an odd number of times since a token was written is flipped where it is read.
        sign = torch.where(decay < 0, -1.0, 1.0).to(decay).cumprod(-1).unsqueeze(-1)
        size = decay.abs().clamp(min=torch.finfo(decay.dtype).tiny).log()
        o, last = core(queries * sign, keys * sign, values, size, before=before, initial=initial)
        return o, last * sign[:, :, -1:]

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """A matrix of 0, in fp32 or better whatever the model's dtype, and the convolution's taps."""
        matrix = empty_matrix(batch, self.heads, self.state_dim, self.head_dim, **like)
        return {"matrix": matrix, "taps": self.empty_taps(batch, **like)}

    def flops(self, time: int) -> int:
        """Projections and the convolution, and for each head writing and reading the state, and the pairs in sight inside the chunks."""
        weights = self.in_proj.weight.numel() + self.out_proj.weight.numel() + self.conv1d.weight.numel()
        core = 4 * time * self.state_dim * self.head_dim + 2 * pairs(time, self.chunk) * (self.state_dim + self.head_dim)
        return 2 * time * weights + self.heads * core

    def state_elements(self, time: int) -> int:
        """The matrices and the convolution's taps, whatever the length."""
        return self.heads * self.state_dim * self.head_dim + self.taps_elements()


class GatedNorm(nn.Module):
    """RMS norm of y silu(z) over each group's channels, with a learned scale."""

    def __init__(self, width: int, groups: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.groups, self.eps = nn.Parameter(torch.ones(width)), groups, eps

    def forward(self, y: Float[Tensor, "batch time width"], z: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        """y in fp32 or better; the result is in the dtype of z."""
        gated = torch.unflatten(y * silu(z.to(y.dtype)), -1, (self.groups, -1))
        scaled = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return scaled.flatten(-2).to(z.dtype) * self.weight.to(z.dtype)
