"""One property for every mixer: packed, padded, cut into calls, a row gives what each of its segments gives alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from registry import UnknownOption, positions, variants
from tests.variants.schemes import Slopes, Stretched
from variants import implementations
from variants.contract import Context, Mixer

MIXERS: dict[str, dict] = {
    "full": {"position": "rope"},
    "mqa": {"position": {"name": "rope", "layout": "interleaved", "fraction": 0.5}},
    "gqa": {"position": Slopes(4, 4, 16), "short_conv": 3},
    "sliding_window": {"window": 4, "sinks": 0, "position": "rope", "short_conv": 2},
    "sliding_window with sinks": {"window": 3, "sinks": 2, "kv_heads": 2, "position": "rope"},
    "sliding_window with sinks and bias": {"window": 3, "sinks": 2, "position": Slopes(4, 4, 16)},
    "sliding_window of one": {"window": 1, "sinks": 3},
    "linear": {"chunk": 3, "short_conv": 4},
    "linear with rope": {"chunk": 4, "position": "rope"},
    "linear with rms": {"chunk": 4, "norm": "rms", "feature_map": "softmax"},
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


def build(name: str, **options: object) -> Mixer:
    torch.manual_seed(0)
    mixer = variants.build(name.split(maxsplit=1)[0], dim=16, heads=4, **{**MIXERS[name], **options})
    assert isinstance(mixer, Mixer)
    return mixer.double().eval()


def alone(mixer: Mixer, x: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Each run of one id among the valid tokens by itself, and 0 at the pads."""
    y = torch.zeros_like(x)
    for row in range(len(x)):
        kept = valid[row].nonzero().flatten()
        starts = [i for i in range(len(kept)) if i == 0 or ids[row, kept[i]] != ids[row, kept[i - 1]]]
        for start, stop in pairwise([*starts, len(kept)]):
            here = kept[start:stop]
            y[row, here] = mixer(x[row, here].unsqueeze(0)).y[0]
    return y


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    time = draw(st.integers(1, 13))
    ids, valid = [], []
    for _ in range(2):
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        ids.append(([i % 2 for i, length in enumerate(lengths) for _ in range(length)] + [len(lengths) % 2] * time)[:time])
        valid.append([draw(st.integers(0, 3)) > 0 for _ in range(time)])
    cuts = sorted(draw(st.sets(st.integers(1, time - 1), max_size=4))) if time > 1 else []
    return torch.tensor(ids), torch.tensor(valid), cuts


@every_mixer
@settings(max_examples=16)
@given(rows=packed_rows(), single=st.booleans())
@torch.no_grad()
def test_packed_padded_and_cut_rows_give_what_their_segments_give_alone(name, rows, single) -> None:
    ids, valid, cuts = rows
    time = ids.shape[1]
    mixer = build(name)
    x = torch.randn(2, time, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(time))
    expected = alone(mixer, x, ids, valid)
    junk = x.masked_fill(~valid.unsqueeze(-1), float("nan"))
    ids = ids.masked_fill(~valid, 77)
    torch.testing.assert_close(mixer(junk, Context(valid=valid, segment_ids=ids)).y, expected)
    state, pieces = mixer.init_state(2), []
    bounds = list(range(time + 1)) if single else [0, *cuts, time]
    for start, stop in pairwise(bounds):
        here = slice(start, stop)
        y, state, _ = mixer(junk[:, here], Context(valid=valid[:, here], segment_ids=ids[:, here]), state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected)


@every_mixer
@settings(max_examples=8)
@given(rows=packed_rows())
@torch.no_grad()
def test_without_causality_too_a_row_gives_what_its_segments_give_alone(name, rows) -> None:
    ids, valid, _ = rows
    mixer = build(name, causal=False)
    x = torch.randn(2, ids.shape[1], 16, dtype=torch.float64, generator=torch.Generator().manual_seed(ids.shape[1]))
    y = mixer(x.masked_fill(~valid.unsqueeze(-1), float("nan")), Context(valid=valid, segment_ids=ids)).y
    torch.testing.assert_close(y, alone(mixer, x, ids, valid))


@every_mixer
def test_every_implementation_gives_the_same_outputs_and_gradients(name) -> None:
    x = torch.randn(2, 19, 16, dtype=torch.float64)
    valid = torch.arange(19).expand(2, 19) < torch.tensor([[19], [11]])
    found = {}
    for impl in variants.entry(name.split()[0]).facts["implementations"]:
        if implementations.usable(impl, "cpu") is not None:
            continue
        mixer = build(name, impl=impl)
        assert mixer.implementation == impl
        y = mixer(x, Context(valid=valid)).y
        found[impl] = [y, *torch.autograd.grad(y.pow(2).sum(), [p for p in mixer.parameters() if p.requires_grad])]
    reference = found.pop("reference")
    for others in found.values():
        for a, b in zip(others, reference, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["full", "gqa", "sliding_window"])
@torch.no_grad()
def test_keys_are_kept_unturned_for_a_scheme_that_depends_on_the_length(name) -> None:
    mixer = build(name, position=Stretched(4, 4, 16))
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    state = mixer.init_state(2)
    for t in range(9):
        y, state, _ = mixer(x[:, t : t + 1], state=state)
        torch.testing.assert_close(y, mixer(x[:, : t + 1]).y[:, -1:], msg=f"after {t + 1} tokens")


@pytest.mark.parametrize("name", ["full", "mqa", "gqa", "sliding_window", "linear"])
def test_a_misspelt_option_of_a_mixer_is_refused_with_the_nearest(name) -> None:
    with pytest.raises(UnknownOption, match=f"variant '{name}' has no option 'windw_size'"):
        variants.build(name, dim=8, heads=2, windw_size=64)
    with pytest.raises(TypeError, match="windw_size"):
        variants.get(name)(8, 2, windw_size=64)


@pytest.mark.parametrize(
    ("name", "typo", "hint"), [("rope", "bas", "base"), ("learned", "max_position", "max_positions"), ("none", "headdim", "head_dim")]
)
def test_a_misspelt_option_of_a_scheme_is_refused_with_the_nearest(name, typo, hint) -> None:
    with pytest.raises(UnknownOption, match=f"position '{name}' has no option '{typo}'. Did you mean '{hint}'"):
        positions.build(name, head_dim=4, heads=2, dim=8, **{typo: 1})


@pytest.mark.parametrize("name", ["full", "mqa", "gqa", "sliding_window", "linear", "rope", "learned"])
def test_every_option_is_explained(name) -> None:
    registry = variants if name in variants.names() else positions
    assert [option["name"] for option in registry.describe(name)["options"] if not option["doc"]] == []
