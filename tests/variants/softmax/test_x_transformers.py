"""The family's options against x-transformers' `Attention` with the same weights, wherever the two mean the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from x_transformers.x_transformers import Attention, RotaryEmbedding

from registry import variants

DIM, HEADS, WIDTH = 32, 4, 8


def by_head(weight: Tensor, heads: Tensor) -> Tensor:
    """Rows of a projection with its heads in another order."""
    return weight.unflatten(0, (len(heads), -1))[heads].flatten(0, 1)


def copied(theirs: Attention, ours: torch.nn.Module, kv_heads: int) -> None:
    """Fill the mixer with their weights, which get random numbers first: some of theirs start at 0."""
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.5)
    # Their query head h reads key/value head h % kv_heads, ours h // (heads / kv_heads).
    order = torch.arange(HEADS).view(-1, kv_heads).T.flatten()
    ours.projections.inward.weight.copy_(torch.cat([by_head(theirs.to_q.weight, order), theirs.to_k.weight, theirs.to_v.weight]))
    ours.projections.outward.weight.copy_(by_head(theirs.to_out.weight.T, order).T)
    if ours.gates is not None:
        ours.gates.weight.copy_(by_head(theirs.to_v_gate.weight, order))
    if ours.sink is not None:
        ours.sink.copy_(0 if theirs.attend.head_attn_sink is None else theirs.attend.head_attn_sink[order])
    for norm, scales in ((ours.q_norm, theirs.q_rmsnorm), (ours.k_norm, theirs.k_rmsnorm)):
        if scales is not None:
            scales.gamma.copy_(scales.gamma[:1].expand_as(scales.gamma))  # our heads share one scale
            norm.weight.copy_(scales.gamma[0, 0] + 1)
    if theirs.data_dependent_alibi is not None:
        linear = theirs.data_dependent_alibi.to_forget_gates[0]
        ours.forget.weight.copy_(linear.weight[order])
        ours.forget.bias.copy_(linear.bias[order])


@pytest.mark.parametrize(
    ("name", "options", "their_options"),
    [
        ("full", {}, {}),
        ("full", {"causal": False}, {"causal": False}),
        ("gqa", {"kv_heads": 2}, {"kv_heads": 2}),
        ("mqa", {}, {"one_kv_head": True}),
        ("sliding_window", {"window": 4}, {"max_attend_past": 3}),
        ("full", {"qk_norm": True}, {"qk_rmsnorm": True}),
        ("full", {"gate": "element"}, {"gate_values": True}),
        ("gqa", {"gate": "head", "kv_heads": 2}, {"gate_values": True, "gate_values_headwise": True, "kv_heads": 2}),
        ("gqa", {"sink_logit": True, "kv_heads": 2}, {"head_learned_sink": True, "kv_heads": 2}),
        ("full", {"sink_logit": True}, {"add_zero_kv": True}),
        ("full", {"position": {"name": "rope", "layout": "interleaved"}}, {}),
        ("forgetting", {"kv_heads": 2}, {"data_dependent_alibi": True, "kv_heads": 2}),
    ],
)
@pytest.mark.parametrize("impl", ["sdpa", "torch"])
def test_outputs_and_input_gradients_are_those_of_x_transformers(impl, name, options, their_options) -> None:
    theirs = Attention(DIM, dim_head=WIDTH, heads=HEADS, **{"causal": True, **their_options})
    ours = variants.build(name, dim=DIM, heads=HEADS, impl=impl, **options)
    with torch.no_grad():
        copied(theirs, ours, ours.kv_heads)
    x, weights = torch.randn(2, 11, DIM, requires_grad=True), torch.randn(2, 11, DIM)
    rotary = RotaryEmbedding(WIDTH).forward_from_seq_len(11) if "position" in options else None
    expected, got = theirs(x, rotary_pos_emb=rotary), ours(x).y
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    wanted, found = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (expected, got))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
