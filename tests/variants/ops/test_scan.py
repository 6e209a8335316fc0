"""The selective scan: its recurrence, its chunks and its compiled loops, against every pair of tokens written out, and public ones."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.variants import oracles
from tests.variants.oracles import places, run_ids
from variants.conformance.costs import Meter
from variants.ops import reference, scan, scan_loops, scan_numba, threads

CHUNK, STATE = 4, 3
IMPLEMENTATIONS = [
    pytest.param(reference.selective_scan, id="recurrence"),
    pytest.param(partial(scan.selective_scan, chunk=CHUNK), id="chunks"),
    pytest.param(scan_numba.selective_scan, id="loops"),
]
every_implementation = pytest.mark.parametrize("run", IMPLEMENTATIONS)
every_sign = pytest.mark.parametrize("signed", [False, True])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch) -> None:
    """Blocks of two chunks, so that states are handed from block to block."""
    monkeypatch.setattr(scan, "BLOCK", 2 * CHUNK)


def inputs(time: int, channels: int = 5, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, step, rate, write, read."""
    like = {"generator": torch.Generator().manual_seed(time), "dtype": dtype}
    x, write, read = (torch.randn(batch, time, width, **like) for width in (channels, STATE, STATE))
    step, rate = torch.rand(batch, time, channels, **like), -2 * torch.rand(channels, STATE, **like)
    return [part.requires_grad_() for part in (x, step, rate, write, read)]


def start(channels: int = 5, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, STATE, dtype=torch.float64, generator=generator).requires_grad_()


def all_pairs(made: list[Tensor], signed: bool = False, initial: Tensor | None = None, ids: list[list[int]] | None = None) -> Tensor:
    """For each row and token the sum over what was written before it, in its segment, times every decay in between."""
    x, step, rate, write, read = made
    time = x.shape[1]
    decay = (step.unsqueeze(-1) * rate).exp()
    decay = 2 * decay - 1 if signed else decay
    starts = torch.tensor([[i == 0 or row[i] != row[i - 1] for i in range(time)] for row in ids or [[0] * time] * len(x)])
    run = starts.cumsum(1)
    total = torch.zeros_like(x)
    for j in range(time):
        left = torch.cat([torch.ones_like(decay[:, :1]), decay[:, j + 1 :].cumprod(1)], dim=1)
        own = (step[:, j] * x[:, j])[:, None, :, None] * write[:, j, None, None, :]
        seen = ((left * own) @ read[:, j:].unsqueeze(-1)).squeeze(-1) * (run[:, j:] == run[:, j : j + 1]).unsqueeze(-1)
        total = total + torch.cat([torch.zeros_like(x[:, :j]), seen], dim=1)
    if initial is not None:
        total = total + ((decay.cumprod(1) * initial[:, None]) @ read.unsqueeze(-1)).squeeze(-1)
    return total


@every_implementation
@every_sign
@pytest.mark.parametrize("time", [1, 2, 3, 4, 5, 8, 9, 17])
def test_every_length_gives_the_sum_over_all_pairs_and_its_gradients(run, signed, time) -> None:
    made = inputs(time)
    got, expected = run(*made, signed=signed)[0], all_pairs(made, signed)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, made)


@every_implementation
@every_sign
@pytest.mark.parametrize("time", [1, 4, 5, 17])
def test_an_initial_state_is_read_forgotten_and_differentiated(run, signed, time) -> None:
    made, initial = inputs(time), start()
    got, expected = run(*made, signed=signed, initial=initial)[0], all_pairs(made, signed, initial)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, [*made, initial])


@every_implementation
@every_sign
@given(time=st.integers(1, 14), lengths=st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=2, max_size=2))
def test_a_segment_sees_nothing_of_the_one_before_it(run, signed, time, lengths) -> None:
    ids = [run_ids(row, time) for row in lengths]
    made = inputs(time)
    got, expected = run(*made, signed=signed, before=places(ids))[0], all_pairs(made, signed, ids=ids)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, made)


@every_implementation
@every_sign
@given(time=st.integers(2, 15), cut=st.integers(1, 14), lengths=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=2, max_size=2))
def test_two_pieces_with_the_state_handed_on_are_the_whole(run, signed, time, cut, lengths) -> None:
    cut = min(cut, time - 1)
    before = places([run_ids(row, time) for row in lengths])
    x, step, rate, write, read = made = inputs(time)
    whole, end = run(*made, before=before, signed=signed)
    timed = (x, step, write, read)
    a, b, c, d = (part[:, :cut] for part in timed)
    first, state = run(a, b, rate, c, d, before=before[:, :cut], signed=signed)
    a, b, c, d = (part[:, cut:] for part in timed)
    second, state = run(a, b, rate, c, d, before=before[:, cut:], initial=state, signed=signed)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(state, end)
    oracles.same_gradients(torch.cat([first, second], dim=1), whole, made)


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 17, 18])
@every_sign
def test_any_chunk_gives_the_recurrence(chunk, signed) -> None:
    made = inputs(17)
    torch.testing.assert_close(scan.selective_scan(*made, chunk=chunk, signed=signed)[0], reference.selective_scan(*made, signed=signed)[0])


@every_sign
@pytest.mark.parametrize("channels", [1, scan_loops.LANES - 1, scan_loops.LANES, scan_loops.LANES + 1, 3 * scan_loops.LANES])
@pytest.mark.parametrize("time", [scan_loops.SEGMENT - 1, scan_loops.SEGMENT, 2 * scan_loops.SEGMENT + 1])
def test_loops_do_any_number_of_channels_over_any_number_of_kept_states(channels, time, signed) -> None:
    made, initial = inputs(time, channels), start(channels)
    before = places([run_ids([5, 20, 1, 40], time), run_ids([time], time)])
    got, expected = (f(*made, before=before, initial=initial, signed=signed) for f in (scan_numba.selective_scan, reference.selective_scan))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        oracles.same_gradients(ours, theirs, [*made, initial])


@every_sign
def test_the_gradient_of_the_operator_is_the_numerical_one(signed) -> None:
    given = [*inputs(5, 2), start(2)]

    def run(x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        return scan_numba.selective_scan(x, step, rate, write, read, initial=initial, signed=signed)

    assert torch.autograd.gradcheck(run, given)


def test_the_operators_are_what_torch_asks_of_operators() -> None:
    x, step, rate, write, read = inputs(5, 2)
    starts = torch.tensor([[True, False, False, True, False]] * 2)
    example = (x, step, rate.mT.contiguous(), write, read, starts, start(2).mT.contiguous(), True)
    torch.library.opcheck(torch.ops.attnlab.selective_scan.default, example)


def test_compiled_it_is_the_same(unchecked) -> None:
    made = inputs(40)
    torch._dynamo.reset()
    got, expected = torch.compile(scan_numba.selective_scan, fullgraph=True, backend="aot_eager")(*made), scan_numba.selective_scan(*made)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    oracles.same_gradients(got[0], expected[0], made)


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    made = [part.detach() for part in inputs(40)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = scan_numba.selective_scan(*map(mode.from_tensor, made))
    for ours, real in zip(fake, scan_numba.selective_scan(*made), strict=True):
        assert ours.shape == real.shape and ours.dtype == real.dtype


def test_the_exponential_is_right_to_two_units_in_the_last_place() -> None:
    """Rates of -1, and an input at the first token alone: the state is the exponential of the second step."""
    exponents = torch.cat([torch.linspace(0, 80, 20001), torch.logspace(-8, 1.9, 2000)])
    x = torch.stack([torch.ones_like(exponents), torch.zeros_like(exponents)])[None]
    step = torch.stack([torch.ones_like(exponents), exponents])[None]
    one = torch.ones(1, 2, 1)
    got = scan_numba.selective_scan(x, step, -torch.ones(len(exponents), 1), one, one)[0][0, 1]
    right = (-exponents.double()).exp()
    assert float(((got - right) / right).abs().max()) < 2 * 2.0**-23


@pytest.mark.parametrize("steps", ["as it begins", "long", "short"])
def test_in_fp32_a_whole_scan_is_right_to_five_digits(steps) -> None:
    """Rates and steps as Mamba begins with them, 512 tokens, every length of memory."""
    generator = torch.Generator().manual_seed(0)
    x, write, read = (torch.randn(2, 512, width, generator=generator) for width in (64, 16, 16))
    low, high = {"as it begins": (-3, -1), "long": (-5, -4), "short": (-1, 1)}[steps]
    step = 10 ** (low + (high - low) * torch.rand(2, 512, 64, generator=generator))
    rate = -torch.arange(1.0, 17).repeat(64, 1)
    made = [part.requires_grad_() for part in (x, step, rate, write, read)]
    exact = [part.detach().double().requires_grad_() for part in made]
    got, right = scan_numba.selective_scan(*made)[0], reference.selective_scan(*exact)[0]
    weights = torch.randn(got.shape, generator=generator)
    pairs = [(got, right)]
    pairs += zip(torch.autograd.grad(got, made, weights), torch.autograd.grad(right, exact, weights.double()), strict=True)
    for ours, theirs in pairs:
        assert float((ours - theirs).detach().abs().max() / theirs.detach().abs().max()) < 1e-5


@pytest.mark.parametrize("run", [scan.selective_scan, scan_numba.selective_scan])
def test_autocast_and_bf16_change_nothing_but_the_input(run) -> None:
    made = [part.detach().bfloat16() for part in inputs(20)]
    expected = run(*(part.float() for part in made))[0]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(*made)[0], expected, rtol=0, atol=0)
    assert run(*made)[0].dtype == torch.float32


@every_implementation
def test_the_future_changes_no_bit_of_the_past(run) -> None:
    made = [part.detach() for part in inputs(40, 40)]
    before = run(*made)[0][:, :33]
    for part in (made[0], made[1], made[3], made[4]):
        part[:, 33:] = 1e4
    assert torch.equal(run(*made)[0][:, :33], before)


def test_what_is_not_a_number_stays_so() -> None:
    for n in range(5):
        made = [part.detach() for part in inputs(3)]
        made[n].view(-1)[0] = torch.nan
        assert scan_numba.selective_scan(*made)[0].isnan().any(), n


@pytest.mark.parametrize("fast", [scan.selective_scan, scan_numba.selective_scan])
def test_training_keeps_no_tensor_of_time_by_channels_by_state(fast, monkeypatch) -> None:
    """Twice the length adds a few numbers for each token and channel, and not as many as a state has."""
    monkeypatch.setattr(scan, "BLOCK", 256)
    channels, size, peaks = 32, 16, []
    for time in (1024, 2048):
        generator = torch.Generator().manual_seed(0)
        made = [torch.rand(1, time, width, generator=generator) for width in (channels, channels, size, size)]
        made.insert(2, -torch.rand(channels, size, generator=generator))
        for part in made:
            part.requires_grad_()
        meter = Meter()
        with meter:
            torch.autograd.grad(fast(*made)[0].sum(), made)
        peaks.append(meter.peak)
    grown = (peaks[1] - peaks[0]) / (1024 * channels * 4)
    assert grown < size / 2, grown


def test_one_thread_or_many_is_the_same(monkeypatch) -> None:
    monkeypatch.setattr(scan_numba, "WORTH", 0)
    made = inputs(70, 100, dtype=torch.float32)
    weights = torch.randn(2, 70, 100)
    results, before = [], torch.get_num_threads()
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        try:
            y = scan_numba.selective_scan(*made)[0]
            results.append([y, *torch.autograd.grad(y, made, weights)])
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("team", ["torch's", "none"])
def test_tasks_are_spread_once_each_and_errors_come_back(team, monkeypatch) -> None:
    if team == "none":
        monkeypatch.setattr(threads, "_team", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        done: list[int] = []
        threads.spread(lambda first, end: done.extend(range(first, end)), 10)
        assert sorted(done) == list(range(10))

        def fail(first: int, end: int) -> None:
            raise MemoryError(f"{first} to {end}")

        with pytest.raises(MemoryError):
            threads.spread(fail, 10)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_scans_too() -> None:
    made = [part.detach() for part in inputs(40, 64)]
    expected = scan_numba.selective_scan(*made)[0]
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        os._exit(0 if torch.equal(scan_numba.selective_scan(*made)[0], expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("step", (2, 7, 4)),
        ("step", (1, 7, 5)),
        ("rate", (4, 3)),
        ("write", (2, 6, 3)),
        ("read", (2, 7, 2)),
        ("initial", (2, 5, 1)),
        ("initial", (2, 3, 5)),
        ("before", (2, 6)),
    ],
)
def test_what_does_not_fit_is_refused_before_a_loop_reads_it(name, shape, unchecked) -> None:
    x, step, rate, write, read = inputs(7)
    made = {"step": step, "rate": rate, "write": write, "read": read, "initial": start(), "before": torch.ones(2, 7, dtype=torch.long)}
    made[name] = torch.ones(shape, dtype=made[name].dtype)
    with pytest.raises(ValueError, match=f"{name} must be"):
        scan_numba.selective_scan(x, **made)


@every_implementation
def test_a_step_of_nothing_stands_still_at_any_rate(run) -> None:
    x, step, rate, write, read = (part.detach() for part in inputs(7))
    rate = torch.full_like(rate, torch.finfo(rate.dtype).min)
    step[:, 3:] = 0
    y, last = run(x, step, rate, write, read)
    torch.testing.assert_close(last, run(x[:, :3], step[:, :3], rate, write[:, :3], read[:, :3])[1])
    assert y.isfinite().all()


def test_mambapy_scans_the_same() -> None:
    pscan = pytest.importorskip("mambapy.pscan").pscan
    x, step, rate, write, read = made = inputs(32, dtype=torch.float32)
    states = pscan((step.unsqueeze(-1) * rate).exp(), (step * x).unsqueeze(-1) * write.unsqueeze(2))
    got, expected = scan_numba.selective_scan(*made)[0], (states @ read.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    for a, b in zip(torch.autograd.grad(got, made, weights), torch.autograd.grad(expected, made, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
