"""Hybrid stacks: patterns, the mixers they stand for, positions where they have a meaning, one cache of many kinds."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import Tensor

from experiments import model
from experiments.config import resolve
from registry import UserError, options, variants
from variants.contract import Context, NotApplicable
from variants.hybrid import PRESETS, parse


def tokens(time: int = 9) -> Tensor:
    return torch.randn(2, time, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def build(**options):
    torch.manual_seed(0)
    return variants.build("hybrid", dim=16, heads=2, **options).double()


def names(pattern) -> list[list[str]]:
    return [[part["name"] for part in layer] for layer in parse(pattern)]


def test_a_pattern_is_read_layer_by_layer() -> None:
    assert names("mamba2*3 full") == [["mamba2"], ["mamba2"], ["mamba2"], ["full"]]
    assert names("mamba2+full*2 gla") == [["mamba2", "full"], ["mamba2", "full"], ["gla"]]
    assert names(["gla", {"name": "full", "kv_heads": 1}, ["kda", {"name": "mla"}]]) == [["gla"], ["full"], ["kda", "mla"]]
    assert parse([{"name": "full", "kv_heads": 1}])[0][0]["kv_heads"] == 1


def test_presets_are_the_stacks_of_their_papers() -> None:
    assert {preset: " ".join(name for (name,) in names(pattern)) for preset, pattern in PRESETS.items()} == {
        "jamba": "mamba mamba mamba mamba full mamba mamba mamba",
        "samba": "mamba sliding_window",
        "griffin": "gla gla sliding_window",
        "kimi": "kda kda kda mla",
    }
    assert set(PRESETS) | {"none"} == {
        word for option in options(variants.get("hybrid")) if option.name == "preset" for word in typing.get_args(option.type)
    }


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "is text such as 'mamba2\\*7 full'"),
        (3, "is text such as"),
        ("full*0", "'full\\*0' is not a name, name\\*count or name\\+name"),
        ("ful", "ful.*Did you mean 'full'"),
        ([{"heads": 3}], "a mapping with the key 'name'"),
        ("hybrid", "a hybrid stands in no hybrid"),
        ([[]], "needs at least one"),
        ([{"name": "full", "causal": False}], "full cannot have causal of its own"),
        ([{"name": "full", "heads": 4}], "full cannot have heads of its own"),
        (["gla", {"name": "full", "shrot_conv": 4}], "no option 'shrot_conv'.*Did you mean 'short_conv'"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, message) -> None:
    with pytest.raises(UserError, match=message):
        build(pattern=pattern)


def test_settings_hold_for_every_mixer_of_a_name_but_for_what_it_sets_itself() -> None:
    settings = {"mamba2": {"state_dim": 4, "expand": 1}, "full": {"kv_heads": 1}}
    pattern = ["mamba2", {"name": "mamba2", "state_dim": 6}, "full"]
    first, second, third = (build(pattern=pattern, settings=settings, layer=n).parts[0] for n in range(3))
    assert (first.state_dim, first.head_dim) == (4, 8) and (second.state_dim, second.head_dim) == (6, 8) and third.kv_heads == 1
    build(pattern=pattern, settings={"mamba": {}})
    with pytest.raises(UserError, match="Did you mean 'mamba2'"):
        build(pattern=pattern, settings={"mambo2": {}})
    with pytest.raises(UserError, match="settings.full is a mapping of options; got 3"):
        build(pattern=pattern, settings={"full": 3})
    with pytest.raises(UserError, match="Did you mean 'short_conv'"):
        build(pattern=pattern, settings={"full": {"shrot_conv": 4}}, layer=0)


def test_settings_that_are_no_mapping_are_refused(unchecked) -> None:
    with pytest.raises(UserError, match="settings is a mapping of names to options; got \\[1\\]"):
        build(settings=[1])


@torch.no_grad()
def test_a_layer_is_the_mixer_of_its_place() -> None:
    for layer, name in enumerate(["gla", "full", "gla", "full"]):
        hybrid = build(pattern="gla full", layer=layer, position="rope")
        alone = variants.build(name, dim=16, heads=2, position="rope").double()
        alone.load_state_dict(hybrid.parts[0].state_dict())
        assert torch.equal(hybrid(tokens()).y, alone(tokens()).y)
        assert (hybrid.flops(100), hybrid.state_elements(100), hybrid.time) == (alone.flops(100), alone.state_elements(100), alone.time)


def test_what_is_read_is_what_the_parts_read() -> None:
    hybrid = build(pattern="moba+gla", settings={"moba": {"block": 4, "count": 2}})
    chosen, whole = hybrid.mixers
    assert chosen.read_elements(50) < chosen.state_elements(50) and whole.read_elements(50) == whole.state_elements(50)
    assert hybrid.read_elements(50) == chosen.read_elements(50) + whole.read_elements(50)


@torch.no_grad()
def test_parallel_parts_give_the_mean_of_their_normed_outputs() -> None:
    hybrid = build(pattern="gla+full", position="rope")
    hybrid.norms[1].weight.mul_(3)
    expected = 0
    for part, norm in zip(hybrid.parts, hybrid.norms, strict=True):
        y = part(tokens()).y
        expected = expected + y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight / 2
    torch.testing.assert_close(hybrid(tokens()).y, expected)
    assert (hybrid.time, hybrid.state) == ("T^2", "T")


@torch.no_grad()
def test_parallel_parts_keep_their_states_apart() -> None:
    hybrid = build(pattern="sliding_window+mamba2+sliding_window")
    state, outputs = hybrid.init_state(2), []
    for piece in tokens(11).split([4, 1, 5, 1], dim=1):
        y, state, _ = hybrid(piece, state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), hybrid(tokens(11)).y)
    assert {name.partition(".")[0] for name in state if "." in name} == {"0", "1", "2"}


def test_a_position_goes_to_the_parts_that_take_it() -> None:
    hybrid = build(pattern="mamba2+full", position="rope")
    assert [part.position is not None for part in hybrid.parts] == [False, True]
    with pytest.raises(NotApplicable, match="no mixer of its pattern takes position rope"):
        build(pattern="mamba2", position="rope")
    own = build(pattern=[["gla", {"name": "full", "position": "alibi"}]], position="rope")
    assert [type(part.position).__name__ for part in own.parts] == ["Rotary", "ALiBi"]
    assert build(pattern="mamba2", position="learned").position is not None


@torch.no_grad()
def test_a_scheme_of_one_part_that_is_added_to_x_is_added_there() -> None:
    alone = variants.build("full", dim=16, heads=2, position="sinusoidal").double()
    hybrid = build(pattern=[{"name": "full", "position": "sinusoidal"}])
    hybrid.parts[0].load_state_dict(alone.state_dict())
    torch.testing.assert_close(hybrid(tokens()).y, alone(tokens()).y)
    assert not torch.allclose(hybrid(tokens()).y, build(pattern="full")(tokens()).y)


def test_what_a_part_refuses_the_hybrid_refuses() -> None:
    ids = Context(segment_ids=torch.arange(8)[None] // 4)
    for given in ({"position": "dynamic_ntk", "pattern": "full"}, {"pattern": [["gla", {"name": "full", "position": "dynamic_ntk"}]]}):
        with pytest.raises(ValueError, match="depends on the length of a row"):
            build(**given)(torch.randn(1, 8, 16, dtype=torch.float64), ids)


def test_presets_without_positions_take_none() -> None:
    assert build(preset="jamba", layer=4).parts[0].position is None
    with pytest.raises(NotApplicable, match="no mixer of its pattern takes position rope"):
        build(preset="jamba", position="rope")
    assert build(preset="kimi", position="rope", layer=3).parts[0].position is None


def test_without_causality_each_part_must_have_such_a_form() -> None:
    assert build(pattern="full+linear", causal=False).causal is False
    with pytest.raises(NotApplicable, match="Mamba2 has no bidirectional form"):
        build(pattern="full+mamba2", causal=False)


@torch.no_grad()
def test_a_stack_has_one_cache_of_many_kinds_and_one_count_of_positions() -> None:
    config = resolve(
        [
            "variant=hybrid",
            "variant.pattern='mamba2 sliding_window full'",
            "position=rope",
            "model.layers=4",
            "model.dim=16",
            "model.heads=2",
        ]
    )
    decoder = model.build(config, 11).double().eval()
    assert [type(mixer.parts[0]).__name__ for mixer in decoder.mixers()] == ["Mamba2", "SlidingWindow", "Full", "Mamba2"]
    ids = torch.randint(0, 11, (2, 13), generator=torch.Generator().manual_seed(0))
    state, logits = decoder.init_state(2), []
    for piece in ids.split([1, 6, 2, 4], dim=1):
        out = decoder(piece, state=state)
        state = out.state
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), decoder(ids).logits)
    assert state.counters["seen"].tolist() == [13, 13]
