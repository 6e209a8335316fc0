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
