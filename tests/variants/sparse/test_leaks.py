"""What is chosen, or summed up, must tell nothing of later tokens: to the bit, by gradient, and by what a model could learn from it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from experiments.model import Decoder
from registry import variants
from variants.contract import Mixer

TIME = 64
FORMS = {
    "nsa": {"compress_block": 32, "compress_stride": 16, "block": 32, "count": 2, "local_blocks": 1, "window": 4},
    "nsa of small blocks": {"compress_block": 4, "compress_stride": 2, "block": 4, "count": 3, "local_blocks": 1, "window": 4},
    "moba": {"block": 16, "count": 2},
    "dsa": {"count": 8},
}
# Whose gradients, and not only whose outputs, are made of what was chosen.
FORMS |= {f"{form} straight through": {**FORMS[form], "straight_through": True} for form in ("nsa", "nsa of small blocks", "moba")}


def build(form: str, **options) -> Mixer:
    torch.manual_seed(0)
    return variants.build(form.partition(" ")[0], dim=16, heads=2, **FORMS[form], **options)


def test_a_query_sees_the_compressed_keys_that_are_complete() -> None:
    mixer = build("nsa")
    assert mixer.summaries.complete(torch.tensor([30, 31, 46, 47]) + 1).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("form", FORMS)
def test_no_token_changes_what_comes_before_it(form: str) -> None:
    mixer = build(form).eval()
    x = torch.randn(1, TIME, 16)
    with torch.no_grad():
        before = mixer(x)
        for token in (1, 15, 16, 31, 32, 47, 48, 50, 63):
            for size in (1.0, 100.0):
                changed = x.clone()
                changed[:, token] = size * torch.randn(16)
                after = mixer(changed)
                assert torch.equal(after.y[:, :token], before.y[:, :token])
                for name, chosen in before.aux.items():  # (batch, heads that choose, time, count)
                    assert torch.equal(after.aux[name][:, :, :token], chosen[:, :, :token])
    rows = x.expand(TIME, -1, -1).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mixer(rows).y[range(TIME), range(TIME)].sum(), rows)
    assert not gradient.abs().sum(-1).triu(1).any()


class Leaky(Mixer):
    """Looks at the next token."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.out = nn.Linear(dim, dim)

    def mix(self, x, context, state):
        return self.out(x.roll(-1, dims=1)), {}, {}


def loss_of_the_unforeseeable(mixers: list[Mixer]) -> float:
    """The loss of the next token, where tokens are drawn evenly and independently, after training; mean of the last ten steps."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Decoder(4, mixers, dim=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):
        tokens = torch.randint(0, 4, (8, 33), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("form", [*FORMS, "leaky"])
def test_no_model_learns_what_cannot_be_foreseen(form: str) -> None:
    mixers = [Leaky(16, 2) for _ in range(2)] if form == "leaky" else [build(form, position="rope") for _ in range(2)]
    loss = loss_of_the_unforeseeable(mixers)
    assert (loss < 0.5 * math.log(4)) if form == "leaky" else (loss > 0.98 * math.log(4))
