"""The numerical cores: softmax attention in tiles of our own and through torch's fused kernels, recurrences, and their public peers.

Every candidate is verified against the mathematics line by line, taken over blocks of queries. A baseline may compute less than its group
does (a window against causal attention, say): it shows what the feature costs, and is verified against the mathematics of what it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from experiments.bench import peers, recurrent
from experiments.bench.candidate import Candidate, Group, Notes, Point, Timing, measure, metered, work
from experiments.bench.sizes import Sizes
from registry import UserError, nearest
from variants.ops import fused, reference, softmax
from variants.ops.attention import Fade, Sight

MODES = ("forward", "train")
#: Queries in a block of the oracle.
BLOCK = 512
#: The candidates whose memory is metered.
OURS = ("tiles", "chunks")


Build = Callable[[Sizes, int], Group]


def run(
    sizes: Sizes, only: Sequence[str], modes: Sequence[str], lengths: Sequence[int], repeats: int | None, notes: Notes
) -> Iterator[Timing | Point]:
    """Every group in turn, and how the memory of the tiles grows."""
    for name in only:
        if name not in GROUPS:
            raise UserError(f"--only: no group {name!r} at core level.{nearest(name, GROUPS)}")
    for name in only or GROUPS:
        workload = GROUPS[name]
        for timed in lengths or (workload.length,):
            yield from measure("core", workload.build(sizes, timed), modes, repeats, notes)
        if not lengths:
            yield from memory(name, workload, sizes, modes)


def memory(name: str, workload: Workload, sizes: Sizes, modes: Sequence[str]) -> Iterator[Point]:
    """What our own core needs besides inputs and outputs, for one head, since tiles take heads one after another."""
    for mode in modes:
        for length in workload.weighed:
            group = workload.build(Sizes(batch=1, heads=1, head_dim=sizes.head_dim, window=sizes.window), length)
            ours = next(candidate for candidate in group.candidates if candidate.name in OURS)
            _, value = metered(work(ours, mode))
            yield Point("core", f"{name}, one head", ours.name, mode, "peak_bytes", length, value)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    fade: Callable[[], Fade] | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The reference, a block of queries at a time over the slots in its sight."""
    faded, blocks = fade() if fade else None, []
    for start in range(0, q.shape[2], BLOCK):
        stop = min(start + BLOCK, q.shape[2])
        slots = slice(0 if window is None else max(0, start - window + 1), stop)
        part = None if faded is None else Fade(faded.at_queries[:, :, start:stop], faded.at_keys[:, :, slots])
        sight = Sight(window=window)
        blocks.append(reference.attention(q[:, :, start:stop], k[:, :, slots], v[:, :, slots], sight=sight, fade=part, sink=sink))
    return torch.cat(blocks, dim=2)


def causal(sizes: Sizes, length: int) -> Group:
    """Full causal attention."""
    q, k, v = inputs(sizes, length)
    add = adder(oracle, (q, k, v), (q, k, v), causal_flops(q, v))
    return _group(
        "causal",
        sizes,
        length,
        [
            add("sdpa", peers.sdpa, peer=True),
            add("sdpa math", peers.sdpa_math, peer=True),
            add("tiles", softmax.attention),
            add("fused", fused.attention),
        ],
    )


def window(sizes: Sizes, length: int) -> Group:
    """A sliding window, the baseline looking at everything before."""
    q, k, v = inputs(sizes, length)
    wide = min(sizes.window, length)
    near = pair_flops(q, v) * (wide * (wide + 1) // 2 + (length - wide) * wide)
    full = adder(oracle, (q, k, v), (q, k, v), causal_flops(q, v))
    add = adder(partial(oracle, window=wide), (q, k, v), (q, k, v), near)

    @functools.cache
    def band() -> Tensor:
        distance = torch.arange(length)[:, None] - torch.arange(length)
        return (distance >= 0) & (distance < wide)

    candidates = [
        full("sdpa", peers.sdpa, peer=True),
        add("sdpa band mask", lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=band()), peer=True),
        add("tiles", partial(softmax.attention, sight=Sight(window=wide))),
        add("fused", partial(fused.attention, sight=Sight(window=wide))),
    ]
    left_out = {}
    try:
        wider = adder(partial(oracle, window=wide + 1), (q, k, v), (q, k, v), near)
        candidates.append(wider("local-attention", peers.local_attention(wide), peer=True))
    except peers.Missing as reason:
        left_out["local-attention"] = str(reason)
    return _group("window", sizes, length, candidates, left_out)


def sink(sizes: Sizes, length: int) -> Group:
    """A learned logit in each row's denominator, the baseline without."""
    q, k, v = inputs(sizes, length)
    logit = torch.zeros(sizes.heads, requires_grad=True)
    leaves = (q, k, v, logit)
    plain = adder(oracle, (q, k, v), leaves, causal_flops(q, v))
    add = adder(partial(oracle, sink=logit), (q, k, v), leaves, causal_flops(q, v))
    return _group(
        "sink",
        sizes,
        length,
        [
            plain("sdpa", peers.sdpa, peer=True),
            add("tiles", partial(softmax.attention, sink=logit)),
            add("fused", partial(fused.attention, sink=logit)),
        ],
    )


def fade(sizes: Sizes, length: int) -> Group:
    """Forget gates: weights fade with what lies between, the baseline without."""
    q, k, v = inputs(sizes, length)
    gates = (torch.randn(sizes.batch, sizes.heads, length, generator=torch.Generator().manual_seed(1)) + 4).requires_grad_()
    leaves = (q, k, v, gates)

    def faded() -> Fade:
        total = logsigmoid(gates).double().cumsum(-1)
        return Fade(total, total)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total = faded().at_queries
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        bias = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(q.dtype).masked_fill(future, -torch.inf)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias)

    plain = adder(oracle, (q, k, v), leaves, causal_flops(q, v))
    add = adder(partial(oracle, fade=faded), (q, k, v), leaves, causal_flops(q, v))
    return _group(
        "fade",
        sizes,
        length,
        [
            plain("sdpa", peers.sdpa, peer=True),
            add("sdpa bias", masked, peer=True),
            add("tiles", lambda q, k, v: softmax.attention(q, k, v, fade=faded())),
            add("fused", lambda q, k, v: fused.attention(q, k, v, fade=faded())),
        ],
    )


def wide_values(sizes: Sizes, length: int) -> Group:
    """Values of twice the width, as differential attention has them; torch's kernel takes them in two calls."""
    q, k, v = inputs(sizes, length, values=2 * sizes.head_dim)
    add = adder(oracle, (q, k, v), (q, k, v), causal_flops(q, v))

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([peers.sdpa(q, k, half) for half in v.chunk(2, dim=-1)], dim=-1)

    candidates = [add("sdpa twice", twice, peer=True), add("tiles", softmax.attention), add("fused", fused.attention)]
    return _group("wide_values", sizes, length, candidates)


def mla(sizes: Sizes, length: int) -> Group:
    """Keys half as wide again as the values, as latent attention has them with its rotary part; torch leaves its fused kernel."""
    q, k, v = inputs(sizes, length, keys=sizes.head_dim + sizes.head_dim // 2)
    add = adder(oracle, (q, k, v), (q, k, v), causal_flops(q, v))
    candidates = [add("sdpa", peers.sdpa, peer=True), add("tiles", softmax.attention), add("fused", fused.attention)]
    return _group("mla", sizes, length, candidates)


class Workload(NamedTuple):
    """A group, the length at which it is timed, and those at which the memory of our core is metered."""

    build: Build
    length: int
    weighed: Sequence[int] = ()


GROUPS = {
    "causal": Workload(causal, 4096, (4096, 8192, 16384)),
    "window": Workload(window, 8192, (8192, 16384, 32768, 65536)),
    "sink": Workload(sink, 4096),
    "fade": Workload(fade, 4096),
    "wide_values": Workload(wide_values, 4096),
    "mla": Workload(mla, 4096),
    "scalar_decay": Workload(recurrent.scalar_decay, 2048, (8192, 16384, 32768)),
    "channel_decay": Workload(recurrent.channel_decay, 8192, (8192, 16384, 32768)),
    "delta": Workload(recurrent.delta_rule, 8192, (8192, 16384, 32768)),
    "gated_delta": Workload(recurrent.gated_delta, 4096, (8192, 16384, 32768)),
    "channel_delta": Workload(recurrent.channel_delta, 8192, (8192, 16384, 32768)),
    "selective_scan": Workload(recurrent.selective_scan, 512, (2048, 4096, 8192)),
}


def inputs(sizes: Sizes, length: int, *, keys: int | None = None, values: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (batch, heads, length, width), the same at every call."""
    generator = torch.Generator().manual_seed(0)
    widths = (keys or sizes.head_dim, keys or sizes.head_dim, values or sizes.head_dim)
    q, k, v = (torch.randn(sizes.batch, sizes.heads, length, width, generator=generator).requires_grad_() for width in widths)
    return q, k, v


def pair_flops(q: Tensor, v: Tensor) -> int:
    """Operations for one pair of query and key, over batch and heads."""
    return 2 * q.shape[0] * q.shape[1] * (q.shape[-1] + v.shape[-1])


def causal_flops(q: Tensor, v: Tensor) -> int:
    """Operations for all pairs in which the key does not follow."""
    return pair_flops(q, v) * (q.shape[2] * (q.shape[2] + 1) // 2)


def adder(
    right: Callable[..., Tensor], qkv: tuple[Tensor, Tensor, Tensor], leaves: tuple[Tensor, ...], flops: int
) -> Callable[..., Candidate]:
    """What makes a candidate out of a function of q, k and v, for those that compute one thing."""
    bound = partial(right, *qkv)

    def add(name: str, function: Callable[..., Tensor], **more: Any) -> Candidate:
        return Candidate(name, partial(function, *qkv), bound, leaves, flops=flops, **more)

    return add


def _group(name: str, sizes: Sizes, length: int, candidates: list[Candidate], left_out: dict[str, str] | None = None) -> Group:
    return Group(name, length, sizes.batch * length, candidates[0].name, candidates, left_out or {})
