"""Relative position maps, against the distance of every pair written out: the maps, the layers around them, and what they refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from registry import positions, variants
from tests.variants.positions import formulas
from variants.contract import Context, NotApplicable
from variants.implementations import NotUsable
from variants.ops import softmax, tiling
from variants.ops.attention import Output, Sight
from variants.positions.contract import Part, Scheme
from variants.positions.relative import Relative
from variants.softmax import layer
from variants.softmax.parts import Relation, attend_in_parts, reach

FP64 = {"dtype": torch.float64}
TIME = 19
Distance = Callable[[int, int], float]
#: Options by which few tokens cross every boundary, and the map they stand for.
SCHEMES: dict[str, tuple[dict[str, Any], Distance]] = {
    "self_extend": ({"name": "self_extend", "group": 3, "window": 5}, lambda p, o: formulas.self_extend(p, o, 3, 5)),
    "rerope": ({"name": "rerope", "window": 4, "layout": "interleaved"}, lambda p, o: formulas.rerope(p, o, 4)),
    "leaky": ({"name": "rerope", "window": 4, "slowdown": 2.5, "fraction": 0.5}, lambda p, o: formulas.rerope(p, o, 4, 2.5)),
    "sharpened": (
        {"name": "rerope", "window": 4, "log_scaled": True, "trained_length": 6},
        lambda p, o: formulas.rerope(p, o, 4),
    ),
    "dual_chunk": ({"name": "dual_chunk", "trained_length": 8}, lambda p, o: formulas.dual_chunk(p, o, 6, 1)),
}
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "mqa": ("mqa", {"gate": "head", "short_conv": 2}),
    "gqa": ("gqa", {"kv_heads": 2, "qk_norm": True, "gate": "element", "sink_logit": True}),
    "flash": ("flash", {"sink_logit": True}),
    "forgetting": ("forgetting", {"kv_heads": 2, "output_norm": True, "kv_shift": True, "sink_logit": True}),
    "differential": ("differential", {"kv_heads": 2, "sink_logit": True}),
    "mla": ("mla", {"rope_dim": 4, "q_rank": 6, "gate": "head", "sink_logit": True}),
    "mla, absorbed": ("mla", {"rope_dim": 4, "kv_rank": 3}),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


@pytest.fixture(params=["whole tiles", "small tiles"])
def tiles(request):
    """Tiles as they are, and so small that few tokens have many."""
    if request.param == "whole tiles":
        yield
        return
    with (
        mock.patch.object(tiling, "TILE", 100),
        mock.patch.object(softmax, "TILE", 100),
        mock.patch.object(tiling, "QUERIES", 4),
        mock.patch.object(tiling, "FEWEST", 2),
        mock.patch.object(tiling, "SLOTS", 5),
    ):
        yield


def build(mixer: str, scheme: str, **options: Any) -> Any:
    name, chosen = MIXERS[mixer]
    torch.manual_seed(0)
    built = variants.build(name, dim=32, heads=4, position=SCHEMES[scheme][0], **{**chosen, **options}).double().eval()
    with torch.no_grad():  # what starts at 0 or 1 hides what it does
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if mixer == "mla, absorbed":
        built.operations = lambda q_time, k_time: (1, 0)
    return built


def build_scheme(name: str, **options: Any) -> Relative:
    scheme = positions.build(name, head_dim=8, heads=2, dim=16, **options)
    assert isinstance(scheme, Relative)
    return scheme


def tokens(rows: int = 2, time: int = TIME, seed: int = 0) -> Tensor:
    return torch.randn(rows, time, 32, generator=torch.Generator().manual_seed(seed), **FP64)


def in_pieces(mixer: Any, x: Tensor, sizes: list[int], context: Context | None = None) -> Tensor:
    state, outputs, start = mixer.init_state(len(x)), [], 0
    for size in sizes:
        here, told = slice(start, start + size), context or Context()
        parts = (told.positions, told.valid, told.segment_ids)
        y, state, _ = mixer(x[:, here], Context(*(None if part is None else part[:, here] for part in parts)), state)
        outputs.append(y)
        start += size
    assert start == x.shape[1]
    return torch.cat(outputs, 1)


def cut(time: int, piece: int) -> list[int]:
    return [min(piece, time - start) for start in range(0, time, piece)]


def contexts() -> dict[str, Context]:
    """Rows that differ: of one segment, padded, packed, with gaps and repetitions, and all of it at once."""
    time = torch.arange(TIME)
    valid = torch.stack([time >= 6, time % 4 != 2])
    ids = torch.stack([(time >= 2).long() + (time >= 11).long(), 3 - (time // 9) % 2])
    gaps = torch.stack([time**2 // 7 + 3, 2 * time - time % 3])
    return {
        "one segment": Context(),
        "padded": Context(valid=valid),
        "packed": Context(segment_ids=ids),
        "gaps": Context(positions=gaps),
        "all of it": Context(positions=gaps, valid=valid, segment_ids=ids),
    }


def written_out(distance: Distance) -> Callable[..., Tensor]:
    """Attention from a dense square of distances: what stands in for attention in parts, and knows nothing of parts."""

    def attend(
        attend: Any, relation: Relation, q: Tensor, k: Tensor, v: Tensor, *, sight: Sight, sink: Any, scale: float, **more: Any
    ) -> Tensor:
        scheme: Any = relation.scheme
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        square = torch.tensor(
            [
                [[distance(p, o) if o <= p else 0.0 for o in at_keys] for p in at_queries]
                for at_queries, at_keys in zip(relation.q_positions.tolist(), relation.k_positions.tolist(), strict=True)
            ],
            **FP64,
        )
        frequencies = torch.tensor(formulas.rope(scheme.width, scheme.base), **FP64)
        phases = torch.polar(torch.ones_like(square).unsqueeze(-1), square.unsqueeze(-1) * frequencies)
        start = q.shape[-1] - scheme.head_dim
        turning = slice(start, start + scheme.width)
        pairs = [_complex(x[..., turning], scheme.layout) for x in (q, k)]
        logits = torch.einsum("bhip,bhjp,bijp->bhij", pairs[0], pairs[1].conj(), phases.to(pairs[0].dtype)).real
        still = [torch.cat([x[..., :start], x[..., turning.stop :]], -1) for x in (q, k)]
        logits = scale * (logits + still[0] @ still[1].mT)
        if getattr(scheme, "log_scaled", False):
            grown = (relation.q_positions.double() + 1).log() / math.log(scheme.trained_length)
            logits = logits * grown.clamp(min=1)[:, None, :, None]
        if more.get("fade") is not None:
            logits = logits + more["fade"].at_queries.unsqueeze(-1) - more["fade"].at_keys.unsqueeze(-2)
        weights = logits.exp() * sight.mask(q.shape[2], k.shape[2], q.device)
        total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink.exp()[:, None, None])
        return weights / total @ v

    return attend


def _complex(x: Tensor, layout: str) -> Tensor:
    real, imaginary = x.chunk(2, -1) if layout == "half" else x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.complex(real, imaginary)


def distances(scheme: Relative, at_query: int, at_keys: list[int]) -> list[float]:
    """The map as the scheme's ranges tell it."""
    found: list[float | None] = [None] * len(at_keys)
    for by_query, by_keys, since in scheme.ranges(torch.tensor([[at_query]]), torch.tensor([at_keys])):
        for j, key in enumerate(at_keys):
            if found[j] is None and (since is None or key >= int(since)):
                found[j] = float(by_query) - (0.0 if by_keys is None else float(by_keys[0, j]))
    return [float("nan") if x is None else x for x in found]


@pytest.mark.parametrize(
    ("name", "options", "at_query", "expected"),
    [
        ("self_extend", {"group": 4, "window": 8}, 20, [11] * 4 + [10] * 4 + [9] * 4 + [8, 7, 6, 5, 4, 3, 2, 1, 0]),
        ("rerope", {"window": 8}, 20, [8] * 13 + [7, 6, 5, 4, 3, 2, 1, 0]),
        ("dual_chunk", {"trained_length": 16}, 25, [*range(12, 2, -1), *range(12, 2, -1), 5, 4, 3, 2, 1, 0]),
    ],
)
def test_the_maps_are_the_published_ones(name, options, at_query, expected) -> None:
    assert distances(build_scheme(name, **options), at_query, [*range(at_query + 1)]) == expected


def test_a_window_that_the_group_does_not_divide_is_shifted_by_whole_numbers() -> None:
    assert distances(build_scheme("self_extend", group=4, window=10), 20, [0, 10, 11]) == [13, 11, 9]


@given(at_query=st.integers(0, 200), group=st.integers(1, 9), window=st.integers(1, 40), slowdown=st.sampled_from([None, 1.0, 2.5, 16.0]))
def test_every_pair_is_at_the_distance_of_the_formula(at_query, group, window, slowdown) -> None:
    keys = [*range(at_query + 1)]
    assert distances(build_scheme("self_extend", group=group, window=window), at_query, keys) == [
        formulas.self_extend(at_query, key, group, window) for key in keys
    ]
    assert distances(build_scheme("rerope", window=window, slowdown=slowdown), at_query, keys) == pytest.approx(
        [formulas.rerope(at_query, key, window, slowdown) for key in keys], abs=1e-12
    )


@given(at_query=st.integers(0, 200), chunk=st.integers(1, 30), share=st.floats(0, 1, exclude_max=True))
def test_dual_chunks_are_at_the_distances_of_the_formula_and_never_above_a_chunk(at_query, chunk, share) -> None:
    local, keys = int(share * chunk), [*range(at_query + 1)]
    found = distances(build_scheme("dual_chunk", chunk=chunk, local=local, trained_length=chunk + 1), at_query, keys)
    assert found == [formulas.dual_chunk(at_query, key, chunk, local) for key in keys]
    assert 0 <= min(found) <= max(found) <= chunk


def test_a_chunk_is_three_quarters_of_the_trained_length_and_an_eighth_of_that_length_is_local() -> None:
    scheme = build_scheme("dual_chunk", trained_length=64)
    assert (scheme.chunk, scheme.local, scheme.block_sizes()) == (48, 8, (40,))


@pytest.mark.parametrize(("group", "window", "trained_length"), [(4, 8, 16), (2, 32, 64), (8, 16, 64)])
def test_self_extend_stays_within_the_trained_length_as_far_as_it_promises_and_no_farther(group, window, trained_length) -> None:
    scheme, reaches = build_scheme("self_extend", group=group, window=window), (trained_length - window) * group + window
    assert distances(scheme, reaches - 1, [0]) == [trained_length - 1]
    assert distances(scheme, reaches, [0]) == [trained_length]


def test_logits_are_sharpened_by_the_logarithm_of_the_position_above_the_trained_length() -> None:
    scheme, at = build_scheme("rerope", log_scaled=True, trained_length=512), torch.tensor([[0, 100, 511, 1023, 4095]])
    torch.testing.assert_close(scheme.sharpen(at), torch.tensor([[1, 1, 1, 10 / 9, 4 / 3]], **FP64))
    assert build_scheme("rerope").sharpen(at) is None
    assert build_scheme("self_extend").sharpen(at) is None


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("name", ["self_extend", "rerope", "dual_chunk"])
def test_the_scheme_turns_as_rope_does_and_leaves_position_zero_alone(name, layout) -> None:
    scheme = build_scheme(name, layout=layout)
    x, at = torch.randn(1, 1, 3, 8, **FP64), torch.tensor([[0, 5, 9]])
    q, k, _ = next(scheme.relate(x, x, at, at))
    rope = positions.build("rope", head_dim=8, heads=2, dim=16, layout=layout)
    assert torch.equal(q, rope.rotate(x, x, at, at)[0]) and torch.equal(k, q)
    assert torch.equal(q[:, :, 0], x[:, :, 0])


@every_mixer
@every_scheme
@pytest.mark.parametrize(("context", "impl"), [*((name, "torch") for name in contexts()), ("all of it", "reference")])
def test_outputs_and_gradients_are_those_of_every_pair_at_its_distance(mixer, scheme, context, impl) -> None:
    built, x = build(mixer, scheme, impl=impl), tokens().requires_grad_()
    leaves, results = [x, *built.parameters()], []
    for stand_in in (attend_in_parts, written_out(SCHEMES[scheme][1])):
        with mock.patch.object(layer, "attend_in_parts", stand_in):
            y = built(x, contexts()[context]).y
        results.append((y, *torch.autograd.grad((y * tokens(seed=1)).sum(), leaves, allow_unused=True)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    plain = variants.build(MIXERS[mixer][0], dim=32, heads=4, position="rope", **MIXERS[mixer][1]).double().eval()
    plain.load_state_dict(built.state_dict())  # a rotary model's weights fit, and the map does change its outputs
    assert (plain(x, contexts()[context]).y - results[0][0]).abs().max() > 1e-4


@every_mixer
@every_scheme
def test_small_tiles_give_the_same_with_the_same_gradients(tiles, mixer, scheme) -> None:
    built, x = build(mixer, scheme), tokens().requires_grad_()
    context = contexts()["all of it"]
    results = []
    for impl in ("torch", "reference"):
        built.implementation = impl
        y = built(x, context).y
        results.append((y, *torch.autograd.grad((y * tokens(seed=1)).sum(), [x, *built.parameters()], allow_unused=True)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@every_mixer
@every_scheme
@pytest.mark.parametrize("context", ["one segment", "all of it"])
@torch.no_grad()
def test_pieces_of_one_three_and_seven_tokens_are_the_full_pass(mixer, scheme, context) -> None:
    built, x, told = build(mixer, scheme), tokens(), contexts()[context]
    expected = built(x, told).y
    for piece in (1, 3, 7):
        got = in_pieces(built, x, cut(TIME, piece), told)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10, msg=f"pieces of {piece}")


@every_scheme
@torch.no_grad()
def test_a_prompt_of_any_length_is_continued_with_the_same_map(scheme) -> None:
    built, x = build("gqa", scheme), tokens()
    expected = built(x).y
    for prompt in range(1, TIME - 1):
        torch.testing.assert_close(in_pieces(built, x, [prompt, 1, TIME - prompt - 1]), expected, msg=f"a prompt of {prompt}")
        torch.testing.assert_close(built(x[:, :prompt]).y, expected[:, :prompt], msg=f"{prompt} tokens alone")


@every_mixer
@every_scheme
@torch.no_grad()
def test_segments_and_padded_rows_equal_rows_of_their_own(mixer, scheme) -> None:
    built, told = build(mixer, scheme), contexts()
    valid, ids = told["padded"].valid, told["packed"].segment_ids
    x = tokens()
    y = built(x.masked_fill(~valid.unsqueeze(-1), torch.nan), Context(valid=valid)).y
    packed = built(x, Context(segment_ids=ids)).y
    for row in range(2):
        alone = built(x[row : row + 1, valid[row]]).y
        torch.testing.assert_close(y[row : row + 1, valid[row]], alone, msg=f"row {row}, padded")
        starts = [0, *((ids[row, 1:] != ids[row, :-1]).nonzero().flatten() + 1).tolist(), TIME]
        for start, end in itertools.pairwise(starts):
            alone = built(x[row : row + 1, start:end]).y
            torch.testing.assert_close(packed[row : row + 1, start:end], alone, msg=f"row {row} from {start} to {end}")


@every_mixer
@pytest.mark.parametrize(
    "position", [{"name": "self_extend", "window": 19}, {"name": "rerope", "window": 19}, {"name": "dual_chunk", "chunk": 20, "local": 1}]
)
@torch.no_grad()
def test_rows_within_the_window_or_the_block_are_those_of_rope_bit_for_bit(mixer, position) -> None:
    name, options = MIXERS[mixer]
    x, outputs = tokens().float(), []
    for chosen in (position, "rope"):
        torch.manual_seed(0)
        built = variants.build(name, dim=32, heads=4, position=chosen, impl="torch", **options)
        outputs.append(built(x).y)
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("position", "ranges"),
    [
        ({"name": "self_extend", "window": 5}, [1, 2, 2]),
        ({"name": "rerope", "window": 5, "slowdown": 2.0}, [1, 2, 2]),
        ({"name": "dual_chunk", "chunk": 6, "local": 1}, [1, 2, 3]),
    ],
)
@torch.no_grad()
def test_keys_are_turned_for_no_more_ranges_than_hold_any(position, ranges) -> None:
    built = variants.build("full", dim=32, heads=4, position=position)
    for time, expected in zip((5, 6, 11), ranges, strict=True):
        with mock.patch.object(built.position, "turned", wraps=built.position.turned) as turned:
            built(tokens(time=time).float())
        assert turned.call_count == 2 * expected, f"{time} tokens"


@every_mixer
@pytest.mark.parametrize("position", [{"name": "self_extend", "group": 1, "window": 5}, {"name": "rerope", "window": 4, "slowdown": 1.0}])
@torch.no_grad()
def test_groups_of_one_and_distances_that_are_not_slowed_are_rope(mixer, position) -> None:
    name, options = MIXERS[mixer]
    outputs = []
    for chosen in (position, "rope"):
        torch.manual_seed(0)
        outputs.append(variants.build(name, dim=32, heads=4, position=chosen, **options).double()(tokens()).y)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)


@every_scheme
def test_weights_are_dropped_in_every_range_and_keep_their_mean(scheme) -> None:
    built = build("full", scheme, dropout=0.5)
    x = tokens(1, 12)
    expected = built(x).y[0]
    torch.manual_seed(0)
    dropped = built.train()(x.expand(4000, -1, -1)).y
    assert (dropped.mean(0) - expected).norm() < 0.05 * expected.norm()
    one = dropped[:, -1] - expected[-1]
    assert one.abs().amax(0).min() > 1e-3


@given(data=st.data(), rows=st.integers(1, 3), past=st.integers(0, 9), time=st.integers(1, 9))
def test_a_reach_counts_the_slots_of_the_segment_from_a_position_on(data, rows, past, time) -> None:
    steps = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=past + time, max_size=past + time), min_size=rows, max_size=rows))
    at_keys = torch.tensor(steps).cumsum(1)
    before = torch.tensor([[data.draw(st.integers(0, past + i)) for i in range(time)] for _ in range(rows)])
    since = torch.tensor([[data.draw(st.integers(-2, 40)) for _ in range(time)] for _ in range(rows)])
    expected = [
        [sum(int(at_keys[row, past + i - back] >= since[row, i]) for back in range(int(before[row, i]) + 1)) - 1 for i in range(time)]
        for row in range(rows)
    ]
    assert reach(since, at_keys, before).tolist() == expected


def test_ranges_are_joined_in_more_digits_than_bf16_has() -> None:
    class Three(Scheme):
        hooks = ("relate",)

        def relate(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Any:
            for since in (torch.tensor([[2]]), torch.tensor([[1]]), None):
                yield Part(q, k, since)

    steps = iter([1, 2, 1])  # of 2^-7, the last digit of bf16 at 1; halfway between two steps it rounds to 2

    def attend(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> Output:
        return Output(torch.full((1, 1, 1, 2), 1 + next(steps) / 128).bfloat16(), torch.zeros(1, 1, 1))

    x, at = torch.zeros(1, 1, 3, 2).bfloat16(), torch.arange(3)[None]
    y = attend_in_parts(attend, Relation(Three(2, 1, 2), at[:, 2:], at), x[:, :, 2:], x, x, sight=Sight())
    assert y.dtype == torch.bfloat16
    assert y.unique().tolist() == [1 + 1 / 128]


@pytest.mark.parametrize("scheme", ["self_extend", "rerope", "dual_chunk"])
def test_no_square_of_pairs_is_ever_in_memory(scheme) -> None:
    time, largest = 1500, 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
            return out

    mixer = variants.build("full", dim=8, heads=1, position=SCHEMES[scheme][0])
    with Largest():
        mixer(torch.randn(1, time, 8)).y.sum().backward()
    assert largest < time * time // 8


@pytest.mark.parametrize("mixer", [mixer for mixer in MIXERS if mixer != "mla, absorbed"])
def test_a_cache_holds_what_rope_holds_and_the_positions(mixer) -> None:
    name, options = MIXERS[mixer]
    plain = variants.build(name, dim=32, heads=4, position="rope", **options).double()
    built = build(mixer, "dual_chunk")
    assert built.state_elements(9) == plain.state_elements(9)
    assert built.flops(9) == plain.flops(9)
    states = [m(tokens(2, 9), state=m.init_state(2)).state for m in (built, plain)]
    assert states[0].elements == states[1].elements == 2 * built.state_elements(9)
    assert set(states[0]) - set(states[1]) == {"positions"}
    assert set(built.init_state(2)) == set(states[0])


@pytest.mark.parametrize("name", ["self_extend", "rerope", "dual_chunk"])
@pytest.mark.parametrize(
    ("mixer", "options", "reason"),
    [
        ("sliding_window", {}, "which SlidingWindow does not have: a window keeps distances inside the trained length by itself"),
        (
            "flash",
            {"window": 8},
            "Flash with window=8 cannot take position .*: a window keeps distances inside the trained length by itself",
        ),
        ("linear", {}, "needs the hook 'relate', which Linear does not have"),
        ("full", {"causal": False}, "keys that came before their query, and says nothing of later ones: Full with causal=False"),
        ("mla", {"causal": False}, "LatentAttention with causal=False cannot take it"),
    ],
)
def test_mixers_to_which_a_map_means_nothing_refuse_it_with_the_reason(name, mixer, options, reason) -> None:
    with pytest.raises(NotApplicable, match=reason):
        variants.build(mixer, dim=32, heads=4, position=name, **options)


@pytest.mark.parametrize(
    ("mixer", "impl"), [("full", "sdpa"), ("mqa", "sdpa"), ("mla", "sdpa"), ("flash", "flex"), ("flash", "flash_attn"), ("flash", "sdpa")]
)
def test_kernels_without_a_log_sum_exp_are_passed_over_and_refused_by_name(mixer, impl) -> None:
    assert variants.build(mixer, dim=32, heads=4, position="rerope").implementation == "torch"
    assert variants.build(mixer, dim=32, heads=4, position="rerope", impl="reference").implementation == "reference"
    with pytest.raises(NotUsable, match=f"impl='{impl}' is not usable: ReRoPE attends to ranges .* log-sum-exp .*; use impl='torch'"):
        variants.build(mixer, dim=32, heads=4, position="rerope", impl=impl)


@pytest.mark.parametrize("mixer", ["full", "mla"])
def test_positions_that_decrease_inside_a_segment_are_refused_and_between_segments_and_on_pads_they_may(mixer) -> None:
    built, x = build(mixer, "self_extend"), tokens(1, 4)
    falling = torch.tensor([[5, 6, 4, 7]])
    with pytest.raises(ValueError, match="SelfExtend .* must not decrease inside a segment; in row 0 position 4 follows 6"):
        built(x, Context(positions=falling))
    built(x, Context(positions=falling, segment_ids=torch.tensor([[0, 0, 1, 1]])))
    built(x, Context(positions=falling, valid=torch.tensor([[True, True, False, True]])))
    state = built(x[:, :2], Context(positions=falling[:, :2]), built.init_state(1)).state
    with pytest.raises(ValueError, match="in row 0 position 4 follows 6"):
        built(x[:, 2:], Context(positions=falling[:, 2:]), state)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("self_extend", {"group": 0}, "SelfExtend: group must be at least 1; got 0"),
        ("self_extend", {"window": 0}, "SelfExtend: window must be at least 1; got 0"),
        ("rerope", {"window": 0}, "ReRoPE: window must be at least 1; got 0"),
        ("rerope", {"slowdown": 0.5}, "ReRoPE: slowdown must be at least 1.*; got 0.5"),
        ("rerope", {"slowdown": float("inf")}, "ReRoPE: slowdown must be at least 1, and None .*; got inf"),
        ("rerope", {"trained_length": 1}, "ReRoPE: trained_length must be at least 2; got 1"),
        ("dual_chunk", {"chunk": 8, "local": 8}, "got local=8, chunk=8, trained_length=2048"),
        ("dual_chunk", {"local": -1}, "got local=-1, chunk=1536"),
        ("dual_chunk", {"trained_length": 16, "chunk": 16}, "got local=2, chunk=16, trained_length=16"),
        ("dual_chunk", {"trained_length": 1}, "got local=0, chunk=0, trained_length=1"),
        ("self_extend", {"fraction": 0.4}, "fraction=0.4 of head_dim=8 is 3"),
    ],
)
def test_options_that_cannot_be_are_refused_with_the_numbers(name, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_scheme(name, **options)
