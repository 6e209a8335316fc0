"""Checks that a variant keeps what it declares: state size, operations, normalised rows, implementations that agree."""

from __future__ import annotations

from typing import Any

import torch

from registry import variants
from variants.conformance.caching import WITHIN, cached_mixer, expect_same_outputs
from variants.conformance.subject import Failed, Subject, expect_close, kept, tokens
from variants.contract import NotApplicable

IMPLEMENTATION_TOLERANCE = 1e-4


@torch.no_grad()
def the_state_has_the_declared_size(subject: Subject) -> str:
    """`state_elements(time)` against the numbers a real state of two rows carries."""
    mixer = cached_mixer(subject)
    x = tokens(2, subject.longest, mixer.dim)
    for time in subject.lengths:
        state = kept(mixer(x[:, :time], state=mixer.init_state(2)).state)
        declared = mixer.state_elements(time)
        if state.elements != 2 * declared:
            raise Failed(f"after {time} tokens a row's state has {state.elements / 2:g} elements; state_elements({time}) says {declared}")
    return f"{mixer.state_elements(1)} elements after 1 token, {declared} after {subject.longest}"


def the_operations_are_declared(subject: Subject) -> str:
    """`flops(time)` is a positive whole number that grows with the tokens."""
    mixer = subject.build()
    previous = 0
    for time in subject.lengths:
        flops = mixer.flops(time)
        if not isinstance(flops, int) or flops <= previous:
            raise Failed(f"flops({time}) is {flops!r} and fewer tokens take {previous}; it must be a whole number that grows")
        previous = flops
    return f"{mixer.flops(1)} for 1 token, {flops} for {subject.longest}"


@torch.no_grad()
def constant_values_come_out_unchanged(subject: Subject) -> str:
    """A mixer whose rows are normalised gives equal outputs for equal tokens: every row is the same average of the same values."""
    # A convolution sees zeros before the first token, so that the first values are not those of the rest.
    without: dict[str, Any] = {"short_conv": 0} if subject.takes("short_conv") else {}
    mixer = subject.build(**without)
    if not mixer.normalises_rows:
        raise NotApplicable("it declares normalises_rows=False")
    if mixer.position is not None and "embed" in mixer.position.hooks:
        raise NotApplicable("positions are added to the inputs, so that equal tokens do not have equal values")
    for time in subject.lengths:
        y = mixer(tokens(2, 1, mixer.dim).expand(-1, time, -1)).y
        expect_same_outputs(y, y[:, :1].expand_as(y), f"{time} equal tokens, but the outputs differ from the first one")
    return f"{WITHIN}; {subject.lengths_in_words()}"


@torch.no_grad()
def implementations_agree(subject: Subject) -> str:
    """Every implementation that can be used here gives the same outputs; fp32."""
    if not subject.takes("impl") or "impl" in subject.arguments:
        raise NotApplicable("one implementation")
    outputs = {}
    for impl in getattr(variants.get(subject.name), "implementations", ()):
        try:
            mixer = subject.build(torch.float32, impl=impl)
        except ValueError:
            continue  # not usable for this device or these options, which the mixer says itself
        outputs[impl] = [mixer(tokens(2, time, mixer.dim, dtype=torch.float32)).y for time in subject.lengths]
    if len(outputs) < 2:
        raise NotApplicable(f"one implementation is usable here: {', '.join(outputs) or 'none'}")
    (first, expected), *others = outputs.items()
    for impl, got in others:
        for time, a, b in zip(subject.lengths, got, expected, strict=True):
            expect_close(a, b, f"{time} tokens: {impl} differs from {first}", IMPLEMENTATION_TOLERANCE)
    return f"{', '.join(outputs)} within {IMPLEMENTATION_TOLERANCE:.0e}, fp32"
