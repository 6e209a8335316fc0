"""State-space cores through the CUDA and Triton kernels of mamba_ssm and causal_conv1d; what they cannot do, ours do.

The selective scan starts from nothing and knows no segments: continuations and packed rows are left to our own, and so are decays that
change sign, double precision and single tokens. Mamba-2's takes either a state or segments. Layouts are (batch, channels, time) for the
scan and the convolution, (batch, time, heads, channels) for Mamba-2.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import silu

from variants import implementations
from variants.ops import conv, decay, scan


def selective_scan(
    x: Float[Tensor, "batch time channels"],
    step: Float[Tensor, "batch time channels"],
    rate: Float[Tensor, "channels state"],
    write: Float[Tensor, "batch time state"],
    read: Float[Tensor, "batch time state"],
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch channels state"] | None = None,
    signed: bool = False,
) -> tuple[Float[Tensor, "batch time channels"], Float[Tensor, "batch channels state"]]:
    """The same as `reference.selective_scan`."""
    ours = not x.is_cuda or x.shape[1] == 1 or x.dtype == torch.float64 or signed or before is not None or initial is not None
    if ours:
        return scan.selective_scan(x, step, rate, write, read, before=before, initial=initial, signed=signed)
    return through(x, step, rate, write, read)


def through(
    x: Float[Tensor, "batch time channels"],
    step: Float[Tensor, "batch time channels"],
    rate: Float[Tensor, "channels state"],
    write: Float[Tensor, "batch time state"],
    read: Float[Tensor, "batch time state"],
) -> tuple[Float[Tensor, "batch time channels"], Float[Tensor, "batch channels state"]]:
    """What the kernel makes of inputs in our layout; states and what they are made of in fp32."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    x, step, write, read = (part.float().mT.contiguous() for part in (x, step, write, read))
    y, last = selective_scan_fn(x, step, rate.float(), write, read, return_last_state=True)
    return y.mT, last


def state_space_duality(
    read: Float[Tensor, "batch groups time state"],
    write: Float[Tensor, "batch groups time state"],
    x: Float[Tensor, "batch heads time head_dim"],
    step: Float[Tensor, "batch heads time"],
    rate: Float[Tensor, " heads"],
    *,
    before: Int[Tensor, "batch time"] | None = None,
    initial: Float[Tensor, "batch heads state head_dim"] | None = None,
    chunk: int = 64,
) -> tuple[Float[Tensor, "batch heads time head_dim"], Float[Tensor, "batch heads state head_dim"]]:
    """`reference.gated_linear_attention` of read, write, step x and the log-decays step rate; heads of a group share read and write."""
    if not x.is_cuda or x.shape[2] == 1 or step.dtype == torch.float64 or (before is not None and initial is not None):
        q, k = (part.repeat_interleave(x.shape[1] // part.shape[1], 1) for part in (read, write))
        return decay.gated_linear_attention(q, k, x * step.unsqueeze(-1), step * rate[:, None], before=before, initial=initial, chunk=chunk)
    return through_chunks(read, write, x, step, rate, before=before, initial=initial, chunk=chunk)


def through_chunks(
    read: Float[Tensor, "batch groups time state"],
    write: Float[Tensor, "batch groups time state"],
    x: Float[Tensor, "batch heads time head_dim"],
    step: Float[Tensor, "batch heads time"],
    rate: Float[Tensor, " heads"],
    *,
    before: Int[Tensor, "batch time"] | None,
    initial: Float[Tensor, "batch heads state head_dim"] | None,
    chunk: int,
) -> tuple[Float[Tensor, "batch heads time head_dim"], Float[Tensor, "batch heads state head_dim"]]:
    """What the kernel makes of inputs in our layout: steps, rates and states in fp32, everything else as it comes."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    read, write, x, step = (part.transpose(1, 2).contiguous() for part in (read, write, x, step.float()))
    y, last = mamba_chunk_scan_combined(
        x,
        step,
        rate.float(),
        write.to(x.dtype),
        read.to(x.dtype),
        max(chunk, 16),  # the least that a tensor core multiplies
        initial_states=None if initial is None else initial.mT.float().contiguous(),
        seq_idx=None if before is None else (before == 0).cumsum(1, dtype=torch.int32),
        return_final_states=True,
    )
    return y.transpose(1, 2).float(), last.mT


def convolution(
    x: Float[Tensor, "batch time channels"], weight: Float[Tensor, "channels width"], bias: Float[Tensor, " channels"]
) -> Float[Tensor, "batch time channels"]:
    """`conv.short_convolution` of a row that begins here, a bias, and SiLU; the kernel has widths of 2 to 4, and eights of channels."""
    fits = x.is_cuda and 2 <= weight.shape[1] <= 4 and x.shape[2] % 8 == 0 and x.dtype != torch.float64
    if not fits or implementations.usable("causal_conv1d") is not None:
        return silu(conv.short_convolution(x, weight) + bias)
    return convolution_kernel(x, weight, bias)


def convolution_kernel(
    x: Float[Tensor, "batch time channels"], weight: Float[Tensor, "channels width"], bias: Float[Tensor, " channels"]
) -> Float[Tensor, "batch time channels"]:
    """What the kernel makes of inputs in our layout."""
    from causal_conv1d import causal_conv1d_fn

    y: Tensor = causal_conv1d_fn(x.contiguous().mT, weight.to(x.dtype), bias.to(x.dtype), activation="silu")
    return y.mT
