"""Linear attention with and without decay: the recurrence and the chunks, against all pairs written out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.variants import oracles
from tests.variants.oracles import places, run_ids
from variants.ops import decay, reference

CHUNK = 4
IMPLEMENTATIONS = [
    pytest.param(reference.gated_linear_attention, id="recurrence"),
    pytest.param(partial(decay.gated_linear_attention, chunk=CHUNK), id="chunks"),
]
every_implementation = pytest.mark.parametrize("attend", IMPLEMENTATIONS)
every_kind = pytest.mark.parametrize("kind", ["none", "scalar", "channel"])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch) -> None:
    """Blocks of two chunks, so that states are handed from block to block."""
    monkeypatch.setattr(decay, "BLOCK", 2 * CHUNK)


def inputs(time: int, kind: str = "none", batch: int = 2, strength: float = 0.5) -> list[Tensor]:
    """q, k, v and, unless there is none, log-decays around -strength."""
    generator = torch.Generator().manual_seed(time)
    like = {"generator": generator, "dtype": torch.float64}
    made = [torch.randn(batch, 2, time, width, **like) for width in (3, 3, 5)]
    if kind != "none":
        made.append(-2 * strength * torch.rand(batch, 2, time, *([3] if kind == "channel" else []), **like))
    return [x.requires_grad_() for x in made]


def all_pairs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, *, sees: Tensor) -> Tensor:
    return oracles.fading(q, k, v, k.new_zeros(k.shape[:3]) if log_decay is None else log_decay, sees)


def causal(time: int) -> Tensor:
    return oracles.matrix(oracles.causal(time, time), 2, time, time)


def with_state(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor) -> Tensor:
    """The state as what key_dim tokens, one a channel, have written before."""
    before = torch.eye(k.shape[-1], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    k, v = torch.cat([before, k], dim=2), torch.cat([initial, v], dim=2)
    q = torch.cat([torch.zeros_like(before), q], dim=2)
    if log_decay is not None:
        log_decay = torch.cat([torch.zeros_like(before if log_decay.ndim == 4 else before[..., 0]), log_decay], dim=2)
    time = k.shape[2]
    return all_pairs(q, k, v, log_decay, sees=causal(time))[:, :, before.shape[2] :]


@every_implementation
@every_kind
@pytest.mark.parametrize("time", range(1, 19))
def test_every_length_gives_the_sum_over_all_pairs_and_its_gradients(attend, kind, time) -> None:
    made = inputs(time, kind)
    got, _ = attend(*made)
    expected = all_pairs(*made, sees=causal(time))
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, made)


@every_implementation
@every_kind
def test_the_last_state_is_what_is_left_of_every_product(attend, kind) -> None:
    q, k, v, *rest = inputs(11, kind)
    _, state = attend(q, k, v, *rest)
    total = torch.zeros_like(k) if not rest else oracles.by_channel(rest[0], k).cumsum(2)
    expected = torch.einsum("bhtc,bhtc,bhtv->bhcv", k, (total[:, :, -1:] - total).exp(), v)
    torch.testing.assert_close(state, expected)
    oracles.same_gradients(state, expected, [k, v, *rest])


@every_implementation
@every_kind
@pytest.mark.parametrize("time", [1, 4, 5, 17])
def test_an_initial_state_is_read_forgotten_and_differentiated(attend, kind, time) -> None:
    q, k, v, *rest = inputs(time, kind)
    initial = torch.randn(2, 2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    got, _ = attend(q, k, v, *rest, initial=initial)
    expected = with_state(q, k, v, rest[0] if rest else None, initial)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, [q, k, v, *rest, initial])


@every_implementation
@every_kind
@pytest.mark.parametrize("time", [1, 3, 4, 5, 9, 17])
def test_with_a_bonus_a_query_reads_before_its_own_decay(attend, kind, time) -> None:
    q, k, v, *rest = inputs(time, kind)
    bonus = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    got, state = attend(q, k, v, *rest, bonus=bonus)
    # What is read before the decay of token i is what is left after that of token i - 1.
    late, earlier = [x[:, :, 1:] for x in (q,)], [x[:, :, :-1] for x in (k, v, *rest)]
    own = (q * bonus[:, None] * k).sum(-1, keepdim=True) * v
    past = all_pairs(*late, *earlier, sees=causal(time - 1)) if time > 1 else v[:, :, :0]
    expected = own + torch.cat([torch.zeros_like(v[:, :, :1]), past], dim=2)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(state, attend(q, k, v, *rest)[1])
    oracles.same_gradients(got, expected, [*([q, k, v, *rest] if time > 1 else [q, k, v]), bonus])


@every_implementation
@every_kind
@given(time=st.integers(1, 18), lengths=st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=2, max_size=2))
def test_a_segment_sees_nothing_of_the_one_before_it(attend, kind, time, lengths) -> None:
    ids = [run_ids(row, time) for row in lengths]
    q, k, v, *rest = made = inputs(time, kind)
    got, state = attend(*made, before=places(ids))
    expected = all_pairs(*made, sees=oracles.matrix(oracles.through_window(ids, time), 2, time, time))
    torch.testing.assert_close(got, expected)
    last = torch.tensor([[one == row[-1] for one in row] for row in ids])[:, None, :, None]
    torch.testing.assert_close(state, attend(q, k * last, v, *rest)[1])
    oracles.same_gradients(got, expected, made)


@every_implementation
@every_kind
@given(time=st.integers(2, 15), cut=st.integers(1, 14), lengths=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=2, max_size=2))
def test_two_pieces_with_the_state_handed_on_are_the_whole(attend, kind, time, cut, lengths) -> None:
    cut = min(cut, time - 1)
    before = places([run_ids(row, time) for row in lengths])
    bonus = torch.tensor([[0.5, 1, 2], [3, 2, 1]], dtype=torch.float64) if kind == "channel" else None
    made = inputs(time, kind)
    whole, end = attend(*made, before=before, bonus=bonus)
    first, state = attend(*(x[:, :, :cut] for x in made), before=before[:, :cut], bonus=bonus)
    second, state = attend(*(x[:, :, cut:] for x in made), before=before[:, cut:], bonus=bonus, initial=state)
    torch.testing.assert_close(torch.cat([first, second], dim=2), whole)
    torch.testing.assert_close(state, end)
    oracles.same_gradients(torch.cat([first, second], dim=2), whole, made)


@every_kind
@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 17, 18])
@pytest.mark.parametrize("bonus", [False, True])
def test_any_chunk_gives_the_recurrence(kind, chunk, bonus) -> None:
    made = inputs(17, kind)
    more = {"bonus": torch.ones(2, 3, dtype=torch.float64)} if bonus else {}
    got, expected = decay.gated_linear_attention(*made, chunk=chunk, **more)[0], reference.gated_linear_attention(*made, **more)[0]
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, made)


@pytest.mark.parametrize("kind", ["scalar", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bonus", [False, True])
def test_decays_from_almost_none_to_almost_all_in_one_chunk_stay_exact(kind, dtype, bonus, monkeypatch) -> None:
    """e^(-30 * 64) and its inverse are far outside of fp32; and what is left after a strong decay is a difference of large sums."""
    monkeypatch.setattr(decay, "BLOCK", 128)
    made = inputs(150, kind)
    strengths = torch.tensor([-0.001, -30.0, -0.001, -0.01, -5.0, -0.001, -30.0, -30.0])
    with torch.no_grad():
        made[3].copy_(made[3] * 0 + strengths.repeat(19)[:150].view(150, *[1] * (made[3].ndim - 3)))
    expected, _ = reference.gated_linear_attention(*made, bonus=torch.ones(2, 3, dtype=torch.float64) if bonus else None)
    rounded = [x.detach().to(dtype).requires_grad_() for x in made]
    got, _ = decay.gated_linear_attention(*rounded, bonus=torch.ones(2, 3, dtype=dtype) if bonus else None, chunk=64)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine = torch.autograd.grad((got * weights).sum(), rounded)
    theirs = torch.autograd.grad((expected * weights).sum(), made)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_the_gradient_of_a_strong_decay_is_not_lost_beside_those_of_near_tokens(kind) -> None:
    """Every decay is e^-12: its gradient is e^-12 times that of q. Rounding that is relative to q's would leave nothing of it."""
    made = inputs(40, kind)
    with torch.no_grad():
        made[3].fill_(-12)
    (expected,) = torch.autograd.grad(reference.gated_linear_attention(*made)[0].sum(), made[3])
    rounded = [x.detach().float().requires_grad_() for x in made]
    (got,) = torch.autograd.grad(decay.gated_linear_attention(*rounded, chunk=16)[0].sum(), rounded[3])
    size = float(expected.detach().abs().max())
    assert size < 1e-3
    torch.testing.assert_close(got.double() / size, expected / size, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["scalar", "channel"])
@pytest.mark.parametrize("amount", [-1000.0, 0.0])
@pytest.mark.parametrize("changed", [15, 16, 17, 31, 32, 33])
@torch.no_grad()
def test_a_gate_of_the_future_changes_nothing_before_it(kind, amount, changed) -> None:
    made = [x.detach().float() for x in inputs(50, kind)]
    first, _ = decay.gated_linear_attention(*made, chunk=16)
    made[3][:, :, changed:] = amount
    second, _ = decay.gated_linear_attention(*made, chunk=16)
    assert torch.equal(first[:, :, :changed], second[:, :, :changed])


@every_kind
def test_gradients_of_the_chunks_are_those_of_finite_differences(kind) -> None:
    before = torch.tensor([[2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4]])
    initial = torch.randn(1, 2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    bonus = torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6), requires_grad=True)
    attend = partial(decay.gated_linear_attention, before=before, chunk=3)
    assert torch.autograd.gradcheck(
        lambda s, u, *made: attend(*made, initial=s, bonus=u), (initial, bonus, *inputs(11, kind, 1)), fast_mode=True
    )


def test_equal_decays_of_all_channels_are_one_number() -> None:
    q, k, v, log_decay = inputs(17, "scalar")
    one, _ = decay.gated_linear_attention(q, k, v, log_decay, chunk=8)
    each, _ = decay.gated_linear_attention(q, k, v, log_decay.unsqueeze(-1).expand_as(k), chunk=8)
    torch.testing.assert_close(one, each)


def test_a_bonus_of_one_over_a_constant_decay_is_the_inclusive_reading() -> None:
    """GLA with a constant decay a equals RWKV-6 with r = q a and u = 1 / a."""
    q, k, v = inputs(17)
    rates = torch.tensor([[0.9, 0.5, 0.7], [0.99, 0.2, 0.8]], dtype=torch.float64)
    log_decay = rates.log()[:, None].expand_as(k)
    inclusive, _ = decay.gated_linear_attention(q, k, v, log_decay, chunk=8)
    exclusive, _ = decay.gated_linear_attention(q * rates[:, None], k, v, log_decay, bonus=1 / rates, chunk=8)
    torch.testing.assert_close(inclusive, exclusive)


@pytest.mark.parametrize("autocast", [False, True])
def test_sums_do_not_stop_growing_in_bf16(autocast) -> None:
    ones = torch.ones(1, 1, 4096, 1, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, state = decay.gated_linear_attention(ones, ones, ones)
    assert y.dtype == state.dtype == torch.float32
    assert y[0, 0, :, 0].tolist() == list(range(1, 4097))
    assert state.item() == 4096


def test_only_states_between_blocks_are_kept_for_the_backward_pass(monkeypatch) -> None:
    monkeypatch.setattr(decay, "BLOCK", 16)
    made = inputs(64, "channel")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        decay.gated_linear_attention(*made, chunk=8)
    given = {x.untyped_storage().data_ptr() for x in made}
    extra = sum(x.numel() for x in kept if x.untyped_storage().data_ptr() not in given)
    assert extra <= 4 * 2 * 2 * 3 * 5, "four states of two rows and two heads"


def test_a_log_decay_beyond_all_bounds_leaves_nothing_and_spoils_nothing_after_it() -> None:
    for kind in ("scalar", "channel"):
        for amount in (-1e18, -3e38, -float("inf")):
            q, k, v, log_decay = (x.detach().float() for x in inputs(20, kind))
            log_decay[:, :, 5] = amount
            got, _ = decay.gated_linear_attention(q, k, v, log_decay, chunk=16)
            expected, _ = reference.gated_linear_attention(q, k, v, log_decay)
            torch.testing.assert_close(got, expected)


def test_decays_of_nothing_have_their_gradient_under_a_bonus() -> None:
    """A running sum less its last term may round to more than the sum before it, and what is held at 0 has no gradient."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        q, k, v = (torch.randn(1, 1, 16, 2, dtype=torch.float64, generator=generator) for _ in range(3))
        log_decay = -torch.rand(1, 1, 16, dtype=torch.float64, generator=generator)
        log_decay = log_decay.masked_fill(torch.rand(1, 1, 16, generator=generator) < 0.5, 0).requires_grad_()
        bonus = torch.ones(1, 2, dtype=torch.float64)
        got, expected = (
            torch.autograd.grad(core(q, k, v, log_decay, bonus=bonus)[0].sum(), log_decay)[0]
            for core in (decay.gated_linear_attention, reference.gated_linear_attention)
        )
        torch.testing.assert_close(got, expected)


def test_what_is_recomputed_by_checkpointing_is_recomputed_once() -> None:
    made = inputs(20, "channel")
    expected = torch.autograd.grad(decay.gated_linear_attention(*made)[0].sum(), made)
    y = torch.utils.checkpoint.checkpoint(lambda *made: decay.gated_linear_attention(*made)[0], *made, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(y.sum(), made), expected, strict=True):
        torch.testing.assert_close(a, b)
