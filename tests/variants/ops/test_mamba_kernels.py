"""How the kernels of mamba_ssm and causal_conv1d are fed, against their own documented references; and what they are not asked."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.variants.oracles import places
from variants.ops import conv, decay, mamba_kernels, reference


def scan_inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, step, write, read = (torch.randn(2, 13, width, generator=generator) for width in (6, 6, 4, 4))
    return [part.to(dtype) for part in (x, step.exp() / 5, -torch.rand(6, 4, generator=generator), write, read)]


def test_the_scan_is_asked_in_its_own_conventions(mamba_ssm, monkeypatch) -> None:
    scans = mamba_ssm("ops.selective_scan_interface")
    monkeypatch.setattr(scans, "selective_scan_fn", scans.selective_scan_ref)
    for ours, right in zip(mamba_kernels.through(*scan_inputs()), reference.selective_scan(*scan_inputs()), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def duality_inputs() -> tuple[list[Tensor], Tensor]:
    """read and write in two groups of two heads, x, steps, rates; a state."""
    generator = torch.Generator().manual_seed(0)
    read, write, x = (torch.randn(2, n, 32, width, generator=generator) for n, width in ((2, 4), (2, 4), (4, 6)))
    step, rate = torch.rand(2, 4, 32, generator=generator), -torch.rand(4, generator=generator)
    return [read, write, x, step, rate], torch.randn(2, 4, 4, 6, generator=generator)


def expected(made: list[Tensor], **told: Tensor | None) -> tuple[Tensor, Tensor]:
    read, write, x, step, rate = made
    q, k = (part.repeat_interleave(2, 1) for part in (read, write))
    return reference.gated_linear_attention(q, k, x * step.unsqueeze(-1), step * rate[:, None], **told)


@pytest.fixture
def chunk_scan(mamba_ssm, monkeypatch):
    """mamba_chunk_scan_combined by its documentation: mamba_ssm's minimal form, run for each segment; states (heads, width, state)."""
    minimal = mamba_ssm("modules.ssd_minimal").ssd_minimal_discrete
    calls = []

    def combined(x, dt, a, b, c, chunk_size, *, initial_states=None, seq_idx=None, return_final_states=False):
        calls.append(chunk_size)
        group = x.shape[2] // b.shape[2]
        b, c = (part.repeat_interleave(group, 2) for part in (b, c))
        outputs, last = [], []
        for row in range(len(x)):
            ids = torch.zeros(x.shape[1]) if seq_idx is None else seq_idx[row]
            state = None if initial_states is None else initial_states[row : row + 1]
            pieces = []
            for one in ids.unique_consecutive():
                here = ids == one
                written, left, key, query = (part[row : row + 1, here] for part in (x * dt.unsqueeze(-1), a * dt, b, c))
                # One chunk a token, so that any length will do.
                y, state = minimal(written, left, key, query, 1, None if state is None else state.unsqueeze(1))
                pieces.append(y)
                ended, state = state, None
            outputs.append(torch.cat(pieces, dim=1))
            last.append(ended)
        return torch.cat(outputs), torch.cat(last)

    module = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    module.mamba_chunk_scan_combined = combined  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.mark.parametrize("told", ["nothing", "a state", "segments"])
def test_the_chunk_scan_is_asked_in_its_own_conventions(told, chunk_scan) -> None:
    made, initial = duality_inputs()
    before = places([[0] * 10 + [1] * 22, [0] * 32])
    options = {"before": before if told == "segments" else None, "initial": initial if told == "a state" else None}
    got = mamba_kernels.through_chunks(*made, chunk=64, **options)
    for ours, right in zip(got, expected(made, **options), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    assert chunk_scan == [64]


def test_ssd_minimal_discrete_is_our_decay_core(mamba_ssm) -> None:
    (read, write, x, step, rate), initial = duality_inputs()
    q, k = (part.repeat_interleave(2, 1) for part in (read, write))
    values, log_decay = (x * step.unsqueeze(-1)).requires_grad_(), (step * rate[:, None]).requires_grad_()
    theirs = mamba_ssm("modules.ssd_minimal").ssd_minimal_discrete(
        values.transpose(1, 2), log_decay.transpose(1, 2), k.transpose(1, 2), q.transpose(1, 2), 8, initial.mT[:, None]
    )
    ours = decay.gated_linear_attention(q, k, values, log_decay, initial=initial, chunk=8)
    torch.testing.assert_close(ours[0], theirs[0].transpose(1, 2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[1], theirs[1].mT, rtol=1e-4, atol=1e-4)
    weights = torch.randn(ours[0].shape, generator=torch.Generator().manual_seed(1))
    pairs = (torch.autograd.grad((y * weights).sum(), (values, log_decay)) for y in (ours[0], theirs[0].transpose(1, 2)))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_the_convolution_is_asked_in_its_own_conventions(monkeypatch) -> None:
    x, weight, bias = torch.randn(2, 7, 6), torch.randn(6, 3), torch.randn(6)

    def causal_conv1d_fn(x, weight, bias=None, activation=None):
        """(batch, channels, time)."""
        y = torch.nn.functional.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=len(weight))[..., : x.shape[2]]
        return torch.nn.functional.silu(y) if activation == "silu" else y

    module = ModuleType("causal_conv1d")
    module.causal_conv1d_fn = causal_conv1d_fn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "causal_conv1d", module)
    right = torch.nn.functional.silu(conv.short_convolution(x, weight) + bias)
    torch.testing.assert_close(mamba_kernels.convolution_kernel(x, weight, bias), right)
    torch.testing.assert_close(mamba_kernels.convolution(x, weight, bias), right)


def test_away_from_cuda_our_own_run() -> None:
    made = scan_inputs()
    for ours, right in zip(mamba_kernels.selective_scan(*made), reference.selective_scan(*made), strict=True):
        torch.testing.assert_close(ours, right)
    made, initial = duality_inputs()
    for ours, right in zip(mamba_kernels.state_space_duality(*made, initial=initial), expected(made, initial=initial), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
