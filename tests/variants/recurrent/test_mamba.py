"""Mamba: its equations token by token, and mamba_ssm, transformers and mambapy with the same weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from registry import variants
from variants.contract import Context, NotApplicable

DIM, HEADS, STATE = 16, 2, 5


def build(dtype: torch.dtype = torch.float64, **options):
    torch.manual_seed(0)
    mixer = variants.build("mamba", dim=DIM, heads=HEADS, **{"state_dim": STATE, "chunk": 4, **options}).to(dtype)
    move(mixer)
    return mixer


@torch.no_grad()
def move(module: nn.Module) -> None:
    """Away from the beginning, where much is the same in every channel."""
    for parameter in module.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))


def tokens(time: int = 11, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, time, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def token_by_token(mixer, x: Tensor) -> Tensor:
    """The recurrence, one channel and one token at a time."""
    width = mixer.width
    channels, z = x @ mixer.in_proj.weight[:width].T, x @ mixer.in_proj.weight[width:].T
    taps = mixer.conv1d.weight[:, 0]
    row = torch.cat([channels.new_zeros(len(x), taps.shape[1] - 1, width), channels], dim=1)
    channels = sum(row[:, n : n + x.shape[1]] * taps[:, n] for n in range(taps.shape[1])) + mixer.conv1d.bias
    channels = channels * torch.sigmoid(channels)
    made = channels @ mixer.x_proj.weight.T
    rank = mixer.dt_proj.in_features
    parts = [made[..., :rank], made[..., rank : rank + mixer.state_dim], made[..., rank + mixer.state_dim :]]
    for n, norm in enumerate((mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm)):
        if isinstance(norm, nn.RMSNorm):
            parts[n] = parts[n] / (parts[n].pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    dt, b, c = parts
    y = torch.zeros_like(channels)
    for channel in range(width):
        state = torch.zeros(len(x), mixer.state_dim, dtype=x.dtype)
        for t in range(x.shape[1]):
            step = torch.log1p(torch.exp(dt[:, t] @ mixer.dt_proj.weight[channel] + mixer.dt_proj.bias[channel]))[:, None]
            decay = torch.exp(-step * mixer.A_log[channel].exp())
            decay = 2 * decay - 1 if mixer.negative else decay
            state = decay * state + step * channels[:, t, channel, None] * b[:, t]
            y[:, t, channel] = (state * c[:, t]).sum(-1) + mixer.D[channel] * channels[:, t, channel]
    return (y * z * torch.sigmoid(z)) @ mixer.out_proj.weight.T


@pytest.mark.parametrize("impl", ["numba", "torch", "reference"])
@pytest.mark.parametrize(
    "options", [{}, {"norms": True, "rank": 3}, {"allow_negative_eigenvalues": True}, {"short_conv": 2, "expand": 3}, {"state_dim": 1}]
)
@torch.no_grad()
def test_the_layer_is_its_recurrence(options, impl) -> None:
    mixer = build(impl=impl, **options)
    torch.testing.assert_close(mixer(tokens()).y, token_by_token(mixer, tokens()))


@pytest.mark.parametrize("time", [1, 2, 3, 4, 7, 23])
@pytest.mark.parametrize("negative", [False, True])
@torch.no_grad()
def test_pieces_of_every_kind_are_the_whole(time, negative) -> None:
    """Shorter than the convolution, several tokens after several, single ones."""
    mixer = build(allow_negative_eigenvalues=negative)
    x = tokens(time)
    for sizes in ([time], [1] * time, [time // 2, time - time // 2], [time - 1, 1], [1, time - 1]):
        state, outputs = mixer.init_state(2), []
        for piece in x.split([size for size in sizes if size], dim=1):
            y, state, _ = mixer(piece, state=state)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, dim=1), mixer(x).y)


def same_with_same_weights(ours, theirs, call, *, names=lambda name: name, rtol: float = 1e-4) -> None:
    """Outputs and all gradients, on a length that is no multiple of anything."""
    x = tokens(21, torch.float32).requires_grad_()
    expected, got = call(x), ours(x).y
    torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-5)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    other = {names(name): parameter for name, parameter in theirs.named_parameters()}
    mine = [("x", x), *ours.named_parameters()]
    wanted = torch.autograd.grad(expected, [x, *(other[name] for name, _ in ours.named_parameters())], weights)
    for (name, _), a, b in zip(mine, torch.autograd.grad(got, [part for _, part in mine], weights), wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-3 * float(b.abs().max()) + 1e-6, name


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_mamba_ssm_gives_the_same_with_the_same_weights(impl, mamba_ssm, monkeypatch) -> None:
    scans, simple = mamba_ssm("ops.selective_scan_interface"), mamba_ssm("modules.mamba_simple")
    monkeypatch.setattr(simple, "selective_scan_fn", scans.selective_scan_ref)
    monkeypatch.setattr(simple, "causal_conv1d_fn", None)
    torch.manual_seed(0)
    theirs = simple.Mamba(DIM, d_state=STATE, use_fast_path=False)
    move(theirs)
    ours = variants.build("mamba", dim=DIM, heads=HEADS, state_dim=STATE, impl=impl, chunk=4)
    ours.load_state_dict(theirs.state_dict())
    same_with_same_weights(ours, theirs, theirs)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_transformers_slow_path_gives_the_same_with_the_same_weights(impl) -> None:
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    config = mamba.MambaConfig(hidden_size=DIM, state_size=STATE, expand=2, conv_kernel=4, time_step_rank=3)
    torch.manual_seed(0)
    theirs = mamba.MambaMixer(config, 0)
    move(theirs)
    ours = variants.build("mamba", dim=DIM, heads=HEADS, state_dim=STATE, rank=3, impl=impl, chunk=4)
    ours.load_state_dict(theirs.state_dict())
    same_with_same_weights(ours, theirs, theirs)


def test_with_norms_it_is_the_mixer_of_jamba() -> None:
    jamba = pytest.importorskip("transformers.models.jamba.modeling_jamba")
    config = jamba.JambaConfig(hidden_size=DIM, mamba_d_state=STATE, mamba_expand=2, mamba_dt_rank=3)
    torch.manual_seed(0)
    theirs = jamba.JambaMambaMixer(config, 0)
    move(theirs)
    ours = variants.build("mamba", dim=DIM, heads=HEADS, state_dim=STATE, rank=3, norms=True)
    ours.load_state_dict(theirs.state_dict())
    same_with_same_weights(ours, theirs, theirs)


def test_mambapy_gives_the_same_with_the_same_weights() -> None:
    mamba = pytest.importorskip("mambapy.mamba")
    torch.manual_seed(0)
    theirs = mamba.MambaBlock(mamba.MambaConfig(d_model=DIM, n_layers=1, d_state=STATE))
    move(theirs)
    ours = variants.build("mamba", dim=DIM, heads=HEADS, state_dim=STATE)
    ours.load_state_dict(theirs.state_dict())
    same_with_same_weights(ours, theirs, theirs)


def test_names_and_shapes_are_those_of_mamba_ssm() -> None:
    shapes = {name: tuple(part.shape) for name, part in variants.build("mamba", dim=64, heads=2).state_dict().items()}
    assert shapes == {
        "A_log": (128, 16),
        "D": (128,),
        "in_proj.weight": (256, 64),
        "conv1d.weight": (128, 1, 4),
        "conv1d.bias": (128,),
        "x_proj.weight": (4 + 16 + 16, 128),
        "dt_proj.weight": (128, 4),
        "dt_proj.bias": (128,),
        "out_proj.weight": (64, 128),
    }


def test_rates_and_steps_start_where_the_source_has_them() -> None:
    torch.manual_seed(0)
    mixer = variants.build("mamba", dim=256, heads=2)
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17).repeat(512, 1))
    assert torch.equal(mixer.D, torch.ones(512))
    sizes = nn.functional.softplus(mixer.dt_proj.bias).log10()
    assert -3.01 < float(sizes.min()) < -2.9 and -1.1 < float(sizes.max()) < -0.99
    assert abs(float(sizes.mean()) + 2) < 0.1, "log-uniform"
    bound = 1 / math.sqrt(16)
    assert 0.95 * bound < float(mixer.dt_proj.weight.abs().max()) <= bound


def test_rates_and_skips_are_not_decayed() -> None:
    mixer = variants.build("mamba", dim=DIM, heads=HEADS)
    assert any(part is mixer.A_log for part in mixer.undecayed()) and mixer.D.ndim == 1 and mixer.dt_proj.bias.ndim == 1


@torch.no_grad()
def test_pads_on_either_side_and_segments_are_as_if_alone() -> None:
    """The state stands still on pads, and so do the taps; public ones read and write them."""
    mixer, x = build(), tokens(9)
    alone, _, _ = mixer(x, state=mixer.init_state(2))
    _, state, _ = mixer(x, state=mixer.init_state(2))
    for left, right in ((3, 0), (0, 3), (2, 5)):
        padded = torch.full((2, left + 9 + right, DIM), torch.nan, dtype=x.dtype)
        padded[:, left : left + 9] = x
        valid = torch.zeros(2, left + 9 + right, dtype=torch.bool)
        valid[:, left : left + 9] = True
        y, after, _ = mixer(padded, Context(valid=valid), state=mixer.init_state(2))
        torch.testing.assert_close(y[:, left : left + 9], alone)
        for name in ("scan", "taps"):
            torch.testing.assert_close(after[name], state[name])
    ids = torch.tensor([[0] * 4 + [1] * 5, [3] * 1 + [4] * 8])
    y = mixer(x, Context(segment_ids=ids)).y
    torch.testing.assert_close(y[0, 4:], mixer(x[:1, 4:]).y[0])
    torch.testing.assert_close(y[1, 1:], mixer(x[1:, 1:]).y[0])


@pytest.mark.parametrize("impl", ["numba", "torch", "reference"])
@torch.no_grad()
def test_rates_beyond_any_number_leave_pads_alone(impl) -> None:
    mixer, x = build(torch.float32, impl=impl), tokens(6, torch.float32)
    mixer.A_log.fill_(200)
    valid = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    y, state, _ = mixer(x, Context(valid=valid), mixer.init_state(2))
    assert y.isfinite().all() and state["scan"].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_dim": 0}, "state_dim must be at least 1; got 0"),
        ({"rank": 0}, "rank must be at least 1; got 0"),
        ({"expand": 0}, "expand must be at least 1; got 0"),
        ({"short_conv": 0}, "short_conv must be at least 1; got 0"),
        ({"head_dim": 8}, "head_dim=8 means nothing"),
        ({"impl": "mamba_ssm", "allow_negative_eigenvalues": True}, "its decays are positive"),
    ],
)
def test_wrong_options_say_what_would_be_right(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        variants.build("mamba", dim=DIM, heads=HEADS, **options)


@pytest.mark.parametrize(("position", "reason"), [("alibi", "never writes out the logits"), ("rope", "its order is in its decays")])
def test_position_schemes_are_refused_with_the_reason(position, reason) -> None:
    with pytest.raises(NotApplicable, match=reason):
        build(position=position)


def test_without_numba_chunks_of_torch_run(monkeypatch) -> None:
    from variants import implementations

    monkeypatch.setattr(implementations, "usable", lambda name, device=None, **_: "absent" if name in ("numba", "mamba_ssm") else None)
    mixer = build()
    assert mixer.implementation == "torch"
    torch.testing.assert_close(mixer(tokens()).y, token_by_token(mixer, tokens()))
