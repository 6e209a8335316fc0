"""Every property has a mixer that breaks it and nothing can hide: a check that cannot fail checks nothing."""

from __future__ import annotations

import re

import pytest
import torch

from registry import positions, variants
from tests.variants.conformance import broken, broken_rows, test_gradients, test_scaling, toys
from variants.conformance import basics, caching, causality, declared, rows, splitting
from variants.conformance.checks import PROPERTIES, sentence
from variants.conformance.run import check, judge, subjects_of
from variants.softmax.full import Full

BROKEN = [
    (
        broken.WrongDtypeWithState,
        basics.outputs_have_the_shape_and_dtype_of_the_input,
        r"\(1, 1, 16\) with a state: the output is .* float32",
    ),
    (broken.ParameterWithoutSlope, basics.gradients_reach_every_parameter, "the gradient of parameter gate.weight is not finite"),
    (
        broken.WrongDtype,
        basics.outputs_have_the_shape_and_dtype_of_the_input,
        r"bfloat16 input of shape \(1, 1, 16\): the output is .* float32",
    ),
    (broken.StateWithheld, basics.outputs_have_the_shape_and_dtype_of_the_input, "a call with a state gave none back"),
    (broken.BatchNotFirst, basics.outputs_have_the_shape_and_dtype_of_the_input, r"state's part shared, \(1, 2\), is not the batch"),
    (broken.StateUnasked, basics.outputs_have_the_shape_and_dtype_of_the_input, r"shape \(1, 1, 16\): a full pass gave a state"),
    (broken.UnusedParameter, basics.gradients_reach_every_parameter, "parameter forgotten.weight gets no gradient"),
    (broken.Overflow, basics.extreme_inputs_give_finite_outputs_and_gradients, "1 tokens, inputs of 100+: output 0 is not finite"),
    (broken.Noisy, basics.evaluation_is_deterministic_and_drops_nothing_out, "two calls in eval mode differ"),
    (
        broken.InfiniteSlope,
        basics.extreme_inputs_give_finite_outputs_and_gradients,
        "1 tokens, zeros: the gradient of the input is not finite",
    ),
    (broken.DropoutAlwaysOn, basics.evaluation_is_deterministic_and_drops_nothing_out, "dropout=0.5: eval mode differs from dropout=0 by"),
    (broken.DropoutNeverOn, basics.evaluation_is_deterministic_and_drops_nothing_out, "dropout=0.5: training drops nothing out"),
    (broken.LeakInLastBlock, causality.changing_a_token_changes_no_earlier_output, "of 6 tokens: changing token 5 .* changes output 4"),
    (broken.LeakByOne, causality.changing_a_token_changes_no_earlier_output, "of 2 tokens: changing token 1 .* changes output 0"),
    (broken.FiniteMask, causality.changing_a_token_changes_no_earlier_output, "to a value of size 10000 among .* changes output"),
    (broken.LeakByGradient, causality.no_output_has_a_gradient_from_a_later_token, "of 2 tokens: the gradient of output 0 from token 1 is"),
    (broken.ReachUnderstated, causality.no_output_reaches_further_back_than_declared, "depends on the token 3 before it; reach.. says 2"),
    (
        broken.WindowOffByOneInSteps,
        caching.single_steps_give_the_full_pass_of_every_length,
        "full pass of 4 tokens differs from single steps: output 3",
    ),
    (
        broken.CacheDropped,
        caching.single_steps_give_the_full_pass_of_every_length,
        "full pass of 2 tokens differs from single steps: output 1",
    ),
    (broken.PositionsFromShape, caching.single_steps_give_the_full_pass_of_every_length, "full pass of 2 tokens differs .*: output 1"),
    (broken.StateOnlyForFirstToken, caching.split_passes_give_the_full_pass, r"pieces of 1\+16 tokens differ from the full pass: output 2"),
    (broken.TapsNotHandedOn, caching.split_passes_give_the_full_pass, r"short_conv=3: pieces of 1\+16 tokens differ .*: output 1"),
    (broken.StateCountsPieces, caching.states_agree_however_the_sequence_was_split, "after 2 single steps .* part pieces differs"),
    (broken.StateGrowsByPieces, caching.states_agree_however_the_sequence_was_split, r"part pieces differs: shapes \(2, 3\) and \(2, 2\)"),
    (broken.PartsComeAndGo, caching.states_agree_however_the_sequence_was_split, r"the states have parts .*'step'"),
    (
        broken.StateRemembersLongPieces,
        caching.states_agree_however_the_sequence_was_split,
        r"pieces of 1\+16 tokens .* part hidden differs",
    ),
    (broken.StateSpoiled, caching.a_state_may_be_continued_twice_and_its_rows_reordered, "the second continuation differs"),
    (broken.StateChangedInPlace, caching.a_state_may_be_continued_twice_and_its_rows_reordered, "the first continuation differs"),
    (broken.RowsStoredBackwards, caching.a_state_may_be_continued_twice_and_its_rows_reordered, "rows in the order 1, 0, 0 differs"),
    (broken.PositionsCountedFromOne, caching.positions_are_those_given_and_otherwise_counted, "positions 0 to 8 differ from none given"),
    (broken.PositionsIgnored, caching.positions_are_those_given_and_otherwise_counted, "positions .* give the outputs of positions 0 to 8"),
    (broken.PositionsIgnoredInPieces, caching.positions_are_those_given_and_otherwise_counted, r"pieces of 4\+5 tokens differ"),
    (broken.NothingBehind, caching.the_bidirectional_form_takes_no_state, "causal=False: outputs for 1 tokens are not finite"),
    (broken.CacheOfTheFuture, caching.the_bidirectional_form_takes_no_state, "init_state should raise ValueError"),
    (broken.StateIgnoredByTheBidirectionalForm, caching.the_bidirectional_form_takes_no_state, "a call with a state should raise"),
    (broken_rows.BatchMean, rows.neighbours_in_the_batch_change_nothing, "4 rows of 1 tokens: row 0 alone differs"),
    (broken_rows.NeighboursInTheLastDigit, rows.neighbours_in_the_batch_change_nothing, "changing rows 1 to 3 .* changes row 0"),
    (
        broken_rows.JunkRead,
        rows.padding_changes_no_output_and_no_gradient,
        "9 slots, padded left with 10000, differ from the 6 valid tokens alone",
    ),
    (
        broken_rows.GradientDoubled,
        rows.padding_changes_no_output_and_no_gradient,
        "9 slots padded with 0: the gradient of parameter .* differs",
    ),
    (broken_rows.GradientOfPads, rows.padding_changes_no_output_and_no_gradient, "9 slots padded with 0: a padded slot has a gradient"),
    (broken_rows.PadsSeen, rows.padding_changes_no_output_and_no_gradient, "causal=False, short_conv=3: 9 slots, padded left with 0"),
    (broken_rows.PadsCounted, rows.a_state_stands_still_on_padding, "9 slots padded left, .*: what follows differs"),
    (
        broken_rows.PadsSeenInPieces,
        rows.a_state_stands_still_on_padding,
        "9 slots padded left, .*: the outputs differ from those without padding",
    ),
    (
        broken_rows.PadsSpeak,
        rows.a_row_of_padding_alone_gives_zeros_and_finite_gradients,
        "17 slots of padding alone: the outputs are not 0",
    ),
    (broken_rows.EmptyRowsCounted, rows.a_row_of_padding_alone_gives_zeros_and_finite_gradients, "the other rows differ"),
    (broken_rows.HiddenPartDecaysOnPads, rows.a_state_stands_still_on_padding, "9 slots of padding change the state's part hidden"),
    (
        broken_rows.NothingSeen,
        rows.a_row_of_padding_alone_gives_zeros_and_finite_gradients,
        "the outputs are not 0|gradient of parameter .* differs",
    ),
    (
        broken_rows.SegmentsIgnored,
        rows.packed_segments_equal_separate_runs,
        "row 0: the segment from token 3 to 16 differs from a run of its own: output 0",
    ),
    (
        broken_rows.SegmentsById,
        rows.packed_segments_equal_separate_runs,
        "row 1: the segment from token 8 to 11 differs from a run of its own",
    ),
    (
        broken_rows.GradientDoubledBySegments,
        rows.packed_segments_equal_separate_runs,
        "packed segments: the gradient of parameter .* differs",
    ),
    (
        broken_rows.SegmentsForgottenBetweenPieces,
        rows.packed_segments_equal_separate_runs,
        "packed segments in pieces .* differ from the full pass",
    ),
    (broken_rows.SplitIgnored, splitting.rows_split_over_processes_give_those_of_one, "17 tokens over 2 ranks differ from one: output"),
    (
        broken_rows.GradientDoubledWhenSplit,
        splitting.rows_split_over_processes_give_those_of_one,
        "17 tokens over 2 ranks: the gradient of .* differs",
    ),
    (broken.StateUnderstated, declared.the_state_has_the_declared_size, r"after 1 tokens .* 17 elements; state_elements\(1\) says 16"),
    (broken.MoreReadThanKept, declared.the_state_has_the_declared_size, r"read_elements\(1\) says 34, of a state that has 17 elements"),
    (
        broken.DenominatorLost,
        declared.constant_values_come_out_unchanged,
        "2 equal tokens, but the outputs differ from the first one: output 1",
    ),
    (broken.LeakInTraining, causality.no_output_has_a_gradient_from_a_later_token, "tokens in training mode: the gradient of output"),
    (broken.LeakWhenLong, causality.changing_a_token_changes_no_earlier_output, "of 131 tokens: changing token"),
    (broken.LeakWhenLong, causality.no_output_has_a_gradient_from_a_later_token, "of 131 tokens: the gradient of output"),
    (broken.Crash, basics.gradients_reach_every_parameter, "RuntimeError: no such kernel$"),
]


@pytest.mark.parametrize(("mixer", "judged", "counter_example"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mixer_broken_on_purpose_is_caught_by_the_property_meant_for_it(mixer, judged, counter_example):
    with variants.scope(), positions.scope():
        variants.register("toy")(mixer)
        positions.register("ramp")(toys.Ramp)
        outcome = judge(judged, subjects_of("toy", {}))
    assert outcome.status == "failed", outcome.detail
    assert re.search(counter_example, outcome.detail), outcome.detail


def test_every_property_has_a_mixer_that_breaks_it():
    broken_somewhere = {judged for _, judged, _ in [*BROKEN, *test_gradients.BROKEN, *test_scaling.BROKEN]}
    assert [sentence(judged) for judged in PROPERTIES if judged not in broken_somewhere] == []
    assert broken_somewhere <= set(PROPERTIES), "a property is judged here that no report has"


@pytest.mark.parametrize("options", [{}, {"position": "ramp"}], ids=["no position", "a position scheme"])
@pytest.mark.parametrize("mixer", [toys.Mean, toys.WindowMean], ids=lambda mixer: mixer.__name__)
def test_a_mixer_that_satisfies_the_contract_passes_every_property(mixer, options):
    with variants.scope(), positions.scope():
        variants.register("toy")(mixer)
        positions.register("ramp")(toys.Ramp)
        outcomes = {outcome.property: outcome for outcome in check("toy", options=options, fast=True)}
    others = {name: outcome for name, outcome in outcomes.items() if outcome.status != "passed"}
    expected = {"implementations agree", "the chunk size changes nothing", "rows split over processes give those of one"}
    expected |= {"constant values come out unchanged"} if options else {"positions are those given and otherwise counted"}
    expected |= {"no output reaches further back than declared"} if mixer is toys.Mean else set()
    assert set(others) == expected, others
    assert {outcome.status for outcome in others.values()} == {"not applicable"}


def test_what_another_package_changes_is_not_taken_for_fit_to_be_split():
    class Cumulative(Full):
        """Softmax attention to running means of the keys, which look past a slice."""

        def attend(self, q, k, v, slots, **told):
            return self.attention(q, k.cumsum(2) / torch.arange(1, k.shape[2] + 1).unsqueeze(-1), v, **told)

    class Said(Cumulative):
        def whole_rows(self):
            return None

    assert "inherits whole_rows() from Softmax; define it in Cumulative" in Cumulative(16, 4).must_be_whole()
    assert Said(16, 4).must_be_whole() is None and Full(16, 4).must_be_whole() is None
    with variants.scope():
        variants.register("toy")(Said)
        assert judge(splitting.rows_split_over_processes_give_those_of_one, subjects_of("toy", {})).status == "failed"


def test_a_mixer_that_honours_a_split_passes():
    with variants.scope():
        variants.register("toy")(broken_rows.SplitHonoured)
        outcome = judge(splitting.rows_split_over_processes_give_those_of_one, subjects_of("toy", {}))
    assert outcome.status == "passed", outcome.detail
