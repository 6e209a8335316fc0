"""Stretched rotary positions: against published vectors, against the formulas in Python's floats, and what holds for all of them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from registry import UnknownOption, positions, variants
from tests.variants import oracles
from tests.variants.positions import formulas
from variants.contract import NotApplicable
from variants.positions.rotary import Rotary

STRETCHED = ["pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope"]
ROTARY = ["rope", "p_rope", *STRETCHED]
BY_LENGTH = ["dynamic_ntk", "longrope"]
FP64 = {"dtype": torch.float64}
FOUR_TIMES = {"factor": 4.0, "trained_length": 2048}

every_rotary = pytest.mark.parametrize("name", ROTARY)
every_stretched = pytest.mark.parametrize("name", STRETCHED)


def build(name: str, head_dim: int = 8, **options: object) -> Rotary:
    scheme = positions.build(name, head_dim=head_dim, heads=2, dim=2 * head_dim, **options)
    assert isinstance(scheme, Rotary)
    return scheme


def table(scheme: Rotary, length: int | None = None) -> list[float]:
    return scheme.frequencies().tolist() if length is None else scheme.frequencies(torch.tensor([length])).view(-1).tolist()


def turned(scheme: Rotary, x: Tensor, at: Tensor) -> Tensor:
    """x: (batch, heads, time, head_dim)."""
    return scheme.rotate(x, x, at, at)[0]


@pytest.mark.parametrize(
    ("name", "options", "length", "expected"),
    [
        ("rope", {}, None, [1.0, 0.1, 0.01, 0.001]),
        ("pi", {"factor": 4.0}, None, [2.5e-01, 2.5e-02, 2.5e-03, 2.5e-04]),
        ("ntk", {"factor": 4.0}, None, [1.0, 6.29960525e-02, 3.96850263e-03, 2.5e-04]),
        ("ntk", {"factor": 4.0, "form": "fixed"}, None, [7.07106781e-01, 5.0e-02, 3.53553391e-03, 2.5e-04]),
        ("ntk", {"factor": 4.0, "form": "mixed"}, None, [5.58296565e-01, 4.07016855e-02, 3.14063372e-03, 2.5e-04]),
        ("dynamic_ntk", FOUR_TIMES, 2048, [1.0, 0.1, 0.01, 0.001]),
        ("dynamic_ntk", FOUR_TIMES, 2049, [1.0, 9.99349805e-02, 9.98700032e-03, 9.98050682e-04]),
        ("dynamic_ntk", FOUR_TIMES, 4096, [1.0, 5.84803548e-02, 3.41995189e-03, 2.0e-04]),
        ("dynamic_ntk", FOUR_TIMES, 8192, [1.0, 4.25290370e-02, 1.80871899e-03, 7.69230769e-05]),
        ("yarn", FOUR_TIMES, None, [1.0, 0.1, 6.25e-03, 2.5e-04]),
        ("yarn", {**FOUR_TIMES, "truncate": False}, None, [1.0, 0.1, 5.05697152e-03, 2.5e-04]),
        ("yarn", {**FOUR_TIMES, "ramp": "rotations"}, None, [1.0, 0.1, 3.04665159e-03, 2.5e-04]),
        ("ntk_by_parts", FOUR_TIMES, None, [1.0, 0.1, 3.04665159e-03, 2.5e-04]),
        ("llama3", FOUR_TIMES, None, [1.0, 0.1, 8.14873309e-03, 2.5e-04]),
        (
            "longrope",
            {**FOUR_TIMES, "long_factors": [1.0, 1.5, 3.0, 4.0]},
            2049,
            [1.0, 6.66666667e-02, 3.33333333e-03, 2.5e-04],
        ),
        ("p_rope", {"proportion": 0.75}, None, [1.0, 0.1, 0.01, 0]),
        ("p_rope", {"proportion": 0.5}, None, [1.0, 0.1, 0, 0]),
        ("rope", {"fraction": 0.5}, None, [1.0, 0.01]),
    ],
)
def test_frequencies_of_width_eight_are_those_published(name, options, length, expected) -> None:
    assert table(build(name, **options), length) == pytest.approx(expected, rel=1e-8)


PAIRS = [0, 1, 4, 8, 12, 16, 20, 24, 28, 31]


@pytest.mark.parametrize(
    ("name", "options", "length", "expected"),
    [
        ("rope", {}, None, "1 7.49894209e-01 3.16227766e-01 .1 3.16227766e-02 .01 3.16227766e-03 .001 3.16227766e-04 1.33352143e-04"),
        (
            "pi",
            {"factor": 4.0},
            None,
            ".25 1.87473552e-01 7.90569415e-02 .025 7.90569415e-03 .0025 7.90569415e-04 2.5e-04 7.90569415e-05 3.33380358e-05",
        ),
        (
            "ntk",
            {"factor": 4.0},
            None,
            "1 7.17098328e-01 2.64432505e-01 6.99245499e-02 1.84903239e-02 4.88944268e-03 1.29292758e-03 3.41892079e-04 9.04073790e-05 "
            "3.33380358e-05",
        ),
        (
            "dynamic_ntk",
            FOUR_TIMES,
            4096,
            "1 7.11955059e-01 2.56927341e-01 6.60116585e-02 1.69601999e-02 4.35753905e-03 1.11957092e-03 2.87648380e-04 7.39047333e-05 "
            "2.66704286e-05",
        ),
        (
            "dynamic_ntk",
            FOUR_TIMES,
            8192,
            "1 6.90345254e-01 2.27125227e-01 5.15858686e-02 1.17164521e-02 2.66110184e-03 6.04403359e-04 1.37275250e-04 3.11786723e-05 "
            "1.02578572e-05",
        ),
        (
            "yarn",
            FOUR_TIMES,
            None,
            "1 7.49894209e-01 3.16227766e-01 .1 2.43252128e-02 5.38461538e-03 9.73008511e-04 2.5e-04 7.90569415e-05 3.33380358e-05",
        ),
        (
            "yarn",
            {**FOUR_TIMES, "truncate": False},
            None,
            "1 7.49894209e-01 3.16227766e-01 .1 2.38701923e-02 5.05697152e-03 8.11290382e-04 2.5e-04 7.90569415e-05 3.33380358e-05",
        ),
        (
            "ntk_by_parts",
            FOUR_TIMES,
            None,
            "1 7.49894209e-01 3.16227766e-01 .1 1.50264977e-02 3.04665159e-03 7.92921405e-04 2.5e-04 7.90569415e-05 3.33380358e-05",
        ),
        (
            "llama3",
            FOUR_TIMES,
            None,
            "1 7.49894209e-01 3.16227766e-01 .1 3.16227766e-02 8.14873309e-03 8.14873309e-04 2.5e-04 7.90569415e-05 3.33380358e-05",
        ),
        (
            "ntk",
            {"factor": 4.0, "form": "mixed"},
            None,
            "8.5307766e-01 5.86907723e-01 2.04784773e-01 5.33983144e-02 1.43590317e-02 3.93130417e-03 1.08965959e-03 3.04802978e-04 "
            "8.58747119e-05 3.33380358e-05",
        ),
    ],
)
def test_frequencies_of_width_sixty_four_are_those_published(name, options, length, expected) -> None:
    got = table(build(name, 64, **options), length)
    assert [got[pair] for pair in PAIRS] == pytest.approx([float(number) for number in expected.split()], rel=1e-8)


def test_llama_3_1_keeps_its_fast_pairs_blends_six_and_divides_the_rest() -> None:
    got = table(build("llama3", 128, base=500_000.0))
    plain = table(build("rope", 128, base=500_000.0))
    blended = [2.16657076e-03, 1.37189357e-03, 8.56751413e-04, 5.24846161e-04, 3.12693750e-04, 1.78507813e-04]
    assert got[:29] == plain[:29]
    assert got[28] == pytest.approx(3.21144599e-03, rel=1e-8)
    assert got[29:35] == pytest.approx(blended, rel=1e-8)
    assert got[35:] == [f / 8 for f in plain[35:]]
    assert [got[35], got[36], got[63]] == pytest.approx([9.55621235e-05, 7.78465527e-05, 3.06892599e-07], rel=1e-8)


@pytest.mark.parametrize(
    ("width", "options", "expected"),
    [
        (8, FOUR_TIMES, (1, 3)),
        (8, {**FOUR_TIMES, "truncate": False}, (1.0080001, 2.5131501)),
        (64, FOUR_TIMES, (8, 21)),
        (64, {**FOUR_TIMES, "truncate": False}, (8.06400085, 20.10520067)),
        (64, {"base": 150_000.0, "factor": 32.0, "trained_length": 4096}, (8, 18)),
        (64, {"base": 150_000.0, "factor": 32.0, "trained_length": 4096, "truncate": False}, (8.092779115512, 17.398024501588)),
        (64, {"factor": 40.0, "trained_length": 4096}, (10, 23)),
        (64, {"trained_length": 256, "truncate": False}, (0.84, 12.88)),
        (64, {"trained_length": 128, "truncate": False}, (0, 10.47)),
    ],
)
def test_the_ramp_of_yarn_begins_and_ends_where_published(width, options, expected) -> None:
    digits = 5e-3 if options.get("trained_length", 0) < 1000 else 1e-7
    assert build("yarn", width, **options).ends() == pytest.approx(expected, abs=digits)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1.0, 1.0),
        (4.0, 1.138629436112),
        (16.0, 1.277258872224),
        (32.0, 1.346573590280),
        (40.0, 1.368887945411),
        (64.0, 1.415888308336),
    ],
)
def test_yarn_multiplies_what_it_turns_by_a_factor_that_grows_with_the_logarithm(factor, expected) -> None:
    assert build("yarn", factor=factor).magnitude == pytest.approx(expected, abs=1e-12)


def test_an_attention_factor_that_is_given_is_final() -> None:
    scheme = build("yarn", factor=64.0, attention_factor=1.0)
    assert (scheme.magnitude, scheme.logit_scale) == (1.0, 1.0)
    # DeepSeek-V2 writes its own into the logits.
    given = build("yarn", factor=40.0, attention_factor=0.1 * 0.707 * math.log(40) + 1, temperature_on="logits")
    assert (given.magnitude, given.logit_scale) == (1.0, pytest.approx(1.589626165121, abs=1e-12))


@pytest.mark.parametrize("option", ["mscale", "mscale_all_dim", "attention_facter"])
def test_a_factor_under_another_name_is_refused_and_the_valid_names_are_listed(option) -> None:
    with pytest.raises(UnknownOption, match=f"position 'yarn' has no option '{option}'.*attention_factor.*temperature_on"):
        build("yarn", **{option: 1.0})


def test_the_base_of_dynamic_ntk_follows_the_length_and_comes_back() -> None:
    scheme = build("dynamic_ntk", 64, factor=2.0, trained_length=2048)
    bases = [table(scheme, length)[1] ** -32 for length in (100, 4096, 8192, 100)]
    assert bases == pytest.approx([10000, 31082.24, 74534.83, 10000], abs=5e-3)
    assert table(scheme, 100) == table(build("rope", 64))


def test_yarn_turns_one_to_eight_at_position_five_thousand_into_the_published_vector() -> None:
    x = torch.arange(1, 9, **FP64).view(1, 1, 1, 8)
    got = turned(build("yarn", **FOUR_TIMES), x, torch.tensor([[5000]]))
    expected = [5.80074835, 1.18295888, 4.68541541, -7.20819328, -0.24437767, -7.10349829, 7.29674914, 7.19444988]
    torch.testing.assert_close(got.flatten(), torch.tensor(expected, **FP64), rtol=0, atol=1e-8)
    assert float(got.norm() / x.norm()) == pytest.approx(1.138629436, abs=1e-9)


sizes = {
    "pairs": st.integers(2, 64),
    "base": st.floats(10, 1e6),
    "factor": st.floats(1, 64),
    "trained_length": st.integers(2, 10_000),
}


@given(**sizes, ratio=st.floats(0.1, 40), low=st.floats(0.1, 4), wider=st.floats(1.1, 40), truncate=st.booleans())
def test_every_table_is_that_of_its_formula(pairs, base, factor, trained_length, ratio, low, wider, truncate) -> None:
    width, length, high = 2 * pairs, max(1, int(ratio * trained_length)), low * wider
    given, trained = {"base": base, "factor": factor}, {"trained_length": trained_length}
    factors = [1 + factor * i for i in range(pairs)]
    betas = {"beta_slow": low, "beta_fast": high}
    expected = [
        ("pi", given, formulas.pi(width, base, factor)),
        *(("ntk", {**given, "form": form}, formulas.ntk(width, base, factor, form)) for form in ("base", "fixed", "mixed")),
        ("dynamic_ntk", given | trained, formulas.dynamic_ntk(width, base, factor, trained_length, length)),
        (
            "ntk_by_parts",
            {**given, **trained, "slow": low, "fast": high},
            formulas.by_parts(width, base, factor, trained_length, low, high),
        ),
        (
            "llama3",
            {**given, **trained, "low_freq_factor": low, "high_freq_factor": high},
            formulas.by_parts(width, base, factor, trained_length, low, high),
        ),
        (
            "yarn",
            {**given, **trained, **betas, "truncate": truncate},
            formulas.yarn(width, base, factor, trained_length, high, low, truncate),
        ),
        (
            "yarn",
            {**given, **trained, **betas, "ramp": "rotations"},
            formulas.by_parts(width, base, factor, trained_length, low, high),
        ),
        (
            "longrope",
            {**given, **trained, "long_factors": factors},
            formulas.longrope(width, base, factors if length > trained_length else [1.0] * pairs),
        ),
    ]
    for name, options, frequencies in expected:
        assert table(build(name, width, **options), length) == pytest.approx(frequencies, rel=1e-9), name


@given(pairs=st.integers(2, 64), base=st.floats(10, 1e6), start=st.integers(0, 100_000), layout=st.sampled_from(["half", "interleaved"]))
def test_at_factor_one_each_is_rope_bit_for_bit(pairs, base, start, layout) -> None:
    x = torch.randn(2, 2, 3, 2 * pairs, generator=torch.Generator().manual_seed(start))
    at = start + torch.tensor([[0, 1, 5], [3, 4, 9]])
    options = {"base": base, "layout": layout}
    expected = turned(build("rope", 2 * pairs, **options), x, at)
    for name in STRETCHED:
        scheme = build(name, 2 * pairs, factor=1.0, **options, **({"trained_length": 10**6} if name == "dynamic_ntk" else {}))
        assert torch.equal(turned(scheme, x, at), expected), name
        assert scheme.logit_scale == 1, name


@given(pairs=st.integers(2, 64), base=st.floats(2, 1e6), factor=st.floats(1, 64))
def test_the_larger_base_of_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest(pairs, base, factor) -> None:
    plain = table(build("rope", 2 * pairs, base=base))
    stretched = table(build("ntk", 2 * pairs, base=base, factor=factor))
    assert stretched[0] == plain[0]
    assert stretched[-1] == pytest.approx(plain[-1] / factor, rel=1e-12)
    assert all(slow <= fast for fast, slow in zip(plain, stretched, strict=True))
    default = table(build("longrope", 2 * pairs, base=base, factor=factor), 10**6)
    assert default == pytest.approx(stretched, rel=1e-12)


@given(**sizes, truncate=st.booleans())
def test_yarn_keeps_pairs_that_turned_often_and_interpolates_those_that_never_turned(pairs, base, factor, trained_length, truncate) -> None:
    width = 2 * pairs
    scheme = build("yarn", width, base=base, factor=factor, trained_length=trained_length, truncate=truncate)
    low, high = formulas.yarn_ends(width, base, trained_length)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    plain = table(build("rope", width, base=base))
    for pair, (before, after) in enumerate(zip(plain, table(scheme), strict=True)):
        if pair <= low:
            assert after == before
        elif pair >= high and pair > 0:  # the first pair is kept whatever the length
            assert after == before / factor
        else:
            assert before / factor * (1 - 1e-12) <= after <= before


def shifted_score(scheme: Rotary, shift: int) -> Tensor:
    """q at 40 + shift, k at 33 + shift; a first key far ahead fixes the length that the row has."""
    torch.manual_seed(3)
    q, k = torch.randn(1, 1, 1, scheme.head_dim, **FP64), torch.randn(1, 1, 2, scheme.head_dim, **FP64)
    q, k = scheme.rotate(q, k, torch.tensor([[40 + shift]]), torch.tensor([[33 + shift, 5000]]))
    return (q * k[:, :, :1]).sum()


@every_rotary
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("head_dim", "fraction"), [(6, 1.0), (8, 1.0), (8, 0.5)])
def test_scores_depend_on_the_distance_alone(name, layout, head_dim, fraction) -> None:
    scheme = build(name, head_dim, layout=layout, fraction=fraction)
    for shift in (5, 1000, 4000):
        torch.testing.assert_close(shifted_score(scheme, shift), shifted_score(scheme, 0))


@every_rotary
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("length", [9, 5000])
def test_norms_grow_by_the_magnitude_and_channels_beyond_the_fraction_pass_through(name, layout, length) -> None:
    scheme = build(name, 12, layout=layout, fraction=0.67)
    assert scheme.width == 8
    x = torch.randn(1, 1, 2, 12, **FP64)
    got = turned(scheme, x, torch.tensor([[3, length - 1]]))
    torch.testing.assert_close(got[..., :8].norm(dim=-1), scheme.magnitude * x[..., :8].norm(dim=-1))
    assert torch.equal(got[..., 8:], x[..., 8:])
    assert (got[..., :8] != x[..., :8]).any()


@every_rotary
def test_the_layouts_are_one_another_permuted(name) -> None:
    x, at, order = torch.randn(1, 2, 3, 8, **FP64), torch.tensor([[1, 50, 4000]]), torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    half, interleaved = build(name), build(name, layout="interleaved")
    torch.testing.assert_close(turned(half, x[..., order], at), turned(interleaved, x, at)[..., order])


@pytest.mark.parametrize("name", BY_LENGTH)
def test_what_came_before_changes_nothing(name) -> None:
    scheme, x = build(name, factor=4.0, trained_length=64), torch.randn(1, 1, 3, 8, **FP64)

    def at(length: int, using: Rotary = scheme) -> Tensor:
        return turned(using, x, torch.tensor([[0, length // 2, length - 1]]))

    lengths = [10, 64, 65, 128, 1000, 65, 64, 63, 65, 128, 10]
    for length in lengths:
        fresh = build(name, factor=4.0, trained_length=64)
        assert torch.equal(at(length), at(length, fresh)), f"{length} tokens"
    assert not torch.equal(at(64), at(65))


@pytest.mark.parametrize("name", BY_LENGTH)
def test_neither_heads_nor_tokens_are_counted_for_a_length(name) -> None:
    options = {"factor": 4.0, "trained_length": 4}
    x, plain = torch.randn(1, 8, 6, 8), build("rope")
    within, beyond = torch.tensor([[0, 1, 1, 2, 3, 3]]), torch.tensor([[0, 1, 2, 3, 9, 9]])
    scheme = build(name, attention_factor=1.0, **options) if name == "longrope" else build(name, **options)
    assert torch.equal(turned(scheme, x, within), turned(plain, x, within))
    assert torch.equal(turned(scheme, x, beyond)[:, :1], turned(scheme, x[:, :1], beyond))
    assert torch.equal(turned(scheme, x, beyond)[:, :, -1:], turned(scheme, x[:, :, -1:], beyond[:, -1:]))


@pytest.mark.parametrize("name", BY_LENGTH)
@pytest.mark.parametrize("lengths", [(64, 65), (200, 3), (65, 500)])
def test_the_length_of_a_row_changes_no_other_row(name, lengths) -> None:
    scheme, x = build(name, factor=4.0, trained_length=64), torch.randn(2, 1, 2, 8, **FP64)
    at = torch.tensor([[1, length - 1] for length in lengths])
    together = turned(scheme, x, at)
    for row in range(2):
        torch.testing.assert_close(together[row], turned(scheme, x[row : row + 1], at[row : row + 1])[0])


@pytest.mark.parametrize("name", BY_LENGTH)
def test_queries_at_one_place_are_turned_by_the_lengths_of_their_own_rows(name) -> None:
    scheme, q = build(name, factor=4.0, trained_length=64), torch.randn(2, 1, 1, 8, **FP64)
    k, k_positions = torch.randn(2, 1, 2, 8, **FP64), torch.tensor([[0, 60], [0, 900]])
    q_turned, k_turned = scheme.rotate(q, k, torch.tensor([[40]]).expand(2, 1), k_positions)
    for row in range(2):
        here = slice(row, row + 1)
        alone = scheme.rotate(q[here], k[here], torch.tensor([[40]]), k_positions[here])
        torch.testing.assert_close((q_turned[here], k_turned[here]), alone)


@every_rotary
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_cast_model_turns_by_angles_that_were_not_cast(name, dtype, autocast) -> None:
    scheme = build(name, fraction=0.5).to(dtype)
    where = [*range(255, 261), 2047, 2048, 2049, *range(4096, 4113), 131_071]
    at = torch.tensor([where])
    ones = torch.zeros(1, 1, len(where), 8, dtype=dtype)
    ones[..., :2] = 1  # (1, 0) in each of the two pairs
    with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else dtype, enabled=autocast):
        got = turned(scheme, ones, at)
    assert got.dtype == dtype
    for pair, frequency in enumerate(table(scheme, where[-1] + 1)):
        angles = [p * frequency for p in where]
        exact = torch.tensor([[scheme.magnitude * f(a) for a in angles] for f in (math.cos, math.sin)])
        mine = torch.stack([got[0, 0, :, pair], got[0, 0, :, pair + 2]])
        torch.testing.assert_close(mine.float(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps)
    fastest = scheme.angles(at, torch.tensor([where[-1] + 1]))[0, :, 0]
    assert fastest.dtype == torch.float64
    assert len(fastest.unique()) == len(where)


@pytest.mark.parametrize("name", [*ROTARY, "xpos", "sinusoidal", "alibi", "t5_bias", "learned", "none"])
def test_a_model_made_on_the_meta_device_or_sent_through_a_bf16_checkpoint_has_its_positions(name) -> None:
    made = variants.build("full", dim=8, heads=2, position=name)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16())
    x = torch.randn(1, 5, 8)
    with torch.device("meta"):
        empty = variants.build("full", dim=8, heads=2, position=name)
    restored = empty.to_empty(device="cpu")
    restored.load_state_dict({key: part.bfloat16() for key, part in made.state_dict().items()})
    assert torch.equal(restored(x).y, made(x).y)
    if name not in ("t5_bias", "learned"):
        assert not any("position" in key for key in made.state_dict())
    assert torch.equal(copy.deepcopy(made).to(torch.float64).to(torch.float32)(x).y, made(x).y)


@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_a_temperature_on_the_logits_is_that_on_the_rotation_where_all_channels_turn_and_only_there(name) -> None:
    def outputs(where: str, fraction: float) -> Tensor:
        torch.manual_seed(0)
        position = {"name": name, "factor": 16.0, "temperature_on": where, "fraction": fraction}
        mixer = variants.build("full", dim=16, heads=2, position=position).double()
        return mixer(3 * torch.randn(1, 9, 16, **FP64)).y

    torch.testing.assert_close(outputs("rotation", 1.0), outputs("logits", 1.0))
    assert (outputs("rotation", 0.5) - outputs("logits", 0.5)).abs().max() > 1e-3


@pytest.mark.parametrize("name", STRETCHED)
def test_a_cached_run_gives_the_outputs_of_complex_multiplication_by_the_formula(name) -> None:
    """The layer by hand within the trained length and beyond it, one token at a time."""
    torch.manual_seed(1)
    options = {"factor": 4.0} if name in ("pi", "ntk") else {"factor": 4.0, "trained_length": 8}
    mixer = variants.build("full", dim=8, heads=1, position={"name": name, **options}).double()
    x, state = torch.randn(1, 12, 8, **FP64), mixer.init_state(1)
    q, k, v = (x @ mixer.projections.inward.weight.T).split(8, -1)
    by_hand = {
        "pi": lambda length: formulas.pi(8, 1e4, 4.0),
        "ntk": lambda length: formulas.ntk(8, 1e4, 4.0),
        "dynamic_ntk": lambda length: formulas.dynamic_ntk(8, 1e4, 4.0, 8, length),
        "ntk_by_parts": lambda length: formulas.by_parts(8, 1e4, 4.0, 8, 1.0, 32.0),
        "yarn": lambda length: formulas.yarn(8, 1e4, 4.0, 8),
        "llama3": lambda length: formulas.by_parts(8, 1e4, 4.0, 8, 1.0, 4.0),
        "longrope": lambda length: formulas.ntk(8, 1e4, 4.0) if length > 8 else formulas.rope(8, 1e4),
    }[name]
    magnitude = {"yarn": 1 + 0.1 * math.log(4), "longrope": math.sqrt(1 + math.log(4) / math.log(8))}.get(name, 1.0)
    for t in range(12):
        y, state, _ = mixer(x[:, t : t + 1], state=state)

        def turn(rows: Tensor, start: int, frequencies: list[float]) -> Tensor:
            pairs = torch.complex(rows[..., :4], rows[..., 4:])
            angles = torch.arange(start, start + rows.shape[1], **FP64)[:, None] * torch.tensor(frequencies, **FP64)
            product = magnitude * pairs * torch.polar(torch.ones_like(angles), angles)
            return torch.cat([product.real, product.imag], -1).unsqueeze(1)

        q_turned, k_turned = turn(q[:, t : t + 1], t, by_hand(t + 1)), turn(k[:, : t + 1], 0, by_hand(t + 1))
        expected = oracles.attention(q_turned, k_turned, v[:, None, : t + 1], oracles.causal(1, t + 1))
        torch.testing.assert_close(y, expected[:, 0] @ mixer.projections.outward.weight.T, msg=f"token {t}")


@pytest.mark.parametrize(
    ("name", "head_dim", "options", "message"),
    [
        *((name, 8, {"factor": 0.5}, "factor stretches and must be at least 1; got 0.5") for name in STRETCHED),
        *((name, 8, {"factor": math.nan}, "must be at least 1; got nan") for name in STRETCHED),
        *((name, 7, {}, "fraction=1.0 of head_dim=7 is 7") for name in STRETCHED),
        *((name, 2, {}, "there must be another; got width 2") for name in ("ntk", "dynamic_ntk")),
        *(
            (name, 8, {"trained_length": 1}, "trained_length must be at least 2; got 1")
            for name in ("dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope")
        ),
        ("yarn", 8, {"beta_fast": 1.0, "beta_slow": 32.0}, "beta_slow must lie above 0 and below beta_fast; got 32.0 and 1.0"),
        ("yarn", 8, {"beta_slow": 0.0}, "beta_slow must lie above 0 and below beta_fast; got 0.0 and 32.0"),
        ("yarn", 8, {"attention_factor": 0.0}, "attention_factor must be positive; got 0.0"),
        ("yarn", 8, {"base": 1.0}, "base must lie above 1, .* got 1.0"),
        ("ntk_by_parts", 8, {"slow": 4.0, "fast": 4.0}, "slow must lie above 0 and below fast; got 4.0 and 4.0"),
        ("llama3", 8, {"high_freq_factor": 0.5}, "low_freq_factor must lie above 0 and below high_freq_factor; got 1.0 and 0.5"),
        ("p_rope", 8, {"proportion": 1.5}, "proportion must lie between 0 and 1; got 1.5"),
    ],
)
def test_arithmetic_that_cannot_be_is_refused_with_the_numbers(name, head_dim, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, head_dim, **options)


@pytest.mark.parametrize(
    ("name", "option", "value", "choices"),
    [
        ("yarn", "ramp", "turns", "pairs, rotations"),
        ("ntk", "form", "fix", "base, fixed, mixed"),
        ("rope", "layout", "neox", "half, inter"),
    ],
)
def test_a_choice_that_there_is_not_is_refused_with_those_that_there_are(name, option, value, choices) -> None:
    with pytest.raises(UnknownOption, match=f"position '{name}': {option} cannot be '{value}'.*Valid: {choices}"):
        build(name, **{option: value})


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_mixer_that_sums_its_keys_up_refuses_frequencies_that_change(name) -> None:
    with pytest.raises(NotApplicable, match="cannot turn them again when the length of a row changes"):
        variants.build("linear", dim=8, heads=2, position=name)


@given(proportion=st.floats(0, 1), pairs=st.integers(1, 64))
def test_p_rope_turns_the_fastest_pairs_as_rope_does_and_leaves_the_others(proportion, pairs) -> None:
    got, plain = table(build("p_rope", 2 * pairs, proportion=proportion)), table(build("rope", 2 * pairs))
    turning = math.floor(proportion * pairs + 1e-9)
    assert got == [*plain[:turning], *[0.0] * (pairs - turning)]


def test_p_rope_turns_one_to_eight_at_position_three_into_the_published_vector() -> None:
    x = torch.arange(1, 9, **FP64).view(1, 1, 1, 8)
    expected = torch.tensor([-1.69559254, 0.13755174, 3, 4, -4.80884247, 6.32305935, 7, 8], **FP64)
    got = turned(build("p_rope", proportion=0.5), x, torch.tensor([[3]])).flatten()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-8)


def test_the_proportion_runs_from_no_position_to_rope() -> None:
    x, at = torch.randn(1, 1, 3, 8), torch.tensor([[0, 7, 900]])
    assert torch.equal(turned(build("p_rope", proportion=0.0), x, at), x)
    assert torch.equal(turned(build("p_rope", proportion=1.0), x, at), turned(build("rope"), x, at))
