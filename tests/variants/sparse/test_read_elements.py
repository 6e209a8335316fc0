"""What a decoded token reads of its state: counted in real steps, with everything else made unreadable."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from registry import variants
from variants.hybrid import COUNTERS

DIM, HEADS = 16, 4
#: Options, and whether what is declared is read in every step, or is the most that may be.
CASES = [
    ("nsa", {"kv_heads": 2}, True),
    ("nsa", {"kv_heads": 1, "count": 3, "first_blocks": 0, "short_conv": 3}, True),
    ("nsa", {"kv_heads": 4, "block": 8, "count": 3, "window": 1, "compression": "mean"}, True),
    ("moba", {}, True),
    ("moba", {"kv_heads": 2, "short_conv": 3}, False),
    ("moba", {"kv_heads": 1, "count": 2}, False),
    ("moba", {"count": 1}, True),
    ("dsa", {}, False),
    ("dsa", {"kv_heads": 2, "count": 1, "short_conv": 3}, False),
]
SMALL = {
    "nsa": {"compress_block": 4, "compress_stride": 2, "block": 4, "count": 4, "window": 5},
    "moba": {"block": 4, "count": 3},
    "dsa": {"count": 5, "index_heads": 3},
}


def build(name: str, options: dict):
    torch.manual_seed(0)
    mixer = variants.build(name, dim=DIM, heads=HEADS, position="rope", **{**SMALL[name], **options}).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer


def chosen_slots(mixer, aux: dict[str, Tensor], time: int) -> Tensor:
    """Which of the `time` slots each key/value head is asked for by any of the heads that share it, (kv_heads, time)."""
    size, chosen = (1, aux["tokens"]) if "tokens" in aux else (mixer.block, aux["blocks"])
    slots = torch.zeros(mixer.kv_heads, time, dtype=torch.bool)
    for group, row in enumerate(chosen[0, :, 0].tolist()):
        served = range(mixer.kv_heads) if chosen.shape[1] == 1 else [group * mixer.kv_heads // chosen.shape[1]]
        for head in served:
            for block in row:
                if block >= 0:
                    slots[head, block * size : (block + 1) * size] = True
    return slots


def beside(state, time: int) -> int:
    """Numbers in the other parts of the state. Of what was there lately, slots before the first token hold nothing."""
    parts = {name: state[name] for name in state if name not in ("keys", "values", *COUNTERS)}
    lately = [name for name in parts if name.startswith("near_") or name.endswith("_waiting")]
    return sum(part[:, :time].numel() if name in lately else part.numel() for name, part in parts.items())


@torch.no_grad()
@pytest.mark.parametrize("impl", ["numba", "torch"])
@pytest.mark.parametrize(("name", "options", "always"), CASES)
def test_a_decoded_token_reads_what_is_declared_and_nothing_else(name, options, always, impl) -> None:
    mixer = build(name, {**options, "impl": impl})
    x = torch.randn(1, 41, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state, shares = mixer.init_state(1), []
    for time in range(x.shape[1]):
        token = x[:, time : time + 1]
        y, grown, aux = mixer(token, state=state)
        slots = chosen_slots(mixer, aux, time)
        unread = ~slots.T.unsqueeze(-1)
        poisoned = state.replace(**{part: state[part].masked_fill(unread, math.nan) for part in ("keys", "values")})
        assert torch.equal(mixer(token, state=poisoned).y, y), f"after {time} tokens something else is read"
        read = 2 * mixer.head_dim * int(slots.sum()) + beside(state, time)
        shares.append(read / mixer.read_elements(time) if read else 1)
        assert read <= mixer.read_elements(time) <= mixer.state_elements(time), time
        state = grown
    assert shares == [1] * len(shares) if always else max(shares[20:]) > 0.75
    assert mixer.read_elements(400) < mixer.state_elements(400) / 2


def test_everything_is_read_where_nothing_is_chosen() -> None:
    for name in ("full", "sliding_window", "gla"):
        mixer = variants.build(name, dim=DIM, heads=HEADS)
        assert [mixer.read_elements(time) for time in (0, 1, 100)] == [mixer.state_elements(time) for time in (0, 1, 100)]
    dense = build("dsa", {"stage": "dense"})
    assert dense.read_elements(100) == dense.state_elements(100)
