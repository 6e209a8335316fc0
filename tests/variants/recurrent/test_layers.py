"""Gated and delta-rule layers: each as its equations have it, written out from the layer's own parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from registry import UserError, variants
from tests.variants.schemes import Stretched
from variants.contract import Context, NotApplicable
from variants.ops import reference

DIM, HEADS, TIME = 16, 2, 11
NAMES = ["retention", "gla", "gla scalar", "deltanet", "gated_deltanet", "kda", "kda bounded"]
OPTIONS = {"gla scalar": {"decay": "scalar"}, "kda bounded": {"decay": "bounded"}}


def build(name: str, **options):
    """A layer in fp64 whose parameters are all away from where they start."""
    torch.manual_seed(0)
    mixer = variants.build(name.split(maxsplit=1)[0], dim=DIM, heads=HEADS, **OPTIONS.get(name, {}), **options).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def tokens(batch: int = 2, time: int = TIME) -> Tensor:
    return torch.randn(batch, time, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def apart(x: Tensor, heads: int = HEADS) -> Tensor:
    """(batch, time, heads * width) -> (batch, heads, time, width)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def channels(mixer, x: Tensor) -> tuple[Tensor, ...]:
    """q, k and v as the matrix, the convolution and the activation make them."""
    made = x @ mixer.projections.inward.weight.T
    taps = mixer.projections.taps
    if taps is not None:
        width = taps.shape[1]
        row = torch.cat([made.new_zeros(len(made), width - 1, made.shape[2]), made], dim=1)
        made = sum(row[:, n : n + x.shape[1]] * taps[:, n] for n in range(width))
    if mixer.activation is not None:
        made = made * torch.sigmoid(made)
    key, value = HEADS * mixer.head_dim, HEADS * mixer.writes * mixer.value_dim
    q, k, v = made.split([key, key * mixer.writes, value], dim=-1)
    return apart(q), apart(k, HEADS * mixer.writes), apart(v, HEADS * mixer.writes)


def out(mixer, o: Tensor, gate: Tensor | None) -> Tensor:
    """Norm, gate, matrix."""
    y = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    y = y if gate is None else y * apart(gate)
    return y.transpose(1, 2).flatten(2) @ mixer.projections.outward.weight.T


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def unit(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


@torch.no_grad()
def test_retention_forgets_at_fixed_rates() -> None:
    mixer, x = build("retention"), tokens()
    assert mixer.value_dim == 2 * mixer.head_dim
    q, k, v = channels(mixer, x)
    place = torch.arange(TIME)
    distance = place[:, None] - place
    rates = torch.tensor([1 - 2**-5, 1 - 2**-6], dtype=torch.float64)[:, None, None]
    weights = (q @ k.mT / math.sqrt(mixer.head_dim)) * (rates ** distance.clamp(min=0) * (distance >= 0))
    torch.testing.assert_close(mixer(x).y, out(mixer, weights @ v, swish(x @ mixer.gate.matrix.weight.T)))


@pytest.mark.parametrize("name", ["gla", "gla scalar"])
@torch.no_grad()
def test_gla_forgets_as_its_gates_say(name) -> None:
    mixer, x = build(name), tokens()
    q, k, v = channels(mixer, x)
    assert (q.shape[-1], v.shape[-1]) == (DIM // HEADS // 2, DIM // HEADS)
    if mixer.scalar:
        logits = (x @ mixer.forget.weight.T + mixer.forget.bias).transpose(1, 2)
    else:
        logits = apart(x @ mixer.forget.down.weight.T @ mixer.forget.up.weight.T + mixer.forget.up.bias)
    log_decay = torch.log(torch.sigmoid(logits)) / 16
    o, _ = reference.gated_linear_attention(q / math.sqrt(mixer.head_dim), k, v, log_decay)
    torch.testing.assert_close(mixer(x).y, out(mixer, o, swish(x @ mixer.gate.matrix.weight.T)))


@torch.no_grad()
def test_gla_starts_by_forgetting_little() -> None:
    mixer = variants.build("gla", dim=64, heads=4)
    decay = mixer.gates(torch.randn(4, 50, 64))["log_decay"].exp()
    assert 0.94 < float(decay.mean()) < 0.97


def delta_inputs(mixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = channels(mixer, x)
    beta = mixer.largest * torch.sigmoid(x @ mixer.strength.weight.T).transpose(1, 2)
    return unit(q) / math.sqrt(mixer.head_dim), unit(k), v, beta


@pytest.mark.parametrize("negative", [False, True])
@torch.no_grad()
def test_deltanet_writes_over_what_it_finds(negative) -> None:
    mixer, x = build("deltanet", allow_negative_eigenvalues=negative), tokens()
    assert mixer.largest == (2 if negative else 1)
    o, _ = reference.delta_rule(*delta_inputs(mixer, x))
    torch.testing.assert_close(mixer(x).y, out(mixer, o, None))


@torch.no_grad()
def test_gated_deltanet_decays_by_head() -> None:
    mixer, x = build("gated_deltanet"), tokens()
    assert (mixer.head_dim, mixer.value_dim) == (6, 12)  # three quarters of dim, and twice that
    steps = torch.log1p(torch.exp(x @ mixer.forget.weight.T + mixer.bias))
    log_decay = (-mixer.log_rate.exp() * steps).transpose(1, 2)
    o, _ = reference.delta_rule(*delta_inputs(mixer, x), log_decay)
    torch.testing.assert_close(mixer(x).y, out(mixer, o, swish(x @ mixer.gate.matrix.weight.T)))


@pytest.mark.parametrize("name", ["kda", "kda bounded"])
@torch.no_grad()
def test_kda_decays_by_channel(name) -> None:
    mixer, x = build(name), tokens()
    logits = apart(x @ mixer.forget.down.weight.T @ mixer.forget.up.weight.T + mixer.bias)
    rates = mixer.log_rate.exp()[:, None, None]
    log_decay = -5 * torch.sigmoid(rates * logits) if mixer.bounded else -rates * torch.log1p(logits.exp())
    o, _ = reference.delta_rule(*delta_inputs(mixer, x), log_decay)
    gate = torch.sigmoid(x @ mixer.gate.matrix.down.weight.T @ mixer.gate.matrix.up.weight.T + mixer.gate.matrix.up.bias)
    torch.testing.assert_close(mixer(x).y, out(mixer, o, gate))


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda"])
@torch.no_grad()
def test_reflections_are_writes_one_after_another(name) -> None:
    """Each by the rule; the state decays before the first, and is read after the last."""
    mixer, x = build(name, reflections=3), tokens()
    q, k, v, beta = delta_inputs(mixer, x)
    log_decay = mixer.log_decay(x)
    decay = torch.ones(2, HEADS, TIME, 1, dtype=torch.float64) if log_decay is None else log_decay.exp()
    decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay
    state, rows = torch.zeros(2, HEADS, mixer.head_dim, mixer.value_dim, dtype=torch.float64), []
    k, v, beta = (part.unflatten(1, (HEADS, 3)) for part in (k, v, beta))
    for t in range(TIME):
        state = decay[:, :, t, :, None] * state
        for n in range(3):
            key, value, strength = k[:, :, n, t], v[:, :, n, t], beta[:, :, n, t, None, None]
            found = torch.einsum("bhk,bhkv->bhv", key, state)
            state = state + strength * torch.einsum("bhk,bhv->bhkv", key, value - found)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    o = torch.stack(rows, dim=2)
    y = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    y = y if mixer.gate is None else y * mixer.gate(x)
    torch.testing.assert_close(mixer(x).y, y.transpose(1, 2).flatten(2) @ mixer.projections.outward.weight.T)


@pytest.mark.parametrize("reflections", [1, 2])
@torch.no_grad()
def test_transitions_reach_minus_one_where_they_are_allowed_to(reflections) -> None:
    """The spectrum of a token's transition, measured on the states themselves."""
    for negative in (False, True):
        mixer = build("deltanet", allow_negative_eigenvalues=negative, reflections=reflections)
        mixer.strength.weight.mul_(50)  # strengths near their ends
        x = tokens(time=1)
        start = mixer.init_state(2)
        basis = torch.eye(mixer.head_dim, mixer.value_dim, dtype=torch.float64).expand_as(start["matrix"])
        written = mixer(x, state=start).state["matrix"]
        moved = mixer(x, state=start.replace(matrix=basis.clone())).state["matrix"]
        spectrum = torch.linalg.eigvals((moved - written)[..., : mixer.head_dim]).real
        assert float(spectrum.max()) < 1 + 1e-9
        assert float(spectrum.min()) > (-1 - 1e-9 if negative else -1e-3 if reflections == 1 else -1 - 1e-9)
        if reflections == 1:
            assert (float(spectrum.min()) < -0.5) == negative


@torch.no_grad()
def test_rates_and_steps_of_the_gates_start_where_their_sources_have_them() -> None:
    torch.manual_seed(0)
    gdn, kda = variants.build("gated_deltanet", dim=512, heads=64), variants.build("kda", dim=512, heads=64)
    bounded = variants.build("kda", dim=512, heads=64, decay="bounded")
    assert float(gdn.log_rate.exp().min()) > 0 and 14 < float(gdn.log_rate.exp().max()) <= 16
    assert 1 <= float(kda.log_rate.exp().min()) < 2 and 14 < float(kda.log_rate.exp().max()) <= 16
    assert torch.equal(bounded.log_rate, torch.zeros(64))
    for mixer in (gdn, kda):
        steps = torch.nn.functional.softplus(mixer.bias)
        assert 1e-3 * 0.999 <= float(steps.min()) < 2e-3 and 0.08 < float(steps.max()) <= 0.1001
        protected = {id(parameter) for parameter in mixer.undecayed()}
        assert all(parameter.ndim < 2 or id(parameter) in protected for parameter in (mixer.log_rate, mixer.bias))
    assert float(bounded.log_decay(torch.randn(1, 9, 512)).min()) >= -5


@pytest.mark.parametrize("name", [*NAMES, "rwkv6"])
@torch.no_grad()
def test_pads_write_nothing_and_forget_nothing(name) -> None:
    mixer, x = build(name), tokens()
    valid = torch.ones(2, TIME, dtype=torch.bool)
    valid[0, 4:7], valid[1, :3] = False, False
    state = mixer(x.masked_fill(~valid.unsqueeze(-1), math.nan), Context(valid=valid), mixer.init_state(2)).state
    for row in range(2):
        alone = mixer(x[row : row + 1, valid[row]], state=mixer.init_state(1)).state
        torch.testing.assert_close(state["matrix"][row : row + 1], alone["matrix"])


@pytest.mark.parametrize("name", [*NAMES, "rwkv6"])
def test_what_cannot_be_is_refused(name) -> None:
    with pytest.raises(NotApplicable, match="no bidirectional form"):
        build(name, causal=False)
    with pytest.raises(NotApplicable, match="logits that a bias"):
        build(name, position="alibi")
    with pytest.raises(NotApplicable, match="keeps its keys turned or summed up"):
        build(name, position=Stretched(build(name).head_dim, HEADS, DIM))
    with pytest.raises(ValueError, match="chunk must be at least 1; got 0"):
        build(name, chunk=0)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda"])
def test_a_scheme_that_makes_keys_longer_is_refused_where_they_must_have_length_one(name) -> None:
    with pytest.raises(NotApplicable, match="needs keys of length 1, and XPos makes them longer"):
        build(name, position="xpos")


@pytest.mark.parametrize("name", ["gla", "deltanet", "kda", "rwkv6"])
def test_a_table_of_positions_is_no_operation(name) -> None:
    assert build(name, position="learned").flops(100) == build(name).flops(100)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gla", {"gate_rank": 2.5}, "variant 'gla': gate_rank takes int; got 2.5"),
        ("gla", {"gate_root": "x"}, "gate_root takes float; got 'x'"),
        ("deltanet", {"allow_negative_eigenvalues": "yes"}, "allow_negative_eigenvalues takes bool; got 'yes'"),
        ("deltanet", {"reflections": None}, "reflections takes int; got None"),
        ("rwkv6", {"layer": "a"}, "layer takes int or null; got 'a'"),
        ("linear", {"chunk": True}, "chunk takes int; got True"),
    ],
)
def test_options_of_another_type_are_refused_by_name(name, options, message) -> None:
    with pytest.raises(UserError, match=message):
        variants.build(name, dim=DIM, heads=HEADS, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gla", {"gate_root": 0.0}, "gate_root a positive number; got 16 and 0"),
        ("gla", {"gate_rank": 0}, "gate_rank must be at least 1 .*; got 0 and 16"),
        ("retention", {"value_dim": 0}, "value_dim must be positive; got 0"),
        ("deltanet", {"reflections": 0}, "reflections must be at least 1; got 0"),
        ("deltanet", {"short_conv": -1}, "short_conv must be 0"),
        ("rwkv6", {"layer": 3, "layers": 2}, "layer must be from 0 to layers - 1; got layer=3 of layers=2"),
        ("rwkv6", {"layers": 0}, "layer must be from 0 to layers - 1; got layer=0 of layers=0"),
        ("rwkv6", {"shift_rank": 0}, "shift_rank must be at least 1; got 0"),
    ],
)
def test_wrong_options_say_what_would_be_right(name, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        variants.build(name, dim=DIM, heads=HEADS, **options)


@torch.no_grad()
def test_rwkv6_mixes_tokens_and_weighs_its_own_apart() -> None:
    mixer, x = build("rwkv6", shift_rank=3, decay_rank=5, layer=1, layers=3), tokens()
    previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    change = previous - x
    middle = torch.tanh((x + change * mixer.mixture) @ mixer.shift_down).unflatten(-1, (5, 3))
    mixed = [x + change * (mixer.mixtures[n] + middle[..., n, :] @ mixer.shift_up[n]) for n in range(5)]
    w, k, v, r, g = mixed
    log_decay = -torch.exp(mixer.decay + torch.tanh(w @ mixer.decay_down) @ mixer.decay_up)
    r, k, v = (apart(part @ matrix.weight.T) for part, matrix in ((r, mixer.receptance), (k, mixer.key), (v, mixer.value)))
    o, _ = reference.gated_linear_attention(r, k, v, apart(log_decay), bonus=mixer.bonus)
    centred = o - o.mean(-1, keepdim=True)
    y = centred / (centred.pow(2).mean(-1, keepdim=True) + 64e-5).sqrt()
    y = y * mixer.norm_weight[:, None] + mixer.norm_bias[:, None]
    expected = (y.transpose(1, 2).flatten(2) * swish(g @ mixer.gate.weight.T)) @ mixer.outward.weight.T
    torch.testing.assert_close(mixer(x).y, expected)


def test_rwkv6_starts_as_its_source_has_it() -> None:
    first, last = (variants.build("rwkv6", dim=8, heads=2, layer=layer, layers=4) for layer in (0, 3))
    channel = torch.arange(8.0)
    torch.testing.assert_close(first.mixture, 1 - (channel / 8) ** 1.0)
    torch.testing.assert_close(last.mixture, 1 - (channel / 8) ** 0.25)
    torch.testing.assert_close(last.mixtures[2], 1 - ((channel / 8) ** 0.25 + 0.3))
    torch.testing.assert_close(last.mixtures[3], 1 - (channel / 8) ** 0.125)
    torch.testing.assert_close(first.decay, -6 + 5 * (channel / 7) ** 0.7)
    torch.testing.assert_close(last.decay, -6 + 5 * (channel / 7) ** 2.0)
    zigzag = 0.1 * torch.tensor([0.0, 1, -1, 0, 1, -1, 0, 1])
    torch.testing.assert_close(first.bonus.flatten(), zigzag)
    torch.testing.assert_close(last.bonus.flatten(), 1 - channel / 7 + zigzag)
    assert not first.shift_down.any() and not first.decay_down.any() and float(first.shift_up.detach().abs().max()) <= 0.01
    variants.build("rwkv6", dim=8, heads=2)  # a stack of one layer divides by nothing
    assert {id(p) for p in first.undecayed()} == {id(p) for p in (first.mixtures, first.bonus, first.norm_weight, first.norm_bias)}
