"""What the fast code is compared with: sums over explicit sets of keys, and rotations by complex numbers. fp64."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Sees = Callable[[int, int, int], bool]


def causal(q_time: int, k_time: int) -> Sees:
    """The last query stands at the last key."""
    return lambda row, i, j: j <= i + k_time - q_time


def through_window(ids: Sequence[Sequence[int]], window: int, sinks: int = 0, *, ahead: bool = False) -> Sees:
    """Keys of the same run of ids that are near enough, or first in their run."""
    starts = [[max(s for s in range(i + 1) if s == 0 or row[s] != row[s - 1]) for i in range(len(row))] for row in ids]

    def sees(row: int, i: int, j: int) -> bool:
        if starts[row][i] != starts[row][j] or (j > i and not ahead):
            return False
        return abs(i - j) < window or j - starts[row][j] < sinks

    return sees


def places(ids: list[list[int]]) -> Tensor:
    """How many tokens of its run lie before each token."""
    rows = []
    for row in ids:
        place: list[int] = []
        for i, one in enumerate(row):
            place.append(place[-1] + 1 if i and row[i - 1] == one else 0)
        rows.append(place)
    return torch.tensor(rows)


def run_ids(lengths: list[int], time: int) -> list[int]:
    """Runs of the given lengths, the last as long as it takes."""
    ids = [i for i, length in enumerate(lengths) for _ in range(length)][:time]
    return ids + [len(lengths)] * (time - len(ids))


def matrix(sees: Sees, batch: int, q_time: int, k_time: int) -> Tensor:
    """(batch, 1, q_time, k_time), True where the key is seen."""
    return torch.tensor([[[sees(b, i, j) for j in range(k_time)] for i in range(q_time)] for b in range(batch)]).unsqueeze(1)


def attention(q: Tensor, k: Tensor, v: Tensor, sees: Sees, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Row by row over the keys that are seen, and over no others; heads share as h // (heads / kv_heads)."""
    batch, heads, q_time, width = q.shape
    group = heads // k.shape[1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    rows = []
    for b in range(batch):
        for h in range(heads):
            for i in range(q_time):
                seen = [j for j in range(k.shape[2]) if sees(b, i, j)]
                if not seen:
                    rows.append(0 * q[b, h, i, :1] * v[b, 0, 0])
                    continue
                logits = scale * k[b, h // group, seen] @ q[b, h, i]
                if bias is not None:
                    logits = logits + bias.expand(batch, heads, -1, -1)[b, h, i, seen]
                weights = (logits - logits.max()).exp()
                rows.append(weights / weights.sum() @ v[b, h // group, seen])
    return torch.stack(rows).view(batch, heads, q_time, v.shape[-1])


def linear_attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """sum_j (q_i . k_j) v_j over the keys seen, all pairs written out."""
    return torch.einsum("bhid,bhjd,bhje,bgij->bhie", q, k, v, sees.to(q.dtype))


def fading(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, sees: Tensor) -> Tensor:
    """sum_j sum_c q_ic k_jc exp(log-decays of channel c after j up to i) v_j over the keys seen, all pairs written out."""
    total = by_channel(log_decay, k).cumsum(2)
    between = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(~sees.unsqueeze(-1), -math.inf)
    return torch.einsum("bhic,bhjc,bhijc,bhje->bhie", q, k, between.exp(), v)


def by_channel(log_decay: Tensor, k: Tensor) -> Tensor:
    """One number for each channel of each key."""
    return log_decay.unsqueeze(-1).expand_as(k) if log_decay.ndim == 3 else log_decay


def transitions(k: Tensor, beta: Tensor, log_decay: Tensor) -> list[Tensor]:
    """(I - beta k^T k) diag(decay) of each token: (batch, heads, key_dim, key_dim)."""
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    erase = identity - beta[..., None, None] * k.unsqueeze(-1) * k.unsqueeze(-2)
    return list((erase * by_channel(log_decay, k).exp().unsqueeze(-2)).unbind(2))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, sees: Tensor) -> Tensor:
    """sum_j q_i (transitions after j up to i) beta_j k_j^T v_j over the keys seen, each product of matrices by itself."""
    steps, rows = transitions(k, beta, log_decay), []
    for i in range(q.shape[2]):
        row: Tensor | float = 0.0
        for j in range(i + 1):
            written = beta[:, :, j, None, None] * k[:, :, j, :, None] * v[:, :, j, None, :]
            for step in steps[j + 1 : i + 1]:
                written = step @ written
            row = row + sees[:, :, i, j, None, None] * (q[:, :, i, None, :] @ written)
        rows.append(row)
    return torch.cat(rows, dim=2)


def rotated(x: Sequence[float], position: float, base: float, layout: str) -> list[float]:
    """One vector, its pairs turned as complex numbers."""
    width = len(x)
    pairs = [(i, i + width // 2) if layout == "half" else (2 * i, 2 * i + 1) for i in range(width // 2)]
    out = [0.0] * width
    for i, (a, b) in enumerate(pairs):
        turned = complex(x[a], x[b]) * cmath.exp(1j * position * base ** (-2 * i / width))
        out[a], out[b] = turned.real, turned.imag
    return out


def same_gradients(got: Tensor, expected: Tensor, inputs: Sequence[Tensor], atol: float = 1e-9) -> None:
    """The gradients of one random weighting of both."""
    weighting = torch.randn(got.shape, generator=torch.Generator().manual_seed(7), dtype=got.dtype)
    mine = torch.autograd.grad((got * weighting).sum(), inputs, retain_graph=True, materialize_grads=True)
    theirs = torch.autograd.grad((expected * weighting).sum(), inputs, retain_graph=True, materialize_grads=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
