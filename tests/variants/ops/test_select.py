"""Selection: one rule, in torch and in a compiled loop, against sorting by hand; attention to what was chosen, against a mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.variants import oracles
from variants.ops import gathered, inverted, reference, select
from variants.ops.prefix import attend_prefix
from variants.ops.straight_through import lifted


def by_hand(row: list[float], count: int) -> list[int]:
    allowed = [n for n, score in enumerate(row) if score > -math.inf]
    found = sorted(sorted(allowed, key=lambda n: (-row[n], n))[:count])
    return found + [-1] * (count - len(found))


SCORES = st.lists(
    st.lists(st.sampled_from([-math.inf, math.inf, 0.0, -0.0, 1.0, 1.0, 2.5, -3.0]), min_size=7, max_size=7), min_size=1, max_size=5
)


@given(scores=SCORES, count=st.integers(1, 9))
def test_the_best_are_chosen_and_of_equals_the_first(scores, count) -> None:
    expected = torch.tensor([by_hand(row, count) for row in scores])
    for dtype in (torch.float32, torch.float64):
        given = torch.tensor(scores, dtype=dtype)
        assert torch.equal(select.best(given, count), expected)
        assert torch.equal(select._by_threshold(given, count), expected)


@pytest.mark.parametrize("count", [1, 3, 63, 64, 65, 200])
def test_many_are_chosen_as_well_as_few_whatever_the_shape(count) -> None:
    scores = torch.randn(2, 3, 5, 150, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([by_hand(row, count) for row in scores.flatten(0, 2).tolist()]).view(2, 3, 5, count)
    assert torch.equal(select.best(scores, count), expected)
    assert torch.equal(select.best(scores.transpose(0, 1), count), expected.transpose(0, 1))
    assert torch.equal(select.best(scores.bfloat16().float(), count), select._by_threshold(scores.bfloat16(), count))


@given(scores=SCORES, count=st.integers(1, 9))
def test_digit_by_digit_the_same_are_chosen(scores, count) -> None:
    expected = torch.tensor([by_hand(row, count) for row in scores])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "INSERTED", 0)
        for dtype in (torch.float32, torch.float64):
            assert torch.equal(select.best(torch.tensor(scores, dtype=dtype), count), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_digit_of_a_score_counts(dtype) -> None:
    """Neighbouring numbers of either sign, and ties at the score to reach."""
    near = torch.arange(-100, 100).to(dtype) * torch.finfo(dtype).eps
    for base in (1.0, -1.0, 0.0, 1e-30, -1e30):
        row = (base + near)[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
        assert select.best(row, 90).tolist() == by_hand(row.tolist(), 90)


@pytest.mark.parametrize("count", [1, 65])
def test_what_is_no_number_is_refused(count) -> None:
    for wrong in (math.nan, -math.nan):
        with pytest.raises(ValueError, match="NaN"):
            select.best(torch.tensor([1.0, wrong] * 70), count)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        select.best(torch.ones(3), 0)


def test_nothing_flows_back_through_a_choice() -> None:
    assert not select.best(torch.ones(3, requires_grad=True), 2).requires_grad


@pytest.fixture(params=["loops", "gathered", "inverted"])
def loops(request, monkeypatch) -> bool:
    """Every way to attend to chosen blocks; by blocks, which small problems do not suit, in tiles of five."""
    monkeypatch.setattr(inverted, "suits", in_line if request.param == "inverted" else lambda *_: False)
    monkeypatch.setattr(inverted, "ROWS", 5)
    return bool(request.param == "loops")


def in_line(q: Tensor, k: Tensor, chosen: Tensor, place: Tensor, size: int) -> bool:
    assert bool((place.diff() == 1).all())
    return True


def inputs(
    heads: int, kv_heads: int, groups: int, q_time: int, k_time: int, size: int = 4, count: int = 3
) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k and v; blocks chosen at random, those that follow among them; places. Two rows, the second one behind the first."""
    generator = torch.Generator().manual_seed(heads + q_time)
    like = {"generator": generator, "dtype": torch.float64}
    made = [torch.randn(2, n, time, width, **like) for n, time, width in ((heads, q_time, 8), (kv_heads, k_time, 8), (kv_heads, k_time, 6))]
    scores = torch.randn(2, groups, q_time, -(-k_time // size), **like)
    scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < 0.3, -math.inf)
    scores[0, 0, 0] = -math.inf  # a query for which nothing was chosen
    place = torch.arange(k_time - q_time, k_time) - torch.tensor([[0], [min(2, k_time - q_time)]])
    return [x.requires_grad_() for x in made], select.best(scores, count), place


@pytest.mark.parametrize(("heads", "kv_heads", "groups"), [(4, 1, 1), (4, 2, 2), (4, 1, 4), (4, 4, 1), (6, 2, 6)])
@pytest.mark.parametrize(("q_time", "k_time"), [(1, 1), (1, 9), (7, 7), (13, 17), (16, 16)])
def test_chosen_blocks_are_attended_and_nothing_else(loops, heads, kv_heads, groups, q_time, k_time, monkeypatch) -> None:
    monkeypatch.setattr(gathered, "TILE", 500)
    made, chosen, place = inputs(heads, kv_heads, groups, q_time, k_time)
    got = gathered.attend_blocks(*made, chosen, place, size=4, loops=loops)
    expected = reference.attend_blocks(*made, chosen, place, size=4)
    torch.testing.assert_close(got.y, expected.y)
    torch.testing.assert_close(got.lse, expected.lse)
    oracles.same_gradients(got.y, expected.y, made)
    seen = expected.lse > -math.inf
    if seen.any():
        oracles.same_gradients(got.lse[seen], expected.lse[seen], made)
    assert not got.y[~seen].any()


@pytest.mark.parametrize("attend", [reference.attend_blocks, gathered.attend_blocks])
def test_all_blocks_are_full_attention(attend) -> None:
    (q, k, v), _, place = inputs(4, 2, 2, 14, 14)
    every = torch.arange(4).expand(2, 2, 14, 4)
    place = torch.arange(14).expand(2, 14)
    torch.testing.assert_close(attend(q, k, v, every, place, size=4).y, reference.attention(q, k, v))


def test_what_was_not_chosen_may_be_anything(loops) -> None:
    (q, k, v), chosen, place = inputs(4, 1, 1, 14, 14)
    chosen = chosen.masked_fill(chosen == 1, -1)
    k, v = (x.detach().index_fill(2, torch.arange(4, 8), math.nan).requires_grad_() for x in (k, v))
    y = gathered.attend_blocks(q, k, v, chosen, place, size=4, loops=loops).y
    grads = torch.autograd.grad(y.sum(), (q, k, v))
    assert y.isfinite().all() and all(grad.isfinite().all() for grad in grads)
    assert not grads[1][:, :, 4:8].any() and not grads[2][:, :, 4:8].any()


def test_the_operator_is_what_torch_asks_of_operators(loops) -> None:
    (q, k, v), chosen, place = inputs(4, 2, 2, 5, 9)
    example = (torch.unflatten(q, 1, (2, 2)).contiguous(), k, v, chosen, place, 4, 0.3, loops)
    torch.library.opcheck(torch.ops.attnlab.attend_blocks.default, example)


@pytest.mark.parametrize("wrong", ["q", "k", "v", "chosen", "place"])
def test_what_does_not_fit_is_refused_before_a_loop_reads_it(wrong, unchecked) -> None:
    (q, k, v), chosen, place = inputs(4, 2, 2, 5, 9)
    made = {"q": q, "k": k, "v": v, "chosen": chosen, "place": place}
    made[wrong] = made[wrong][..., :-1] if wrong in ("q", "k") else made[wrong][:, :, :-1] if wrong in ("v", "chosen") else place[:, :-1]
    with pytest.raises(ValueError, match="do not go together"):
        gathered.attend_blocks(**made, size=4, loops=True)


def crowd(time: int = 300, size: int = 64, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor, Tensor]:
    """One row that attention block by block suits: q, k and v, choices of two groups and places."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, n, time, 16, generator=generator, dtype=dtype).requires_grad_() for n in (4, 2, 2)]
    own, block = torch.arange(time)[:, None] // size, torch.arange(-(-time // size))
    scores = torch.randn(1, 2, time, len(block), generator=generator)
    scores = scores.masked_fill(block == own, math.inf).masked_fill(block > own, -math.inf)
    assert inverted.suits(torch.unflatten(made[0], 1, (2, 2)), made[1], select.best(scores, 3), torch.arange(time)[None], size)
    return made, select.best(scores, 3), torch.arange(time)[None]


def test_large_blocks_are_attended_one_after_another() -> None:
    made, chosen, place = crowd(dtype=torch.float64)
    got, expected = (attend(*made, chosen, place, size=64) for attend in (gathered.attend_blocks, reference.attend_blocks))
    torch.testing.assert_close(got.y, expected.y)
    torch.testing.assert_close(got.lse, expected.lse)
    oracles.same_gradients(got.y + got.lse.unsqueeze(-1), expected.y + expected.lse.unsqueeze(-1), made)


@torch.no_grad()
def test_what_later_queries_choose_changes_no_digit_of_an_earlier_one() -> None:
    """The products of a block are of as many rows as chose it, unless something is done about it."""
    made, chosen, place = crowd()
    before = gathered.attend_blocks(*made, chosen, place, size=64)
    for t in (65, 130, 200, 257, 299):
        *others, choice = (x.clone() for x in (*made, chosen))
        for tensor in others:
            tensor[:, :, t:] *= 3
        choice[:, :, t:, :2] = -1  # their own block alone
        after = gathered.attend_blocks(*others, choice, place, size=64)
        assert torch.equal(after.y[:, :, :t], before.y[:, :, :t]) and torch.equal(after.lse[:, :, :t], before.lse[:, :, :t]), t


def test_queries_that_do_not_stand_side_by_side_are_attended_for_all_that() -> None:
    made, chosen, place = crowd(dtype=torch.float64)
    for moved in (place.clamp(max=250), place // 2, place + 1, place - 1):
        assert not inverted.suits(torch.unflatten(made[0], 1, (2, 2)), made[1], chosen, moved, 64)
        got, expected = (attend(*made, chosen, moved, size=64) for attend in (gathered.attend_blocks, reference.attend_blocks))
        torch.testing.assert_close(got.y, expected.y)


def test_equal_calls_are_equal_to_the_last_digit() -> None:
    made, chosen, place = crowd()
    runs = []
    for _ in range(3):
        y = gathered.attend_blocks(*made, chosen, place, size=64).y
        runs.append([y, *torch.autograd.grad(y, made, torch.ones_like(y))])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_one_thread_or_many_is_the_same(monkeypatch) -> None:
    monkeypatch.setattr(gathered, "WORTH", 0)
    made, chosen, place = inputs(4, 1, 1, 60, 60)
    results, before = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            y = gathered.attend_blocks(*made, chosen, place, size=4, loops=True).y
            results.append([y, *torch.autograd.grad(y, made, torch.ones_like(y))])
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_fla_attends_chosen_blocks_the_same() -> None:
    naive = pytest.importorskip("fla.ops.nsa.naive")
    made, _, place = inputs(4, 2, 2, 16, 16)
    q, k, v = (x.detach().float() for x in made)
    scores = torch.randn(2, 2, 16, 4).masked_fill(torch.arange(4) * 4 > torch.arange(16)[:, None], -math.inf)
    scores[..., 0] = math.inf
    chosen = select.best(scores, 2)
    place = torch.arange(16).expand(2, 16)
    theirs = naive.naive_nsa_selection(*(x.transpose(1, 2) for x in (q, k, v)), chosen.transpose(1, 2).contiguous(), block_size=4)
    torch.testing.assert_close(
        gathered.attend_blocks(q, k, v, chosen, place, size=4, loops=True).y, theirs.transpose(1, 2), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("tile", [1, 64, 10_000])
def test_a_prefix_is_attended_and_nothing_behind_it(heads, kv_heads, tile, monkeypatch) -> None:
    monkeypatch.setattr("variants.ops.prefix.TILE", tile)
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(2, n, time, width, generator=generator, dtype=torch.float64).requires_grad_()
        for n, time, width in ((heads, 17, 4), (kv_heads, 9, 4), (kv_heads, 9, 3))
    ]
    visible = torch.stack([torch.arange(17) // 2, (torch.arange(17) - 5).clamp(0, 9)]).clamp(max=9)
    watched: list[tuple[slice, Tensor]] = []
    got = attend_prefix(*made, visible, watch=lambda here, weights: watched.append((here, weights.clone())))
    q, k, v = made
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    hidden = (torch.arange(9) >= visible.unsqueeze(-1)).unsqueeze(1)
    logits = (q @ k.mT / 2).masked_fill(hidden, -math.inf)
    weights = logits.softmax(-1).masked_fill(hidden, 0)
    torch.testing.assert_close(got.y, weights @ v)
    torch.testing.assert_close(got.lse, logits.logsumexp(-1))
    oracles.same_gradients(got.y, weights @ v, made)
    seen = got.lse > -math.inf
    oracles.same_gradients(got.lse[seen], logits.logsumexp(-1)[seen], made)
    for here, shown in watched:
        expected = torch.unflatten(weights, 1, (kv_heads, -1))[..., here, :]
        torch.testing.assert_close(shown, expected[..., : shown.shape[-1]])
        assert not expected[..., shown.shape[-1] :].any()
    assert {i for here, _ in watched for i in range(here.start, here.stop)} >= set(range(2, 17))


def test_no_slots_give_nothing() -> None:
    q, nothing = torch.randn(1, 2, 3, 4), torch.empty(1, 1, 0, 4)
    got = attend_prefix(q, nothing, nothing, torch.zeros(1, 3, dtype=torch.long))
    assert not got.y.any() and (got.lse == -math.inf).all()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_offsets_of_chosen_blocks_get_the_gradient_they_would_have_at_zero(groups: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 19, 6, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    place = torch.arange(19).expand(2, -1)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(2 * groups * 19)]).view(2, groups, 19, 3)
    chosen = chosen.masked_fill(chosen * 4 > place[:, None, :, None], -1)
    offsets = torch.zeros(2, groups, 19, 3, dtype=torch.float64, requires_grad=True)
    told = {"size": 4, "scale": 0.4}
    expected = reference.attend_blocks(q, k, v, chosen, place, **told, offsets=offsets)
    found = lifted(gathered.attend_blocks(q, k, v, chosen, place, **told), offsets, q, k, v, chosen, place, **told)
    seen = expected.lse.detach() > -torch.inf
    arriving = torch.randn_like(expected.y), torch.randn_like(expected.lse)
    results = [
        torch.autograd.grad((y * arriving[0]).sum() + (lse[seen] * arriving[1][seen]).sum(), (q, k, v, offsets))
        for y, lse in (found, expected)
    ]
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)
