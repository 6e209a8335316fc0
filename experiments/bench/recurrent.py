"""The recurrent cores, against causal attention, which costs O(T^2), against their own token loops and against public torch paths.

A token loop takes seconds a thousand tokens, and is timed up to LOOPED. Beyond, candidates are verified against chunks of another size in
fp64, which the loop has been compared with at the short lengths; and attention is left out beyond ATTENDED tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from experiments.bench import peers
from experiments.bench.candidate import Candidate, Group
from experiments.bench.sizes import Sizes
from variants.ops import decay, delta, reference, scan, scan_numba

LOOPED, ATTENDED = 1024, 16384
#: Numbers a channel of a selective scan, as Mamba has them.
STATE = 16
#: Kimi's path writes (chunk, chunk, channels) numbers for each chunk out, gigabytes of them beyond so many tokens.
KIMI = 2048

Core = Callable[..., tuple[Tensor, Tensor]]


def scalar_decay(sizes: Sizes, length: int) -> Group:
    """One decay a token and head."""
    return _decay("scalar_decay", sizes, length, channels=False)


def channel_decay(sizes: Sizes, length: int) -> Group:
    """One decay a token and channel of the keys."""
    return _decay("channel_decay", sizes, length, channels=True)


def delta_rule(sizes: Sizes, length: int) -> Group:
    """The delta rule without decay."""
    made = _inputs(sizes, length)
    return _group("delta", sizes, length, made[:4], fast=delta.delta_rule, loop=reference.delta_rule)


def gated_delta(sizes: Sizes, length: int) -> Group:
    """The delta rule with one decay a token and head."""
    made = _inputs(sizes, length, decays=1)
    path = partial(peers.transformers_delta, "qwen3_next", "torch_chunk_gated_delta_rule")
    return _group("gated_delta", sizes, length, made, fast=delta.delta_rule, loop=reference.delta_rule, peer=path)


def channel_delta(sizes: Sizes, length: int) -> Group:
    """The delta rule with one decay a token and channel of the keys."""
    made = _inputs(sizes, length, decays=sizes.head_dim)
    path = partial(peers.transformers_delta, "kimi_linear", "chunk_kimi_delta_attention") if length <= KIMI else None
    return _group("channel_delta", sizes, length, made, fast=delta.delta_rule, loop=reference.delta_rule, peer=path)


def selective_scan(sizes: Sizes, length: int) -> Group:
    """Mamba's scan over heads * head_dim channels: compiled loops, chunks of torch, and mambapy's parallel scan."""
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.batch, length)
    channels = sizes.heads * sizes.head_dim
    x, write, read = (torch.randn(*shape, width, generator=generator) for width in (channels, STATE, STATE))
    step = 10 ** (-3 + 2 * torch.rand(*shape, channels, generator=generator))
    leaves = [part.requires_grad_() for part in (x, step, -torch.arange(1.0, STATE + 1).repeat(channels, 1), write, read)]

    def right() -> Tensor:
        if length <= LOOPED:
            return reference.selective_scan(*leaves)[0]
        return scan.selective_scan(*(part.double() for part in leaves))[0].float()

    def add(name: str, call: Callable[..., Tensor], *, peer: bool = False) -> Candidate:
        flops = 9 * sizes.batch * length * channels * STATE
        state_bytes = 4 * sizes.batch * channels * STATE
        return Candidate(name, lambda: call(*leaves), right, leaves, flops=flops, peer=peer, state_bytes=state_bytes)

    candidates, left_out = [add("loops", lambda *made: scan_numba.selective_scan(*made)[0])], {}
    candidates.append(add("chunks", lambda *made: scan.selective_scan(*made)[0]))
    try:
        candidates.append(add("mambapy", peers.mambapy_scan(), peer=True))
    except peers.Missing as reason:
        left_out["mambapy"] = str(reason)
    if length <= LOOPED:
        candidates.append(add("token loop", lambda *made: reference.selective_scan(*made)[0]))
    baseline = "mambapy" if "mambapy" not in left_out else "chunks"
    return Group("selective_scan", length, sizes.batch * length, baseline, candidates, left_out)


def _decay(name: str, sizes: Sizes, length: int, *, channels: bool) -> Group:
    decays = sizes.head_dim if channels else 1
    q, k, v, _, log_decay = _inputs(sizes, length, decays=decays)
    fast, loop = decay.gated_linear_attention, reference.gated_linear_attention
    return _group(name, sizes, length, [q, k, v, log_decay], fast=fast, loop=loop)


def _inputs(sizes: Sizes, length: int, *, decays: int = 0) -> list[Tensor]:
    """q, keys of length 1, v, beta in (0, 1) and log-decays: (batch, heads, length, ...), the same at every call."""
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.batch, sizes.heads, length)
    q, k, v = (torch.randn(*shape, sizes.head_dim, generator=generator) for _ in range(3))
    made = [q * sizes.head_dim**-0.5, normalize(k, dim=-1), v, torch.rand(shape, generator=generator)]
    if decays:
        gates = torch.randn(*shape, *([decays] if decays > 1 else []), generator=generator)
        made.append(logsigmoid(gates + 3))
    return [x.requires_grad_() for x in made]


def _group(
    name: str,
    sizes: Sizes,
    length: int,
    leaves: Sequence[Tensor],
    *,
    fast: Core,
    loop: Core,
    peer: Callable[[], Callable[..., Tensor]] | None = None,
) -> Group:
    q, k, v = leaves[:3]
    state_bytes = sizes.batch * sizes.heads * sizes.head_dim**2 * 4

    def right() -> Tensor:
        if length <= LOOPED:
            return loop(*leaves)[0]
        return fast(*(x.double() for x in leaves), chunk=16)[0].float()

    def add(name: str, call: Callable[[], Tensor], *, peer: bool = False) -> Candidate:
        # Reading and writing the state, once a token; what a chunk adds is its own affair.
        flops = 4 * sizes.batch * sizes.heads * length * sizes.head_dim**2
        return Candidate(name, call, right, leaves, flops=flops, peer=peer, state_bytes=state_bytes)

    candidates, left_out = [], {}
    if length <= ATTENDED:
        pairs = length * (length + 1) // 2
        flops = 4 * sizes.batch * sizes.heads * sizes.head_dim * pairs
        # It computes something else: what is compared is the cost.
        candidates.append(Candidate("sdpa", partial(peers.sdpa, q, k, v), None, (q, k, v), flops=flops, peer=True))
    else:
        left_out["sdpa"] = f"beyond {ATTENDED:,} tokens it takes minutes"
    candidates.append(add("chunks", lambda: fast(*leaves)[0]))
    if peer is not None:
        try:
            theirs = peer()
            candidates.append(add("transformers", lambda: theirs(*leaves), peer=True))
        except peers.Missing as reason:
            left_out["transformers"] = str(reason)
    if length <= LOOPED:
        candidates.append(add("token loop", lambda: loop(*leaves)[0]))
    return Group(name, length, sizes.batch * length, candidates[0].name, candidates, left_out)
