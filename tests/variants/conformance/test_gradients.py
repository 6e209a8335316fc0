"""What is wrong with gradients, implementations, saving, casting, compiling, recomputing or grouping of parameters is found."""

from __future__ import annotations

import re

import pytest

from registry import positions, variants
from tests.variants.conformance import broken, broken_gradients, toys
from variants.conformance import agreement, gradients, machinery
from variants.conformance.run import judge, subjects_of

BROKEN = [
    (broken_gradients.WrongBackward, gradients.analytic_gradients_equal_numerical_ones, "as given: 17 tokens: .* of y for the input is"),
    (
        broken_gradients.WrongBackwardOfState,
        gradients.analytic_gradients_equal_numerical_ones,
        "17 slots with padding after a state: the gradient of y for the state's part total is .*, numerically",
    ),
    (
        broken_gradients.WrongBackwardWithPadding,
        gradients.analytic_gradients_equal_numerical_ones,
        "17 slots with padding: the gradient of y for the input is",
    ),
    (broken_gradients.NewGradientEachTime, gradients.analytic_gradients_equal_numerical_ones, "17 tokens: Backward is not reentrant"),
    (
        broken_gradients.StateDetachedOnTheWayIn,
        gradients.analytic_gradients_equal_numerical_ones,
        "after a state: the gradient of y for the state's part total is 0",
    ),
    (
        broken_gradients.StateDetachedOnTheWayIn,
        gradients.gradients_through_a_cache_are_those_of_the_full_pass,
        r"pieces of 3\+4 tokens: the gradient of the input differs",
    ),
    (
        broken_gradients.StateDetachedOnTheWayOut,
        gradients.gradients_through_a_cache_are_those_of_the_full_pass,
        r"pieces of 3\+4 tokens: the gradient of the input differs",
    ),
    (
        broken_gradients.StateDetachedWithPadding,
        gradients.gradients_through_a_cache_are_those_of_the_full_pass,
        r"pieces of 3\+4 tokens with padding: the gradient of the input differs",
    ),
    (
        broken_gradients.InputReadByAddress,
        gradients.strides_of_inputs_and_output_gradients_change_nothing,
        "an input that is stored with its first two axes exchanged: the outputs differ from those of a contiguous copy",
    ),
    (
        broken_gradients.GradientReadByAddress,
        gradients.strides_of_inputs_and_output_gradients_change_nothing,
        "an output gradient that is stored with .*, against a contiguous copy: the gradient of the input differs",
    ),
    (
        broken_gradients.ExpandedGradientHalved,
        gradients.strides_of_inputs_and_output_gradients_change_nothing,
        "an output gradient that is one number expanded, against a contiguous copy: the gradient of the input differs",
    ),
    (
        broken_gradients.StateReadByAddress,
        gradients.strides_of_inputs_and_output_gradients_change_nothing,
        "a state that is one row expanded.*: the outputs differ",
    ),
    (
        broken_gradients.PaddingReadByStride,
        gradients.strides_of_inputs_and_output_gradients_change_nothing,
        "a context whose one row is expanded: the outputs differ",
    ),
    (broken.ImplementationsDisagree, agreement.implementations_agree, "as given: 2 tokens: torch differs from reference: the outputs by"),
    (
        broken_gradients.DisagreeInTheBackwardPass,
        agreement.implementations_agree,
        "as given: 1 tokens: torch differs from reference: the gradient of the input by",
    ),
    (broken_gradients.DisagreeInBf16, agreement.implementations_agree, "1 tokens, bf16: torch differs from reference in fp32: the outputs"),
    (broken_gradients.DisagreeUnderAutocast, agreement.implementations_agree, "1 tokens, autocast to bf16: torch differs from reference"),
    (broken_gradients.DisagreeWithState, agreement.implementations_agree, "1 tokens in pieces with a state: torch differs from reference"),
    (broken_gradients.GroupsTiled, agreement.implementations_agree, "1 tokens: torch differs from reference: the outputs"),
    (broken_gradients.DisagreeWhenGrouped, agreement.implementations_agree, "17 tokens, kv_heads=2: torch differs from reference"),
    (
        broken_gradients.TableNotSaved,
        machinery.a_saved_state_dict_restores_every_output,
        "17 tokens: an instance of another seed gives other outputs",
    ),
    (broken_gradients.ParameterNotSaved, machinery.a_saved_state_dict_restores_every_output, 'Missing key.* "gate.bias"'),
    (broken_gradients.ParameterNotLoaded, machinery.a_saved_state_dict_restores_every_output, "parameter balance is another after loading"),
    (
        broken_gradients.TableRounded,
        machinery.casting_to_bf16_and_back_loses_only_rounding,
        "with every parameter restored, the outputs differ by .*: something outside the state_dict was rounded",
    ),
    (
        broken_gradients.TooFineForBf16,
        machinery.casting_to_bf16_and_back_loses_only_rounding,
        "after a cast to bf16 and back the outputs differ by",
    ),
    (broken_gradients.SumsInHalf, machinery.parts_of_a_state_are_as_fine_as_the_model_or_fp32, "float32 model: .* part total is float16"),
    (
        broken_gradients.SumsRoundedBetweenCalls,
        machinery.parts_of_a_state_are_as_fine_as_the_model_or_fp32,
        "bfloat16 model: the state's part total is float32 when empty, then bfloat16",
    ),
    (
        broken_gradients.SumsRoundedUnderAutocast,
        machinery.parts_of_a_state_are_as_fine_as_the_model_or_fp32,
        "float32 model under autocast to bf16: the state's part total is bfloat16",
    ),
    (broken_gradients.CompiledOtherwise, machinery.torch_compile_changes_nothing, "as given: 17 tokens, compiled: the outputs differ"),
    (
        broken_gradients.CompiledOtherwiseInSteps,
        machinery.torch_compile_changes_nothing,
        "as given: one token after a state, compiled: the outputs differ",
    ),
    (
        broken_gradients.CompiledToAnotherGradient,
        machinery.torch_compile_changes_nothing,
        "17 tokens, compiled: the gradient of the input differs",
    ),
    (
        broken_gradients.CallsCounted,
        machinery.activation_checkpointing_changes_nothing,
        "17 tokens, checkpointed: the gradient of the input differs",
    ),
    (broken_gradients.OwnRandomNumbers, machinery.activation_checkpointing_changes_nothing, "17 tokens, checkpointed: the outputs differ"),
    (
        broken_gradients.UndecayedElsewhere,
        machinery.parameters_without_weight_decay_are_its_own,
        r"undecayed\(\): number 1, of shape \(3, 5\), is not a parameter of the mixer",
    ),
    (broken_gradients.UndecayedTwice, machinery.parameters_without_weight_decay_are_its_own, r"undecayed\(\) gives gate.weight twice"),
    (
        broken_gradients.UndecayedOnce,
        machinery.parameters_without_weight_decay_are_its_own,
        r"undecayed\(\) gives 1 parameters, and 0 when called again",
    ),
    (
        broken_gradients.UndecayedBeforeTheCopy,
        machinery.parameters_without_weight_decay_are_its_own,
        r"undecayed\(\) of a copy: number 0, of shape \(1, 16\), is not a parameter",
    ),
]


@pytest.mark.parametrize(("mixer", "judged", "counter_example"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mixer_broken_on_purpose_is_caught_by_the_property_meant_for_it(mixer, judged, counter_example):
    outcome = _judged(mixer, judged)
    assert outcome.status == "failed", outcome.detail
    assert re.search(counter_example, outcome.detail), outcome.detail


def test_implementations_that_agree_pass_and_are_named():
    outcome = _judged(broken_gradients.Implemented, agreement.implementations_agree)
    assert outcome.status == "passed", outcome.detail
    assert outcome.detail.startswith("reference, torch; outputs and gradients within 1e-05 in fp32")


def test_an_implementation_that_cannot_run_here_is_left_out():
    class Elsewhere(broken_gradients.Implemented):
        """One of its implementations needs a GPU."""

        implementations = ("flash_attn", "reference")

        def __init__(self, *args, impl: str = "auto", **options):
            assert impl != "flash_attn", "it was built"
            super().__init__(*args, impl=impl, **options)

    outcome = _judged(Elsewhere, agreement.implementations_agree)
    assert (outcome.status, outcome.detail) == ("not applicable", "one implementation is usable here: reference")


def test_one_form_is_compiled_and_the_others_say_so():
    with variants.scope():
        variants.register("toy")(toys.Mean)
        outcome = judge(machinery.torch_compile_changes_nothing, subjects_of("toy", {})[1:])
    assert (outcome.status, outcome.detail) == ("not applicable", "only the form as given is compiled")


def test_a_check_of_dropout_is_a_check_with_dropout_on():
    outcome = _judged(toys.Mean, machinery.activation_checkpointing_changes_nothing)
    assert "training mode, dropout=0.5" in outcome.detail


def _judged(mixer, judged):
    with variants.scope(), positions.scope():
        variants.register("toy")(mixer)
        positions.register("ramp")(toys.Ramp)
        return judge(judged, subjects_of("toy", {}))
