"""The parts of the sparse mixers against fla's naive functions, which compute in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from registry import variants
from variants.contract import Context

nsa = pytest.importorskip("fla.ops.nsa.naive")
dsa = pytest.importorskip("fla.ops.dsa.naive")

DIM, HEADS, TIME = 16, 4, 24


def tokens() -> Tensor:
    return torch.randn(2, TIME, DIM, generator=torch.Generator().manual_seed(1))


def same_sets(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to their order."""
    assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)


@torch.no_grad()
def test_native_sparse_attention_chooses_and_summarises_like_fla() -> None:
    """Their simplification: means of blocks that do not overlap, of the size of those that are chosen."""
    torch.manual_seed(0)
    blocks = {"compress_block": 4, "compress_stride": 4, "block": 4, "compression": "mean", "count": 4}
    mixer = variants.build("nsa", dim=DIM, heads=HEADS, kv_heads=2, **blocks)
    mixer.gates.weight.zero_()
    mixer.gates.bias.copy_(torch.tensor([50.0] * HEADS + [-50.0] * 2 * HEADS))
    x = tokens()
    q, k, v, _ = mixer.projections(x, Context(), None, None, None)
    q, k, v = (part.transpose(1, 2) for part in (q, k.chunk(3, 1)[0], v.chunk(3, 1)[0]))
    summaries = [part.unflatten(1, (-1, 4)).mean(2) for part in (k, v)]
    scale = q.shape[-1] ** -0.5
    y, _, aux = mixer(x)
    same_sets(aux["blocks"].transpose(1, 2), nsa.naive_nsa_topk(q, summaries[0], 4, 4, scale))
    compressed, _ = nsa.naive_nsa_compression(q, *summaries, 4, scale)
    torch.testing.assert_close(y, mixer.projections.back(compressed.transpose(1, 2)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_lightning_indexer_chooses_like_fla() -> None:
    torch.manual_seed(0)
    mixer = variants.build("dsa", dim=DIM, heads=HEADS, count=5)
    x = tokens()
    index_q, index_k, weight = mixer.indexer(x)
    theirs = dsa.naive_dsa_indexer(index_q.transpose(1, 2), index_k[:, 0], weight[..., 0].transpose(1, 2), topk=5, activation="relu")
    ours, scores = mixer(x).aux["tokens"][:, 0], mixer.scored(index_q, index_k, weight)
    # Where no head fits, scores are 0 and equal, and theirs takes any of them.
    found = [scores.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, -torch.inf).sort(-1).values for chosen in (ours, theirs)]
    torch.testing.assert_close(*found)


@torch.no_grad()
def test_native_sparse_attention_whole_is_flas(monkeypatch) -> None:
    """Their three branches have one key and value, and the window, which takes flash-attn, is left out."""
    torch.manual_seed(0)
    monkeypatch.setattr(nsa, "mean_pooling", lambda x, size, _: x.unflatten(1, (-1, size)).mean(2))  # theirs is a Triton kernel
    heads, width = 16, 4  # no fewer: a tile of their kernel
    blocks = {"compress_block": 4, "compress_stride": 4, "block": 4, "compression": "mean", "count": 4}
    mixer = variants.build("nsa", dim=heads * width, heads=heads, kv_heads=1, **blocks)
    queries, keys, values = mixer.projections.inward.weight.split([heads * width, 3 * width, 3 * width])
    for part in (keys, values):
        part.copy_(part[:width].repeat(3, 1))
    mixer.gates.weight[2 * heads :] = 0
    mixer.gates.bias[2 * heads :] = -50
    x = torch.randn(2, TIME, heads * width)
    gates = torch.sigmoid(mixer.gates(x)).unflatten(-1, (3, heads)).unbind(2)
    q, k, v = (part.unflatten(-1, (-1, width)) for part in (x @ queries.T, x @ keys[:width].T, x @ values[:width].T))
    theirs, chosen = nsa.naive_nsa(q, k, v, gates[0], gates[1], block_counts=4, block_size=4, return_block_indices=True)
    y, _, aux = mixer(x)
    same_sets(aux["blocks"].transpose(1, 2), chosen)
    torch.testing.assert_close(y, theirs.flatten(2) @ mixer.projections.outward.weight.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("branch", ["selected", "window"])
@torch.no_grad()
def test_native_sparse_attention_attends_like_lucidrains(branch: str) -> None:
    """To all blocks, so that another way to choose them chooses the same; and through a window, of which his has one token more."""
    public = pytest.importorskip("native_sparse_attention_pytorch")
    torch.manual_seed(0)
    window, width, shared = 5, DIM // HEADS, {"kv_heads": 2}
    sizes = {"compress_block_size": 4, "compress_block_sliding_stride": 4, "selection_block_size": 4, "num_selected_blocks": TIME // 4}
    theirs = public.SparseAttention(
        dim=DIM, dim_head=width, heads=HEADS, sliding_window_size=window, causal=True, norm=False, **sizes, **shared
    )
    ours = variants.build(
        "nsa",
        **{"dim": DIM, "heads": HEADS, "position": {"name": "rope", "layout": "interleaved"}, **shared},
        **{"compress_block": 4, "compress_stride": 4, "block": 4, "count": TIME // 4, "window": window + 1},
    )
    queries, keys, values = theirs.to_qkv.weight.split([DIM, 2 * width, 2 * width])
    ours.projections.inward.weight.copy_(torch.cat([queries, keys.repeat(3, 1), values.repeat(3, 1)]))
    ours.projections.outward.weight.copy_(theirs.combine_heads.weight)
    open_to = torch.tensor([50.0 if name == branch else -50.0 for name in ("compressed", "selected", "window")])
    for gates, bias in ((ours.gates, open_to.repeat_interleave(HEADS)), (theirs.to_strategy_combine[0], open_to.repeat(HEADS))):
        gates.weight.zero_()
        gates.bias.copy_(bias)
    x = tokens()
    torch.testing.assert_close(ours(x).y, theirs(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_lightning_indexer_is_that_of_deepseek_v32_in_transformers() -> None:
    """Its rotary halves included, which its main attention has interleaved."""
    v32 = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    torch.manual_seed(0)
    width = DIM // HEADS
    sizes = {"hidden_size": DIM, "q_lora_rank": DIM, "index_n_heads": 4, "index_head_dim": width, "qk_rope_head_dim": width}
    theirs = v32.DeepseekV32Indexer(v32.DeepseekV32Config(**sizes, index_topk=5), 0)
    ours = variants.build("dsa", dim=DIM, heads=HEADS, count=5, index_heads=4, position="rope")
    for mine, right in ((theirs.wq_b, ours.index_queries), (theirs.wk, ours.index_keys), (theirs.weights_proj, ours.index_weights)):
        mine.weight.copy_(right.weight)
    x = tokens()
    angles = torch.arange(TIME)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.cat([angles, angles], -1).expand(2, -1, -1)
    causal = torch.ones(TIME, TIME, dtype=torch.bool).tril().expand(2, -1, -1)
    chosen = theirs(x, x, (angles.cos(), angles.sin()), causal, torch.arange(TIME)[None]).long()
    place = torch.arange(TIME).expand(2, -1)
    index_q, index_k, weight = ours.indexer(x)
    index_q, index_k = ours.rotate(index_q, index_k, place, place)
    scores = ours.scored(index_q, index_k, weight).masked_fill(~causal, -torch.inf)
    mine = ours(x).aux["tokens"][:, 0]
    # The first queries have fewer to choose from, and it fills up with what follows; equal scores may fall either way.
    found = [scores.gather(-1, picked.clamp(min=0)).masked_fill(picked < 0, -torch.inf).sort(-1).values for picked in (mine, chosen)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_attention_to_what_the_indexer_chooses_is_flas(impl: str) -> None:
    """Outputs, and the gradient of the input, which no choice and no indexer passes on."""
    torch.manual_seed(0)
    mixer = variants.build("dsa", dim=DIM, heads=HEADS, kv_heads=2, count=5, impl=impl)
    x = tokens().requires_grad_()
    q, k, v, _ = mixer.projections(x, Context(), None, None, None)
    output = mixer(x)
    chosen = output.aux["tokens"][:, 0]  # equal scores may fall either way; what is chosen is compared above
    theirs = dsa.naive_dsa(*(part.transpose(1, 2) for part in (q, k, v)), None, None, indices=chosen, topk=5).flatten(2)
    theirs = theirs @ mixer.projections.outward.weight.T
    torch.testing.assert_close(output.y, theirs, rtol=1e-4, atol=1e-5)
    arriving = torch.randn_like(theirs)
    mine, right = (torch.autograd.grad((y * arriving).sum(), x, retain_graph=True)[0] for y in (output.y, theirs))
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
