"""Full, multi-query and grouped-query attention: the layer around the core."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from registry import variants
from tests.variants import oracles
from tests.variants.schemes import Slopes
from variants.contract import Context, NotApplicable
from variants.implementations import NotUsable


def by_hand(mixer, x: Tensor, heads: int, kv_heads: int, base: float | None = None) -> Tensor:
    """The layer from its two matrices: project, turn by complex numbers, attend key by key, project back."""
    width = mixer.head_dim
    channels = x @ mixer.projections.inward.weight.T
    q, k, v = channels.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
    q, k, v = (part.view(*x.shape[:2], -1, width).transpose(1, 2) for part in (q, k, v))
    if base is not None:
        q, k = (
            torch.tensor([[[oracles.rotated(t.tolist(), p, base, "half") for p, t in enumerate(head)] for head in row] for row in part])
            for part in (q.double(), k.double())
        )
    y = oracles.attention(q.double(), k.double(), v.double(), oracles.causal(x.shape[1], x.shape[1]))
    return y.transpose(1, 2).flatten(2) @ mixer.projections.outward.weight.T


@pytest.mark.parametrize(("name", "options", "kv_heads"), [("full", {}, 4), ("mqa", {}, 1), ("gqa", {}, 2), ("gqa", {"kv_heads": 4}, 4)])
@pytest.mark.parametrize("base", [None, 100.0])
@torch.no_grad()
def test_the_layer_is_the_sum_written_out_by_hand(name, options, kv_heads, base) -> None:
    position = None if base is None else {"name": "rope", "base": base}
    mixer = variants.build(name, dim=16, heads=4, position=position, **options).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(mixer(x).y, by_hand(mixer, x, 4, kv_heads, base))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (9, 3)])
def test_grouped_heads_default_to_the_largest_divisor_below_all(heads, kv_heads) -> None:
    assert variants.build("gqa", dim=heads * 2, heads=heads).kv_heads == kv_heads


def test_gradients_reach_every_parameter_and_equal_those_of_fp64() -> None:
    mixer = variants.build("gqa", dim=16, heads=4, short_conv=3, position="rope")
    x = torch.randn(2, 11, 16)
    gradients = []
    for precise in (False, True):
        mixer, x = (mixer.double(), x.double()) if precise else (mixer, x)
        gradients.append(torch.autograd.grad(mixer(x).y.pow(2).sum(), list(mixer.parameters())))
    for single, double in zip(*gradients, strict=True):
        assert double.abs().max() > 0
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("full", {"dim": 100, "heads": 3}, "heads=3 does not divide dim=100"),
        ("gqa", {"dim": 12, "heads": 6, "kv_heads": 4}, "kv_heads=4 does not divide heads=6"),
        ("full", {"dim": 12, "heads": 6, "kv_heads": 0}, "kv_heads=0 does not divide heads=6"),
        ("mqa", {"dim": 12, "heads": 6, "kv_heads": 2}, "one key/value head; got kv_heads=2"),
        ("full", {"dim": 1023, "heads": 8, "head_dim": 25, "position": "rope"}, "head_dim=25 is 25"),
        ("full", {"dim": 8, "heads": 2, "dropout": 1.0}, r"dropout must lie in \[0, 1\); got 1.0"),
        ("full", {"dim": 8, "heads": 2, "short_conv": -1}, "short_conv must be 0 .* got -1"),
        ("sliding_window", {"dim": 8, "heads": 2, "window": 0}, "at least 1; got 0"),
        ("sliding_window", {"dim": 8, "heads": 2, "sinks": -1}, "not be negative; got -1"),
        ("linear", {"dim": 8, "heads": 2, "chunk": 0}, "chunk must be at least 1; got 0"),
    ],
)
def test_wrong_arithmetic_is_refused_when_built_with_the_numbers(name, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        variants.build(name, **arguments)


@pytest.mark.parametrize("arguments", [{"dim": 5120, "heads": 40, "kv_heads": 8}, {"dim": 1023, "heads": 8, "head_dim": 25}])
def test_unusual_but_right_arithmetic_builds_and_runs(arguments) -> None:
    with torch.device("meta"):
        mixer = variants.build("full", **arguments)
        assert mixer(torch.zeros(2, 3, arguments["dim"])).y.shape == (2, 3, arguments["dim"])
    if arguments["dim"] < 2000:
        mixer = variants.build("full", **arguments)
        assert mixer(torch.randn(2, 3, arguments["dim"])).y.isfinite().all()


def test_the_matrices_keep_the_variance_of_what_they_are_given() -> None:
    mixer = variants.build("full", dim=256, heads=4, short_conv=3)
    torch.testing.assert_close(mixer.projections.inward(torch.randn(200, 256)).std(), torch.tensor(1.0), rtol=0.1, atol=0)
    torch.testing.assert_close(mixer.projections.outward(torch.randn(200, 256)).std(), torch.tensor(1.0), rtol=0.1, atol=0)
    assert mixer.projections.taps.abs().max() <= 3**-0.5


def test_dropout_is_for_training_alone() -> None:
    mixer = variants.build("full", dim=8, heads=2, dropout=0.5)
    without = variants.build("full", dim=8, heads=2)
    without.load_state_dict(mixer.state_dict())
    x = torch.randn(1, 4, 8)
    for _ in range(2):
        mixer.train()
        assert not torch.equal(mixer(x).y, mixer(x).y)
        mixer.eval()
        assert torch.equal(mixer(x).y, mixer(x).y)
        torch.testing.assert_close(mixer(x).y, without(x).y)
    mixer.train()
    torch.manual_seed(0)
    average, expected = mixer(x.expand(8000, -1, -1)).y.mean(0), without(x).y[0]
    assert (average - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(("name", "instead"), [("full", "torch"), ("sliding_window", "torch")])
def test_dropout_rules_the_fused_kernel_out_and_says_so(name, instead) -> None:
    assert variants.build(name, dim=8, heads=2, dropout=0.1).implementation == instead
    with pytest.raises(NotUsable, match=f"cannot drop weights .*dropout=0.1.* use impl='{instead}'"):
        variants.build(name, dim=8, heads=2, dropout=0.1, impl="sdpa")


def test_a_bias_and_a_temperature_reach_the_logits() -> None:
    mixer = variants.build("full", dim=8, heads=2, position=Slopes(4, 2, 8)).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 4, 5, 9]])
    q, k, v = (part.view(1, 5, 2, 4).transpose(1, 2) for part in (x @ mixer.projections.inward.weight.T).chunk(3, -1))
    bias = Slopes(4, 2, 8).bias(positions, positions)
    y = oracles.attention(q, k, v, oracles.causal(5, 5), bias, 1.7 / 4**0.5)
    torch.testing.assert_close(mixer(x, Context(positions=positions)).y, y.transpose(1, 2).flatten(2) @ mixer.projections.outward.weight.T)


@pytest.mark.parametrize("short_conv", [0, 4])
@pytest.mark.parametrize(("name", "kv_heads"), [("full", 4), ("gqa", 2), ("mqa", 1)])
def test_costs_are_declared(name, kv_heads, short_conv) -> None:
    mixer = variants.build(name, dim=16, heads=4, short_conv=short_conv)
    state = mixer(torch.randn(3, 7, 16), state=mixer.init_state(3)).state
    assert state.elements == 3 * mixer.state_elements(7) == 3 * (2 * kv_heads * 4 * 7 + max(short_conv - 1, 0) * (16 + 8 * kv_heads))
    channels = 16 + 8 * kv_heads
    assert mixer.flops(7) == 2 * 7 * (16 * channels + 16 * 16 + short_conv * channels) + 4 * 16 * 28
    assert mixer.reach() is None


def test_the_bidirectional_form_has_no_cache() -> None:
    mixer = variants.build("full", dim=8, heads=2, causal=False)
    with pytest.raises(ValueError, match="causal=False has no cache"):
        mixer.init_state(1)
    with pytest.raises(ValueError, match="causal=False takes no state"):
        mixer(torch.zeros(1, 2, 8), state=variants.build("full", dim=8, heads=2).init_state(1))
    x = torch.randn(1, 4, 8)
    assert not torch.equal(mixer(x).y[:, 0], mixer(torch.cat([x[:, :3], -x[:, 3:]], 1)).y[:, 0])


def test_a_scheme_that_needs_a_hook_the_mixer_lacks_is_refused_with_the_reason() -> None:
    with pytest.raises(NotApplicable, match="Slopes needs the hook 'bias', which Linear does not have: it never writes out the logits"):
        variants.build("linear", dim=8, heads=2, position=Slopes(4, 2, 8))


def test_a_mask_of_another_shape_is_refused() -> None:
    mixer, x = variants.build("full", dim=8, heads=2), torch.zeros(2, 5, 8)
    with pytest.raises(ValueError, match=r"valid must be \(batch, time\) = \(2, 5\); got \(2, 4\)"):
        mixer(x, Context(valid=torch.ones(2, 4, dtype=torch.bool)))


@torch.no_grad()
def test_gates_norms_and_a_sink_logit_are_what_they_say() -> None:
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    for gate, width in (("head", 1), ("element", 4)):
        mixer = variants.build("gqa", dim=16, heads=4, qk_norm=True, gate=gate, sink_logit=True).double()
        for scale in (mixer.q_norm.weight, mixer.k_norm.weight, mixer.sink):
            scale.copy_(torch.randn_like(scale))
        q, k, v = (x @ mixer.projections.inward.weight.T).split([16, 8, 8], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        q, k = (
            part / (part.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight for part, norm in ((q, mixer.q_norm), (k, mixer.k_norm))
        )
        weights = (q @ k.repeat_interleave(2, 1).mT / 2).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf).exp()
        weights = weights / (weights.sum(-1, keepdim=True) + mixer.sink.exp()[:, None, None])
        y = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
        y = y * torch.sigmoid(x @ mixer.gates.weight.T).view(2, 7, 4, width)
        torch.testing.assert_close(mixer(x).y, y.flatten(2) @ mixer.projections.outward.weight.T)
        assert not mixer.normalises_rows
        assert mixer.flops(7) == mixer.projections.flops(7) + 2 * 7 * 16 * 4 * width + 4 * 16 * 28


@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_flash_is_full_or_windowed_attention(window) -> None:
    options = {"window": window, "sinks": 1} if window else {}
    flash = variants.build("flash", dim=8, heads=2, position="rope", **options)
    other = variants.build("sliding_window" if window else "full", dim=8, heads=2, position="rope", **options)
    other.load_state_dict(flash.state_dict())
    x = torch.randn(2, 30, 8)
    torch.testing.assert_close(flash(x).y, other(x).y)
    assert flash.flops(30) == other.flops(30)
    assert flash.state_elements(30) == other.state_elements(30)
    assert flash.reach() == other.reach()


def test_sinks_without_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match="sinks=2 are what a window leaves in sight, and without one everything is; give window"):
        variants.build("flash", dim=8, heads=2, sinks=2)
