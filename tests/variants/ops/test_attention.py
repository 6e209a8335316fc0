"""Softmax attention: the reference, the tiles and torch's kernels, against sums over explicit sets of keys."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.variants import oracles
from tests.variants.schemes import SharedSlopes, Slopes
from variants.conformance.costs import Meter
from variants.ops import fused, reference, softmax, tiling
from variants.ops.attention import Bias, Fade, Output, Sight, merge
from variants.positions.contract import Scheme

IMPLEMENTATIONS = [
    pytest.param(reference.attention, id="reference"),
    pytest.param(softmax.attention, id="tiles"),
    pytest.param(fused.attention, id="fused"),
]
every_implementation = pytest.mark.parametrize("attention", IMPLEMENTATIONS)
every_lse = pytest.mark.parametrize("attend", [pytest.param(reference.attend, id="reference"), pytest.param(softmax.attend, id="tiles")])
sharings = st.sampled_from([(2, 2), (4, 2), (3, 1), (6, 3)])
FUSED = {"aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"}


@pytest.fixture(params=["whole", "small", "smallest"])
def tiles(request):
    """Tiles as they are, so small that short sequences have many of every kind, and one weight at a time."""
    sizes = {"small": (100, 4, 2, 5), "smallest": (1, 1, 1, 1)}.get(request.param)
    if sizes is None:
        yield
        return
    with (
        mock.patch.object(tiling, "TILE", sizes[0]),
        mock.patch.object(softmax, "TILE", sizes[0]),
        mock.patch.object(tiling, "QUERIES", sizes[1]),
        mock.patch.object(tiling, "FEWEST", sizes[2]),
        mock.patch.object(tiling, "SLOTS", sizes[3]),
        mock.patch.object(fused, "MASK", sizes[0]),
    ):
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).requires_grad_()


def inputs(
    q_time: int, k_time: int, heads: int = 2, kv_heads: int = 2, batch: int = 2, width: int = 4, value_width: int = 3
) -> list[Tensor]:
    shapes = (heads, q_time, width), (kv_heads, k_time, width), (kv_heads, k_time, value_width)
    return [random(batch, *shape, seed=i) for i, shape in enumerate(shapes)]


segments = st.lists(st.lists(st.integers(1, 12), max_size=4), min_size=2, max_size=2)


@every_implementation
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(q_time=st.integers(1, 19), k_time=st.integers(1, 19), sharing=sharings, causal=st.booleans())
def test_outputs_and_gradients_are_those_of_the_sum_over_the_visible_keys(tiles, attention, q_time, k_time, sharing, causal) -> None:
    q, k, v = inputs(q_time, k_time, *sharing)
    sees = oracles.causal(q_time, k_time) if causal else lambda row, i, j: True
    got, expected = attention(q, k, v, sight=Sight(causal)), oracles.attention(q, k, v, sees)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v))


@every_implementation
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(time=st.integers(1, 26), width=st.integers(1, 9) | st.none(), sinks=st.integers(0, 3), lengths=segments, causal=st.booleans())
def test_segments_windows_and_sinks_show_each_query_exactly_its_keys(tiles, attention, time, width, sinks, lengths, causal) -> None:
    ids = [oracles.run_ids(row, time) for row in lengths]
    q, k, v = inputs(time, time)
    before, after = oracles.places(ids), oracles.places([row[::-1] for row in ids]).flip(1)
    got = attention(q, k, v, sight=Sight(causal, width, sinks if width else 0, before=before, after=None if causal else after))
    expected = oracles.attention(q, k, v, oracles.through_window(ids, width or time, sinks, ahead=not causal))
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v))


@every_implementation
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(past=st.integers(0, 20), time=st.integers(1, 16), width=st.integers(1, 7), sinks=st.integers(0, 3), lengths=segments)
def test_a_cache_of_window_less_one_and_sinks_stands_in_for_the_whole_past(tiles, attention, past, time, width, sinks, lengths) -> None:
    total = past + time
    ids = [oracles.run_ids(row, total) for row in lengths]
    q, k, v = inputs(total, total, 4, 2)
    before = oracles.places(ids)
    # What a cache holds: the sinks of the segment the past stops in (junk where they have not come), then the keys of the window.
    starts = [past - 1 - int(row[past - 1]) if past else total for row in before]
    index = torch.tensor([[min(start + p, total - 1) for p in range(sinks)] + list(range(past - width + 1, total)) for start in starts])
    cached = [x.gather(2, index.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v)]
    got = attention(q[:, :, past:], *cached, sight=Sight(window=width, sinks=sinks, kept=sinks, before=before[:, past:]))
    expected = oracles.attention(q, k, v, oracles.through_window(ids, width, sinks))[:, :, past:]
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v))


@every_implementation
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(
    data=st.data(),
    past=st.integers(0, 12),
    time=st.integers(1, 16),
    width=st.integers(1, 9) | st.none(),
    sinks=st.integers(0, 3),
    rows=st.integers(1, 2),
    lengths=segments,
)
def test_slots_as_near_as_a_query_is_told_are_not_seen(tiles, attention, data, past, time, width, sinks, rows, lengths) -> None:
    total = past + time
    ids = [oracles.run_ids(row, total) for row in lengths]
    q, k, v = inputs(total, total, 4, 2)
    beyond = torch.tensor([[data.draw(st.integers(-1, total)) for _ in range(total)] for _ in range(rows)])
    sight = Sight(window=width, sinks=sinks if width else 0, before=oracles.places(ids)[:, past:], beyond=beyond[:, past:])
    shown = oracles.through_window(ids, width or total, sinks)

    def sees(row: int, i: int, j: int) -> bool:
        return shown(row, i, j) and i - j > int(beyond[row % rows, i])

    got, expected = attention(q[:, :, past:], k, v, sight=sight), oracles.attention(q, k, v, sees)[:, :, past:]
    expected = expected + 0 * (q.sum() + k.sum() + v.sum())  # where no query sees a slot, all gradients are 0
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v))


@every_implementation
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(data=st.data(), past=st.integers(4, 12), time=st.integers(1, 9), width=st.integers(1, 6))
def test_sinks_that_a_cache_kept_are_as_far_as_their_tokens_are(tiles, attention, data, past, time, width) -> None:
    total, sinks = past + time, 2
    q, k, v = inputs(total, total, 4, 2)
    beyond = torch.tensor([[data.draw(st.integers(-1, total)) for _ in range(total)] for _ in range(2)])
    index = torch.tensor([0, 1, *range(past - width + 1, total)]).clamp(min=0)
    sight = Sight(window=width, sinks=sinks, kept=sinks, before=oracles.places([[0] * total] * 2)[:, past:], beyond=beyond[:, past:])
    shown = oracles.through_window([[0] * total] * 2, width, sinks)
    got = attention(q[:, :, past:], k[:, :, index], v[:, :, index], sight=sight)
    expected = oracles.attention(q, k, v, lambda row, i, j: shown(row, i, j) and i - j > int(beyond[row, i]))[:, :, past:]
    expected = expected + 0 * (q.sum() + k.sum() + v.sum())
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v))


@every_implementation
def test_nearness_of_which_nothing_else_is_told_counts(tiles, attention) -> None:
    one_hot, zeros = torch.eye(6)[None, None], torch.zeros(1, 1, 6, 4)
    y = attention(zeros, zeros, one_hot, sight=Sight(beyond=torch.tensor([[-1, 0, 0, 1, 4, 1]])))
    assert ["".join(str(int(weight > 0)) for weight in row) for row in y[0, 0]] == [
        "100000",
        "100000",
        "110000",
        "110000",
        "000000",
        "111100",
    ]


@every_implementation
def test_nearness_differs_from_tile_to_tile_of_a_window(tiles, attention) -> None:
    q, k, v = (x.detach() for x in inputs(40, 40))
    near = torch.arange(40)[None] // 7
    expected = oracles.attention(q, k, v, lambda row, i, j: i // 7 < i - j < 6)
    torch.testing.assert_close(attention(q, k, v, sight=Sight(window=6, beyond=near)), expected)


@every_lse
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(data=st.data(), time=st.integers(1, 9))
def test_what_is_near_and_what_is_beyond_merge_to_the_whole(tiles, attend, data, time) -> None:
    q, k, v = inputs(time, time, 4, 2)
    sink, near = random(4, seed=7), torch.tensor([[data.draw(st.integers(-1, i)) for i in range(time)] for _ in range(2)])
    merged = merge(attend(q, k, v, sight=Sight(before=near), sink=sink), attend(q, k, v, sight=Sight(beyond=near)))
    whole = attend(q, k, v, sink=sink)
    for got, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, expected)
        oracles.same_gradients(got, expected, (q, k, v, sink) if got.ndim == 4 else (q, k, sink))


@pytest.mark.parametrize("near", [0, 15, 200])
def test_tiles_that_are_too_near_or_too_far_are_not_computed(near) -> None:
    time = 1024
    q, k, v = (torch.randn(1, 1, time, 8) for _ in range(3))

    def products(sight: Sight) -> int:
        with Meter() as meter, torch.no_grad():
            softmax.attention(q, k, v, sight=sight)
        return meter.products

    told, pair = torch.full((1, time), near), 4 * 8
    assert products(Sight(beyond=told)) <= products(Sight())
    assert products(Sight(before=told)) <= pair * time * (near + 2 * tiling.QUERIES)
    assert products(Sight(beyond=torch.full((1, time), time // 2))) <= pair * (time // 2) * (time // 2 + tiling.QUERIES)


@every_implementation
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(
    time=st.integers(1, 12),
    extra=st.integers(0, 5),
    sharing=sharings,
    causal=st.booleans(),
    faded=st.booleans(),
    width=st.sampled_from([None, 3]),
)
def test_a_fade_and_a_sink_join_the_logits(tiles, attention, time, extra, sharing, causal, faded, width) -> None:
    heads, kv_heads = sharing
    q, k, v = inputs(time, time + extra, heads, kv_heads)
    fade = Fade(random(2, heads, time, seed=5), random(2, heads, time + extra, seed=6)) if faded else None
    sink = random(heads, seed=7)
    sight = Sight(causal, width)
    got = attention(q, k, v, sight=sight, fade=fade, sink=sink, scale=0.7)
    # The oracle takes the fade as a bias and the sink as one more key, which only the bias lets in.
    bias = torch.zeros(2, heads, time, time + extra) if fade is None else fade.at_queries.unsqueeze(-1) - fade.at_keys.unsqueeze(-2)
    bias = torch.cat([bias, sink[:, None, None].expand(2, -1, time, 1)], -1)
    group = heads // kv_heads
    longer = [torch.cat([x.repeat_interleave(group, 1), torch.zeros_like(x[:, :1, :1]).expand(-1, heads, -1, -1)], 2) for x in (k, v)]
    seen = sight.mask(time, time + extra, q.device)
    expected = oracles.attention(q, *longer, lambda row, i, j: j == time + extra or bool(seen[0, 0, i, j]), bias, 0.7)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v, sink, *(fade or ())))


@every_lse
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(time=st.integers(1, 12), sharing=sharings, sunk=st.booleans(), width=st.sampled_from([None, 3]))
def test_the_log_sum_exp_is_right_and_carries_gradients(tiles, attend, time, sharing, sunk, width) -> None:
    q, k, v = inputs(time, time, *sharing)
    sink = random(sharing[0], seed=7) if sunk else None
    lse = attend(q, k, v, sight=Sight(window=width), sink=sink).lse
    logits = q @ k.repeat_interleave(sharing[0] // sharing[1], 1).mT / 2
    logits = logits.masked_fill(~Sight(window=width).mask(time, time, q.device), -torch.inf)
    if sink is not None:
        logits = torch.cat([logits, sink[:, None, None].expand(2, -1, time, 1)], -1)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    oracles.same_gradients(lse, logits.logsumexp(-1), (q, k) if sink is None else (q, k, sink))


@every_implementation
@pytest.mark.parametrize(
    ("q_time", "k_time", "visible"), [(1, 6, ["111111"]), (2, 5, ["11110", "11111"]), (5, 2, ["00", "00", "00", "10", "11"])]
)
def test_the_causal_mask_is_anchored_bottom_right(tiles, attention, q_time, k_time, visible) -> None:
    one_hot = torch.eye(k_time)[None, None]
    y = attention(torch.zeros(1, 1, q_time, 4), torch.zeros(1, 1, k_time, 4), one_hot)
    assert ["".join(str(int(weight > 0)) for weight in row) for row in y[0, 0]] == visible


@every_implementation
@pytest.mark.parametrize("width", [None, 4])
def test_for_fewer_queries_than_keys_the_rows_are_the_last_of_the_square(tiles, attention, width) -> None:
    q, k, v = inputs(9, 9)
    sight = Sight(window=width)
    torch.testing.assert_close(attention(q[:, :, 4:], k, v, sight=sight), attention(q, k, v, sight=sight)[:, :, 4:])


@every_implementation
def test_the_window_counts_the_query_itself(tiles, attention) -> None:
    one_hot, zeros = torch.eye(8)[None, None], torch.zeros(1, 1, 8, 4)
    y = attention(zeros, zeros, one_hot, sight=Sight(window=4))
    assert (y[0, 0] > 0).sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    torch.testing.assert_close(attention(zeros, zeros, one_hot, sight=Sight(window=1)), one_hot)


@every_implementation
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_as_long_as_the_sequence_is_full_attention(tiles, attention, causal) -> None:
    q, k, v = inputs(9, 9)
    torch.testing.assert_close(attention(q, k, v, sight=Sight(causal, 9, 2)), attention(q, k, v, sight=Sight(causal)))


@every_implementation
def test_without_causality_the_window_reaches_as_far_to_both_sides(tiles, attention) -> None:
    zeros = torch.zeros(1, 1, 7, 4)
    y = attention(zeros, zeros, torch.eye(7)[None, None], sight=Sight(False, 3))
    assert (y[0, 0, 3] > 0).tolist() == [False, True, True, True, True, True, False]


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_sees_nothing_is_zero_and_poisons_no_gradient(tiles, attention, dtype) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs(4, 2, value_width=4))
    y = attention(q, k, v)
    assert not y[:, :, :2].any()
    expected = oracles.attention(q[:, :, 2:], k, v, oracles.causal(2, 2))
    wanted = torch.autograd.grad(expected.pow(2).sum(), (q, k, v))
    for loss in (y.pow(2).sum(), y[:, :, 2:].pow(2).sum()):
        for a, b in zip(torch.autograd.grad(loss, (q, k, v), retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@every_implementation
@pytest.mark.parametrize(("heads", "kv_heads", "expected"), [(4, 2, [0, 0, 1, 1]), (4, 1, [0] * 4), (6, 3, [0, 0, 1, 1, 2, 2])])
def test_query_heads_share_key_and_value_heads_in_blocks(tiles, attention, heads, kv_heads, expected) -> None:
    q, k, _ = (x.detach() for x in inputs(3, 3, heads, kv_heads))
    v = torch.arange(kv_heads, dtype=torch.float64)[:, None, None].expand(2, kv_heads, 3, 4).clone().requires_grad_()
    y = attention(q, k, v)
    assert y[0, :, 0, 0].round(decimals=9).tolist() == expected
    (gradient,) = torch.autograd.grad(y[:, :, :1].sum(), v)
    assert gradient[0, :, 0, 0].round(decimals=9).tolist() == [heads / kv_heads] * kv_heads


class Table(Scheme):
    """A trained number for each head and distance."""

    hooks = ("bias",)

    def __init__(self, head_dim: int, heads: int, dim: int):
        super().__init__(head_dim, heads, dim)
        self.table = nn.Parameter(random(heads, 64).detach())

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = (q_positions[:, :, None] - k_positions[:, None, :]).clamp(-31, 32) + 31
        return self.table[:, distance].transpose(0, 1)


@every_implementation
@pytest.mark.parametrize("scheme", [Slopes, SharedSlopes, Table])
@pytest.mark.parametrize(
    "sight", [Sight(), Sight(False), Sight(window=4), Sight(window=4, sinks=2)], ids=["causal", "both", "window", "sinks"]
)
def test_a_bias_is_added_by_position_and_not_by_slot_and_is_trained(tiles, attention, scheme, sight) -> None:
    q, k, v = inputs(20, 20, 4, 2)
    slopes = scheme(4, 4, 8).double()
    positions = torch.arange(20).expand(2, 20) ** 2 // 13
    got = attention(q, k, v, sight=sight, bias=slopes.as_bias(positions, positions))
    seen = sight.mask(20, 20, q.device)
    bias = slopes.bias(positions, positions)
    expected = oracles.attention(q, k, v, lambda row, i, j: bool(seen[0, 0, i, j]), bias)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, (q, k, v, *slopes.parameters()))


@every_implementation
@pytest.mark.parametrize("sight", [Sight(), Sight(window=4, sinks=2, before=oracles.places([oracles.run_ids([3], 20), [0] * 20]))])
@pytest.mark.parametrize("expanded", ["queries", "slots", "both"])
def test_positions_that_are_one_expanded_row_on_one_side_alone_are_those_of_every_row(tiles, attention, sight, expanded) -> None:
    q, k, v = inputs(20, 20, 4, 2)
    one, own = torch.arange(20).expand(2, 20), torch.arange(20).expand(2, 20).clone()
    positions = (own if expanded == "slots" else one, own if expanded == "queries" else one)
    slopes = Slopes(4, 4, 8)
    expected = attention(q, k, v, sight=sight, bias=slopes.as_bias(own, own))
    torch.testing.assert_close(attention(q, k, v, sight=sight, bias=slopes.as_bias(*positions)), expected)


def test_a_bias_trained_by_tensors_that_it_does_not_name_is_refused() -> None:
    table, positions = torch.zeros(1, 1, 1, requires_grad=True), torch.arange(3)[None]
    with pytest.raises(ValueError, match=r"Bias\.parameters"):
        softmax.attention(*inputs(3, 3), bias=Bias(lambda a, b: table.expand(2, a.shape[1], b.shape[1]), (positions, positions)))


def test_gradients_of_a_bias_belong_to_the_parameters_it_was_called_with() -> None:
    """A functional call puts others in the module's place, and takes them away before backward."""
    scheme, positions = Table(4, 2, 8), torch.arange(5).expand(2, 5)
    given_, own = torch.randn(2, 64, dtype=torch.float64, requires_grad=True), scheme.table

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scheme = scheme

        def forward(self) -> Tensor:
            return softmax.attention(*inputs(5, 5), bias=self.scheme.as_bias(positions, positions))

    torch.func.functional_call(Attends(), {"scheme.table": given_}, ()).sum().backward()
    assert own.grad is None
    assert given_.grad is not None
    assert given_.grad.any()


@every_implementation
@pytest.mark.parametrize("biased", [False, True])
def test_no_score_is_low_enough_to_let_the_future_in(tiles, attention, biased) -> None:
    q = torch.full((1, 1, 4, 4), 100.0)
    k, v = -200 * q, torch.randn(1, 1, 4, 4)
    positions = torch.arange(4)[None]
    bias = Bias(lambda a, b: torch.full((1, a.shape[1], b.shape[1]), -1e30), (positions, positions)) if biased else None
    later = v.clone()
    later[:, :, 3] = 1e6
    assert torch.equal(attention(q, k, v, bias=bias)[:, :, :3], attention(q, k, later, bias=bias)[:, :, :3])


@pytest.mark.parametrize("sight", [Sight(), Sight(False, 3, 1)], ids=["causal", "window"])
def test_gradients_of_the_tiles_are_those_of_finite_differences(sight) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(softmax.attend(q, k, v, sight=sight, fade=Fade(a, b), sink=sink))

    more = random(1, 2, 6, seed=3), random(1, 2, 6, seed=4), random(2, seed=5)
    assert torch.autograd.gradcheck(function, (*inputs(6, 6, 2, 1, batch=1), *more))


@every_implementation
@pytest.mark.parametrize("case", ["expanded output gradient", "transposed output gradient", "expanded keys", "sliced inputs"])
def test_strides_change_nothing(attention, case) -> None:
    q, k, v = inputs(40, 40, value_width=4)
    if case == "expanded keys":
        k = k[:1].expand(2, -1, -1, -1)
    if case == "sliced inputs":
        q, k, v = (torch.stack([x, x], -1)[..., 0] for x in (q, k, v))
    gradient = {
        "expanded output gradient": torch.ones(()).double().expand(2, 2, 40, 4),
        "transposed output gradient": random(4, 40, 2, 2).detach().permute(3, 2, 1, 0),
    }.get(case, random(2, 2, 40, 4).detach())
    y = attention(q, k, v, sight=Sight(window=7))
    plain = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    expected = reference.attention(*plain, sight=Sight(window=7))
    torch.testing.assert_close(y, expected)
    for a, b in zip(torch.autograd.grad(y, (q, k, v), gradient), torch.autograd.grad(expected, plain, gradient.contiguous()), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "case", ["causal", "not causal", "grouped", "one step", "mask", "wider values", "narrower values", "sink", "fade", "fixed bias"]
)
def test_the_fused_kernel_runs_forward_and_backward(case) -> None:
    widths = {"wider values": 6, "narrower values": 2}
    q, k, v = inputs(8, 8, 4, 2 if case == "grouped" else 4, value_width=widths.get(case, 4))
    positions = torch.arange(8).expand(2, 8)
    options = {
        "not causal": {"sight": Sight(False)},
        "mask": {"sight": Sight(before=torch.arange(8)[None] % 3)},
        "sink": {"sink": random(4)},
        "fade": {"fade": Fade(random(2, 4, 8), random(2, 4, 8))},
        "fixed bias": {"bias": Slopes(4, 4, 16).as_bias(positions, positions)},
    }.get(case, {})
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        fused.attention(q, k, v, **options).sum().backward()
    assert {event.key for event in recorded.key_averages()} >= FUSED


@pytest.mark.parametrize("case", ["dropout", "trained bias", "large mask", "window"])
def test_where_torch_would_take_quadratic_memory_the_tiles_run(case) -> None:
    time = 1100
    q, k, v = (torch.randn(1, 1, time, 4, requires_grad=True) for _ in range(3))
    positions = torch.arange(time)[None]
    options = {
        "dropout": {"dropout": 0.1},
        "trained bias": {"bias": Table(4, 1, 4).as_bias(positions, positions)},
        "large mask": {"sight": Sight(before=positions)},
        "window": {"sight": Sight(window=8)},
    }[case]
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor))])
            return out

    with Largest():
        fused.attention(q, k, v, **options).sum().backward()
    assert largest < time * time // 2


@pytest.mark.parametrize("extent", ["before", "beyond"])
@torch.no_grad()
def test_a_mask_is_as_large_as_all_rows_that_are_told_something(extent) -> None:
    q, k, v = (torch.randn(2, 1, 800, 4) for _ in range(3))  # one row's mask would be written out, two rows' are not
    told = torch.arange(800).expand(2, -1).clone() // 2
    with mock.patch.object(softmax, "attention", wraps=softmax.attention) as tiled:
        fused.attention(q, k, v, sight=Sight(**{extent: told[:1]}))
        assert not tiled.called
        fused.attention(q, k, v, sight=Sight(**{extent: told}))
        assert tiled.called


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (4, 2)])
@torch.no_grad()
def test_one_query_copies_nothing_of_the_cache(heads) -> None:
    q, k, v = (torch.randn(2, h, t, 64) for h, t in ((heads[0], 1), (heads[1], 4096), (heads[1], 4096)))
    most = 0

    class Written(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            out = func(*args, **(kwargs or {}))
            new = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known]
            most = max([most, *(x.numel() for x in new)])
            return out

    known = {x.untyped_storage()._cdata for x in (q, k, v)}
    with Written():
        fused.attention(q, k, v, fade=Fade(torch.zeros(2, 4, 1), torch.zeros(2, 4, 4096)), sink=torch.zeros(4))
    assert most <= 2 * 4 * 4097  # the weights; keys are 64 times as wide


def test_a_fade_in_half_precision_keeps_its_digits() -> None:
    q, k, v = (x.detach().bfloat16() for x in inputs(40, 40, value_width=4))
    sums = -torch.arange(40, dtype=torch.float64).expand(2, 2, 40) * 3.3 - 1e6
    expected = reference.attention(q.float(), k.float(), v.float(), fade=Fade(sums, sums))
    for attention in (fused.attention, softmax.attention):
        with torch.autocast("cpu", torch.bfloat16):
            got = attention(q, k, v, fade=Fade(sums, sums))
        torch.testing.assert_close(got.float(), expected, rtol=0, atol=3e-2)


def test_dropped_weights_keep_their_mean_and_their_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach()[:1].expand(2000, -1, -1, -1) for x in inputs(9, 9))
    dropped = [attention(q, k, v + 3, dropout=0.5) for attention in (reference.attention, softmax.attention)]
    for y in dropped:
        assert not torch.equal(y[0], y[1])
        torch.testing.assert_close(y.mean(0), reference.attention(q[:1], k[:1], v[:1] + 3)[0], rtol=0.05, atol=0)


def test_backward_drops_the_weights_that_forward_dropped(tiles) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        return softmax.attention(q, k, v, sight=Sight(window=5), dropout=0.4)

    assert torch.autograd.gradcheck(function, inputs(9, 9, 2, 1, batch=1))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(cut=st.integers(0, 9))
def test_attention_to_two_sets_of_keys_merges_to_attention_to_both(cut) -> None:
    q, k, v = inputs(9, 9)
    whole = softmax.attend(q, k, v, sight=Sight(False))
    nothing = Output(torch.zeros_like(whole.y), torch.full_like(whole.lse, -torch.inf))
    parts = [
        softmax.attend(q, k[:, :, s], v[:, :, s], sight=Sight(False)) if k[:, :, s].numel() else nothing
        for s in (slice(cut), slice(cut, 9))
    ]
    merged = merge(*parts)
    torch.testing.assert_close(tuple(merged), tuple(whole))
    for got, expected in zip(merged, whole, strict=True):
        oracles.same_gradients(got, expected, (q, k, v) if got.ndim == 4 else (q, k))


def test_merging_nothing_with_nothing_is_nothing_with_finite_gradients() -> None:
    y, lse = torch.zeros(1, 1, 2, 3, requires_grad=True), torch.full((1, 1, 2), -torch.inf, requires_grad=True)
    merged = merge(Output(y, lse), Output(y, lse))
    assert not merged.y.any()
    assert merged.lse.eq(-torch.inf).all()
    for gradient in torch.autograd.grad(merged.y.sum() + merged.lse.exp().sum(), (y, lse)):
        assert gradient.isfinite().all()


def test_sums_that_have_grown_large_lose_nothing_nearby() -> None:
    """A running sum of log gates after a million tokens, in fp64, over fp32 queries and keys."""
    q, k, v = (x.detach().float() for x in inputs(20, 20, value_width=4))
    sums = -0.5 * torch.arange(20, dtype=torch.float64).expand(2, 2, 20)
    near, far = (softmax.attention(q, k, v, fade=Fade(sums + start, sums + start)) for start in (0.0, -1e6))
    torch.testing.assert_close(far, near, rtol=0, atol=1e-6)


def test_sums_that_have_grown_large_lose_little_in_the_fused_kernel() -> None:
    """They ride along as two terms each, and meet before the product of query and key is added."""
    q, k, v = (x.detach().float() for x in inputs(300, 300, value_width=4))
    steps = torch.cat([torch.full((150,), -60.0), torch.full((150,), -1e-3)]).double()
    sums = steps.cumsum(0).expand(2, 2, 300)
    expected = reference.attention(*(x.double() for x in (q, k, v)), fade=Fade(sums, sums))
    for attention in (fused.attention, softmax.attention):
        torch.testing.assert_close(attention(q, k, v, fade=Fade(sums, sums)).double(), expected, rtol=0, atol=5e-5)


@torch.no_grad()
def test_one_query_in_half_precision_survives_large_products() -> None:
    q, k, v = (100 * x.detach().half() for x in inputs(1, 30, width=16))
    expected = reference.attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(fused.attention(q, k, v).float(), expected, rtol=2e-2, atol=1)


def test_logits_far_below_the_maximum_do_not_matter_and_huge_ones_stay_finite() -> None:
    q, k, v = (x.detach().float() for x in inputs(40, 40, value_width=4))
    y = softmax.attention(1e4 * q, k, v)
    torch.testing.assert_close(y, reference.attention(1e4 * q.double(), k.double(), v.double()).float(), rtol=0, atol=2e-3)


def test_the_end_of_a_very_long_sequence_needs_only_the_window_before_it() -> None:
    q, k, v = (torch.randn(1, 1, 65_536, 4) for _ in range(3))
    whole = softmax.attention(q, k, v, sight=Sight(window=64))[:, :, -256:]
    end = softmax.attention(*(x[:, :, -319:] for x in (q, k, v)), sight=Sight(window=64))[:, :, -256:]
    torch.testing.assert_close(whole, end)


def test_empty_inputs_are_refused() -> None:
    q, k, v = inputs(3, 3)
    with pytest.raises(ValueError, match="at least one query and one key"):
        softmax.attention(q, k[:, :, :0], v[:, :, :0])
