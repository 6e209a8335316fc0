"""Linear attention as a layer: features, normalisation, rotary numerators, state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from registry import UnknownOption, variants
from tests.variants import oracles
from tests.variants.schemes import Stretched
from variants.contract import Context, NotApplicable
from variants.recurrent.linear import FEATURE_MAPS, _divide


def heads_of(mixer, x: Tensor) -> list[Tensor]:
    """q, k, v from the layer's matrix: (batch, heads, time, head_dim)."""
    channels = (x @ mixer.projections.inward.weight.T).unflatten(-1, (3, mixer.heads, -1))
    return [channels[:, :, part].transpose(1, 2) for part in range(3)]


def back(mixer, y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2) @ mixer.projections.outward.weight.T


@pytest.mark.parametrize("feature_map", list(FEATURE_MAPS))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("time", [1, 3, 4, 9])
@torch.no_grad()
def test_outputs_are_the_weighted_means_over_all_pairs(feature_map, causal, time) -> None:
    mixer = variants.build("linear", dim=8, heads=2, feature_map=feature_map, causal=causal, chunk=4).double()
    x = torch.randn(2, time, 8, dtype=torch.float64)
    q, k, v = heads_of(mixer, x)
    phi = {
        "elu": lambda x: torch.where(x > 0, x + 1, x.exp()),
        "relu": torch.relu,
        "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    }
    if feature_map == "taylor":
        logits = q @ k.transpose(-2, -1) / 2  # heads of 4 channels
        weights = 1 + logits + logits**2 / 2
    else:
        weights = phi[feature_map](q) @ phi[feature_map](k).transpose(-2, -1)
    weights = weights.tril() if causal else weights
    expected = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6) @ v
    torch.testing.assert_close(mixer(x).y, back(mixer, expected))


@torch.no_grad()
def test_with_the_rms_norm_the_sum_is_normalised_head_by_head() -> None:
    mixer = variants.build("linear", dim=8, heads=2, norm="rms").double()
    mixer.rms.weight.copy_(torch.tensor([1.0, 2, 3, 4]))
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    q, k, v = heads_of(mixer, x)
    y = oracles.linear_attention(FEATURE_MAPS["elu"](q), FEATURE_MAPS["elu"](k), v, oracles.matrix(oracles.causal(6, 6), 2, 6, 6))
    expected = y * (y.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * mixer.rms.weight
    torch.testing.assert_close(mixer(x).y, back(mixer, expected))
    assert not mixer.normalises_rows


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_rotary_scheme_turns_the_numerator_alone(causal) -> None:
    mixer = variants.build("linear", dim=8, heads=2, position={"name": "rope", "base": 50.0}, causal=causal, chunk=4).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    q, k, v = heads_of(mixer, x)
    q, k = FEATURE_MAPS["elu"](q), FEATURE_MAPS["elu"](k)
    turned_q, turned_k = (
        torch.tensor(
            [[[oracles.rotated(t.tolist(), p, 50.0, "half") for p, t in enumerate(head)] for head in part[0]]], dtype=torch.float64
        )
        for part in (q, k)
    )
    above, below = turned_q @ turned_k.transpose(-2, -1), q @ k.transpose(-2, -1)
    above, below = (above.tril(), below.tril()) if causal else (above, below)
    torch.testing.assert_close(mixer(x).y, back(mixer, above @ v / below.sum(-1, keepdim=True)))
    assert not mixer.normalises_rows, "turned weights do not sum to one, and it says so"


@pytest.mark.parametrize("options", [{}, {"feature_map": "softmax"}, {"causal": False}])
@pytest.mark.parametrize("time", [1, 7, 8, 17, 64, 67])
@torch.no_grad()
def test_values_of_one_come_out_as_ones(options, time) -> None:
    mixer = variants.build("linear", dim=8, heads=2, chunk=8, **options)
    assert mixer.normalises_rows
    q, k, _ = heads_of(mixer, torch.randn(2, time, 8))
    ones = torch.ones_like(q)
    mixer.projections.forward = lambda *_: (q, k, ones, {})
    mixer.projections.back = lambda y: y.transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixer(torch.zeros(2, time, 8)).y, torch.ones(2, time, 8), rtol=0, atol=1e-6)


@pytest.mark.parametrize("time", [1, 2, 3, 7, 8, 15, 16, 17, 33])
@torch.no_grad()
def test_keys_of_zero_weigh_all_alike_whatever_the_tail_of_the_last_chunk(time) -> None:
    mixer = variants.build("linear", dim=4, heads=2, chunk=16)
    zeros, ones = torch.zeros(1, 2, time, 2), torch.ones(1, 2, time, 2)
    mixer.projections.forward = lambda *_: (zeros, zeros, ones, {})
    mixer.projections.back = lambda y: y.transpose(1, 2).flatten(2)
    assert torch.equal(mixer(torch.zeros(1, time, 4)).y, torch.ones(1, time, 4))


def test_a_query_that_matches_no_key_gives_zero_with_finite_gradients() -> None:
    mixer = variants.build("linear", dim=4, heads=2, feature_map="relu")
    with torch.no_grad():
        mixer.projections.inward.weight[:4] = 0
    y = mixer(torch.randn(1, 5, 4)).y
    assert not y.any()
    y.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in mixer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_feature_of_a_very_negative_number_is_small_but_not_zero(dtype) -> None:
    x = torch.tensor([-20.0, -7, -1, 0, 3], dtype=dtype, requires_grad=True)
    y = FEATURE_MAPS["elu"](x)
    exact = torch.where(x.double() > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
    y.sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.clamp(max=1), rtol=torch.finfo(dtype).eps, atol=0)


@torch.no_grad()
def test_sums_are_kept_in_fp32_in_a_bf16_model() -> None:
    mixer = variants.build("linear", dim=8, heads=2, short_conv=2).to(torch.bfloat16)
    state = mixer.init_state(1)
    assert {name: part.dtype for name, part in state.items() if part.is_floating_point()} == {
        "matrix": torch.float32,
        "normaliser": torch.float32,
        "taps": torch.bfloat16,
    }
    y, state, _ = mixer(torch.randn(1, 5, 8, dtype=torch.bfloat16), state=state)
    assert y.dtype == torch.bfloat16
    assert state["matrix"].dtype == state["normaliser"].dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"norm": "rms"}, {"position": "rope", "short_conv": 4}])
@torch.no_grad()
def test_the_state_has_the_declared_size_at_any_length_and_stands_still_on_pads(options) -> None:
    mixer = variants.build("linear", dim=8, heads=2, chunk=4, **options)
    state = mixer.init_state(2)
    for time in (1, 9):
        state = mixer(torch.randn(2, time, 8), state=state).state
        assert state.elements == 2 * mixer.state_elements(time) == 2 * mixer.state_elements(10**6)
    after = mixer(torch.randn(2, 3, 8), Context(valid=torch.zeros(2, 3, dtype=torch.bool)), state).state
    assert all(torch.equal(after[name], part) for name, part in state.items())


def test_operations_grow_linearly_and_count_the_last_chunk_by_its_length() -> None:
    mixer = variants.build("linear", dim=8, heads=2, chunk=4)
    width, columns = 4, 5
    core = 2 * (4 * 6 * width * columns + 2 * (10 + 3) * (width + columns))
    assert mixer.flops(6) == mixer.projections.flops(6) + core
    assert mixer.flops(400) == 100 * mixer.flops(4)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(NotApplicable, match="cannot turn them again"):
        variants.build("linear", dim=8, heads=2, position=Stretched(4, 2, 8))
    with pytest.raises(UnknownOption, match="feature_map cannot be 'exp'"):
        variants.build("linear", dim=8, heads=2, feature_map="exp")
    with pytest.raises(UnknownOption, match="norm cannot be 'none'"):
        variants.build("linear", dim=8, heads=2, norm="none")


@pytest.mark.parametrize("scale", [1, 10, 30])
def test_rows_of_tiny_features_still_sum_to_one(scale) -> None:
    torch.manual_seed(0)
    mixer = variants.build("linear", dim=8, heads=8)  # one channel a head: a feature may be as small as exp(-scale)
    q, k = (-scale * torch.rand(1, 8, 20, 1) for _ in range(2))
    phi = FEATURE_MAPS["elu"]
    y, _ = mixer.sum(phi(q), phi(k), torch.ones(1, 8, 20, 2), before=None, after=None, initial=None)
    torch.testing.assert_close(_divide(*y.split(1, -1)), torch.ones(1, 8, 20, 1))


def test_nothing_in_gives_nothing_out_and_leaves_the_state() -> None:
    mixer = variants.build("linear", dim=8, heads=2)
    state = mixer.init_state(2)
    output = mixer(torch.randn(2, 0, 8), state=state)
    assert output.y.shape == (2, 0, 8) and output.state is state
