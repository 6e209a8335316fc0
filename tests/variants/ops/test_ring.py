"""Attention of rows that are split over ranks, all of them in this process, against attention of whole rows in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from variants.ops import cpu_kernel, reference, ring
from variants.ops.attention import CAUSAL, Bias, Fade, Sight
from variants.ops.ranks import Ring, Simulated

TIME = 40


def problem(time: int, *, heads: int = 4, kv_heads: int = 2, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v with value heads of a width of their own."""
    torch.manual_seed(0)
    shapes = (batch, heads, time, 8), (batch, kv_heads, time, 8), (batch, kv_heads, time, 6)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def split(x: Tensor, held: Ring) -> Tensor:
    """What is here of (batch, heads, time, ...)."""
    return held.part(x.transpose(1, 2)).transpose(1, 2)


def whole(x: Tensor, held: Ring) -> Tensor:
    """Whole rows again."""
    return held.whole(x.transpose(1, 2)).transpose(1, 2)


def segments(time: int) -> dict[str, Tensor]:
    """before and after of two rows: one of segments of 1, 5 and the rest; one whose last token is a segment, as a pad may be."""
    before = torch.tensor([[0, *range(5), *range(time - 6)], [*range(time - 1), 0]])
    after = torch.tensor([[0, *range(4, -1, -1), *range(time - 7, -1, -1)], [*range(time - 2, -1, -1), 0]])
    return {"before": before, "after": after}


SIGHTS = {
    "causal": CAUSAL,
    "everything": Sight(causal=False),
    "window": Sight(window=7),
    "window of one": Sight(window=1),
    "window that spans slices": Sight(window=23),
    "window to both sides": Sight(causal=False, window=6),
    "sinks": Sight(window=5, sinks=3),
    "segments": Sight(before=segments(TIME)["before"]),
    "segments, window": Sight(window=9, before=segments(TIME)["before"]),
    "segments, sinks": Sight(window=4, sinks=2, before=segments(TIME)["before"]),
    "segments to both sides": Sight(causal=False, **segments(TIME)),
    "segments to both sides, window": Sight(causal=False, window=8, **segments(TIME)),
}


def expect_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tensors: list[Tensor]) -> None:
    """Outputs, log-sum-exps, and what both send back to every tensor."""
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)
    arriving = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) for x in expected]
    seen = expected[1].detach() > -torch.inf
    results = []
    for y, lse in (found, expected):
        loss = (y * arriving[0]).sum() + (lse[seen] * arriving[1][seen]).sum()
        results.append(torch.autograd.grad(loss, tensors))
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SIGHTS)
def test_equals_attention_of_whole_rows_with_all_gradients(name: str, size: int) -> None:
    tensors, held = problem(TIME), Ring(Simulated(size), TIME)
    y, lse = ring.attend(*(split(x, held) for x in tensors), held, sight=SIGHTS[name])
    expect_equal((whole(y, held), whole(lse, held)), reference.attend(*tensors, sight=SIGHTS[name]), tensors)


@pytest.mark.parametrize("time", [8, 9, 11, 13, 17])
@pytest.mark.parametrize("size", [2, 4])
def test_lengths_that_the_ranks_do_not_divide(time: int, size: int) -> None:
    tensors, held = problem(time), Ring(Simulated(size), time)
    y, lse = ring.attend(*(split(x, held) for x in tensors), held)
    expect_equal((whole(y, held), whole(lse, held)), reference.attend(*tensors), tensors)


def test_eight_keys_in_two_shards_give_the_gradients_of_one_device_by_finite_differences(unchecked: None) -> None:
    # Wrong where a shard's own softmax statistics stand for those of the row: dq and dk were off by a tenth, dv right, and nothing raised.
    held = Ring(Simulated(2), 8)
    for causal in (True, False):
        tensors = problem(8, heads=2, kv_heads=1, batch=1)

        def attend(*given: Tensor, causal: bool = causal) -> tuple[Tensor, Tensor]:
            return ring.attend(*(split(x, held) for x in given), held, sight=Sight(causal=causal))

        assert torch.autograd.gradcheck(attend, tensors)


def test_biases_fades_and_sinks_are_those_of_whole_rows() -> None:
    tensors, held = problem(TIME), Ring(Simulated(3), TIME)
    table = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    sums = (-0.2 * torch.rand(2, 4, TIME, dtype=torch.float64)).cumsum(-1).requires_grad_()
    positions = (2 * torch.arange(TIME)).expand(2, TIME)

    def bucket(at_queries: Tensor, at_keys: Tensor, weights: Tensor) -> Tensor:
        return weights[:, ((at_queries.unsqueeze(-1) - at_keys.unsqueeze(-2)) // 2).clamp(0, 7)].movedim(0, 1)

    bias = Bias(bucket, (positions, positions), (table,))
    expected = reference.attend(*tensors, bias=bias, sink=sink, fade=Fade(sums, sums), scale=0.3)
    here = split(sums, held)
    y, lse = ring.attend(*(split(x, held) for x in tensors), held, bias=bias, sink=sink, fade=Fade(here, here), scale=0.3)
    expect_equal((whole(y, held), whole(lse, held)), expected, [*tensors, table, sink, sums])


def test_a_slice_in_which_nothing_is_seen_first_leaves_no_trace() -> None:
    # Logits of 1e4 in the slice that comes last: what was added up before must vanish, and not stay as e^0.
    q, k, v = (x.detach() for x in problem(16))
    k[:, :, :4] *= 1e4
    held = Ring(Simulated(4), 16)
    y = whole(ring.attention(split(q, held), split(k, held), split(v, held), held), held)
    torch.testing.assert_close(y, reference.attention(q, k, v), rtol=1e-9, atol=1e-9)


def test_partial_outputs_of_half_precision_are_added_up_in_full() -> None:
    # One rounding to bf16 at the end, not one for each of eight slices.
    tensors = [x.detach().bfloat16() for x in problem(64, dtype=torch.float32)]
    held = Ring(Simulated(4), 64)
    y = whole(ring.attention(*(split(x, held) for x in tensors), held), held)
    assert y.dtype == torch.bfloat16
    exact = reference.attention(*(x.double() for x in tensors))
    assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="give 8 tokens or more"):
        Ring(Simulated(4), 7)
    q, k, v = problem(16)
    held = Ring(Simulated(2), 16)
    for options in ({"dropout": 0.1}, {"sight": Sight(window=3, sinks=1, causal=False)}, {"sight": Sight(window=3, sinks=1, kept=1)}):
        with pytest.raises(ValueError, match="knows no dropout"):
            ring.attend(split(q, held), split(k, held), split(v, held), held, **options)


def test_every_rank_has_as_many_tokens_and_as_many_pairs_in_sight() -> None:
    held = Ring(Simulated(4), 1024)
    spans = [[held.span(n) for n in held.slices(rank)] for rank in range(4)]
    assert [held.length(rank) for rank in range(4)] == [256] * 4
    assert len({sum(i + 1 for span in pair for i in range(span.start, span.stop)) for pair in spans}) == 1


def test_what_comes_before_a_slice_is_found_across_slices_shorter_than_it() -> None:
    held = Ring(Simulated(4), 11)
    row = torch.arange(1.0, 12.0).view(1, 11, 1)
    for (number, _), found in zip(held.here, held.ahead(held.part(row), 3), strict=True):
        start = held.span(number).start
        assert found.flatten().tolist() == ([0.0] * 3 + list(range(1, start + 1)))[-3:]
    assert [found.shape for found in held.ahead(held.part(row), 0)] == [(1, 0, 1)] * 8
    torch.testing.assert_close(held.sums(held.part(row)), held.part(row.cumsum(1)))


def test_torchs_kernel_does_what_is_relied_on_and_the_ring_does_without_it(monkeypatch) -> None:
    assert cpu_kernel.usable()
    tensors, held = [x[..., :6] for x in problem(TIME)], Ring(Simulated(3), TIME)
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = []
    for usable in (True, False):
        monkeypatch.setattr(cpu_kernel, "usable", lambda usable=usable: usable)
        y = whole(ring.attention(*(split(x, held) for x in leaves), held), held)
        results.append((y, torch.autograd.grad(y.square().sum(), leaves)))
    for mine, right in zip((results[0][0], *results[0][1]), (results[1][0], *results[1][1]), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)
