"""Frequencies, turned queries and keys, and biases against those of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from registry import positions
from tests.variants.positions import formulas
from variants.positions.rotary import Rotary

#: Relative. Theirs are made in fp32, each step rounded by 6e-8, ours in fp64.
TOLERANCE = 3e-7
#: So is the share at which two frequencies are blended, which may be small beside the faster of them.
SHARE_TOLERANCE = 1.2e-7
#: Powers of two, so that their exponents 2i / width are exact.
WIDTHS = [8, 16, 32, 64, 128]
LENGTH = 2048


def build(name: str, width: int, **options: object) -> Rotary:
    scheme = positions.build(name, head_dim=width, heads=2, dim=2 * width, **options)
    assert isinstance(scheme, Rotary)
    return scheme


def config(width: int, base: float, trained_length: int, **rope: object) -> LlamaConfig:
    """`max_position_embeddings` is what `dynamic` takes for the trained length; the others are told it by another name."""
    return LlamaConfig(
        hidden_size=2 * width,
        num_attention_heads=2,
        head_dim=width,
        max_position_embeddings=trained_length,
        rope_parameters={"rope_theta": base, **rope},
    )


def longrope_factors(width: int) -> tuple[list[float], list[float]]:
    short = [1 + 0.01 * i for i in range(width // 2)]
    return short, [1 + 0.3 * i for i in range(width // 2)]


def pairs_of_settings(width: int, factor: float, trained_length: int) -> dict[str, tuple[str, dict[str, object], dict[str, object]]]:
    """By what it shows: (our name, our options, their rope parameters)."""
    ours, trained = {"factor": factor, "trained_length": trained_length}, {"original_max_position_embeddings": trained_length}
    short, long = longrope_factors(width)
    yarn = {"rope_type": "yarn", "factor": factor, **trained}
    return {
        "rope": ("rope", {}, {"rope_type": "default"}),
        "pi": ("pi", {"factor": factor}, {"rope_type": "linear", "factor": factor}),
        "dynamic_ntk": ("dynamic_ntk", ours, {"rope_type": "dynamic", "factor": factor}),
        "yarn": ("yarn", ours, yarn),
        "yarn, not truncated": ("yarn", {**ours, "truncate": False}, {**yarn, "truncate": False}),
        "yarn, other turns": ("yarn", {**ours, "beta_fast": 8.0, "beta_slow": 2.0}, {**yarn, "beta_fast": 8.0, "beta_slow": 2.0}),
        "yarn, factor given": ("yarn", {**ours, "attention_factor": 1.25}, {**yarn, "attention_factor": 1.25}),
        "longrope": (
            "longrope",
            {**ours, "short_factors": short, "long_factors": long},
            {"rope_type": "longrope", "factor": factor, "short_factor": short, "long_factor": long, **trained},
        ),
        "llama3": (
            "llama3",
            {**ours, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **trained},
        ),
        **{
            f"p_rope {share}": (
                "p_rope",
                {"proportion": share},
                {"rope_type": "proportional", "partial_rotary_factor": share},
            )
            for share in (0.25, 0.5, 0.75, 1.0)
        },
    }


CASES = list(pairs_of_settings(8, 4.0, LENGTH))


def theirs(their_config: LlamaConfig, length: int) -> tuple[Tensor, float]:
    kind = their_config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(their_config)
    return ROPE_INIT_FUNCTIONS[kind](their_config, seq_len=length)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_frequencies_and_magnitudes_are_theirs(case, width) -> None:
    for base in (10_000.0, 500_000.0):
        for factor in (1.0, 1.7, 4.0, 8.0, 40.0):
            name, ours, rope = pairs_of_settings(width, factor, LENGTH)[case]
            scheme, their_config = build(name, width, base=base, **ours), config(width, base, LENGTH, **rope)
            plain = torch.tensor(formulas.rope(width, base), dtype=torch.float64)
            for length in (1, 100, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH, 4 * LENGTH):
                expected, magnitude = theirs(their_config, length)
                got = scheme.frequencies(torch.tensor([length])).view(-1)
                blended = (got < 0.999 * plain) & (got > 1.001 * plain / factor) & (name in ("yarn", "llama3"))
                allowed = TOLERANCE * got + SHARE_TOLERANCE * plain * blended
                assert ((got - expected).abs() <= allowed).all(), f"base {base}, factor {factor}, {length} tokens"
                assert scheme.magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("length", [63, 64, 65, 130])
def test_queries_and_keys_are_turned_as_theirs(case, width, length) -> None:
    name, ours, rope = pairs_of_settings(width, 4.0, 64)[case]
    # Fresh for every length: theirs remembers the longest that it has seen.
    rotary = LlamaRotaryEmbedding(config(width, 10_000.0, 64, **rope))
    at = torch.arange(length).unsqueeze(0)
    q, k = torch.randn(1, 4, length, width), torch.randn(1, 2, length, width)
    expected = apply_rotary_pos_emb(q, k, *rotary(q, at))
    # Their angles are products in fp32: of numbers up to the length, each rounded.
    torch.testing.assert_close(build(name, width, **ours).rotate(q, k, at, at), expected, rtol=0, atol=length * TOLERANCE)


@pytest.mark.parametrize("heads", [*range(1, 18), 32, 40, 71])
def test_slopes_are_those_of_bloom(heads) -> None:
    scheme = positions.build("alibi", head_dim=4, heads=heads, dim=4 * heads)
    at = torch.arange(9).unsqueeze(0)
    got = scheme.bias(at, at)[0]
    # Theirs grows with the key alone: the same weights, a row at a time.
    expected = build_alibi_tensor(torch.ones(1, 9), heads, torch.float32).expand(heads, 9, 9)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    weights = [bias.masked_fill(~seen, -math.inf).softmax(-1) for bias in (got, expected)]
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000), (20, 77), (20, 320)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_are_those_of_t5(buckets, max_distance, bidirectional) -> None:
    options = {"buckets": buckets, "max_distance": max_distance, "bidirectional": bidirectional}
    scheme = positions.build("t5_bias", head_dim=4, heads=2, dim=8, **options)
    ahead = torch.arange(-1500, 1500 if bidirectional else 1)
    expected = T5Attention._relative_position_bucket(ahead, bidirectional, buckets, max_distance)
    assert torch.equal(scheme.bucket(ahead), expected)
