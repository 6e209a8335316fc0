"""DeepSeek sparse attention: its naive form, what its indexer learns from, and the cases in which it is full attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from registry import variants
from variants.contract import Context
from variants.ops import reference

DIM, HEADS = 16, 4


def build(**options):
    torch.manual_seed(0)
    mixer = variants.build("dsa", dim=DIM, heads=HEADS, **{"count": 5, "index_heads": 3, **options}).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def tokens(time: int = 23, batch: int = 2) -> Tensor:
    return torch.randn(batch, time, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def scores(mixer, x: Tensor) -> Tensor:
    """I, one head and pair at a time."""
    width, heads = mixer.head_dim, mixer.index_heads
    k = x @ mixer.index_keys.weight.T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    k = k * mixer.index_norm.weight + mixer.index_norm.bias
    total = 0
    for head in range(heads):
        q = x @ mixer.index_queries.weight[head * width : (head + 1) * width].T
        weight = x @ mixer.index_weights.weight[head] / math.sqrt(heads)
        total = total + weight.unsqueeze(-1) * torch.relu(q @ k.mT / math.sqrt(width))
    return total


def chosen(mixer, x: Tensor) -> Tensor:
    """Which pairs are attended, (batch, time, time)."""
    found, seen = scores(mixer, x).detach(), torch.zeros(len(x), x.shape[1], x.shape[1], dtype=torch.bool)
    for b in range(len(x)):
        for t in range(x.shape[1]):
            ranked = sorted(range(t + 1), key=lambda s: (-float(found[b, t, s]), s))
            seen[b, t, ranked if mixer.stage == "dense" else ranked[: mixer.count]] = True
    return seen


def naive(mixer, x: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs, loss)."""
    q, k, v, _ = mixer.projections(x, Context(), None, None, None)
    k, v = (z.repeat_interleave(HEADS // mixer.kv_heads, 1) for z in (k, v))
    seen = chosen(mixer, x)
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen.unsqueeze(1), -math.inf).softmax(-1)
    wanted = weights.detach().mean(1)
    said = scores(mixer, x.detach()).masked_fill(~seen, -math.inf).log_softmax(-1)
    loss = (wanted * (wanted.log() - said))[seen].sum() / seen.shape[0] / seen.shape[1]
    return mixer.projections.back(weights @ v), loss


@pytest.mark.parametrize("impl", ["numba", "torch", "reference"])
@pytest.mark.parametrize(
    "options", [{}, {"kv_heads": 1}, {"kv_heads": 2, "count": 1}, {"stage": "dense"}, {"stage": "dense", "kv_heads": 1}]
)
def test_the_layer_and_its_loss_are_their_naive_form(options, impl) -> None:
    mixer, x = build(impl=impl, **options), tokens().requires_grad_()
    y, _, aux = mixer(x)
    expected, loss = naive(mixer, x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(aux["loss/indexer"], loss)
    wanted = [x, *mixer.parameters()]
    weights = torch.randn(y.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad((y * weights).sum() + aux["loss/indexer"], wanted)
    for a, b in zip(got, torch.autograd.grad((expected * weights).sum() + loss, wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_the_loss_teaches_the_indexer_alone_and_the_outputs_teach_it_nothing() -> None:
    mixer, x = build(), tokens().requires_grad_()
    y, _, aux = mixer(x)
    for output, its_own in ((aux["loss/indexer"], True), (y.sum(), False)):
        parts = dict(mixer.named_parameters())
        grads = torch.autograd.grad(output, [x, *parts.values()], allow_unused=True, retain_graph=True)
        for name, grad in zip(["x", *parts], grads, strict=True):
            assert (grad is not None and bool(grad.any())) == (name.startswith("index_") == its_own), name


def test_what_a_state_holds_of_the_indexer_has_no_history() -> None:
    mixer, x = build(), tokens().requires_grad_()
    state = mixer(x, state=mixer.init_state(2)).state
    assert state["keys"].requires_grad and not state["index_keys"].requires_grad


@torch.no_grad()
def test_as_many_tokens_as_there_are_is_full_attention() -> None:
    mixer, x = build(count=23), tokens()
    q, k, v, _ = mixer.projections(x, Context(), None, None, None)
    right = mixer.projections.back(reference.attention(q, k, v))
    torch.testing.assert_close(mixer(x).y, right)
    torch.testing.assert_close(build(stage="dense")(x).y, right)


@torch.no_grad()
def test_the_indexer_is_told_of_positions() -> None:
    """Forgotten there, the choice would not depend on them."""
    mixer, x = build(position="rope"), tokens()
    near = mixer(x, Context(positions=torch.arange(23).expand(2, 23))).aux["tokens"]
    far = mixer(x, Context(positions=(50 * torch.arange(23)).expand(2, 23))).aux["tokens"]
    assert not torch.equal(near, far)


def test_pads_take_no_part_in_the_loss() -> None:
    mixer, x = build(), tokens(12, batch=1)
    padded = torch.cat([torch.full((1, 4, DIM), math.nan, dtype=x.dtype), x], dim=1)
    valid = torch.arange(16).unsqueeze(0) >= 4
    torch.testing.assert_close(mixer(padded, Context(valid=valid)).aux["loss/indexer"], mixer(x).aux["loss/indexer"])
    ids = torch.tensor([[0] * 5 + [1] * 7])
    both = sum(n * mixer(part).aux["loss/indexer"] for n, part in ((5, x[:, :5]), (7, x[:, 5:]))) / 12
    torch.testing.assert_close(mixer(x, Context(segment_ids=ids)).aux["loss/indexer"], both)


@torch.no_grad()
def test_a_cache_agrees_at_every_length() -> None:
    mixer, x = build(position="rope", kv_heads=2), tokens(18)
    whole, state = mixer(x).y, mixer.init_state(2)
    for t in range(x.shape[1]):
        y, state, _ = mixer(x[:, t : t + 1], state=state)
        torch.testing.assert_close(y, whole[:, t : t + 1])
        assert state.elements == 2 * mixer.state_elements(t + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index_heads": 0}, "index_heads must be at least 1; got 0"),
        ({"count": 0}, "count must be at least 1"),
        ({"kv_heads": 3}, "not divide"),
    ],
)
def test_wrong_options_say_what_would_be_right(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


@torch.no_grad()
@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_autocast_does_not_round_what_is_chosen_by(impl) -> None:
    mixer, x = build(impl=impl).float(), tokens().float()
    index = mixer.indexer(x)
    place = torch.arange(23).expand(2, 23)
    expected = mixer.choose(*index, place)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mixer.choose(*index, place), expected)
