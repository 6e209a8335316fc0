"""Mamba-2: its equations token by token, and transformers' slow path with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from registry import variants
from variants.contract import NotApplicable

DIM, HEADS = 16, 4


def build(**options):
    torch.manual_seed(0)
    mixer = variants.build("mamba2", dim=DIM, heads=HEADS, **{"state_dim": 6, "chunk": 4, **options}).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def tokens(time: int = 11) -> Tensor:
    return torch.randn(2, time, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def token_by_token(mixer, x: Tensor) -> Tensor:
    """The recurrence, one head and one token at a time."""
    width, groups, size = HEADS * mixer.head_dim, mixer.groups, mixer.state_dim
    z, channels, dt = (x @ mixer.in_proj.weight.T).split(mixer.widths, dim=-1)
    taps = mixer.conv1d.weight[:, 0]
    row = torch.cat([channels.new_zeros(len(x), taps.shape[1] - 1, channels.shape[2]), channels], dim=1)
    channels = sum(row[:, n : n + x.shape[1]] * taps[:, n] for n in range(taps.shape[1])) + mixer.conv1d.bias
    channels = channels * torch.sigmoid(channels)
    outputs = torch.zeros(len(x), x.shape[1], width, dtype=x.dtype)
    for head in range(HEADS):
        here = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
        shared = width + head // (HEADS // groups) * size
        state = torch.zeros(len(x), mixer.head_dim, size, dtype=x.dtype)
        for t in range(x.shape[1]):
            step = torch.log1p(torch.exp(dt[:, t, head] + mixer.dt_bias[head])).clamp(*mixer.limits)
            decay = torch.exp(-step * mixer.A_log[head].exp())
            decay = 2 * decay - 1 if mixer.negative else decay
            value, b = channels[:, t, here], channels[:, t, shared : shared + size]
            c = channels[:, t, shared + groups * size : shared + groups * size + size]
            state = decay[:, None, None] * state + step[:, None, None] * value.unsqueeze(-1) * b.unsqueeze(-2)
            outputs[:, t, here] = torch.einsum("bpn,bn->bp", state, c) + mixer.D[head] * value
    gated = (outputs * z * torch.sigmoid(z)).unflatten(-1, (groups, -1))
    gated = gated / (gated.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return gated.flatten(-2) * mixer.norm.weight @ mixer.out_proj.weight.T


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2}, {"allow_negative_eigenvalues": True}, {"least_step": 0.05, "largest_step": 0.3}, {"short_conv": 2, "expand": 3}],
)
@torch.no_grad()
def test_the_layer_is_its_recurrence(options) -> None:
    mixer = build(**options)
    if mixer.negative:
        mixer.dt_bias.add_(1)
        decays = 2 * torch.exp(-mixer.A_log.exp() * torch.nn.functional.softplus(mixer.dt_bias)) - 1
        assert (decays < 0).any(), "otherwise nothing flips"
    torch.testing.assert_close(mixer(tokens()).y, token_by_token(mixer, tokens()))


@torch.no_grad()
def test_a_state_that_flips_is_handed_on() -> None:
    mixer = build(allow_negative_eigenvalues=True)
    mixer.dt_bias.add_(1)
    x = tokens()
    state, outputs = mixer.init_state(2), []
    for piece in x.split([3, 1, 5, 2], dim=1):
        y, state, _ = mixer(piece, state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), mixer(x).y)


def theirs(**options):
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = mamba2.Mamba2Config(
        hidden_size=DIM, num_heads=HEADS, head_dim=2 * DIM // HEADS, state_size=6, expand=2, conv_kernel=4, chunk_size=8, **options
    )
    torch.manual_seed(0)
    return mamba2.Mamba2Mixer(config, layer_idx=0)


@pytest.mark.parametrize("groups", [1, 2])
def test_transformers_slow_path_gives_the_same_with_the_same_weights(groups) -> None:
    other = theirs(n_groups=groups)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = variants.build("mamba2", dim=DIM, heads=HEADS, state_dim=6, groups=groups, chunk=4)
    ours.load_state_dict(other.state_dict())
    x = tokens(21).float().requires_grad_()
    expected, got = other(x), ours(x).y
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    wanted = [x, *ours.parameters()]
    mine = torch.autograd.grad((got * weights).sum(), wanted)
    for (name, _), a, b in zip(
        [("x", x), *ours.named_parameters()],
        mine,
        torch.autograd.grad(
            (expected * weights).sum(), [x, *(dict(other.named_parameters())[name] for name, _ in ours.named_parameters())]
        ),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()), msg=lambda m, name=name: f"{name}: {m}")


def test_names_and_shapes_are_those_of_mamba_ssm() -> None:
    mixer = variants.build("mamba2", dim=64, heads=2, state_dim=16, groups=2)
    shapes = {name: tuple(parameter.shape) for name, parameter in mixer.state_dict().items()}
    assert shapes == {
        "dt_bias": (2,),
        "A_log": (2,),
        "D": (2,),
        "in_proj.weight": (2 * 128 + 2 * 2 * 16 + 2, 64),
        "conv1d.weight": (128 + 64, 1, 4),
        "conv1d.bias": (192,),
        "norm.weight": (128,),
        "out_proj.weight": (64, 128),
    }


def test_rates_and_steps_start_where_the_source_has_them() -> None:
    torch.manual_seed(0)
    mixer = variants.build("mamba2", dim=512, heads=128)
    rates, steps = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 1 <= float(rates.min()) < 2 and 14 < float(rates.max()) <= 16
    assert 0.99e-3 < float(steps.min()) < 2e-3 and 0.08 < float(steps.max()) < 0.101
    assert torch.equal(mixer.D, torch.ones(128))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "groups=3 does not divide heads=4"),
        ({"state_dim": 0}, "state_dim must be at least 1; got 0"),
        ({"least_step": 0.2, "largest_step": 0.1}, "least_step must be below largest_step"),
        ({"short_conv": 0}, "short_conv must be at least 1; got 0"),
        ({"least_step": float("nan")}, "least_step must be below"),
        ({"least_step": -1.0}, "neither negative"),
    ],
)
def test_wrong_options_say_what_would_be_right(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        variants.build("mamba2", dim=DIM, heads=HEADS, **options)


@pytest.mark.parametrize(("position", "reason"), [("alibi", "never writes out the logits"), ("rope", "its order is in its decays")])
def test_position_schemes_are_refused_with_the_reason(position, reason) -> None:
    with pytest.raises(NotApplicable, match=reason):
        build(position=position)
