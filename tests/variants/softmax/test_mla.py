"""Latent attention: two forms of one function, the cache of the paper, and the layer that transformers' DeepSeek-V3 has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from registry import UnknownOption, options, variants
from tests.variants import oracles
from tests.variants.schemes import Slopes, Stretched
from variants.conformance.costs import Meter
from variants.contract import Context
from variants.implementations import NotUsable
from variants.positions.rotary import Rotary

#: Widths that no two parts share, so that a part cut at another's width is found.
WIDTHS = {"dim": 16, "heads": 3, "head_dim": 5, "kv_rank": 11, "nope_dim": 7, "rope_dim": 4}
ROPE = {"name": "rope", "base": 50.0}
FORMS = {"expanded": (0, 1), "absorbed": (1, 0)}


def build(dtype: torch.dtype = torch.float64, **changed: Any):
    """A mixer of those widths whose norms have learned something."""
    torch.manual_seed(0)
    mixer = variants.build("mla", **{**WIDTHS, **changed}).to(dtype)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2)
    return mixer


def forced(mixer, form: str, monkeypatch):
    """The same mixer, whose count of operations is in favour of one form."""
    monkeypatch.setattr(mixer, "operations", lambda q_time, k_time: FORMS[form])
    return mixer


def tokens(batch: int, time: int, dim: int = WIDTHS["dim"]) -> Tensor:
    return torch.randn(batch, time, dim, generator=torch.Generator().manual_seed(time), dtype=torch.float64)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: Tensor, layout: str = "half", base: float = ROPE["base"]) -> Tensor:
    """(..., time, rope_dim) with the token at place p turned by p."""
    rows = [[oracles.rotated(token.tolist(), place, base, layout) for place, token in enumerate(row)] for row in x.flatten(0, -3)]
    return torch.tensor(rows, dtype=x.dtype).view(x.shape)


def by_hand(mixer, x: Tensor, turn: Callable[[Tensor], Tensor], bias: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """The layer from its matrices: every latent becomes keys and values, which are attended to key by key."""
    q, latents, rotary = (x @ mixer.inward.weight.T).split(mixer.widths, dim=-1)
    if mixer.q_up is not None:
        q = rms(q, mixer.q_latent_norm.weight) @ mixer.q_up.weight.T
    q = q.unflatten(-1, (3, 7 + 4)).transpose(1, 2)
    made = (rms(latents, mixer.kv_latent_norm.weight) @ mixer.kv_up.weight.T).unflatten(-1, (3, 7 + 5)).transpose(1, 2)
    rotary = turn(rotary.unsqueeze(1)).expand(-1, 3, -1, -1)
    q, k = torch.cat([q[..., :7], turn(q[..., 7:])], -1), torch.cat([made[..., :7], rotary], -1)
    y = oracles.attention(q, k, made[..., 7:], oracles.causal(x.shape[1], x.shape[1]), bias, temperature * (7 + 4) ** -0.5)
    return y.transpose(1, 2).flatten(2) @ mixer.outward.weight.T


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", [None, "half", "interleaved"])
@pytest.mark.parametrize("q_rank", [None, 6])
@torch.no_grad()
def test_the_layer_is_the_sum_written_out_by_hand(form, layout, q_rank, monkeypatch) -> None:
    mixer = build(q_rank=q_rank, position=None if layout is None else {**ROPE, "layout": layout})
    x = tokens(2, 6)
    expected = by_hand(mixer, x, (lambda part: turned(part, layout)) if layout else (lambda part: part))
    torch.testing.assert_close(forced(mixer, form, monkeypatch)(x).y, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_schemes_that_add_to_logits_or_turn_by_the_length_do_so_in_both_forms(form, monkeypatch) -> None:
    x, positions = tokens(2, 6), torch.tensor([[0, 1, 4, 5, 9, 10], [3, 4, 5, 6, 7, 20]])
    stretched, slopes = Stretched(4, 3, 16), Slopes(4, 3, 16)
    expected = {
        stretched: partial(by_hand, turn=lambda part: stretched.rotate(part, part, positions, positions)[0]),
        slopes: partial(by_hand, turn=lambda part: part, bias=slopes.bias(positions, positions), temperature=1.7),
    }
    for scheme, written_out in expected.items():
        mixer = forced(build(position=scheme), form, monkeypatch)
        torch.testing.assert_close(mixer(x, Context(positions=positions)).y, written_out(mixer, x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("impl", ["sdpa", "torch", "reference"])
@pytest.mark.parametrize(
    "changed",
    [
        {"position": ROPE},
        {"position": None, "q_rank": 6, "gate": "element", "sink_logit": True},
        {"position": Slopes(4, 3, 16), "gate": "head"},
        {"position": Stretched(4, 3, 16)},
    ],
)
def test_absorbed_equals_expanded_with_all_gradients_for_every_number_of_queries(changed, impl, monkeypatch) -> None:
    mixer = build(impl=impl, **changed)
    start, x = tokens(2, 4), tokens(2, 6).requires_grad_()
    for q_time in range(1, 7):
        results = []
        for form in FORMS:
            forced(mixer, form, monkeypatch)
            state = mixer(start, state=mixer.init_state(2)).state
            y = mixer(x[:, :q_time], state=state).y
            results.append((y, torch.autograd.grad((y * y.detach().cos()).sum(), [x, *mixer.parameters()])))
        (expanded, expected), (absorbed, got) = results
        torch.testing.assert_close(absorbed, expanded, rtol=0, atol=1e-9)
        for mine, theirs in zip(got, expected, strict=True):
            assert theirs.any()
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_both_forms_run_under_autocast(form, monkeypatch) -> None:
    mixer = forced(build(torch.float32, position=ROPE), form, monkeypatch)
    x = tokens(2, 6).float()
    for impl in ("sdpa", "torch", "reference"):
        mixer.implementation = impl
        expected = mixer(x).y
        with torch.autocast("cpu", torch.bfloat16):
            state, pieces = mixer.init_state(2), []
            for piece in x.split(3, dim=1):
                y, state, _ = mixer(piece, state=state)
                pieces.append(y)
        torch.testing.assert_close(torch.cat(pieces, dim=1).float(), expected, rtol=0, atol=0.05)


@torch.no_grad()
def test_a_full_pass_is_expanded_and_decoding_absorbed(monkeypatch) -> None:
    mixer = variants.build("mla", dim=16, heads=2)
    ran = []
    for form in FORMS:
        whole = getattr(mixer, form)
        monkeypatch.setattr(mixer, form, lambda *given, _form=form, _whole=whole, **more: ran.append(_form) or _whole(*given, **more))
    mixer(torch.randn(1, 40, 16))
    state = mixer(torch.randn(1, 40, 16), state=mixer.init_state(1)).state
    mixer(torch.randn(1, 1, 16), state=state)
    assert ran == ["expanded", "expanded", "absorbed"]


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_the_operations_that_decide_are_those_that_run(form, monkeypatch) -> None:
    mixer = build(causal=False, impl="reference", q_rank=6, gate="head")
    x = tokens(1, 9)
    outside = 2 * 9 * sum(matrix.weight.numel() for matrix in (mixer.inward, mixer.q_up, mixer.outward, mixer.gates))
    counted = dict(zip(FORMS, mixer.operations(9, 9), strict=True))
    assert mixer.flops(9) == outside + min(counted.values())
    with Meter() as meter:
        forced(mixer, form, monkeypatch)(x)
    assert meter.products == outside + counted[form]


def test_few_queries_are_counted_with_the_keys_that_they_see() -> None:
    mixer = build()
    sees = oracles.causal(3, 8)
    pairs = sum(sees(0, i, j) for i in range(3) for j in range(8))
    up = 3 * (7 + 5) * 11
    assert mixer.operations(3, 8) == (2 * 8 * up + 2 * 3 * pairs * (7 + 4 + 5), 2 * 3 * up + 2 * 3 * pairs * 2 * (11 + 4))


@pytest.mark.parametrize(("heads", "gate", "position"), [(1, "none", None), (3, "element", ROPE), (8, "head", ROPE)])
@torch.no_grad()
def test_the_cache_holds_kv_rank_and_rope_dim_numbers_a_token_whatever_the_heads(heads, gate, position) -> None:
    mixer = build(heads=heads, gate=gate, position=position)
    state = mixer(tokens(2, 9), state=mixer.init_state(2)).state
    assert state.elements == 2 * mixer.state_elements(9) == 2 * 9 * (11 + 4)
    assert set(state) == {"latents", "seen", "in_segment"}


@torch.no_grad()
def test_latents_are_normalised_and_rotary_keys_turned_before_they_are_cached() -> None:
    mixer = build(position=ROPE)
    x = tokens(2, 6)
    state = mixer(x[:, 4:], state=mixer(x[:, :4], state=mixer.init_state(2)).state).state
    _, latents, rotary = (x @ mixer.inward.weight.T).split(mixer.widths, dim=-1)
    held = torch.cat([rms(latents, mixer.kv_latent_norm.weight), turned(rotary.unsqueeze(1)).squeeze(1)], dim=-1)
    torch.testing.assert_close(state["latents"], held, rtol=0, atol=1e-12)


@torch.no_grad()
def test_under_a_scheme_that_depends_on_the_length_rotary_keys_are_cached_unturned_with_their_positions() -> None:
    mixer = build(position=Stretched(4, 3, 16))
    x, positions = tokens(2, 7), torch.tensor([[0, 2, 3, 7, 8, 9, 30], [5, 6, 7, 8, 9, 10, 11]])
    state = mixer.init_state(2)
    for t in range(7):
        y, state, _ = mixer(x[:, t : t + 1], Context(positions=positions[:, t : t + 1]), state)
        torch.testing.assert_close(y, mixer(x[:, : t + 1], Context(positions=positions[:, : t + 1])).y[:, -1:], rtol=0, atol=1e-9)
    torch.testing.assert_close(state["latents"][..., 11:], (x @ mixer.inward.weight.T)[..., -4:])
    assert torch.equal(state["positions"], positions)
    assert state.elements == 2 * mixer.state_elements(7)


@torch.no_grad()
def test_the_sink_joins_the_denominator_and_the_gate_scales_the_outputs_in_both_forms(monkeypatch) -> None:
    plain, x = build(), tokens(2, 6)
    for form in FORMS:
        halved = forced(build(gate="element"), form, monkeypatch)
        halved.gates.weight.zero_()
        halved.load_state_dict(plain.state_dict(), strict=False)
        torch.testing.assert_close(halved(x).y, plain(x).y / 2)
        sunk = forced(build(sink_logit=True), form, monkeypatch)
        sunk.load_state_dict(plain.state_dict(), strict=False)
        sunk.sink.fill_(40.0)
        assert sunk(x).y.abs().max() < 1e-12
        sunk.sink.fill_(-1e4)
        torch.testing.assert_close(sunk(x).y, plain(x).y)


def test_dropout_drops_in_both_forms_in_training_alone(monkeypatch) -> None:
    mixer, without, x = build(dropout=0.5), build(), tokens(2, 6)
    for form in FORMS:
        forced(mixer, form, monkeypatch).train()
        assert not torch.equal(mixer(x).y, mixer(x).y)
        torch.testing.assert_close(mixer.eval()(x).y, without(x).y)
    with pytest.raises(NotUsable, match="cannot drop weights .*dropout=0.5.* use impl='torch'"):
        build(dropout=0.5, impl="sdpa")


def test_default_widths_are_in_the_proportions_of_deepseek_v3() -> None:
    with torch.device("meta"):
        mixer = variants.build("mla", dim=7168, heads=128, head_dim=128)
    assert (mixer.kv_rank, mixer.nope_dim, mixer.rope_dim, mixer.state_elements(1)) == (512, 128, 64, 576)


@pytest.mark.parametrize("head_dim", range(1, 13))
def test_default_widths_fit_a_rotary_scheme_at_every_head_dim(head_dim) -> None:
    mixer = variants.build("mla", dim=8, heads=2, head_dim=head_dim, position="rope")
    assert mixer.position.width == mixer.rope_dim


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 3, "head_dim": None}, "heads=3 does not divide dim=16"),
        ({"kv_rank": 0}, "kv_rank must be at least 1; got 0"),
        ({"q_rank": -1}, "q_rank must be at least 1; got -1"),
        ({"nope_dim": 0}, "nope_dim must be at least 1; got 0"),
        ({"rope_dim": 0}, "rope_dim must be at least 1; got 0"),
        ({"rope_dim": 3, "position": "rope"}, "head_dim=3 is 3"),
        ({"position": Rotary(6, 3, 16)}, "LatentAttention: its position turns 4 channels; Rotary has head_dim=6"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\); got 1.0"),
    ],
)
def test_wrong_arithmetic_is_refused_when_built_with_the_numbers(changed, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changed)


def test_options_that_latents_leave_without_a_meaning_are_not_offered() -> None:
    offered = options(variants.get("mla"))
    assert all(option.doc for option in offered)
    for name in ("kv_heads", "short_conv", "qk_norm"):
        assert name not in {option.name for option in offered}
        with pytest.raises(UnknownOption, match=f"'mla' has no option '{name}'"):
            build(**{name: 1})


def test_the_matrices_keep_the_variance_of_what_they_are_given() -> None:
    mixer = variants.build("mla", dim=256, heads=4, q_rank=96)
    for matrix in (mixer.inward, mixer.q_up, mixer.kv_up, mixer.outward):
        torch.testing.assert_close(matrix(torch.randn(200, matrix.in_features)).std(), torch.tensor(1.0), rtol=0.1, atol=0)


def deepseek(q_rank: int | None, interleaved: bool, widths: dict[str, int]) -> tuple[DeepseekV3Attention, DeepseekV3RotaryEmbedding]:
    """Their layer and their rotary tables, with small widths."""
    config = DeepseekV3Config(
        hidden_size=widths["dim"],
        num_attention_heads=widths["heads"],
        num_key_value_heads=widths["heads"],
        q_lora_rank=q_rank,
        kv_lora_rank=widths["kv_rank"],
        qk_nope_head_dim=widths["nope_dim"],
        qk_rope_head_dim=widths["rope_dim"],
        v_head_dim=widths["head_dim"],
        rope_interleave=interleaved,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE["base"]},
        attn_implementation="eager",
    )
    return DeepseekV3Attention(config, layer_idx=0).double().eval(), DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("q_rank", [None, 6])
@pytest.mark.parametrize("form", FORMS)
def test_with_the_weights_of_deepseek_v3_outputs_and_gradients_are_its_own(form, q_rank, layout, monkeypatch) -> None:
    mixer = forced(build(q_rank=q_rank, position={**ROPE, "layout": layout}), form, monkeypatch)
    theirs, tables = deepseek(q_rank, layout == "interleaved", WIDTHS)
    queries = theirs.q_proj if q_rank is None else theirs.q_a_proj
    copied = {
        mixer.kv_latent_norm: theirs.kv_a_layernorm,
        mixer.kv_up: theirs.kv_b_proj,
        mixer.outward: theirs.o_proj,
        **({} if q_rank is None else {mixer.q_latent_norm: theirs.q_a_layernorm, mixer.q_up: theirs.q_b_proj}),
    }
    with torch.no_grad():
        for norm in (theirs.kv_a_layernorm, theirs.q_a_layernorm):
            if norm is not None:
                norm.weight.uniform_(0.5, 2)
        mixer.inward.weight.copy_(torch.cat([queries.weight, theirs.kv_a_proj_with_mqa.weight]))
        for mine, other in copied.items():
            mine.weight.copy_(other.weight)
    time = 9
    x = (3 * tokens(2, time)).requires_grad_()
    positions = torch.stack([torch.arange(time), 2 * torch.arange(time) + 5])
    mask = torch.full((1, 1, time, time), -torch.inf, dtype=x.dtype).triu(1)
    expected, _ = theirs(x, position_embeddings=tables(x, positions), attention_mask=mask)
    got = mixer(x, Context(positions=positions)).y
    # Their norms and tables are in fp32 whatever the model is in.
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    assert expected.std() > 0.1
    oracles.same_gradients(got, expected, [x], atol=2e-5)
