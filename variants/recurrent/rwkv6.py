"""RWKV-6: linear attention by channel decay, whose tokens also look at the one before them, and which weighs its own token apart.

    o_t = r_t (S_{t-1} + diag(u) k_t^T v_t)        S_t = diag(a_t) S_{t-1} + k_t^T v_t        ln a_t = -exp(w_t)

Each of r, k, v, w and the gate g is made from a mixture of x_t and x_{t-1} of its own, whose share depends on the token:

    x_c = x_t + (x_{t-1} - x_t) (mu_c + tanh((x_t + (x_{t-1} - x_t) mu_x) W1) W2_c)        w_t = omega + tanh(x_w A) B

Peng et al. 2024, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", section 4 and its initialisation. r is not
scaled; each head's output passes a layer norm, then the gate silu(x_g W). Time O(T), state head_dim * head_dim a head and one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from registry import variants
from variants import implementations
from variants.cache import newest
from variants.contract import Context, Mixer, State, extent
from variants.ops.precision import without_autocast
from variants.projections import convolved, previous
from variants.recurrent.layer import DECAY, carried, empty_matrix, pairs, running

#: What is made of x, each by a mixture of its own.
BRANCHES = ("w", "k", "v", "r", "g")
#: The variance that counts as none in the norm of a head's output: 1e-5 for outputs that the source divides by 8 first.
EPS = 64e-5


@variants.register("rwkv6", time="T", state="1", hooks=("rotate",), implementations=("fla", "torch", "reference"))
class RWKV6(Mixer):
    """Linear attention by channel decay, of tokens mixed with the one before.

    Options:
        head_dim: width of one head (default: dim / heads; the paper has 64).
        shift_rank: width of the middle of the matrices that make the mixtures.
        decay_rank: width of the middle of the matrix that makes the decays.
        layer: index of the layer, of `layers`: both set the initial mixtures, decays and bonus (the model fills them in; default: 0 of 1).
        layers: depth of the stack.
        short_conv: width of a depthwise convolution over time on r, k and v (0: none).
        chunk: tokens handled by one matrix product, rounded up to a power of two.
        impl: which implementation runs; `auto` takes the fastest that is usable.
    """

    hooks: ClassVar[tuple[str, ...]] = ("rotate",)
    refused: ClassVar = {"bias": "it never writes out the logits that a bias could be added to"}
    keeps_keys: ClassVar[bool] = False
    implementations: tuple[str, ...]

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        shift_rank: int = 32,
        decay_rank: int = 64,
        layer: int | None = None,
        layers: int | None = None,
        short_conv: int = 0,
        chunk: int = 64,
        impl: str = "auto",
        **options: Any,
    ):
        super().__init__(dim, heads, position, **options)
        for option, value in (("shift_rank", shift_rank), ("decay_rank", decay_rank), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"RWKV6: {option} must be at least 1; got {value}")
        if short_conv < 0:
            raise ValueError(f"RWKV6: short_conv must be 0 (off) or a width; got {short_conv}")
        layer, layers = layer or 0, 1 if layers is None else layers
        if not 0 <= layer < layers:
            raise ValueError(f"RWKV6: layer must be from 0 to layers - 1; got layer={layer} of layers={layers}")
        self.chunk = chunk
        self.implementation = implementations.choose("RWKV6", impl, self.implementations)
        width = heads * self.head_dim
        depth, left = layer / max(layers - 1, 1), 1 - layer / layers
        self.mixture = nn.Parameter(_mixture(dim, left))
        self.mixtures = nn.Parameter(torch.stack([_mixture(dim, *powers) for powers in _powers(depth, left)]))
        self.shift_down = nn.Parameter(torch.zeros(dim, len(BRANCHES) * shift_rank))
        self.shift_up = nn.Parameter(torch.empty(len(BRANCHES), shift_rank, dim).uniform_(-0.01, 0.01))
        self.receptance, self.key, self.value, self.gate = (nn.Linear(dim, width, bias=False) for _ in range(4))
        self.outward = nn.Linear(width, dim, bias=False)
        bound = max(short_conv, 1) ** -0.5
        self.taps = nn.Parameter(torch.empty(3 * width, short_conv).uniform_(-bound, bound)) if short_conv else None
        for matrix in (self.receptance, self.key, self.value, self.gate, self.outward):
            nn.init.normal_(matrix.weight, std=matrix.in_features**-0.5)
        place = torch.arange(width) / max(width - 1, 1)
        self.decay = nn.Parameter(-6 + 5 * place ** (0.7 + 1.3 * depth))
        self.decay_down = nn.Parameter(torch.zeros(dim, decay_rank))
        self.decay_up = nn.Parameter(torch.empty(decay_rank, width).uniform_(-0.01, 0.01))
        bonus = depth * (1 - place) + 0.1 * ((torch.arange(width) + 1) % 3 - 1)
        self.bonus = nn.Parameter(bonus.reshape(heads, self.head_dim))
        self.norm_weight, self.norm_bias = (nn.Parameter(torch.full((heads, self.head_dim), number)) for number in (1.0, 0.0))

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor], dict[str, Tensor]]:
        """Mix tokens with those before them, run the core, normalise, gate, project back."""
        before, _ = extent(x, context, state)
        past = x.new_zeros(x.shape[0], 1, self.dim) if state is None else state["shift"].to(x.dtype)
        w, k, v, r, g = self.mixed(x, previous(x, past, context, before))
        channels, parts = torch.cat([self.receptance(r), self.key(k), self.value(v)], dim=-1), dict[str, Tensor]()
        if self.taps is not None:
            channels, parts = convolved(channels, self.taps, context, state, before)
        apart = "batch time (heads head_dim) -> batch heads time head_dim"
        r, k, v = (rearrange(part, apart, heads=self.heads) for part in channels.chunk(3, dim=-1))
        assert context.positions is not None
        r, k = self.rotate(r, k, context.positions, context.positions)
        log_decay = rearrange(self.log_decay(w), apart, heads=self.heads)
        if context.valid is not None:  # what lies in a pad writes nothing and forgets nothing
            k = k.masked_fill(~context.valid[:, None, :, None], 0)
            log_decay = log_decay.masked_fill(~context.valid[:, None, :, None], 0)
        core, starts = running(DECAY, self.implementation, self.chunk), None if context.segment_ids is None else before
        gates, initial = {"log_decay": log_decay, "bonus": self.bonus}, None if state is None else state["matrix"]
        y, matrix = carried(core, r, k, v, gates, context, starts, initial, heads=self.heads)
        y = nn.functional.layer_norm(y, (self.head_dim,), eps=EPS)
        y = torch.addcmul(self.norm_bias[:, None], y, self.norm_weight[:, None]).to(x.dtype)
        gated = rearrange(y, "batch heads time head_dim -> batch time (heads head_dim)") * silu(self.gate(g))
        if state is not None and matrix is not None:
            parts |= {"matrix": matrix, "shift": newest(torch.cat([past, x], dim=1), 1, context.valid)}
        return self.outward(gated), parts, {}

    def mixed(
        self, x: Float[Tensor, "batch time dim"], previous: Float[Tensor, "batch time dim"]
    ) -> tuple[Float[Tensor, "batch time dim"], ...]:
        """For each branch a mixture of a token and the one before."""
        change = previous - x
        middle = torch.tanh((x + change * self.mixture) @ self.shift_down)
        middle = rearrange(middle, "batch time (branches rank) -> branches batch time rank", branches=len(BRANCHES))
        shares = middle @ self.shift_up.unsqueeze(1) + self.mixtures[:, None, None]
        return torch.addcmul(x, change, shares).unbind(0)

    def log_decay(self, x: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch time width"]:
        """-exp(omega + tanh(x A) B), in fp32 or better."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x):
            logits = torch.tanh(x.to(wide) @ self.decay_down.to(wide)) @ self.decay_up.to(wide)
        return -torch.exp(self.decay.to(wide) + logits)

    def whole_rows(self) -> str | None:
        """Nothing: what a slice leaves of a state is passed on."""
        return None

    def undecayed(self) -> Iterable[nn.Parameter]:
        """Mixtures, the bonus and the norm, which are no matrices."""
        return (self.mixtures, self.bonus, self.norm_weight, self.norm_bias)

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """A matrix of 0, in fp32 or better, the token before the first, which is 0, and the convolution's taps."""
        parts = {
            "matrix": empty_matrix(batch, self.heads, self.head_dim, self.head_dim, **like),
            "shift": torch.zeros(batch, 1, self.dim, **like),
        }
        return parts if self.taps is None else parts | {"taps": torch.zeros(batch, self.taps.shape[1] - 1, len(self.taps), **like)}

    def flops(self, time: int) -> int:
        """All matrices, and for each head writing and reading the state, and the pairs in sight inside the chunks."""
        width, names = self.head_dim, ("shift_down", "shift_up", "decay_down", "decay_up")
        matrices = 5 * self.dim * self.heads * width + sum(getattr(self, name).numel() for name in names)
        matrices += 0 if self.taps is None else self.taps.numel()
        return 2 * time * matrices + self.heads * (4 * time * width * width + 4 * pairs(time, self.chunk) * width)

    def state_elements(self, time: int) -> int:
        """The matrices, one token and the convolution's taps, whatever the length."""
        taps = 0 if self.taps is None else len(self.taps) * (self.taps.shape[1] - 1)
        return self.heads * self.head_dim**2 + self.dim + taps


def _powers(depth: float, left: float) -> tuple[tuple[float, float], ...]:
    """For each branch, how its first mixture falls over the channels, and what is taken off."""
    return (left, 0.0), (left, 0.0), (left, 0.3 * depth), (left / 2, 0.0), (left / 2, 0.0)


def _mixture(dim: int, power: float, less: float = 0.0) -> Float[Tensor, " dim"]:
    """The share of the token before in each channel: 1 - (c / dim)^power - less."""
    return 1 - (torch.arange(dim) / dim) ** power - less
