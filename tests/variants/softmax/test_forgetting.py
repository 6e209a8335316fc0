"""Forgetting attention: against its equations written out, against fla's reference, and over sums that have grown large."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from fla.ops.forgetting_attn.naive import naive_forgetting_attn
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from registry import variants
from tests.variants import oracles
from variants.contract import Context, NotApplicable

every_implementation = pytest.mark.parametrize("impl", ["torch", "sdpa", "reference"])
PRO = {"kv_shift": True, "qk_norm": True, "output_norm": True, "gate": "element"}


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale


def log_forget(mixer, x: Tensor) -> Tensor:
    """(batch, time, heads), by the definition of the sigmoid."""
    return -torch.log1p(torch.exp(-(x @ mixer.forget.weight.T + mixer.forget.bias)))


def by_hand(mixer, x: Tensor) -> Tensor:
    """The layer with all of the options that it has, token by token where the paper has an index."""
    time, width, heads, kv_heads = x.shape[1], mixer.head_dim, mixer.heads, mixer.kv_heads
    q, k, v = (x @ mixer.projections.inward.weight.T).split([heads * width, kv_heads * width, kv_heads * width], -1)
    q, k, v = (part.view(*x.shape[:2], -1, width).transpose(1, 2) for part in (q, k, v))
    if mixer.shift is not None:
        shares = torch.sigmoid(x @ mixer.shift.gates.weight.T).transpose(1, 2).unsqueeze(-1).chunk(2, dim=1)
        k, v = (
            torch.stack(
                [share[:, :, t] * (part[:, :, t - 1] if t else 0) + (1 - share[:, :, t]) * part[:, :, t] for t in range(time)], dim=2
            )
            for part, share in zip((k, v), shares, strict=True)
        )
    if mixer.q_norm is not None:
        q, k = rms(q, mixer.q_norm.weight), rms(k, mixer.k_norm.weight)
    gates = log_forget(mixer, x)
    fade = [[gates[:, j + 1 : i + 1].sum(1) if j <= i else torch.zeros_like(gates[:, 0]) for j in range(time)] for i in range(time)]
    bias = torch.stack([torch.stack(row, dim=-1) for row in fade], dim=-2)
    y = oracles.attention(q, k, v, oracles.causal(time, time), bias)
    if mixer.norm is not None:
        y = rms(y, mixer.norm.weight)
    y = y.transpose(1, 2).flatten(2)
    if mixer.gates is not None:
        y = y * torch.sigmoid(x @ mixer.gates.weight.T)
    return y @ mixer.projections.outward.weight.T


def jittered(mixer):
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer.double()


@every_implementation
@pytest.mark.parametrize("options", [{}, PRO, *({name: value} for name, value in PRO.items())], ids="+".join)
def test_outputs_and_gradients_are_those_of_the_equations(options, impl) -> None:
    mixer = jittered(variants.build("forgetting", dim=16, heads=4, kv_heads=2, impl=impl, **options))
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    got, expected = mixer(x).y, by_hand(mixer, x)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, [x, *mixer.parameters()])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_with_the_same_gates_it_is_flas_forgetting_attention(kv_heads) -> None:
    mixer = jittered(variants.build("forgetting", dim=32, heads=4, kv_heads=kv_heads)).float()
    x = torch.randn(2, 19, 32, requires_grad=True)
    parts = (x @ mixer.projections.inward.weight.T).split([32, 8 * kv_heads, 8 * kv_heads], -1)
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in parts)
    expected = naive_forgetting_attn(q, k, v, log_forget(mixer, x)).flatten(2) @ mixer.projections.outward.weight.T
    got = mixer(x).y
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    oracles.same_gradients(got, expected, [x, *mixer.parameters()], atol=1e-3)


@every_implementation
@torch.no_grad()
def test_without_forgetting_it_is_full_attention(impl) -> None:
    mixer = variants.build("forgetting", dim=16, heads=4, position="rope", impl=impl)
    full = variants.build("full", dim=16, heads=4, position="rope", impl=impl)
    full.load_state_dict(mixer.state_dict(), strict=False)
    mixer.forget.weight.zero_()
    mixer.forget.bias.fill_(200.0)  # log sigmoid is 0 in fp32
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(mixer(x).y, full(x).y)


@torch.no_grad()
def test_a_head_that_forgets_all_returns_the_value_itself() -> None:
    mixer = variants.build("forgetting", dim=16, heads=4)
    mixer.forget.bias.fill_(-200.0)
    x = torch.randn(2, 9, 16)
    weight = mixer.projections.outward.weight @ mixer.projections.inward.weight[32:]
    torch.testing.assert_close(mixer(x).y, x @ weight.T)


def test_horizons_are_spaced_evenly_in_their_logarithms() -> None:
    mixer = variants.build("forgetting", dim=16, heads=4, min_horizon=2.0, max_horizon=2000.0)
    kept = torch.sigmoid(mixer.forget.bias.double())
    horizons = torch.tensor([2.0, 20.0, 200.0, 2000.0], dtype=torch.float64)
    torch.testing.assert_close(kept**horizons, torch.full_like(horizons, math.exp(-1)), rtol=1e-4, atol=0)
    assert (mixer.forget(torch.zeros(1, 16)) == mixer.forget.bias).all()
    one = variants.build("forgetting", dim=16, heads=1, min_horizon=5.0, max_horizon=80.0)
    torch.testing.assert_close(torch.sigmoid(one.forget.bias), torch.tensor([math.exp(-1 / 5)]))
    assert torch.isfinite(variants.build("forgetting", dim=16, heads=2, min_horizon=1e-3, max_horizon=1e9).forget.bias).all()
    assert not variants.build("forgetting", dim=16, heads=4).forget.bias.any()


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"min_horizon": 4.0}, "got 4.0 and None"),
        ({"max_horizon": 4.0}, "got None and 4.0"),
        ({"min_horizon": 0.0, "max_horizon": 4.0}, "got 0.0 and 4.0"),
        ({"min_horizon": 8.0, "max_horizon": 4.0}, "got 8.0 and 4.0"),
        ({"min_horizon": 8.0, "max_horizon": math.inf}, "got 8.0 and inf"),
    ],
)
def test_horizons_that_there_cannot_be_are_refused(options, numbers) -> None:
    with pytest.raises(ValueError, match=numbers):
        variants.build("forgetting", dim=16, heads=4, **options)


def test_there_is_no_bidirectional_form() -> None:
    with pytest.raises(NotApplicable, match="no gate says how what lies ahead of a query fades"):
        variants.build("forgetting", dim=16, heads=4, causal=False)


@torch.no_grad()
def test_pads_add_nothing_to_the_sums() -> None:
    mixer = jittered(variants.build("forgetting", dim=16, heads=4, kv_shift=True))
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    valid = torch.tensor([[False, True, True, False, True, True, True, False, False]])
    padded = mixer(x, Context(valid=valid), mixer.init_state(1)).state
    alone = mixer(x[valid][None], state=mixer.init_state(1)).state
    torch.testing.assert_close(padded["sums"][:, -5:], alone["sums"])
    torch.testing.assert_close(alone["sums"], log_forget(mixer, x[valid][None]).cumsum(1))
    torch.testing.assert_close(padded["shift"], alone["shift"])
    assert mixer(x, Context(valid=torch.zeros_like(valid)), padded).state["sums"][0, -1].equal(padded["sums"][0, -1])


@torch.no_grad()
def test_the_sums_of_a_hundred_thousand_tokens_keep_their_digits_however_they_came() -> None:
    # A matrix product rounds a gate's logit by the number of rows it is given, so pieces agree to fp32 gates, summed in fp64. A running
    # sum in fp32 would be off by 1e-5.
    mixer = variants.build("forgetting", dim=4, heads=2)
    x = torch.randn(1, 100_000, 4)
    whole = mixer.extra_slots(x, Context(), None)["sums"]
    state = mixer.init_state(1)
    for piece in x.split([1, 39_999, 60_000], dim=1):
        state = state.replace(sums=mixer.extra_slots(piece, Context(), state)["sums"])
    torch.testing.assert_close(state["sums"][:, -1], whole[:, -1], rtol=1e-8, atol=0)
    terms = torch.nn.functional.logsigmoid(mixer.forget(x))[0]
    for head in range(2):
        assert whole[0, -1, head].item() == pytest.approx(math.fsum(terms[:, head].tolist()), rel=1e-9)


@every_implementation
@torch.no_grad()
def test_only_differences_of_the_sums_count_however_large_they_have_grown(impl) -> None:
    mixer = variants.build("forgetting", dim=16, heads=4, impl=impl)
    x = torch.randn(2, 12, 16)
    state = mixer(x[:, :8], state=mixer.init_state(2)).state
    grown = state.replace(sums=state["sums"] - 1e6)
    for pieces in ([4], [1] * 4):
        states = [state, grown]
        for piece in x[:, 8:].split(pieces, dim=1):
            results = [mixer(piece, state=one) for one in states]
            torch.testing.assert_close(results[1].y, results[0].y)
            states = [result.state for result in results]


@every_implementation
@torch.no_grad()
def test_in_bf16_and_under_autocast_the_sums_keep_their_precision(impl) -> None:
    mixer = variants.build("forgetting", dim=16, heads=4, impl=impl).bfloat16()
    x = torch.randn(1, 400, 16).bfloat16()  # the sums come to some -280, where neighbouring numbers of bf16 are 2 apart
    rounded, wide = mixer(x).y, copy.deepcopy(mixer).float()
    expected = wide(x.float()).y
    with torch.autocast("cpu", torch.bfloat16):
        cast = wide(x.float()).y
    for got in (rounded, cast):
        assert (got - expected).abs().max() < 2e-2 * expected.abs().max()


def test_the_fused_kernel_runs_forward_and_backward() -> None:
    mixer = variants.build("forgetting", dim=16, heads=4, kv_heads=2, impl="sdpa", **PRO)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        mixer(torch.randn(1, 9, 16)).y.sum().backward()
    kernels = {event.key for event in recorded.key_averages()}
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert kernels >= {forward, f"{forward}_backward"}


@pytest.mark.parametrize("options", [{}, PRO])
def test_costs_are_those_of_full_attention_and_of_what_is_added(options) -> None:
    shared = {"dim": 16, "heads": 4, "kv_heads": 2, "short_conv": 3}
    mixer = variants.build("forgetting", **shared, **options)
    full = variants.build("full", **shared, gate=options.get("gate", "none"))
    shift = 2 * 2 * bool(options)  # heads of keys and of values
    assert mixer.flops(7) == full.flops(7) + 2 * 7 * 16 * (4 + shift)
    assert mixer.state_elements(7) == full.state_elements(7) + 4 * 7 + 4 * shift
    assert mixer(torch.randn(1, 7, 16), state=mixer.init_state(1)).state.elements == mixer.state_elements(7)
