"""What is chosen may learn as if choosing were smooth; and learns nothing where that is not asked for."""

from __future__ import annotations

import pytest
import torch

from registry import variants
from variants.contract import Mixer

FORMS = {
    "nsa": {"compress_block": 4, "compress_stride": 2, "block": 4, "count": 3, "local_blocks": 1, "window": 3, "kv_heads": 2},
    "moba": {"block": 4, "count": 3, "kv_heads": 2},
}


def build(name: str, **options) -> Mixer:
    torch.manual_seed(0)
    return variants.build(name, dim=16, heads=4, position="rope", **FORMS[name], **options).double()


def gradients(mixer: Mixer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = mixer(x).y
    arriving = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    inputs = {"x": x, **dict(mixer.named_parameters())}
    found = torch.autograd.grad((y * arriving).sum(), list(inputs.values()), materialize_grads=True, allow_unused=True)
    return dict(zip(inputs, found, strict=True))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("impl", ["torch", "numba"])
def test_the_outputs_stay_and_the_gradients_are_those_of_offsets_on_the_logits(name: str, impl: str) -> None:
    x = torch.randn(2, 27, 16, dtype=torch.float64, requires_grad=True)
    plain, through, right = build(name), build(name, straight_through=True, impl=impl), build(name, straight_through=True, impl="reference")
    torch.testing.assert_close(through(x).y, plain(x).y, rtol=1e-10, atol=1e-12)
    mine, expected = gradients(through, x), gradients(right, x)
    for key, value in expected.items():
        torch.testing.assert_close(mine[key], value, rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")
    assert not torch.allclose(mine["x"], gradients(plain, x)["x"])


def test_the_compression_learns_from_the_choice_only_where_that_is_asked_for() -> None:
    x = torch.randn(2, 27, 16, dtype=torch.float64, requires_grad=True)
    for asked in (False, True):
        mixer = build("nsa", straight_through=asked)
        with torch.no_grad():  # the selection's branch alone reaches the outputs
            mixer.gates.weight.zero_()
            mixer.gates.bias.copy_(torch.tensor([-1e9, 1e9, -1e9]).repeat_interleave(4))
        found = gradients(mixer, x)
        assert found["compress_k.inward.weight"].any() == asked
        assert not found["compress_v.inward.weight"].any()  # the importance is made of weights, and not of values


def test_the_importance_of_a_chosen_block_is_that_by_which_it_was_chosen() -> None:
    mixer = build("nsa", straight_through=True, impl="reference")
    x = torch.randn(1, 27, 16, dtype=torch.float64)
    q, k, v = (torch.randn(1, heads, 27, 4, dtype=torch.float64) for heads in (4, 2, 2))
    place = torch.arange(27)[None]
    seen = mixer.summaries.complete(place + 1)
    keys = mean(k)
    summary = mixer.plainly(q, keys, mean(v), seen.clamp(max=keys.shape[2]), None)
    chosen = mixer(x).aux["blocks"]
    importance = mixer.importance(q, keys, summary.lse, chosen, seen.clamp(max=keys.shape[2]))
    weights = (q @ keys.repeat_interleave(2, 1).mT / 2).masked_fill(torch.arange(keys.shape[2]) >= seen[:, None, :, None], -torch.inf)
    weights = weights.softmax(-1).nan_to_num().unflatten(1, (2, 2)).sum(2)
    right = mixer.overlaps(weights, 7).gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0)
    torch.testing.assert_close(importance, right)


def mean(x: torch.Tensor) -> torch.Tensor:
    """Means of 4 tokens, one every 2."""
    return x.unfold(2, 4, 2).mean(-1)
