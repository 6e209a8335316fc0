"""Every property that `attnlab check` judges, in the order it reports them.

A property is a function of a Subject whose name is the sentence shown to the user. To add one, write it beside its kin and list it here.
"""

from __future__ import annotations

from collections.abc import Callable

from variants.conformance import agreement, basics, caching, causality, declared, gradients, machinery, rows, scaling, splitting
from variants.conformance.subject import Subject

Property = Callable[[Subject], str]

PROPERTIES: tuple[Property, ...] = (
    basics.outputs_have_the_shape_and_dtype_of_the_input,
    basics.gradients_reach_every_parameter,
    basics.extreme_inputs_give_finite_outputs_and_gradients,
    basics.evaluation_is_deterministic_and_drops_nothing_out,
    causality.changing_a_token_changes_no_earlier_output,
    causality.no_output_has_a_gradient_from_a_later_token,
    causality.no_output_reaches_further_back_than_declared,
    caching.single_steps_give_the_full_pass_of_every_length,
    caching.split_passes_give_the_full_pass,
    caching.states_agree_however_the_sequence_was_split,
    caching.a_state_may_be_continued_twice_and_its_rows_reordered,
    caching.positions_are_those_given_and_otherwise_counted,
    caching.the_bidirectional_form_takes_no_state,
    rows.neighbours_in_the_batch_change_nothing,
    rows.padding_changes_no_output_and_no_gradient,
    rows.a_state_stands_still_on_padding,
    rows.a_row_of_padding_alone_gives_zeros_and_finite_gradients,
    rows.packed_segments_equal_separate_runs,
    declared.the_state_has_the_declared_size,
    declared.constant_values_come_out_unchanged,
    scaling.the_state_grows_as_declared,
    scaling.declared_operations_agree_with_counted_ones,
    scaling.operations_and_time_grow_no_faster_than_declared,
    scaling.memory_grows_no_faster_than_declared,
    scaling.the_chunk_size_changes_nothing,
    gradients.analytic_gradients_equal_numerical_ones,
    gradients.gradients_through_a_cache_are_those_of_the_full_pass,
    gradients.strides_of_inputs_and_output_gradients_change_nothing,
    splitting.rows_split_over_processes_give_those_of_one,
    agreement.implementations_agree,
    machinery.a_saved_state_dict_restores_every_output,
    machinery.casting_to_bf16_and_back_loses_only_rounding,
    machinery.parts_of_a_state_are_as_fine_as_the_model_or_fp32,
    machinery.torch_compile_changes_nothing,
    machinery.activation_checkpointing_changes_nothing,
    machinery.parameters_without_weight_decay_are_its_own,
)


def sentence(judged: Property) -> str:
    """The name a user reads."""
    return judged.__name__.replace("_", " ")
