"""The delta rule: the recurrence and the chunks, against products of transition matrices written out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.variants import oracles
from tests.variants.oracles import places, run_ids
from variants.ops import decay, delta, reference

CHUNK = 4
IMPLEMENTATIONS = [
    pytest.param(reference.delta_rule, id="recurrence"),
    pytest.param(partial(delta.delta_rule, chunk=CHUNK), id="chunks"),
]
every_implementation = pytest.mark.parametrize("rule", IMPLEMENTATIONS)
every_kind = pytest.mark.parametrize("kind", ["none", "scalar", "channel"])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch) -> None:
    """Blocks of two chunks, so that states are handed from block to block."""
    monkeypatch.setattr(delta, "BLOCK", 2 * CHUNK)


def inputs(time: int, kind: str = "none", batch: int = 2, largest: float = 2.0) -> list[Tensor]:
    """q, keys of length 1, v, beta in (0, largest) and, unless there is none, log-decays."""
    generator = torch.Generator().manual_seed(time)
    like = {"generator": generator, "dtype": torch.float64}
    q, k, v = (torch.randn(batch, 2, time, width, **like) for width in (3, 3, 5))
    made = [q, torch.nn.functional.normalize(k, dim=-1), v, largest * torch.rand(batch, 2, time, **like)]
    if kind != "none":
        made.append(-torch.rand(batch, 2, time, *([3] if kind == "channel" else []), **like))
    return [x.requires_grad_() for x in made]


def written_out(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, *, sees: Tensor | None = None) -> Tensor:
    time = q.shape[2]
    sees = oracles.matrix(oracles.causal(time, time), len(q), time, time) if sees is None else sees
    return oracles.delta_rule(q, k, v, beta, torch.zeros_like(beta) if log_decay is None else log_decay, sees)


@every_implementation
@every_kind
@pytest.mark.parametrize("time", range(1, 13))
def test_every_length_gives_the_products_of_transitions_and_their_gradients(rule, kind, time) -> None:
    made = inputs(time, kind)
    got, _ = rule(*made)
    expected = written_out(*made)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, made)


@every_implementation
@every_kind
@pytest.mark.parametrize("time", [1, 3, 4, 5, 9, 13])
def test_an_initial_state_passes_all_transitions(rule, kind, time) -> None:
    q, k, v, beta, *rest = made = inputs(time, kind)
    initial = torch.randn(2, 2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    got, state = rule(*made, initial=initial)
    left, rows = initial, []
    for n, step in enumerate(oracles.transitions(k, beta, rest[0] if rest else torch.zeros_like(beta))):
        left = step @ left
        rows.append(q[:, :, n, None, :] @ left)
    expected = written_out(*made) + torch.cat(rows, dim=2)
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, [*made, initial])
    torch.testing.assert_close(state, rule(*made)[1] + left)
    oracles.same_gradients(state, reference.delta_rule(*made, initial=initial)[1], [k, v, beta, *rest, initial])


@every_implementation
@every_kind
@given(time=st.integers(1, 11), lengths=st.lists(st.lists(st.integers(1, 7), max_size=5), min_size=2, max_size=2))
def test_a_segment_sees_nothing_of_the_one_before_it(rule, kind, time, lengths) -> None:
    ids = [run_ids(row, time) for row in lengths]
    made = inputs(time, kind)
    got, _ = rule(*made, before=places(ids))
    expected = written_out(*made, sees=oracles.matrix(oracles.through_window(ids, time), 2, time, time))
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, made)


@every_implementation
@every_kind
@given(time=st.integers(2, 15), cut=st.integers(1, 14), lengths=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=2, max_size=2))
def test_two_pieces_with_the_state_handed_on_are_the_whole(rule, kind, time, cut, lengths) -> None:
    cut = min(cut, time - 1)
    before = places([run_ids(row, time) for row in lengths])
    made = inputs(time, kind)
    whole, end = rule(*made, before=before)
    first, state = rule(*(x[:, :, :cut] for x in made), before=before[:, :cut])
    second, state = rule(*(x[:, :, cut:] for x in made), before=before[:, cut:], initial=state)
    torch.testing.assert_close(torch.cat([first, second], dim=2), whole)
    torch.testing.assert_close(state, end)
    oracles.same_gradients(torch.cat([first, second], dim=2), whole, made)


@every_kind
@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 17, 18, 64])
def test_any_chunk_gives_the_recurrence(kind, chunk) -> None:
    made = inputs(17, kind)
    got, expected = delta.delta_rule(*made, chunk=chunk)[0], reference.delta_rule(*made)[0]
    torch.testing.assert_close(got, expected)
    oracles.same_gradients(got, expected, made)


@every_kind
@pytest.mark.parametrize("strength", [1.0, 2.0])
@pytest.mark.parametrize("chunk", [16, 64, 128])
def test_identical_keys_are_written_over_as_exactly_as_others(kind, strength, chunk) -> None:
    """The system's inverse made of powers is off by 6e9 here."""
    made = inputs(130, kind)
    with torch.no_grad():
        made[1].copy_(made[1][:, :, :1].expand_as(made[1]))
        made[3].fill_(strength)
    expected, _ = reference.delta_rule(*made)
    rounded = [x.detach().float().requires_grad_() for x in made]
    got, _ = delta.delta_rule(*rounded, chunk=chunk)
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(got.double() / size, expected / size, rtol=0, atol=2e-5)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine = torch.autograd.grad((got * weights).sum(), rounded)
    for a, b in zip(mine, torch.autograd.grad((expected * weights).sum(), made), strict=True):
        size = max(float(b.abs().max()), 1.0)  # of what a strength of 1 erases, no decay matters
        torch.testing.assert_close(a.double() / size, b / size, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_decays_from_almost_none_to_almost_all_in_one_chunk_stay_exact(kind) -> None:
    made = inputs(150, kind)
    strengths = torch.tensor([-0.001, -30.0, -0.001, -0.01, -5.0, -0.001, -30.0, -30.0])
    with torch.no_grad():
        made[4].copy_(made[4] * 0 + strengths.repeat(19)[:150].view(150, *[1] * (made[4].ndim - 3)))
    expected, _ = reference.delta_rule(*made)
    rounded = [x.detach().float().requires_grad_() for x in made]
    got, _ = delta.delta_rule(*rounded, chunk=64)
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine = torch.autograd.grad((got * weights).sum(), rounded)
    for a, b in zip(mine, torch.autograd.grad((expected * weights).sum(), made), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5 * float(b.abs().max()))


@pytest.mark.parametrize("kind", ["scalar", "channel"])
@pytest.mark.parametrize("amount", [-1000.0, 0.0])
@pytest.mark.parametrize("changed", [15, 16, 17, 31, 32, 33])
@torch.no_grad()
def test_a_gate_of_the_future_changes_nothing_before_it(kind, amount, changed) -> None:
    made = [x.detach().float() for x in inputs(50, kind)]
    first, _ = delta.delta_rule(*made, chunk=16)
    made[4][:, :, changed:] = amount
    second, _ = delta.delta_rule(*made, chunk=16)
    assert torch.equal(first[:, :, :changed], second[:, :, :changed])


@every_kind
def test_gradients_of_the_chunks_are_those_of_finite_differences(kind) -> None:
    before = torch.tensor([[2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4]])
    initial = torch.randn(1, 2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    rule = partial(delta.delta_rule, before=before, chunk=3)
    assert torch.autograd.gradcheck(lambda s, *made: rule(*made, initial=s), (initial, *inputs(11, kind, 1)), fast_mode=True)


@every_implementation
def test_beta_beyond_one_really_has_negative_eigenvalues(rule) -> None:
    """A state under the one key is multiplied by 1 - beta: flipped by 2, kept by 0, erased by 1."""
    key = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    state = torch.outer(key, torch.arange(1.0, 6, dtype=torch.float64))[None, None]
    for beta, eigenvalue in ((2.0, -1.0), (1.5, -0.5), (1.0, 0.0), (0.5, 0.5), (0.0, 1.0)):
        k = key.expand(1, 1, 1, 3)
        _, last = rule(k, k, torch.zeros(1, 1, 1, 5, dtype=torch.float64), torch.full((1, 1, 1), beta, dtype=torch.float64), initial=state)
        torch.testing.assert_close(last, eigenvalue * state)


@every_implementation
def test_without_decay_and_with_a_decay_of_one_are_the_same(rule) -> None:
    made = inputs(11)
    torch.testing.assert_close(rule(*made)[0], rule(*made, torch.zeros(2, 2, 11, dtype=torch.float64))[0])


@every_implementation
def test_nothing_written_leaves_decay_alone(rule) -> None:
    q, k, v, beta, log_decay = inputs(11, "channel")
    state = torch.randn(2, 2, 3, 5, dtype=torch.float64)
    _, last = rule(q, k, v, torch.zeros_like(beta), log_decay, initial=state)
    torch.testing.assert_close(last, log_decay.sum(2).exp().unsqueeze(-1) * state)


@every_implementation
@every_kind
def test_orthogonal_keys_make_it_gated_linear_attention(rule, kind) -> None:
    """No key finds anything, so that beta v is added; a decay by channel keeps them orthogonal where each key has one channel."""
    q, _, v, beta, *rest = inputs(3, kind)
    k = torch.eye(3, dtype=torch.float64).expand(2, 2, 3, 3)
    expected, _ = decay.gated_linear_attention(q, k, beta.unsqueeze(-1) * v, *rest)
    torch.testing.assert_close(rule(q, k, v, beta, *rest)[0], expected)


@every_implementation
def test_equal_decays_of_all_channels_are_one_number(rule) -> None:
    q, k, v, beta, log_decay = inputs(11, "scalar")
    torch.testing.assert_close(rule(q, k, v, beta, log_decay)[0], rule(q, k, v, beta, log_decay.unsqueeze(-1).expand_as(k))[0])


@torch.no_grad()
def test_thousands_of_reflections_do_not_blow_up() -> None:
    q, k, v, beta = (x.detach().float() for x in inputs(8192, largest=2.0))
    got, _ = delta.delta_rule(q, k, v, beta)
    expected, _ = delta.delta_rule(*(x.double() for x in (q, k, v, beta)))
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(got.double() / size, expected / size, rtol=0, atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
def test_states_are_fp32_or_better_whatever_arrives(autocast) -> None:
    made = [x.detach().bfloat16() for x in inputs(9, "scalar")]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, state = delta.delta_rule(*made)
    assert y.dtype == state.dtype == torch.float32
    expected, _ = reference.delta_rule(*(x.float() for x in made))
    torch.testing.assert_close(y, expected)
