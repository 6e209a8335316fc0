"""The recurrent cores through flash-linear-attention's Triton kernels (Yang and Zhang 2024), for CUDA; what they cannot do, ours do.

Their layout is (batch, time, heads, channels). Sequences that begin anew inside a row are laid end to end, with their borders and a state
for each. Their delta rule takes half precision alone; single tokens, double precision and heads wider than 256 are left to our own cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from variants.ops import decay, delta

WIDEST = 256
#: (q, k, v, gates ..., scale=, initial_state=, output_final_state=, cu_seqlens=) -> (o, last states).
Kernel = Callable[..., tuple[Tensor, Tensor]]


def gated_linear_attention(
    q: Float[Tensor, "batch heads time key_dim"],
    k: Float[Tensor, "batch heads time key_dim"],
    v: Float[Tensor, "batch heads time value_dim"],
    log_decay: Float[Tensor, "batch heads time *key_dim"] | None = None,
    *,
    bonus: Float[Tensor, "heads key_dim"] | None = None,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """The same as `reference.gated_linear_attention`."""
    if not _fits(q, v) or v.dtype == torch.float64:
        return decay.gated_linear_attention(q, k, v, log_decay, bonus=bonus, before=before, initial=initial)
    if bonus is None and (log_decay is None or log_decay.ndim == 3):
        from fla.ops.simple_gla import chunk_simple_gla

        return through(chunk_simple_gla, (q, k, v), {"g": log_decay}, before=before, initial=initial)
    channels = torch.zeros_like(q) if log_decay is None else log_decay
    channels = channels.unsqueeze(-1).expand_as(q) if channels.ndim == 3 else channels
    if bonus is None:
        from fla.ops.gla import chunk_gla

        return through(chunk_gla, (q, k, v), {"g": channels}, before=before, initial=initial)
    from fla.ops.rwkv6 import chunk_rwkv6

    return through(chunk_rwkv6, (q, k, v), {"w": channels}, before=before, initial=initial, u=bonus.float())


def delta_rule(
    q: Float[Tensor, "batch heads time key_dim"],
    k: Float[Tensor, "batch heads time key_dim"],
    v: Float[Tensor, "batch heads time value_dim"],
    beta: Float[Tensor, "batch heads time"],
    log_decay: Float[Tensor, "batch heads time *key_dim"] | None = None,
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None = None,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """The same as `reference.delta_rule`."""
    if not _fits(q, v) or v.dtype not in (torch.float16, torch.bfloat16):
        return delta.delta_rule(q, k, v, beta, log_decay, before=before, initial=initial)
    if log_decay is None:
        from fla.ops.delta_rule import chunk_delta_rule

        return through(chunk_delta_rule, (q, k, v), {"beta": beta}, before=before, initial=initial)
    if log_decay.ndim == 3:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return through(chunk_gated_delta_rule, (q, k, v), {"g": log_decay, "beta": beta}, before=before, initial=initial)
    from fla.ops.kda import chunk_kda

    return through(chunk_kda, (q, k, v), {"g": log_decay, "beta": beta}, before=before, initial=initial)


def through(
    kernel: Kernel,
    qkv: tuple[
        Float[Tensor, "batch heads time key_dim"], Float[Tensor, "batch heads time key_dim"], Float[Tensor, "batch heads time value_dim"]
    ],
    gates: dict[str, Tensor | None],
    *,
    before: Int[Tensor, "batch time"] | None,
    initial: Float[Tensor, "batch heads key_dim value_dim"] | None,
    **fixed: Any,
) -> tuple[Float[Tensor, "batch heads time value_dim"], Float[Tensor, "batch heads key_dim value_dim"]]:
    """What a kernel makes of inputs in our layout: q, k and v in the dtype of v, gates in fp32. (o, last state), both in fp32."""
    q, k, v = (x.to(qkv[2].dtype).transpose(1, 2).contiguous() for x in qkv)
    others = {name: None if x is None else x.float().transpose(1, 2).contiguous() for name, x in gates.items()}
    rows, time = q.shape[:2]
    state = None if initial is None else initial.float().contiguous()
    told = {"scale": 1.0, "output_final_state": True, **fixed}
    if before is None:
        o, last = kernel(q, k, v, **others, initial_state=state, **told)
        return o.float().transpose(1, 2), last
    # A row begins where it does, whether or not its segment began in an earlier call.
    starts = (before == 0) | (torch.arange(time, device=before.device) == 0)
    where = starts.flatten().nonzero().squeeze(1)
    borders = torch.cat([where, where.new_tensor([rows * time])])
    row = where // time
    states = None
    if state is not None:
        carried = (where % time == 0) & (before.flatten()[where] > 0)
        states = state[row] * carried[:, None, None, None]
    flat = [x.flatten(0, 1).unsqueeze(0) for x in (q, k, v)]
    laid = {name: None if x is None else x.flatten(0, 1).unsqueeze(0) for name, x in others.items()}
    o, last = kernel(*flat, **laid, initial_state=states, cu_seqlens=borders, **told)
    final = torch.searchsorted(row, torch.arange(rows, device=row.device), right=True) - 1
    return torch.unflatten(o.squeeze(0), 0, (rows, time)).float().transpose(1, 2), last[final]


def _fits(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels take heads as wide as these, and there is something to gain."""
    return q.is_cuda and q.shape[2] > 1 and max(q.shape[-1], v.shape[-1]) <= WIDEST
