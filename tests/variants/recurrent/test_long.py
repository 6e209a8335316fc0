"""Sequences of 65,536 tokens: whole, in two pieces, and a few single tokens behind them."""

from __future__ import annotations

import pytest
import torch

from registry import variants

LONG = 65_536
MIXERS = {
    "linear": {},
    "retention": {},
    "gla": {},
    "deltanet": {},
    "gated_deltanet": {},
    "kda": {},
    "rwkv6": {},
    "mamba": {},
    "mamba2": {"state_dim": 8},
    "hybrid": {"pattern": "mamba+sliding_window"},
}


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_a_long_sequence_is_its_pieces_and_keeps_a_state_of_one_size(name) -> None:
    torch.manual_seed(0)
    mixer = variants.build(name, dim=4, heads=1, **MIXERS[name])
    x = torch.randn(1, LONG + 3, 4)
    whole = mixer(x).y
    state, outputs = mixer.init_state(1), []
    for piece in x.split([40_001, LONG - 40_001, 1, 1, 1], dim=1):
        y, state, _ = mixer(piece, state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-4, atol=1e-5)
    assert state.elements == mixer.state_elements(LONG) == mixer.state_elements(1000)
    # What is far enough back has been forgotten by some and not by others; nothing has been overwritten by what wrapped around.
    assert whole.isfinite().all() and len(whole[0, :: LONG // 7].unique(dim=0)) == len(whole[0, :: LONG // 7])
