"""Checks that a variant keeps what it declares: the state's size, normalised rows."""

from __future__ import annotations

from typing import Any

import torch

from variants.conformance.caching import WITHIN, cached_mixer, expect_same_outputs
from variants.conformance.subject import Failed, Subject, kept, tokens
from variants.contract import NotApplicable


@torch.no_grad()
def the_state_has_the_declared_size(subject: Subject) -> str:
    """`state_elements(time)` against the numbers a real state of two rows carries, and `read_elements(time)` within it."""
    mixer = cached_mixer(subject)
    x = tokens(2, subject.longest, mixer.dim)
    for time in subject.lengths:
        state = kept(mixer(x[:, :time], state=mixer.init_state(2)).state)
        declared = mixer.state_elements(time)
        if state.elements != 2 * declared:
            raise Failed(f"after {time} tokens a row's state has {state.elements / 2:g} elements; state_elements({time}) says {declared}")
        if not 0 <= mixer.read_elements(time) <= declared:
            raise Failed(f"read_elements({time}) says {mixer.read_elements(time)}, of a state that has {declared} elements")
    return f"{mixer.state_elements(1)} elements after 1 token, {declared} after {subject.longest}; {state.nbytes // 2} bytes then, in fp64"


@torch.no_grad()
def constant_values_come_out_unchanged(subject: Subject) -> str:
    """A mixer whose rows are normalised gives equal outputs for equal tokens: every row is the same average of the same values."""
    if not subject.build().normalises_rows:
        raise NotApplicable("it declares normalises_rows=False")
    # A convolution sees zeros before the first token, so that the first values are not those of the rest.
    without: dict[str, Any] = {"short_conv": 0} if subject.takes("short_conv") else {}
    mixer = subject.build(**without)
    if mixer.position is not None and "embed" in mixer.position.hooks:
        raise NotApplicable("positions are added to the inputs, so that equal tokens do not have equal values")
    for time in subject.lengths:
        y = mixer(tokens(2, 1, mixer.dim).expand(-1, time, -1)).y
        expect_same_outputs(y, y[:, :1].expand_as(y), f"{time} equal tokens, but the outputs differ from the first one")
    return f"{WITHIN}; {subject.lengths_in_words()}"
