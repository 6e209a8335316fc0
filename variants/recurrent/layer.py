"""The layer that gated and delta-rule mixers share: projections, a recurrent core, a norm over each head, a gate, a projection back.

    q, k, v = conv(x W)        o, S = core(q, k, v, gates of x)        y = (norm(o) * gate(x)) W_o

A variant says what its core is given: `prepare` changes queries and keys before a rotary scheme turns them, `gates` makes decays and betas
from x, and `core` names what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import sigmoid, silu

from variants import implementations
from variants.contract import Context, Mixer, State, extent
from variants.ops import decay, delta, fla_kernels, passing, reference
from variants.ops.precision import without_autocast
from variants.projections import Projections

#: What a core is called with after q, k and v, by name: log_decay, beta, bonus.
Gates = Mapping[str, Tensor | None]
#: The cores, by implementation.
DECAY: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "fla": fla_kernels.gated_linear_attention,
    "torch": decay.gated_linear_attention,
    "reference": reference.gated_linear_attention,
}
DELTA: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "fla": fla_kernels.delta_rule,
    "torch": delta.delta_rule,
    "reference": reference.delta_rule,
}
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"swish": silu, "sigmoid": sigmoid}


class Recurrent(Mixer):
    """Base of mixers whose past is one matrix a head.

    Options:
        head_dim: width of a head's queries and keys (default: the variant's share of dim / heads).
        value_dim: width of a head's values (default: the variant's multiple of `head_dim`).
        short_conv: width of a depthwise convolution over time on q, k and v (0: none).
        gate: what the output is multiplied by, made from x by a matrix of its own: `swish`, `sigmoid`, or `none`.
        chunk: tokens handled by one matrix product, rounded up to a power of two.
        impl: which implementation runs; `auto` takes the fastest that is usable.
    """

    hooks: ClassVar[tuple[str, ...]] = ("rotate",)
    refused: ClassVar = {"bias": "it never writes out the logits that a bias could be added to"}
    keeps_keys: ClassVar[bool] = False
    implementations: tuple[str, ...]
    cores: ClassVar[Mapping[str, Callable[..., tuple[Tensor, Tensor]]]] = DECAY
    #: What q, k and v pass after their convolution.
    activation: ClassVar[Callable[[Tensor], Tensor] | None] = None
    #: Default width of queries and keys, as a share of dim / heads, and of values, as a multiple of it.
    key_share: ClassVar[float] = 1.0
    value_share: ClassVar[int] = 1
    #: How many keys and values a head has for each token.
    writes: int = 1
    #: Whether a token takes something out of the state under its key.
    erases: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        short_conv: int = 0,
        gate: Literal["swish", "sigmoid", "none"] = "swish",
        chunk: int = 64,
        impl: str = "auto",
        **options: Any,
    ):
        if head_dim is None and self.key_share != 1 and heads > 0 and dim % heads == 0:
            head_dim = max(2, int(dim * self.key_share / heads) // 2 * 2)  # even, as rotary schemes want it
        super().__init__(dim, heads, position, head_dim=head_dim, **options)
        name = type(self).__name__
        if chunk < 1:
            raise ValueError(f"{name}: chunk must be at least 1; got {chunk}")
        if value_dim is not None and value_dim < 1:
            raise ValueError(f"{name}: value_dim must be positive; got {value_dim}")
        self.chunk, self.value_dim = chunk, self.head_dim * self.value_share if value_dim is None else value_dim
        self.implementation = implementations.choose(name, impl, self.implementations)
        self.projections = Projections(
            dim,
            heads,
            heads * self.writes,
            self.head_dim,
            value_dim=self.value_dim,
            short_conv=short_conv,
            activation=type(self).activation,
        )
        self.norm = HeadNorm(self.value_dim)
        self.gate = self.gating(gate)

    def gating(self, kind: str) -> Gate | None:
        """The output's gate: one number for each of its channels."""
        return None if kind == "none" else Gate(self.dim, self.heads, self.value_dim, kind)

    def prepare(
        self, q: Float[Tensor, "batch heads time head_dim"], k: Float[Tensor, "batch heads time head_dim"]
    ) -> tuple[Float[Tensor, "batch heads time head_dim"], Float[Tensor, "batch heads time head_dim"]]:
        """Queries and keys as the core takes them, but for a rotary scheme; by default queries are scaled by head_dim^-1/2."""
        return q * self.head_dim**-0.5, k

    def gates(self, x: Float[Tensor, "batch time dim"]) -> Gates:
        """What the core takes besides q, k and v, in fp32 or better; (batch, heads, time, ...)."""
        return {}

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor], dict[str, Tensor]]:
        """Project, run the core, normalise, gate, project back."""
        before, after = extent(x, context, state)
        q, k, v, parts = self.projections(x, context, state, before, after)
        q, k = self.prepare(q, k)
        assert context.positions is not None
        q, k = self.rotate(q, k, context.positions, context.positions)
        gates = self.gates(x)
        if context.valid is not None:  # what lies in a pad writes nothing and forgets nothing
            k = k.masked_fill(~context.valid[:, None, :, None], 0)
            gates = {**gates, "log_decay": still(gates.get("log_decay"), context)}
        # Without segments nothing starts again, and what was never seen is 0.
        before = None if context.segment_ids is None else before
        initial = None if state is None else state["matrix"]
        y, matrix = carried(self.core(), q, k, v, gates, context, before, initial, heads=self.heads, erases=self.erases)
        y = self.norm(y, x.dtype)
        y = y if self.gate is None else y * self.gate(x)
        return self.projections.back(y), parts if state is None or matrix is None else parts | {"matrix": matrix}, {}

    def core(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The core that runs: (q, k, v, gates by name, before, initial) -> (o, last state)."""
        return running(self.cores, self.implementation, self.chunk)

    def whole_rows(self) -> str | None:
        """Nothing: what a slice leaves of a state is passed on."""
        return None

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """A matrix of 0, in fp32 or better whatever the model's dtype, and the convolution's taps."""
        return {"matrix": empty_matrix(batch, self.heads, self.head_dim, self.value_dim, **like)} | self.projections.init_parts(
            batch, **like
        )

    def flops(self, time: int) -> int:
        """Projections and gates, and for each head writing and reading the state, and the pairs in sight inside the chunks."""
        return self.projections.flops(time) + 2 * time * gate_weights(self) + self.heads * self.core_flops(time)

    def core_flops(self, time: int) -> int:
        """Operations of one head's core."""
        return 4 * time * self.head_dim * self.value_dim + 2 * pairs(time, self.chunk) * (self.head_dim + self.value_dim)

    def state_elements(self, time: int) -> int:
        """The matrix and the convolution's taps, whatever the length."""
        return self.heads * self.head_dim * self.value_dim + self.projections.state_elements()


def carried(
    core: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    context: Context,
    before: Tensor | None,
    initial: Tensor | None,
    *,
    heads: int,
    erases: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o, last state) of a core; of rows that are split over processes, where no state is kept, o alone.

    before: None where nothing starts again. Gates have a time axis, but for `bonus`.
    """
    if context.split is None:
        return core(q, k, v, **gates, before=before, initial=initial)
    timed = {name: gate for name, gate in gates.items() if name != "bonus"}
    fixed = {name: gate for name, gate in gates.items() if name == "bonus"}
    return passing.run(core, context.split.ring, q, k, v, timed, fixed, heads=heads, before=before, erases=erases), None


class HeadNorm(nn.Module):
    """RMS norm over the channels of each head, with one learned scale for all heads; computed in the precision of what arrives."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, y: Float[Tensor, "batch heads time width"], dtype: torch.dtype) -> Float[Tensor, "batch heads time width"]:
        """y normalised, in `dtype`."""
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(dtype) * self.weight.to(dtype)


class Gate(nn.Module):
    """x (batch, time, dim) -> one factor for each channel of each head's output. rank: width of the matrix's middle (0: one matrix)."""

    def __init__(self, dim: int, heads: int, width: int, kind: str, *, rank: int = 0):
        super().__init__()
        self.activation, self.width = ACTIVATIONS[kind], width
        self.matrix = nn.Linear(dim, heads * width, bias=False) if not rank else LowRank(dim, rank, heads * width, bias=True)
        if not rank:
            nn.init.normal_(self.matrix.weight, std=dim**-0.5)  # type: ignore[arg-type]

    def forward(self, x: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch heads time width"]:
        return rearrange(self.activation(self.matrix(x)), "batch time (heads width) -> batch heads time width", width=self.width)


class LowRank(nn.Module):
    """x W1 W2 + b. Matrices as in nn.Linear, the bias 0."""

    def __init__(self, dim: int, rank: int, width: int, *, bias: bool):
        super().__init__()
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, width, bias=bias)
        if bias:
            nn.init.zeros_(self.up.bias)

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape width"]:
        up: Tensor = self.up(self.down(x))
        return up


def running(
    cores: Mapping[str, Callable[..., tuple[Tensor, Tensor]]], implementation: str, chunk: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The core of that implementation; only our own has a choice of chunks."""
    return partial(cores[implementation], chunk=chunk) if implementation == "torch" else cores[implementation]


def precisely(module: nn.Module, x: Tensor) -> Tensor:
    """A module of matrices and biases applied to x in fp32 or better, whatever the model is in and whatever autocast wants."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parameters = {name: parameter.to(wide) for name, parameter in module.named_parameters()}
    with without_autocast(x):
        result: Tensor = torch.func.functional_call(module, parameters, (x.to(wide),))
    return result


def heads_first(x: Float[Tensor, "batch time heads"]) -> Float[Tensor, "batch heads time"]:
    """One number a token and head, as cores take it, laid out anew: compiled backward passes trip over other strides at a second length."""
    return x.transpose(1, 2).contiguous()


def still(log_decay: Tensor | None, context: Context) -> Tensor | None:
    """The log-decays, 0 at pads."""
    if log_decay is None or context.valid is None:
        return log_decay
    valid = context.valid[:, None] if log_decay.ndim == 3 else context.valid[:, None, :, None]
    return log_decay.masked_fill(~valid, 0)


def unit(x: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape width"]:
    """x by its length, in fp32 or better; 1e-6 inside the root keeps the gradient of a key of 0 below 1,000."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def empty_matrix(batch: int, heads: int, head_dim: int, value_dim: int, **like: Any) -> Float[Tensor, "batch heads head_dim value_dim"]:
    """A state that has seen nothing, in fp32 or better."""
    wide = torch.promote_types(like.get("dtype", torch.float32), torch.float32)
    return torch.zeros(batch, heads, head_dim, value_dim, **like | {"dtype": wide})


def gate_weights(mixer: Recurrent) -> int:
    """Numbers in the matrices that make gates."""
    return sum(p.numel() for name, p in mixer.named_parameters() if p.ndim == 2 and not name.startswith(("projections.", "position.")))


def pairs(time: int, chunk: int) -> int:
    """Pairs of a token and one that is not after it in its chunk."""
    return sum(n * (n + 1) // 2 * count for n, count in ((chunk, time // chunk), (time % chunk, 1)))
