"""Native sparse attention: its three branches query by query, and the cases in which it is full attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from registry import variants
from variants.contract import Context, NotApplicable
from variants.ops import reference

DIM, HEADS = 16, 4
SMALL = {"compress_block": 4, "compress_stride": 2, "block": 4, "count": 4, "window": 5, "kv_heads": 2}


def build(**options):
    torch.manual_seed(0)
    mixer = variants.build("nsa", dim=DIM, heads=HEADS, **{**SMALL, **options}).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer


def tokens(time: int = 27, batch: int = 2) -> Tensor:
    return torch.randn(batch, time, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def attended(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(the output, the weights) of one query; 0 where there are no keys."""
    if not keys:
        return torch.zeros(q.shape[-1], dtype=q.dtype), torch.zeros(0, dtype=q.dtype)
    weights = (torch.stack(keys) @ q / math.sqrt(q.shape[-1])).softmax(0)
    return weights @ torch.stack(values), weights


def query_by_query(mixer, x: Tensor) -> tuple[Tensor, list]:
    """The outputs, and the blocks that each group of heads chose for each token."""
    width, groups, shared = mixer.head_dim, mixer.kv_heads, HEADS // mixer.kv_heads
    made = x @ mixer.projections.inward.weight.T
    q, k, v = made.split([HEADS * width, 3 * groups * width, 3 * groups * width], dim=-1)
    gates = torch.sigmoid(x @ mixer.gates.weight.T + mixer.gates.bias)
    block, stride, size = mixer.summaries.block, mixer.summaries.stride, mixer.block

    def one_of(tokens: list[Tensor], module, group: int) -> Tensor:
        if module is None:
            return sum(tokens) / len(tokens)
        flat = torch.cat([token + module.places[group, n] for n, token in enumerate(tokens)])
        hidden = flat @ module.inward.weight.T + module.inward.bias
        return hidden * torch.sigmoid(hidden) @ module.outward.weight.T + module.outward.bias

    y, blocks = torch.zeros(*x.shape[:2], HEADS * width, dtype=x.dtype), []
    for b in range(len(x)):
        for t in range(x.shape[1]):
            for group in range(groups):
                part = lambda z, branch, j, b=b, group=group: z[b, j].view(3, groups, width)[branch, group]
                starts = [n for n in range(0, t + 1, stride) if n + block - 1 <= t]
                summaries_k = [one_of([part(k, 0, n + i) for i in range(block)], mixer.compress_k, group) for n in starts]
                summaries_v = [one_of([part(v, 0, n + i) for i in range(block)], mixer.compress_v, group) for n in starts]
                queries = [q[b, t, h * width : (h + 1) * width] for h in range(group * shared, (group + 1) * shared)]
                coarse = [attended(one, summaries_k, summaries_v) for one in queries]
                total = sum(weights for _, weights in coarse)
                own = t // size
                importance = {}
                for j in range(own + 1):
                    # How many strides of the compressed key lie in the block.
                    held = [sum(j * size <= n + s < (j + 1) * size for s in range(0, block, stride)) for n in starts]
                    importance[j] = sum((total[m] * count for m, count in enumerate(held)), torch.zeros(()))
                forced = {j for j in importance if j < mixer.first_blocks or j > own - mixer.local_blocks}
                ranked = sorted(importance, key=lambda j: (j not in forced, -float(importance[j]), j))
                chosen = sorted(ranked[: mixer.count])
                blocks.append(chosen)
                fine = [j for n in chosen for j in range(n * size, min((n + 1) * size, t + 1))]
                near = range(max(0, t - mixer.window + 1), t + 1)
                for i, one in enumerate(queries):
                    h = group * shared + i
                    found = [coarse[i][0]]
                    for branch, slots in ((1, fine), (2, near)):
                        found.append(attended(one, [part(k, branch, j) for j in slots], [part(v, branch, j) for j in slots])[0])
                    gate = [gates[b, t, branch * HEADS + h] for branch in range(3)]
                    y[b, t, h * width : (h + 1) * width] = sum(g * z for g, z in zip(gate, found, strict=True))
    return y @ mixer.projections.outward.weight.T, blocks


@pytest.mark.parametrize("impl", ["numba", "torch", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "mean"},
        {"kv_heads": 1, "count": 3},
        {"kv_heads": 4, "block": 8, "first_blocks": 0, "local_blocks": 1, "count": 2},
        {"compress_stride": 4, "count": 5, "window": 1},
        {"compress_block": 6, "compress_stride": 2, "block": 6, "count": 3},
    ],
)
@torch.no_grad()
def test_the_layer_is_its_three_branches(options, impl) -> None:
    mixer = build(impl=impl, **options)
    y, _, aux = mixer(tokens())
    expected, blocks = query_by_query(mixer, tokens())
    torch.testing.assert_close(y, expected)
    found = aux["blocks"].transpose(1, 2).flatten(0, 2).tolist()
    assert [[n for n in row if n >= 0] for row in found] == blocks


def test_gradients_are_those_of_the_reference() -> None:
    x = tokens().requires_grad_()
    results = []
    for impl in ("numba", "torch", "reference"):
        mixer = build(impl=impl)
        weights = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
        results.append(torch.autograd.grad((mixer(x).y * weights).sum(), [x, *mixer.parameters()]))
    for other in results[:2]:
        for a, b in zip(other, results[2], strict=True):
            torch.testing.assert_close(a, b)
    assert all(bool(grad.abs().max() > 0) for grad in results[0]), "every parameter learns"


@torch.no_grad()
def test_the_selection_of_all_blocks_is_full_attention() -> None:
    mixer = build(count=7)
    mixer.gates.weight.zero_()
    mixer.gates.bias.copy_(torch.tensor([-50.0] * HEADS + [50.0] * HEADS + [-50.0] * HEADS))
    x = tokens()
    q, k, v, _ = mixer.projections(x, Context(), None, None, None)
    right = mixer.projections.back(reference.attention(q, k.chunk(3, 1)[1], v.chunk(3, 1)[1]))
    torch.testing.assert_close(mixer(x).y, right)


@torch.no_grad()
def test_a_cache_agrees_at_every_length_up_to_three_blocks() -> None:
    mixer, x = build(position="rope"), tokens(3 * 4 + 5)
    whole, _, seen = mixer(x)
    state = mixer.init_state(2)
    for t in range(x.shape[1]):
        y, state, aux = mixer(x[:, t : t + 1], state=state)
        torch.testing.assert_close(y, whole[:, t : t + 1])
        assert torch.equal(aux["blocks"], seen["blocks"][:, :, t : t + 1])
        assert state.elements == 2 * mixer.state_elements(t + 1)


@torch.no_grad()
def test_rows_of_other_lengths_and_packed_segments_count_their_own_blocks() -> None:
    mixer, x = build(), tokens(23)
    # Two rows that have come to different places go on from there, several tokens and one by one.
    state, valid = mixer.init_state(2), torch.ones(2, 9, dtype=torch.bool)
    valid[1, 6:] = False
    _, state, _ = mixer(x[:, :9], Context(valid=valid), state)
    rows = [mixer(x[:1])[0], mixer(torch.cat([x[1:, :6], x[1:, 9:]], dim=1))[0]]
    for a, b in ((9, 14), (14, 15), (15, 22), (22, 23)):
        y, state, _ = mixer(x[:, a:b], state=state)
        torch.testing.assert_close(y[0], rows[0][0, a:b])
        torch.testing.assert_close(y[1], rows[1][0, a - 3 : b - 3])
    ids = torch.tensor([[0] * 10 + [1] * 13, [0] * 1 + [1] * 4 + [2] * 18])
    y, _, aux = mixer(x, Context(segment_ids=ids))
    for row, a, b in ((0, 0, 10), (0, 10, 23), (1, 0, 1), (1, 1, 5), (1, 5, 23)):
        alone, _, seen = mixer(x[row : row + 1, a:b])
        torch.testing.assert_close(y[row, a:b], alone[0])
        assert torch.equal(aux["blocks"][row, :, a:b], seen["blocks"][0])


@torch.no_grad()
def test_inside_a_chosen_block_nothing_later_is_seen() -> None:
    """A finite sentinel where a mask belongs would let the rest of the query's own block through."""
    mixer, x = build(), tokens(26).float()
    mixer = mixer.float()
    before = mixer(x).y
    for t in range(1, 26):
        changed = x.clone()
        changed[:, t:] = 1e3 * torch.randn(changed[:, t:].shape, generator=torch.Generator().manual_seed(t))
        assert torch.equal(mixer(changed).y[:, :t], before[:, :t]), t


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress_block": 5}, "compress_block=5 must be a multiple of compress_stride=2"),
        ({"block": 7}, "block=7 must be a multiple of compress_stride=2"),
        ({"block": 2}, "block=2 must be at least compress_block=4"),
        ({"count": 2}, "count=2 must leave room for what is always chosen: first_blocks=1 and local_blocks=2"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"window": 0}, "window must be at least 1; got 0"),
    ],
)
def test_wrong_relations_say_what_would_be_right(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("position", ["alibi", "rerope", "longrope"])
def test_schemes_that_blocks_cannot_follow_are_refused(position) -> None:
    with pytest.raises(NotApplicable):
        build(position=position)
