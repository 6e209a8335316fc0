"""What holds for every registered position scheme."""

from __future__ import annotations

import pytest
import torch

from registry import UnknownOption, positions, variants
from variants.conformance import caching, rows
from variants.conformance.run import judge, subjects_of
from variants.positions.rotary import Rotary

ABSOLUTE = ["none", "learned", "sinusoidal"]
BIASES = ["alibi", "t5_bias"]
ROTARY = ["rope", "p_rope", "xpos", "pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope"]

#: Maps of distances, with options that put a boundary within the few tokens of a fast check.
RELATIVE = {"self_extend": {"group": 3, "window": 5}, "rerope": {"window": 5}, "dual_chunk": {"trained_length": 8}}

every_scheme = pytest.mark.parametrize("name", [*ABSOLUTE, *BIASES, *ROTARY, *RELATIVE])


def test_every_promised_name_is_there() -> None:
    assert {*ABSOLUTE, *BIASES, *ROTARY, *RELATIVE} <= set(positions.names())


@every_scheme
def test_every_option_is_explained(name) -> None:
    described = positions.describe(name)
    assert described["summary"].endswith(".")
    assert all(option["doc"] for option in described["options"])


@every_scheme
def test_a_misspelt_option_is_refused_with_the_valid_ones(name) -> None:
    known = [option["name"] for option in positions.describe(name)["options"]] or ["head_dim"]
    with pytest.raises(UnknownOption, match=f"position '{name}' has no option 'windw_size'.*{known[-1]}"):
        positions.build(name, head_dim=4, heads=2, dim=8, windw_size=64)
    with pytest.raises(TypeError, match="windw_size"):
        positions.get(name)(4, 2, 8, windw_size=64)


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_which_channels_pair_is_an_option_and_at_position_zero_nothing_is_turned(name, layout) -> None:
    scheme = positions.build(name, head_dim=8, heads=2, dim=16, layout=layout)
    assert isinstance(scheme, Rotary)
    assert next(option["default"] for option in positions.describe(name)["options"] if option["name"] == "layout") == "half"
    x, start = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.long)
    assert torch.equal(scheme.rotate(x, x, start, start)[0], scheme.magnitude * x)


# Maps of distances have no bidirectional form: test_relative.py has their refusal.
@pytest.mark.parametrize("name", [*ABSOLUTE, *BIASES, *ROTARY])
def test_rows_read_backwards_are_others_but_to_biases_by_distance_and_to_no_position(name) -> None:
    torch.manual_seed(0)
    mixer = variants.build("full", dim=16, heads=2, position=name, causal=False).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    backwards = mixer(x.flip(1)).y.flip(1)
    assert torch.allclose(backwards, mixer(x).y) == (name in ("none", *BIASES))


@every_scheme
@pytest.mark.parametrize(
    "check",
    [
        caching.single_steps_give_the_full_pass_of_every_length,
        caching.positions_are_those_given_and_otherwise_counted,
        rows.packed_segments_equal_separate_runs,
    ],
    ids=lambda check: check.__name__,
)
def test_full_attention_conforms_with_each(name, check) -> None:
    outcome = judge(check, subjects_of("full", {"position": {"name": name, **RELATIVE.get(name, {})}}, fast=True))
    by_length, moot = rows.packed_segments_equal_separate_runs, caching.positions_are_those_given_and_otherwise_counted
    refused = (check is by_length and positions.get(name).length_dependent) or (check is moot and name == "none")
    assert outcome.status == ("not applicable" if refused else "passed"), outcome.detail
