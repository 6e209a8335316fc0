"""What stands between the layers and kernels that need another device: arguments, conventions, and who takes what they cannot do."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from variants.ops import flash_attn, flex, reference
from variants.ops.attention import Fade, Sight

SIGHTS = [
    Sight(),
    Sight(False),
    Sight(window=9),
    Sight(False, 9),
    Sight(window=9, sinks=2),
    Sight(before=torch.arange(70)[None] % 13),
    Sight(beyond=torch.arange(70)[None] % 17),
]


def inputs(q_time: int, k_time: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, t, 16, generator=generator).to(dtype) for heads, t in ((4, q_time), (2, k_time), (2, k_time))]


@pytest.mark.parametrize("more", ["nothing", "sink", "fade"])
@pytest.mark.parametrize("sight", SIGHTS, ids=["causal", "both", "window", "both sides", "sinks", "segments", "beyond"])
@torch.no_grad()
def test_flex_attention_sees_what_the_reference_sees(unchecked, sight, more) -> None:
    q, k, v = inputs(70, 90)
    options = {"sink": {"sink": torch.randn(4)}, "fade": {"fade": Fade(torch.randn(2, 4, 70), torch.randn(2, 4, 90))}}.get(more, {})
    torch.testing.assert_close(
        flex.attention(q, k, v, sight=sight, **options), reference.attention(q, k, v, sight=sight, **options), rtol=0, atol=1e-5
    )


def test_where_flex_attention_has_no_gradient_the_tiles_give_it() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(20, 20))
    got, expected = flex.attention(q, k, v), reference.attention(q, k, v)
    for a, b in zip(torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def package(monkeypatch):
    """A flash-attn that computes by its own documented conventions, and counts its calls."""
    calls = []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        """(batch, time, heads, width); key j is seen iff i - left <= j <= i + right, i counted from the last key backwards."""
        calls.append(window_size)
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        left, right = (10**9 if side < 0 else side for side in window_size)
        if causal:
            right = 0
        distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
        logits = (q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)).masked_fill((distance > left) | (distance < -right), -torch.inf)
        return (logits.softmax(-1) @ v).transpose(1, 2).bfloat16()

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    return calls


@pytest.mark.parametrize("sight", SIGHTS[:4], ids=["causal", "both", "window", "both sides"])
def test_flash_attn_is_asked_in_its_own_conventions(package, sight) -> None:
    q, k, v = inputs(20, 24, torch.bfloat16)
    expected = reference.attention(*(x.float() for x in (q, k, v)), sight=sight, scale=0.3)
    torch.testing.assert_close(flash_attn.attention(q, k, v, sight=sight, scale=0.3).float(), expected, rtol=0, atol=2e-2)
    assert len(package) == 1


@pytest.mark.parametrize("case", ["fp32", "sinks", "segments", "beyond", "sink", "fade"])
def test_what_flash_attn_cannot_do_it_is_not_asked(package, case) -> None:
    q, k, v = inputs(20, 20, torch.float32 if case == "fp32" else torch.bfloat16)
    options = {
        "sinks": {"sight": Sight(window=3, sinks=1)},
        "segments": {"sight": Sight(before=torch.arange(20)[None] % 7)},
        "beyond": {"sight": Sight(beyond=torch.arange(20)[None] % 7)},
        "sink": {"sink": torch.randn(4)},
        "fade": {"fade": Fade(torch.randn(2, 4, 20), torch.randn(2, 4, 20))},
    }.get(case, {})
    expected = reference.attention(*(x.float() for x in (q, k, v)), **options)
    torch.testing.assert_close(flash_attn.attention(q, k, v, **options).float(), expected, rtol=0, atol=3e-2)
    assert not package
