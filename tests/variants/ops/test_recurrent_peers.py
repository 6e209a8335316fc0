"""The recurrent cores against public ones: fla's naive functions and the torch paths of transformers; and how fla's kernels are fed.

Theirs compute in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.variants.oracles import places, run_ids
from variants.ops import decay, delta, fla_kernels, reference

TIME, CHUNK = 128, 32

naive_gla = pytest.importorskip("fla.ops.gla.naive").naive_recurrent_gla
naive_simple_gla = pytest.importorskip("fla.ops.simple_gla.naive").naive_recurrent_simple_gla
naive_rwkv6 = pytest.importorskip("fla.ops.rwkv6.recurrent_naive").naive_recurrent_rwkv6
naive_delta = pytest.importorskip("fla.ops.delta_rule.naive").delta_rule_recurrence
naive_gdn = pytest.importorskip("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
naive_kda = pytest.importorskip("fla.ops.kda.naive").naive_recurrent_kda
naive_retention = pytest.importorskip("fla.ops.retention.naive").naive_retention
naive_linear = pytest.importorskip("fla.ops.linear_attn.naive").naive_chunk_linear_attn
qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, log_decay = (torch.randn(2, 2, TIME, width, generator=generator) for width in (8, 8, 6, 8))
    made = {
        "q": q,
        "k": torch.nn.functional.normalize(k, dim=-1),
        "v": v,
        "channel": torch.nn.functional.logsigmoid(log_decay),
        "scalar": torch.nn.functional.logsigmoid(log_decay[..., 0]),
        "beta": 2 * torch.rand(2, 2, TIME, generator=generator),
        "bonus": torch.rand(2, 8, generator=generator),
        "initial": torch.randn(2, 2, 8, 6, generator=generator),
    }
    return {name: x.requires_grad_() for name, x in made.items()}


def swapped(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (batch, time, heads, ...) as one of (batch, heads, time, ...)."""

    def call(*args: Tensor, **options: Any) -> Any:
        o, last = kernel(*(x.transpose(1, 2) for x in args), **options)
        return o.transpose(1, 2), last

    return call


ours, rule = decay.gated_linear_attention, delta.delta_rule


def same(got: Tensor, expected: Tensor, made: dict[str, Tensor], names: str) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    leaves = [made[name] for name in names.split()]
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad((got * weights).sum(), leaves)
    for name, a, b in zip(names.split(), mine, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()), msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("names", "kernel"),
    [
        pytest.param("q k v scalar", swapped(naive_simple_gla), id="simple GLA"),
        pytest.param("q k v channel", swapped(naive_gla), id="GLA"),
    ],
)
def test_gated_linear_attention_is_flas(names, kernel) -> None:
    made = inputs()
    q, *rest = (made[name] for name in names.split())
    # Theirs scale queries by key_dim^-1/2.
    got, last = ours(q * 8**-0.5, *rest, initial=made["initial"], chunk=CHUNK)
    expected, state = kernel(q, *rest, initial_state=made["initial"], output_final_state=True)
    same(got, expected, made, f"{names} initial")
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-4)


def test_linear_attention_is_flas() -> None:
    made = inputs()
    q, k, v = made["q"], made["k"], made["v"]
    expected = naive_linear(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0)
    same(ours(q, k, v, chunk=CHUNK)[0], expected.transpose(1, 2), made, "q k v")


def test_a_fixed_decay_is_flas_retention() -> None:
    made = inputs()
    q, k, v = made["q"], made["k"], made["v"]
    rates = torch.log1p(-(2.0 ** (-5 - torch.arange(2.0))))[:, None].expand(2, 2, TIME)
    same(ours(q * 8**-0.5, k, v, rates, chunk=CHUNK)[0], naive_retention(q, k, v), made, "q k v")


def test_a_bonus_is_flas_rwkv6() -> None:
    made = inputs()
    q, k, v, w, u, initial = (made[name] for name in ("q", "k", "v", "channel", "bonus", "initial"))
    got, last = ours(q, k, v, w, bonus=u, initial=initial, chunk=CHUNK)
    expected, state = naive_rwkv6(q, k, v, w, u, scale=1.0, initial_state=initial, output_final_state=True)
    same(got, expected, made, "q k v channel bonus initial")
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("names", "kernel"),
    [
        pytest.param("q k v beta", naive_delta, id="fla delta rule"),
        pytest.param("q k v beta scalar", swapped(naive_gdn), id="fla gated delta rule"),
        pytest.param("q k v beta channel", swapped(lambda q, k, v, b, g, **more: naive_kda(q, k, v, g, b, **more)), id="fla KDA"),
        pytest.param(
            "q k v beta scalar",
            swapped(lambda q, k, v, b, g, **more: qwen.torch_chunk_gated_delta_rule.__wrapped__(q, k, v, g, b, **more)),
            id="Qwen3-Next, chunks",
        ),
        pytest.param(
            "q k v beta scalar",
            swapped(lambda q, k, v, b, g, **more: qwen.torch_recurrent_gated_delta_rule.__wrapped__(q, k, v, g, b, **more)),
            id="Qwen3-Next, recurrence",
        ),
        pytest.param(
            "q k v beta channel",
            swapped(lambda q, k, v, b, g, **more: kimi.chunk_kimi_delta_attention.__wrapped__(q, k, v, g, b, **more)),
            id="Kimi Linear, chunks",
        ),
        pytest.param(
            "q k v beta channel",
            swapped(lambda q, k, v, b, g, **more: kimi.recurrent_kimi_delta_attention.__wrapped__(q, k, v, g, b, **more)),
            id="Kimi Linear, recurrence",
        ),
    ],
)
def test_the_delta_rule_is_that_of_others(names, kernel) -> None:
    made = inputs()
    q, *rest = (made[name] for name in names.split())
    got, last = rule(q * 8**-0.5, *rest, initial=made["initial"], chunk=CHUNK)
    expected, state = kernel(q, *rest, initial_state=made["initial"], output_final_state=True)
    same(got, expected, made, f"{names} initial")
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-4)


def kernel_by_reference(q, k, v, g=None, beta=None, *, scale, initial_state, output_final_state, cu_seqlens=None):
    """What a kernel of fla does with sequences laid end to end, one after another by the reference."""
    assert scale == 1.0 and output_final_state
    borders = range(0, len(q) + 1) if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for n, (start, stop) in enumerate(pairwise(borders)):
        parts = [
            None if x is None else (x[:, start:stop] if cu_seqlens is not None else x[start:stop]).transpose(1, 2)
            for x in (q, k, v, beta, g)
        ]
        initial = None if initial_state is None else initial_state[n : n + 1]
        q_, k_, v_, beta_, g_ = parts
        if beta_ is None:
            o, last = reference.gated_linear_attention(q_, k_, v_, g_, initial=initial)
        else:
            o, last = reference.delta_rule(q_, k_, v_, beta_, g_, initial=initial)
        outputs.append(o.transpose(1, 2))
        states.append(last)
    return torch.cat(outputs, dim=0 if cu_seqlens is None else 1), torch.cat(states)


@pytest.mark.parametrize("lengths", [None, [[5, 9], [14]], [[1, 1, 12], [3, 3, 3]]])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("gates", [("scalar",), ("channel",), ("scalar", "beta"), ("channel", "beta")])
def test_what_flas_kernels_are_given_is_what_they_need(lengths, carried, gates) -> None:
    """Segments laid end to end, each with the state that it begins with; a row's last state is that of its last segment."""
    made = {name: x if name in ("bonus", "initial") else x[:, :, :20] for name, x in inputs().items()}
    before = None if lengths is None else places([run_ids(row, 20) for row in lengths])
    if carried and before is not None:  # the first segment of the first row goes on from an earlier call
        before[0, : lengths[0][0]] += 3
    initial = made["initial"] if carried else None
    if carried and before is not None:
        initial = initial * torch.tensor([1.0, 0.0])[:, None, None, None]
    told = {"before": before, "initial": initial}
    qkv = (made["q"], made["k"], made["v"])
    given = {"g": made[gates[0]]} | ({"beta": made["beta"]} if "beta" in gates else {})
    got = fla_kernels.through(kernel_by_reference, qkv, given, **told)
    core = reference.delta_rule if "beta" in gates else reference.gated_linear_attention
    expected = core(*qkv, *([made["beta"]] if "beta" in gates else []), made[gates[0]], **told)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lengths", [None, [[50, 78], [128]]])
@pytest.mark.parametrize("gates", ["", "scalar", "channel", "channel bonus", "beta", "beta scalar", "beta channel"])
def test_flas_kernels_give_what_the_reference_gives(gates, lengths) -> None:
    made = {name: x.detach().cuda().bfloat16().requires_grad_() for name, x in inputs().items() if name != "initial"}
    before = None if lengths is None else places([run_ids(row, TIME) for row in lengths]).cuda()
    names = ["q", "k", "v", *gates.split()]
    options = {"bonus": made["bonus"]} if "bonus" in gates else {}
    positional = [made[name] for name in names if name != "bonus"]
    fast, slow = (
        (fla_kernels.delta_rule, reference.delta_rule)
        if "beta" in gates
        else (fla_kernels.gated_linear_attention, reference.gated_linear_attention)
    )
    got, expected = fast(*positional, before=before, **options), slow(*positional, before=before, **options)
    leaves = [made[name] for name in names]
    for part, (a, b) in enumerate(zip(got, expected, strict=True)):
        size = float(b.abs().max())
        torch.testing.assert_close(a / size, b / size, rtol=0, atol=2e-2, msg=f"output {part}")
    mine, theirs = (torch.autograd.grad(o.square().sum(), leaves, retain_graph=True) for o in (got[0], expected[0]))
    for name, a, b in zip(names, mine, theirs, strict=True):
        size = float(b.abs().max())
        torch.testing.assert_close(a.float() / size, b.float() / size, rtol=0, atol=5e-2, msg=f"gradient of {name}")
