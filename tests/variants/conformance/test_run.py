"""What `check` reports, which forms of a variant it judges, and the pytest cases made of it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from registry import UnknownName, UnknownOption, UserError, positions, variants
from tests.variants.conformance import broken, broken_rows, toys
from variants.conformance import Outcome, as_json, check, pytest_cases
from variants.conformance.checks import PROPERTIES, sentence
from variants.conformance.run import judge, left_out, subjects_of
from variants.conformance.subject import Subject
from variants.contract import Mixer, NotApplicable
from variants.positions.contract import Scheme

#: Leaves no choice open: one form, a quarter of the time.
ONE_FORM = {"position": None, "short_conv": 0, "causal": True}


@pytest.fixture
def toy():
    """Registers a class as `toy` for one test."""
    with variants.scope(), positions.scope():
        yield variants.register("toy")


def test_every_property_is_reported_in_order_and_progress_is_told_before_each(toy):
    toy(toys.Mean)
    told = []
    outcomes = check("toy", options=ONE_FORM, fast=True, on_progress=lambda *step: told.append(step))
    names = [sentence(judged) for judged in PROPERTIES]
    assert [outcome.property for outcome in outcomes] == names
    assert told == [(name, done, len(names)) for done, name in enumerate(names)]


def test_the_json_document_has_exactly_the_promised_keys():
    outcomes = [Outcome("it holds", "passed", "17 tokens"), Outcome("it fails", "failed", "at token 3")]
    expected = [
        {"property": "it holds", "status": "passed", "detail": "17 tokens"},
        {"property": "it fails", "status": "failed", "detail": "at token 3"},
    ]
    assert as_json("toy", outcomes) == {"name": "toy", "properties": expected}
    left = {"property": "what was not checked", "status": "not applicable", "detail": "CUDA: no device; impl=numba: not installed"}
    document = as_json("toy", outcomes, ["CUDA: no device", "impl=numba: not installed"])
    assert document == {"name": "toy", "properties": [*expected, left]}


def test_a_crash_fails_a_property_and_the_rest_is_still_judged(toy):
    toy(broken.Crash)
    outcomes = check("toy", fast=True)
    assert len(outcomes) == len(PROPERTIES)
    crashed = next(outcome for outcome in outcomes if outcome.property == "padding changes no output and no gradient")
    assert (crashed.status, crashed.detail) == ("failed", "as given: RuntimeError: no such kernel")
    assert any(outcome.status == "passed" for outcome in outcomes)


def test_checking_leaves_the_random_numbers_of_the_caller_alone(toy):
    toy(toys.Mean)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check("toy", options=ONE_FORM, fast=True)
    assert torch.equal(torch.rand(3), expected)


def test_unknown_names_and_options_and_impossible_sizes_are_the_users_mistakes(toy):
    toy(toys.Mean)
    with pytest.raises(UnknownName, match="toyy"):
        check("toyy")
    with pytest.raises(UnknownOption, match="Did you mean 'dropout'"):
        check("toy", options={"dropuot": 0.1})
    with pytest.raises(UserError, match=r"'toy' cannot be built with dim=16, heads=3: .*heads=3 does not divide dim=16"):
        check("toy", options={"heads": 3})


def test_the_options_given_are_the_ones_judged(toy):
    @toy
    class Strict(toys.Mean):
        def __init__(self, dim, heads, position=None, **options):
            assert (dim, heads) == (24, 2), f"built with dim={dim}, heads={heads}"
            super().__init__(dim, heads, position, **options)

    assert {outcome.status for outcome in check("toy", options={"dim": 24, "heads": 2, **ONE_FORM}, fast=True)} == {
        "passed",
        "not applicable",
    }


def test_choices_left_open_are_varied_and_those_made_are_kept(toy):
    toy(toys.Mean)
    assert _labels(subjects_of("toy", {}))[-2:] == ["short_conv=3", "causal=False, short_conv=3"]
    assert _labels(subjects_of("toy", ONE_FORM)) == ["as given"]


def test_one_scheme_is_tried_for_each_set_of_hooks_the_variant_takes(toy):
    @toy
    class Turns(toys.Mean):
        hooks = ("rotate",)

    before = _labels(subjects_of("toy", {}))
    for name, hooks, by_length in (("aa_slide", ("rotate", "embed"), False), ("aa_lean", ("bias",), False), ("aa_grow", ("rotate",), True)):
        positions.register(name)(type(name, (Scheme,), {"hooks": hooks, "length_dependent": by_length}))
    # aa_lean needs a hook that the variant lacks, aa_grow depends on the length.
    assert set(_labels(subjects_of("toy", {}))) - set(before) == {"position=aa_slide"}


def test_a_scheme_that_treats_far_keys_in_another_way_is_tried_where_few_tokens_are_far(toy):
    labels = _labels(subjects_of("full", {}, fast=True))
    assert "position=self_extend, position.group=3, position.window=5" in labels
    subject = next(subject for subject in subjects_of("full", {}, fast=True) if "self_extend" in subject.label)
    assert {4, 5, 6, 11} <= set(subject.lengths)
    assert not any("self_extend" in phrase and "self_extend has" not in phrase for phrase in left_out("full", fast=True))


def test_every_length_up_to_twice_a_small_block_and_the_edges_of_a_large_one_are_tried(toy):
    @toy
    class Blocks(toys.Mean):
        def block_sizes(self):
            return 12, 40, 5000

    subject = Subject("toy", {"dim": 16, "heads": 4})
    assert set(subject.lengths) == {*range(1, 26), 39, 40, 41, 60, 79, 80, 81}
    assert "blocks of 5000 not crossed" in subject.lengths_in_words()


def test_a_fast_check_makes_blocks_small_unless_their_size_is_given_or_the_variant_refuses(toy):
    @toy
    class Blocked(toys.Mean):
        def __init__(self, dim, heads, position=None, *, chunk: int = 64, stride: int = 4, **options):
            super().__init__(dim, heads, position, **options)
            if chunk % stride:
                raise ValueError(f"stride={stride} does not divide chunk={chunk}")
            self.block = chunk

    def blocks(options, fast):
        return subjects_of("toy", options, fast=fast)[0].block_sizes

    assert blocks({}, fast=True) == (8,)
    assert blocks({}, fast=False) == (64,)
    assert blocks({"chunk": 12}, fast=True) == (12,)
    assert blocks({"stride": 32}, fast=True) == (64,)
    assert _labels(subjects_of("toy", {}, fast=True))[0] == "with chunk=8"


def test_equal_builds_have_equal_parameters_of_which_none_is_zero(toy):
    toy(toys.Mean)
    subject = Subject("toy", {"dim": 16, "heads": 4})
    first, second = (dict(subject.build().named_parameters()) for _ in range(2))
    assert all(bool((first[name] == second[name]).all()) and bool((first[name] != 0).all()) for name in first)


def test_a_scheme_given_as_an_instance_is_not_shared_between_builds(toy):
    toy(toys.Mean)

    class Learned(toys.Ramp):
        def __init__(self):
            super().__init__(4, 4, 16)
            self.table = nn.Parameter(torch.zeros(16))

    scheme = Learned()
    subject = Subject("toy", {"dim": 16, "heads": 4, "position": scheme})
    first, second = subject.build(), subject.build()
    assert torch.equal(first.position.table, second.position.table)
    assert not scheme.table.any()


def test_pytest_cases_return_fail_or_skip_as_the_property_does(toy):
    toy(broken.LeakByOne)
    cases = {case.id: case.values[0] for case in pytest_cases(["toy"])}
    assert list(cases) == [f"toy: {sentence(judged)}" for judged in PROPERTIES]
    cases["toy: outputs have the shape and dtype of the input"]()
    with pytest.raises(AssertionError, match=r"changing token 1 .* changes output 0"):
        cases["toy: changing a token changes no earlier output"]()
    with pytest.raises(pytest.skip.Exception, match="one implementation"):
        cases["toy: implementations agree"]()


def test_a_refusal_is_not_applicable_and_says_why(toy):
    toy(broken_rows.SegmentsRefused)
    outcome = next(
        outcome for outcome in check("toy", options=ONE_FORM, fast=True) if outcome.property == "packed segments equal separate runs"
    )
    assert outcome == Outcome(outcome.property, "not applicable", "it refuses segments: segments are not supported")


def test_a_variant_that_refuses_everything_is_not_called_passed(toy):
    @toy
    class Refuses(toys.Mean):
        def mix(self, x, context, state):
            raise NotApplicable("not on a Monday")

    statuses = {outcome.property: outcome.status for outcome in check("toy", fast=True)}
    assert statuses["changing a token changes no earlier output"] == "not applicable"


def _labels(subjects):
    return [subject.label for subject in subjects]


def test_a_form_that_nobody_asked_for_and_cannot_be_built_is_left_out():
    labels = [subject.label for subject in subjects_of("full", {"dim": 15, "heads": 3}, fast=True)]
    assert labels and not any("rope" in label for label in labels)


def test_a_mixer_without_parameters_is_judged_like_any_other(toy):
    class Sum(Mixer):
        """The sum of the past."""

        def mix(self, x, context, state):
            total = x.cumsum(1) if state is None else x.cumsum(1) + state["total"].unsqueeze(1)
            return total, {"total": total[:, -1]}, {}

        def init_parts(self, batch, **like):
            return {"total": torch.zeros(batch, self.dim, dtype=torch.float64)}

        def flops(self, time):
            return time * self.dim

        def state_elements(self, time):
            return self.dim

    toy(Sum)
    outcomes = {outcome.property: outcome.status for outcome in check("toy", options={"position": None}, fast=True)}
    assert outcomes["gradients reach every parameter"] == "not applicable"
    assert outcomes["the state has the declared size"] == "passed"


def test_a_report_names_the_forms_that_passed_in_the_shortest_words(toy):
    toy(toys.Mean)

    def passes_but(*labels):
        def judged(subject):
            if subject.label in labels:
                raise NotApplicable("not this one")
            return "seen"

        return judge(judged, subjects_of("toy", {"position": None})).detail

    assert passes_but() == "seen (all 3 forms)"
    assert passes_but("short_conv=3") == "seen (all 3 forms but short_conv=3)"
    assert passes_but("short_conv=3", "as given") == "seen (causal=False, short_conv=3)"
    assert passes_but("as given", "short_conv=3", "causal=False, short_conv=3") == "not this one"


def test_what_a_check_leaves_out_is_told_with_its_reason(toy):
    @toy
    class Picky(toys.Mean):
        hooks = ("rotate",)
        implementations = ("flash_attn", "torch")
        block = 500

        def __init__(self, dim, heads, position=None, *, impl: str = "auto", causal: bool = True, **options):
            if not causal:
                raise NotApplicable("one direction only")
            super().__init__(dim, heads, position, **options)

    positions.register("aa_turn")(type("Turn", (Scheme,), {"hooks": ("rotate",)}))
    positions.register("aa_grow")(type("Grow", (Scheme,), {"hooks": ("rotate",), "length_dependent": True}))
    positions.register("aa_lean")(type("Lean", (Scheme,), {"hooks": ("bias",)}))
    left = left_out("toy")
    assert any(phrase.startswith("CUDA: ") for phrase in left)
    assert any(re.match("impl=flash_attn: (not installed|unavailable|needs a CUDA device)", phrase) for phrase in left)
    assert "causal=False, short_conv=3: one direction only" in left
    assert any(re.match("position=aa_turn.*: rope has the same hooks", phrase) for phrase in left)
    assert any(re.match("position=aa_grow.*: its frequencies depend on the length", phrase) for phrase in left)
    assert "lengths beyond a block of 500: above 128 they take too long" in left
    assert not any(word in phrase for phrase in left for word in ("aa_lean", "position=rope", "impl=torch", "--fast"))
    given = left_out("toy", options={"position": None, "impl": "torch"}, fast=True)
    assert "impl=flash_attn: torch was asked for" in given and "--fast leaves them out" in given[-1]
    assert not any("position" in phrase for phrase in given)


def test_a_mixer_that_leaves_the_process_fails_and_the_rest_is_still_judged(toy):
    class Leaves(toys.Mean):
        def mix(self, x, context, state):
            raise SystemExit(3)

    toy(Leaves)
    outcomes = check("toy", options=ONE_FORM, fast=True)
    assert len(outcomes) == len(PROPERTIES)
    assert any("SystemExit" in outcome.detail for outcome in outcomes if outcome.status == "failed")
