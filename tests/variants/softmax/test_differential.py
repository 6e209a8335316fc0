"""Differential attention: against its equations written out, and against transformers' DiffLlama with the same weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

from registry import variants
from tests.variants import oracles
from tests.variants.schemes import Slopes


class Unchanged(nn.RMSNorm):
    """No norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def projected(mixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maps of queries and keys, and the pairs' values of twice their width."""
    width, heads, kv_heads = mixer.head_dim, mixer.heads, mixer.kv_heads
    q, k, v = (x @ mixer.projections.inward.weight.T).split([heads * width, kv_heads * width, kv_heads * width], -1)
    q, k = (part.view(*x.shape[:2], -1, width).transpose(1, 2) for part in (q, k))
    return q, k, v.view(*x.shape[:2], -1, 2 * width).transpose(1, 2)


def by_hand(mixer, x: Tensor, lambda_init: float, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Pair by pair: two maps attend to one value, the second's share is subtracted, the pair is normalised."""
    q, k, v = projected(mixer, x)
    vectors = [getattr(mixer, f"lambda_{name}").tolist() for name in ("q1", "k1", "q2", "k2")]
    dots = [math.fsum(a * b for a, b in zip(*vectors[i : i + 2], strict=True)) for i in (0, 2)]
    share = math.exp(dots[0]) - math.exp(dots[1]) + lambda_init
    pairs = []
    for pair in range(mixer.heads // 2):
        shared = pair // (mixer.heads // mixer.kv_heads)
        first, second = (
            oracles.attention(
                q[:, [2 * pair + map_]],
                k[:, [2 * shared + map_]],
                v[:, [shared]],
                oracles.causal(x.shape[1], x.shape[1]),
                None if bias is None else bias[None, [2 * pair + map_]],
                scale,
            )[:, 0]
            for map_ in (0, 1)
        )
        y = first - share * second
        y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
        pairs.append((1 - lambda_init) * y)
    return torch.cat(pairs, -1) @ mixer.projections.outward.weight.T


def trained(mixer) -> nn.Module:
    """The mixer with a scale in its norm, and lambdas, that are not those it starts with."""
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if "lambda" in name or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer.double()


@pytest.mark.parametrize("impl", ["sdpa", "torch", "reference"])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_outputs_and_gradients_are_those_of_the_equations(kv_heads, impl) -> None:
    mixer = trained(variants.build("differential", dim=24, heads=6, kv_heads=kv_heads, layer=2, impl=impl))
    x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    got, expected = mixer(x).y, by_hand(mixer, x, 0.8 - 0.6 * math.exp(-0.6))
    torch.testing.assert_close(got, expected)
    # by_hand reads the vectors of lambda as numbers, and knows no gradient of theirs.
    oracles.same_gradients(got, expected, [x, mixer.projections.inward.weight, mixer.norm.weight])


def test_each_map_has_its_own_bias_and_its_own_sink() -> None:
    mixer = trained(variants.build("differential", dim=16, heads=4, position=Slopes(4, 4, 16)))
    x, places = torch.randn(1, 5, 16, dtype=torch.float64), torch.arange(5)[None]
    bias = Slopes(4, 4, 16).bias(places, places)
    torch.testing.assert_close(mixer(x).y, by_hand(mixer, x, 0.2, bias[0], 1.7 / 2))
    sunk = variants.build("differential", dim=16, heads=4, sink_logit=True).double()
    with torch.no_grad():
        sunk.sink.copy_(torch.tensor([60.0, -60.0, 60.0, -60.0]))  # the first maps see nothing, the second ones are as without a sink
        sunk.norm = Unchanged(8, dtype=torch.float64)
    q, k, v = projected(sunk, x)
    second = oracles.attention(q[:, 1::2], k[:, 1::2], v, oracles.causal(5, 5)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(sunk(x).y, -0.8 * sunk.share() * second @ sunk.projections.outward.weight.T)


def test_without_a_share_of_the_second_maps_the_first_ones_attend_alone() -> None:
    mixer = variants.build("differential", dim=16, heads=4).double()
    mixer.norm = Unchanged(8, dtype=torch.float64)
    with torch.no_grad():
        for vector in (mixer.lambda_q1, mixer.lambda_k1, mixer.lambda_q2, mixer.lambda_k2):
            vector.zero_()
        mixer.lambda_q2[0], mixer.lambda_k2[0] = 1.0, math.log(1 + 0.2)  # exp(0) - exp(log 1.2) + 0.2 = 0
    assert mixer.share().abs() < 1e-15
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    y = oracles.attention(q[:, ::2], k[:, ::2], v, oracles.causal(6, 6)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixer(x).y, 0.8 * y @ mixer.projections.outward.weight.T)


@torch.no_grad()
def test_what_both_maps_see_alike_cancels() -> None:
    mixer = variants.build("differential", dim=16, heads=4).double()
    for rows in mixer.projections.inward.weight[:32].view(8, 4, 16).split(2):  # queries, then keys: two maps a pair
        rows[1] = rows[0]
    mixer.lambda_q2.zero_()
    mixer.lambda_q1.zero_()
    mixer.lambda_q1[0], mixer.lambda_k1[0] = 1.0, math.log(1.8)  # lambda = 1.8 - 1 + 0.2 = 1
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    assert mixer(x).y.abs().max() < 1e-12


@pytest.mark.parametrize(("layer", "expected"), [(0, 0.2), (1, 0.3555), (11, 0.7779)])
def test_lambda_starts_higher_the_deeper_the_layer(layer, expected) -> None:
    mixers = [variants.build("differential", dim=64, heads=2, layer=layer) for _ in range(100)]
    starts = torch.stack([mixer.share().detach() for mixer in mixers])
    assert abs(float(starts.mean()) - expected) < 0.05  # each half of lambda spreads by sqrt(32) * 0.1^2
    vectors = torch.cat([vector for mixer in mixers for name, vector in mixer.named_parameters() if "lambda" in name])
    torch.testing.assert_close(vectors.std(), torch.tensor(0.1), rtol=0.05, atol=0)


def test_parameters_and_state_are_those_of_full_attention_and_values_cost_twice() -> None:
    mixer, full = (variants.build(name, dim=16, heads=4, kv_heads=2, short_conv=3) for name in ("differential", "full"))
    numbers = [sum(parameter.numel() for parameter in one.parameters()) for one in (mixer, full)]
    assert numbers[0] == numbers[1] + 4 * 4 + 8
    assert mixer.state_elements(7) == full.state_elements(7) == mixer(torch.randn(1, 7, 16), state=mixer.init_state(1)).state.elements
    assert mixer.flops(7) == full.flops(7) + 2 * 16 * 28


def test_dropout_is_for_training_alone() -> None:
    mixer = variants.build("differential", dim=16, heads=4, dropout=0.5)
    without = variants.build("differential", dim=16, heads=4)
    without.load_state_dict(mixer.state_dict())
    x = torch.randn(1, 6, 16)
    assert not torch.equal(mixer(x).y, mixer(x).y)
    mixer.eval()
    assert torch.equal(mixer(x).y, mixer(x).y)
    torch.testing.assert_close(mixer(x).y, without(x).y)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 12, "heads": 3}, "heads=3 and kv_heads=3; choose even"),
        ({"dim": 12, "heads": 6, "kv_heads": 3}, "heads=6 and kv_heads=3; choose even"),
        ({"dim": 12, "heads": 6, "kv_heads": 4}, "kv_heads=4 does not divide heads=6"),
        ({"dim": 12, "heads": 6, "layer": -1}, "index from 0; got -1"),
    ],
)
def test_wrong_arithmetic_is_refused_with_the_numbers(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        variants.build("differential", **arguments)


def test_the_fused_kernel_runs_forward_and_backward() -> None:
    mixer = variants.build("differential", dim=16, heads=4, kv_heads=2, impl="sdpa")
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        mixer(torch.randn(1, 9, 16)).y.sum().backward()
    kernels = {event.key: event.count for event in recorded.key_averages()}
    assert kernels["aten::_scaled_dot_product_flash_attention_for_cpu"] == 2
    assert kernels["aten::_scaled_dot_product_flash_attention_for_cpu_backward"] == 2


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_outputs_and_gradients_are_those_of_transformers_diff_llama(kv_heads) -> None:
    config = DiffLlamaConfig(
        hidden_size=32, num_attention_heads=8, num_key_value_heads=kv_heads, rms_norm_eps=1e-5, attn_implementation="eager"
    )
    theirs = DiffLlamaAttention(config, layer_idx=3).double().eval()
    ours = variants.build("differential", dim=32, heads=8, kv_heads=kv_heads, layer=3, position="rope").double()
    with torch.no_grad():
        # Their pairs are map p and map p + heads / 2.
        rows = [
            linear.weight.unflatten(0, (2, heads // 2, 4)).transpose(0, 1).flatten(0, 2)
            for linear, heads in ((theirs.q_proj, 8), (theirs.k_proj, kv_heads), (theirs.v_proj, kv_heads))
        ]
        ours.projections.inward.weight.copy_(torch.cat(rows))
        ours.projections.outward.weight.copy_(theirs.o_proj.weight)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            getattr(ours, name).copy_(getattr(theirs, name))
    x = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    tables = DiffLlamaRotaryEmbedding(config)(x, torch.arange(9)[None])
    hidden = torch.full((9, 9), -math.inf, dtype=torch.float64).triu(1)[None, None]
    expected, _ = theirs(x, tables, attention_mask=hidden)
    got = ours(x).y
    # Their tables and their lambda are made in fp32.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    oracles.same_gradients(got, expected, [x], atol=1e-4)
