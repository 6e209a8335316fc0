"""Softmax attention: the reference and the fused kernel, against sums over explicit sets of keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.variants import oracles
from variants.ops import reference, softmax

IMPLEMENTATIONS = [pytest.param(reference.attention, id="reference"), pytest.param(softmax.attention, id="softmax")]
every_implementation = pytest.mark.parametrize("attention", IMPLEMENTATIONS)


def inputs(q_time: int, k_time: int, heads: int = 2, kv_heads: int = 2, batch: int = 2, width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_time + 100 * k_time)
    shapes = (heads, q_time), (kv_heads, k_time), (kv_heads, k_time)
    return [torch.randn(batch, h, t, width, generator=generator, dtype=torch.float64, requires_grad=True) for h, t in shapes]


@every_implementation
@given(q_time=st.integers(1, 6), k_time=st.integers(1, 6), sharing=st.sampled_from([(2, 2), (4, 2), (4, 1), (6, 3)]), causal=st.booleans())
def test_outputs_and_gradients_are_those_of_the_sum_over_the_visible_keys(attention, q_time, k_time, sharing, causal) -> None:
    q, k, v = inputs(q_time, k_time, *sharing)
    sees = oracles.causal(q_time, k_time) if causal else lambda row, i, j: True
    got, expected = attention(q, k, v, causal=causal), oracles.attention(q, k, v, sees)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v))


@every_implementation
@pytest.mark.parametrize(
    ("q_time", "k_time", "visible"), [(1, 6, ["111111"]), (2, 5, ["11110", "11111"]), (5, 2, ["00", "00", "00", "10", "11"])]
)
def test_the_causal_mask_is_anchored_bottom_right(attention, q_time, k_time, visible) -> None:
    one_hot = torch.eye(k_time)[None, None]
    y = attention(torch.zeros(1, 1, q_time, 4), torch.zeros(1, 1, k_time, 4), one_hot)
    assert ["".join(str(int(weight > 0)) for weight in row) for row in y[0, 0]] == visible


@every_implementation
def test_for_fewer_queries_than_keys_the_rows_are_the_last_of_the_square(attention) -> None:
    q, k, v = inputs(6, 6)
    torch.testing.assert_close(attention(q[:, :, 4:], k, v), attention(q, k, v)[:, :, 4:])


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_sees_nothing_is_zero_and_poisons_no_gradient(attention, dtype) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs(4, 4))
    band = torch.ones(4, 4, dtype=torch.bool).tril().triu(-1)
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    visible = band & valid[:, None, None, :]
    y = attention(q, k, v, causal=False, visible=visible)
    assert not y[1, :, 3].any()
    alive = torch.tensor([[True] * 4, [True, True, True, False]])[:, None, :, None].to(dtype)
    expected = oracles.attention(q, k, v, lambda row, i, j: bool(visible[row, 0, i, j]))
    for loss in (y.pow(2).sum(), (alive * y).pow(2).sum()):
        gradients = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
        wanted = torch.autograd.grad((alive * expected).pow(2).sum(), (q, k, v), retain_graph=True)
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@every_implementation
@pytest.mark.parametrize(("heads", "kv_heads", "expected"), [(4, 2, [0, 0, 1, 1]), (4, 1, [0] * 4), (6, 3, [0, 0, 1, 1, 2, 2])])
def test_query_heads_share_key_and_value_heads_in_blocks(attention, heads, kv_heads, expected) -> None:
    q, k, _ = (x.detach() for x in inputs(3, 3, heads, kv_heads))
    v = torch.arange(kv_heads, dtype=torch.float64)[:, None, None].expand(2, kv_heads, 3, 4).clone().requires_grad_()
    y = attention(q, k, v)
    assert y[0, :, 0, 0].round(decimals=9).tolist() == expected
    (gradient,) = torch.autograd.grad(y[:, :, :1].sum(), v)
    assert gradient[0, :, 0, 0].round(decimals=9).tolist() == [heads / kv_heads] * kv_heads


@every_implementation
def test_a_mask_and_a_bias_are_applied_together_and_the_bias_is_trained(attention) -> None:
    q, k, v = inputs(5, 5, 4, 2)
    bias = torch.randn(4, 5, 5, dtype=torch.float64, requires_grad=True)
    visible = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.6

    def sees(row: int, i: int, j: int) -> bool:
        return j <= i and bool(visible[row, 0, i, j])

    got = attention(q, k, v, visible=visible, bias=bias, scale=0.9)
    expected = oracles.attention(q, k, v, sees, bias, 0.9)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v, bias))


@every_implementation
@pytest.mark.parametrize("biased", [False, True])
def test_no_score_is_low_enough_to_let_the_future_in(attention, biased) -> None:
    q = torch.full((1, 1, 4, 4), 100.0)
    k, v = -200 * q, torch.randn(1, 1, 4, 4)
    bias = torch.full((1, 4, 4), -1e30) if biased else None
    later = v.clone()
    later[:, :, 3] = 1e6
    assert torch.equal(attention(q, k, v, bias=bias)[:, :, :3], attention(q, k, later, bias=bias)[:, :, :3])


@pytest.mark.parametrize("case", ["causal", "mask", "grouped", "one step", "fixed bias"])
def test_the_fused_kernel_runs_forward_and_backward(case) -> None:
    q, k, v = inputs(1 if case == "one step" else 8, 8, 4, 2 if case == "grouped" else 4)
    options = {"mask": {"visible": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, "fixed bias": {"bias": torch.zeros(4, 8, 8)}}.get(case, {})
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        softmax.attention(q, k, v, **options).sum().backward()
    names = {event.key for event in recorded.key_averages()}
    assert {"aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"} <= names


def test_the_reference_drops_weights_without_changing_their_mean() -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach()[:1].expand(4000, -1, -1, -1) for x in inputs(3, 3))
    y = reference.attention(q, k, v + 3, dropout=0.5)
    assert not torch.equal(y[0], y[1])
    torch.testing.assert_close(y.mean(0), reference.attention(q[:1], k[:1], v[:1] + 3)[0], rtol=0.05, atol=0)
