"""Mamba: a state-space model whose steps, writing and reading depend on the token.

    h_t = exp(d_t A) h_{t-1} + d_t x_t B_t        y_t = h_t C_t + D x_t        d_t = softplus(dt_t W + b)        A = -exp(A_log)

Every channel of x has `state_dim` numbers h, each forgotten at a rate of its own; B and C are shared by all channels. x passes a
convolution of width 4 with SiLU, and dt, B and C are made from what comes out; y is multiplied by SiLU of a gate z. The decay is
discretised exactly, writing as Euler does. Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section 3:
A starts at -1, ..., -state_dim in every channel (S4D-real), softplus(b) log-uniform in (0.001, 0.1). Names and shapes of parameters are
those of `mamba_ssm.Mamba`, so that a state_dict loads both ways. Time O(T), state state_dim a channel. Heads have no meaning here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softplus

from registry import variants
from variants import implementations
from variants.contract import Context, State, extent
from variants.ops import mamba_kernels, passing, reference, scan
from variants.recurrent.gated_deltanet import steps
from variants.recurrent.state_space import StateSpace


@variants.register("mamba", time="T", state="1", hooks=(), implementations=("mamba_ssm", "numba", "torch", "reference"))
class Mamba(StateSpace):
    """A selective scan of every channel.

    Options:
        expand: width of x, as a multiple of dim.
        state_dim: the state's numbers for each channel of x, and width of B and C.
        rank: width of what the steps are made from (default: dim / 16, rounded up).
        short_conv: width of the convolution over time on x.
        norms: RMS norms on dt, B and C, named as in transformers' Jamba.
        allow_negative_eigenvalues: decays 2 exp(d A) - 1 in (-1, 1) instead of exp(d A) in (0, 1).
        chunk: tokens walked through one after another by the implementation `torch`.
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
        state_dim: int = 16,
        rank: int | None = None,
        short_conv: int = 4,
        norms: bool = False,
        allow_negative_eigenvalues: bool = False,
        chunk: int = 16,
        impl: str = "auto",
        **options: Any,
    ):
        self.at_least_one(expand=expand, state_dim=state_dim, rank=rank, short_conv=short_conv, chunk=chunk)
        if options.get("head_dim") is not None:
            raise ValueError(f"Mamba: head_dim={options['head_dim']} means nothing, it has no heads; expand sets its width")
        super().__init__(dim, heads, position, **options)
        rank, width = -(-dim // 16) if rank is None else rank, expand * dim
        self.state_dim, self.width, self.chunk, self.negative = state_dim, width, chunk, allow_negative_eigenvalues
        excluded = {"mamba_ssm": "its decays are positive"} if allow_negative_eigenvalues else {}
        self.implementation = implementations.choose("Mamba", impl, self.implementations, excluded=excluded)
        self.widths = (rank, state_dim, state_dim)
        self.in_proj = nn.Linear(dim, 2 * width, bias=False)
        self.conv1d = self.convolution(width, short_conv)
        self.x_proj = nn.Linear(width, sum(self.widths), bias=False)
        self.dt_proj = nn.Linear(rank, width)
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        with torch.no_grad():
            self.dt_proj.bias.copy_(steps(width))
        self.A_log = nn.Parameter(torch.arange(1.0, state_dim + 1).log().repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, dim, bias=False)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (nn.RMSNorm(n, eps=1e-6) if norms else nn.Identity() for n in self.widths)

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor], dict[str, Tensor]]:
        """Project, convolve, scan, skip, gate, project back."""
        before, _ = extent(x, context, state)
        channels, z = self.in_proj(x).chunk(2, dim=-1)
        channels, parts = self.convolve(channels, context, state, before)
        dt, write, read = self.x_proj(channels).split(self.widths, dim=-1)
        wide = torch.promote_types(x.dtype, torch.float32)
        step = linear(self.dt_layernorm(dt), self.dt_proj.weight).to(wide)
        step = softplus(step + self.dt_proj.bias.to(wide))
        if context.valid is not None:  # what lies in a pad writes nothing and forgets nothing
            step = step.masked_fill(~context.valid.unsqueeze(-1), 0)
        timed = (channels, step, self.b_layernorm(write), self.c_layernorm(read))
        starts = None if context.segment_ids is None else before
        if context.split is None:
            y, last = self.scan(*timed, before=starts, initial=None if state is None else state["scan"])
        else:
            y = passing.scan(self.scan, context.split.ring, *timed, before=starts)
        y = ((y + channels * self.D.to(wide)) * silu(z.to(wide))).to(x.dtype)
        return self.out_proj(y), parts if state is None else parts | {"scan": last}, {}

    def scan(
        self,
        x: Float[Tensor, "batch time channels"],
        step: Float[Tensor, "batch time channels"],
        write: Float[Tensor, "batch time state"],
        read: Float[Tensor, "batch time state"],
        *,
        before: Int[Tensor, "batch time"] | None,
        initial: Float[Tensor, "batch channels state"] | None,
    ) -> tuple[Float[Tensor, "batch time channels"], Float[Tensor, "batch channels state"]]:
        """(y, last h) of the scan that runs."""
        return self.core()(x, step, self.rates(step.dtype), write, read, before=before, initial=initial, signed=self.negative)

    def core(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The scan that runs; `numba` is imported only here."""
        if self.implementation == "numba":
            from variants.ops import scan_numba

            return scan_numba.selective_scan
        return partial(SCANS["torch"], chunk=self.chunk) if self.implementation == "torch" else SCANS[self.implementation]

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """A scan of 0, in fp32 or better whatever the model's dtype, and the convolution's taps."""
        wide = torch.promote_types(like.get("dtype", torch.float32), torch.float32)
        return {"scan": torch.zeros(batch, self.width, self.state_dim, **like | {"dtype": wide}), "taps": self.empty_taps(batch, **like)}

    def flops(self, time: int) -> int:
        """Projections and the convolution, and 9 for each number of the state: a decay, an update, a reading."""
        matrices = (self.in_proj, self.x_proj, self.dt_proj, self.out_proj, self.conv1d)
        return time * (2 * sum(matrix.weight.numel() for matrix in matrices) + 9 * self.width * self.state_dim)

    def state_elements(self, time: int) -> int:
        """The scan's state and the convolution's taps, whatever the length."""
        return self.width * self.state_dim + self.taps_elements()


SCANS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "mamba_ssm": mamba_kernels.selective_scan,
    "torch": scan.selective_scan,
    "reference": reference.selective_scan,
}
