"""Measured costs: what is counted, how its growth is judged, and that a variant which misstates a cost is caught."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from registry import variants
from tests.variants.conformance import broken, broken_costs, toys
from variants.conformance import scaling
from variants.conformance.costs import Meter, complexity, growth
from variants.conformance.run import judge, subjects_of

BROKEN = [
    (broken.FlopsConstant, scaling.declared_operations_agree_with_counted_ones, r"flops\(2\) is 1024 and fewer tokens take 1024"),
    (
        broken_costs.FlopsNotDoubled,
        scaling.declared_operations_agree_with_counted_ones,
        r"flops\(1\) is 528, but the products with its parameters alone take 1056",
    ),
    (
        broken_costs.PairsHalved,
        scaling.declared_operations_agree_with_counted_ones,
        r"flops\(256\) is \d+, but its matrix products take \d+, 3\.\d\d times that",
    ),
    (
        broken_costs.FlopsOverstated,
        scaling.declared_operations_agree_with_counted_ones,
        r"flops\(1\) is 2112, but 1056 in .* are all there is",
    ),
    (
        broken_costs.FlopsGrowTooSlowly,
        scaling.declared_operations_agree_with_counted_ones,
        r"flops\(time\) grows as T\^1\.6\d, but .* as T\^1\.9\d to T\^1\.9\d",
    ),
    (
        broken_costs.TimeUnderstated,
        scaling.operations_and_time_grow_no_faster_than_declared,
        r"operations grow as T\^1\.\d\d .*; time='T' is T\^1\.00",
    ),
    (broken_costs.TimeUnderstatedInBackward, scaling.operations_and_time_grow_no_faster_than_declared, r"operations grow as T\^1\.\d\d"),
    (broken_costs.TimeUnreadable, scaling.operations_and_time_grow_no_faster_than_declared, "the fact time='linear in T' cannot be read"),
    (
        broken_costs.MemoryUnderstated,
        scaling.memory_grows_no_faster_than_declared,
        r"peak memory grows as T\^1\.\d\d .*; memory='T' is T\^1\.00",
    ),
    (broken_costs.StateOverstated, scaling.the_state_grows_as_declared, r"the state grows as T\^0\.00 .*; state='T' is T\^1\.00"),
    (broken_costs.StateGrows, scaling.the_state_grows_as_declared, r"the state grows as T\^1\.00 .*; state='1' is T\^0\.00"),
    (broken_costs.ChunkChangesOutputs, scaling.the_chunk_size_changes_nothing, "chunk=1: the full pass differs: output 1"),
    (broken_costs.ChunkChangesGradients, scaling.the_chunk_size_changes_nothing, "chunk=1: the gradient of the input differs"),
    (broken_costs.ChunkChangesState, scaling.the_chunk_size_changes_nothing, "chunk=1: the state's part chunks differs"),
]
#: Their numbers are made for the lengths of a full check.
LONG = (broken_costs.PairsHalved, broken_costs.FlopsGrowTooSlowly)
COSTS = (
    scaling.declared_operations_agree_with_counted_ones,
    scaling.operations_and_time_grow_no_faster_than_declared,
    scaling.memory_grows_no_faster_than_declared,
    scaling.the_state_grows_as_declared,
)


@pytest.fixture
def toy():
    """Registers a class as `toy` for one test."""
    with variants.scope():
        yield variants.register("toy")


@pytest.mark.parametrize(
    ("fast", "mixer", "judged", "counter_example"),
    [(fast, *case) for case in BROKEN for fast in (True, False) if not (fast and case[0] in LONG)],
    ids=lambda value: getattr(value, "__name__", {True: "fast", False: "full"}.get(value, "")),
)
def test_a_misstated_cost_is_caught_by_the_property_meant_for_it(toy, fast, mixer, judged, counter_example):
    toy(mixer)
    outcome = judge(judged, subjects_of("toy", {}, fast=fast))
    assert outcome.status == "failed", outcome.detail
    assert re.search(counter_example, outcome.detail), outcome.detail


@pytest.mark.parametrize("judged", [*COSTS, scaling.the_chunk_size_changes_nothing], ids=lambda judged: judged.__name__)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "full"])
def test_a_mixer_that_states_its_costs_truly_passes(toy, judged, fast):
    toy(broken_costs.Running)
    outcome = judge(judged, subjects_of("toy", {}, fast=fast))
    assert outcome.status == "passed", outcome.detail


def test_costs_are_measured_in_the_form_as_given_alone(toy):
    toy(toys.Mean)
    forms = subjects_of("toy", {}, fast=True)
    assert len(forms) > 1
    assert {judge(judged, forms[1:]).detail for judged in COSTS} == {"costs are measured in the form as given"}


def test_a_workspace_of_fixed_size_is_not_taken_for_growth(toy):
    toy(broken_costs.Tiled)
    outcome = judge(scaling.memory_grows_no_faster_than_declared, subjects_of("toy", {}, fast=True))
    assert outcome.status == "passed" and "to 4096 tokens" in outcome.detail, outcome.detail


def test_a_variant_whose_decorator_says_nothing_is_not_judged_on_it(toy):
    @toy
    class Silent(broken_costs.Running):
        time = state = None

    outcome = judge(scaling.operations_and_time_grow_no_faster_than_declared, subjects_of("toy", {}, fast=True))
    assert (outcome.status, outcome.detail) == ("not applicable", "its decorator has no fact time")


def test_lengths_start_beyond_the_blocks_and_blocks_too_large_for_that_are_refused(toy):
    toy(broken_costs.Running)
    judged = scaling.the_state_grows_as_declared
    assert "bytes after 4096 tokens" in judge(judged, subjects_of("toy", {"chunk": 100})).detail
    refused = judge(judged, subjects_of("toy", {"chunk": 1000}))
    assert refused.status == "not applicable" and "blocks of 1000 are too large" in refused.detail


def test_a_block_that_means_something_is_no_chunk(toy):
    @toy
    class Meaningful(broken_costs.ChunkChangesOutputs):
        chunk_options = ()

    assert judge(scaling.the_chunk_size_changes_nothing, subjects_of("toy", {}, fast=True)).status == "not applicable"


def test_chunk_sizes_that_a_variant_refuses_are_named(toy):
    @toy
    class Even(broken_costs.Running):
        def __init__(self, dim, heads, position=None, *, chunk: int = 16, **options):
            if chunk % 2:
                raise ValueError("chunk must be even")
            super().__init__(dim, heads, position, chunk=chunk, **options)

    outcome = judge(scaling.the_chunk_size_changes_nothing, subjects_of("toy", {}))
    assert outcome.status == "passed" and "chunk=2, chunk=16, chunk=64, chunk=70; it refuses chunk=1, chunk=71" in outcome.detail


@pytest.mark.parametrize(
    ("exponents", "noise", "status"),
    [((2.0, 2.0), 1.0, "failed"), ((2.0, 1.0), 1.0, "passed"), ((2.0, 2.0), 30.0, "passed"), ((1.4, 1.4), 1.0, "passed")],
    ids=["a square twice", "a square once", "noise", "within the margin"],
)
def test_the_clock_finds_work_that_is_not_counted_if_it_says_so_clearly_and_twice(toy, monkeypatch, exponents, noise, status):
    toy(broken_costs.Running)
    calls = []

    def seconds(mixer, time):
        calls.append(time)
        return 1e-9 * time ** exponents[calls.count(time) - 1] * (noise if calls.index(time) % 2 else 1.0)

    monkeypatch.setattr(scaling, "_seconds", seconds)
    outcome = judge(scaling.operations_and_time_grow_no_faster_than_declared, subjects_of("toy", {}, fast=True))
    assert outcome.status == status, outcome.detail
    assert "though counted operations grow as T^1" in outcome.detail if status == "failed" else "wall time" in outcome.detail


def test_what_runs_outside_torch_is_counted_in_the_next_implementation(toy):
    @toy
    class Compiled(broken_costs.Running):
        implementations = ("numba", "torch")

        def __init__(self, dim, heads, position=None, *, impl: str = "auto", **options):
            super().__init__(dim, heads, position, **options)
            self.implementation = "numba" if impl == "auto" else impl

        def mix(self, x, context, state):
            assert self.implementation == "torch", "only its outputs would be seen"
            return super().mix(x, context, state)

    assert judge(scaling.declared_operations_agree_with_counted_ones, subjects_of("toy", {}, fast=True)).status == "passed"
    outcome = judge(scaling.declared_operations_agree_with_counted_ones, subjects_of("toy", {"impl": "numba"}, fast=True))
    assert outcome.status == "not applicable" and "numba works outside torch" in outcome.detail


def test_products_are_those_that_torch_counts():
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    x = torch.randn(7, 6, requires_grad=True)
    with FlopCounterMode(display=False) as theirs:
        model(x).sum().backward()
    with Meter(model.parameters()) as meter:
        model(x)
    assert meter.products == meter.projections == 2 * 7 * (6 * 5 + 5 * 3)
    with Meter() as meter:
        model(x).sum().backward()
    assert meter.products == theirs.get_total_flops() and meter.projections == 0


def test_products_in_place_and_with_a_vector_are_products():
    a, b, c = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 5)
    with Meter() as meter:
        c.baddbmm_(a, b)
        assert meter.products == 2 * 2 * 3 * 4 * 5
        c[0].addmm_(a[0], b[0])
        assert meter.products == 3 * 2 * 3 * 4 * 5
        a[0] @ b[0, :, 0] + torch.addmv(c[0, :, 0], a[0], b[0, :, 0])
        assert meter.products == 3 * 2 * 3 * 4 * 5 + 2 * 2 * 3 * 4
        b[0, :, 0] @ b[0, :, 1]
    assert meter.products == 3 * 2 * 3 * 4 * 5 + 2 * 2 * 3 * 4 + 2 * 4


@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_counts_the_pairs_in_sight_and_under_a_mask_all_of_them(masked):
    heads, time, width, value_width = 3, 9, 8, 8
    q, k = (torch.randn(1, heads, time, width, requires_grad=True) for _ in range(2))
    v = torch.randn(1, heads, time, value_width, requires_grad=True)
    mask = torch.ones(time, time, dtype=torch.bool).tril() if masked else None
    pairs = time * time if masked else time * (time + 1) // 2
    with Meter() as meter:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
        assert meter.products == 2 * heads * pairs * (width + value_width)
        y.sum().backward()
    assert meter.products == 2 * heads * pairs * (4 * width + 3 * value_width)


def test_writing_in_place_counts_a_view_does_not_and_a_reduction_counts_what_it_reads():
    x = torch.randn(4, 5)
    with Meter() as meter:
        x[1:].t()
        assert meter.written == 0
        x[1:].add_(1)
        assert meter.written == 15
        x.expand(3, 4, 5).sum()
        assert meter.written == 15 + 60
    assert meter.products == 0


def test_the_peak_is_the_bytes_alive_at_once_a_graph_included():
    x = torch.zeros(1000, requires_grad=True)
    with Meter() as meter:
        y = x + 1
        y = y + 1  # nothing needs the first sum any more
        y = y + 1
        assert meter.peak == 2 * 4000
        z = y.exp().exp()  # the graph keeps the first exponential
        del y
        z = z * 2
    assert meter.peak == 3 * 4000


@given(st.floats(0, 3), st.floats(1e-3, 1e9))
def test_growth_finds_the_exponent_of_a_power_law(exponent, factor):
    found = growth([64, 128, 256, 512], [factor * time**exponent for time in (64, 128, 256, 512)])
    assert found.exponent == pytest.approx(exponent, abs=1e-6) and found.fit == pytest.approx(1.0)


def test_a_poor_fit_shows():
    assert growth([1, 2, 4, 8], [1, 9, 1, 9]).fit < 0.5


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("T", 256), ("T^2", 65536), ("T^1.5", 4096), ("T W", 256), ("W", 1), ("T d^2", 256), ("T log T", 256 * 5.545177)],
)
def test_a_complexity_is_read_as_a_function_of_t(text, value):
    assert complexity(text)(256) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "T+W", "2T", "Time", "T^T", "O(T)"])
def test_a_complexity_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError):
        complexity(text)
