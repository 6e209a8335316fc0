"""Checks of what a variant costs, measured: operations, time, memory and state over the length, and that chunks are only a matter of speed.

Costs are measured on the form as given alone, on the CPU, in fp32, for one sequence, at lengths beyond the variant's blocks: four powers
of two, and in a full check up to two more for what stays cheap, because a small quadratic term shows late.
"""

from __future__ import annotations

import time as clock
from typing import Any

import torch
from torch import Tensor

from registry import variants
from variants import implementations
from variants.conformance.basics import trained
from variants.conformance.caching import WITHIN, cached_mixer, expect_same_outputs, expect_same_state
from variants.conformance.costs import Meter, complexity, growth, power
from variants.conformance.subject import LARGEST_BLOCK, Failed, Subject, expect_close, kept, run_in_pieces, tokens
from variants.contract import Mixer, NotApplicable, State

#: Products counted, per operation declared. What is declared are the pairs in sight; a mask over a square computes twice as many, and
#: blocks around a narrow window more than that.
MOST_COUNTED = 2.6
#: All operations counted, per operation declared.
LEAST_COUNTED = 0.9
#: By how much the exponent of a count may differ from the declared one: lower-order terms still show at the lengths tried.
MARGIN = 0.2
#: The same for declared against counted operations, which have the same lower-order terms.
FLOPS_MARGIN = 0.15
#: By how much the exponent of the wall time may exceed the declared one. Longer sequences leave the processor's caches.
TIME_MARGIN = 0.5
#: Share of the variance that a power law must explain before the wall time is believed.
GOOD_FIT = 0.97
#: A forward and backward pass beyond which no longer sequence is tried: operations, bytes.
CHEAP = (2_000_000_000, 64_000_000)
#: Options that cut the work into chunks, unless the class says otherwise in `chunk_options`.
CHUNK_OPTIONS = ("chunk", "block")
#: Implementations whose work does not pass torch's dispatcher.
OUTSIDE_TORCH = frozenset(implementations.PACKAGES)


def declared_operations_agree_with_counted_ones(subject: Subject) -> str:
    """`flops(time)` is a whole number that grows, lies between the products counted and everything counted, and grows as they do."""
    mixer = _countable(subject)
    _expect_growing(mixer, subject.lengths)
    lengths = _lengths(subject)
    meters, declared = {}, {}
    for time in (1, *lengths):
        meters[time], declared[time] = meter, flops = _count(mixer, time), mixer.flops(time)
        where = f"flops({time}) is {flops}"
        if flops < LEAST_COUNTED * meter.projections:
            raise Failed(f"{where}, but the products with its parameters alone take {meter.projections}")
        if time > 1 and meter.products > MOST_COUNTED * flops:
            raise Failed(f"{where}, but its matrix products take {meter.products}, {meter.products / flops:.2f} times that")
        if meter.operations < LEAST_COUNTED * flops:
            raise Failed(f"{where}, but {meter.products} in matrix products and {meter.written} numbers written are all there is")
    said = growth(lengths, [declared[time] for time in lengths]).exponent
    found = sorted(growth(lengths, [_positive(count) for count in counts]).exponent for counts in _both(meters, lengths))
    if not found[0] - FLOPS_MARGIN <= said <= found[1] + FLOPS_MARGIN:
        raise Failed(
            f"from {_span(lengths)} tokens flops(time) grows as {power(said)}, but its matrix products and all its operations as "
            f"{power(found[0])} to {power(found[1])} (allowed {FLOPS_MARGIN} more or less)"
        )
    last = lengths[-1]
    parameters = sum(parameter.numel() for parameter in mixer.parameters())
    return (
        f"{declared[last]:,} for {last} tokens, {power(said)}; counted {meters[last].products / declared[last]:.2f} times that in matrix "
        f"products, and {meters[last].written:,} numbers written elsewhere; {parameters:,} parameters"
    )


def operations_and_time_grow_no_faster_than_declared(subject: Subject) -> str:
    """Forward and backward together, against the fact `time`."""
    passes = _passes(subject)
    lengths = tuple(passes)
    said = _declared(subject, "time", lengths)
    counted = growth(lengths, [meter.operations for meter in passes.values()])
    if counted.exponent > said + MARGIN:
        raise Failed(
            f"from {_span(lengths)} tokens operations grow as {counted}; {_fact(subject, 'time')} is {power(said)} there "
            f"(allowed {MARGIN} more)"
        )
    # The count decides where it can, because it is the same on every machine and in every run. The clock is there for work that the
    # dispatcher does not see. It is believed where the times follow a power law, and only when it says the same a second time.
    built = subject.build(torch.float32)
    for _ in range(2):
        timed = growth(lengths, [_seconds(built, time) for time in lengths])
        if timed.exponent <= said + TIME_MARGIN or timed.fit < GOOD_FIT:
            break
    else:
        raise Failed(
            f"from {_span(lengths)} tokens the wall time grows as {timed}, though counted operations grow as {power(counted.exponent)}; "
            f"{_fact(subject, 'time')} is {power(said)} there (allowed {TIME_MARGIN} more)"
        )
    noisy = ", too noisy to judge" if timed.exponent > said + TIME_MARGIN and timed.fit < GOOD_FIT else ""
    return (
        f"{_span(lengths)} tokens, forward and backward: operations {counted}, wall time {timed}{noisy}; {_fact(subject, 'time')} is "
        f"{power(said)} there"
    )


def memory_grows_no_faster_than_declared(subject: Subject) -> str:
    """The most bytes alive at once in a forward and backward pass, against the fact `memory`, "T" where there is none.

    Where they grow faster, longer sequences are tried as long as they are cheap, and the last three decide.
    """
    mixer, passes = _countable(subject), _passes(subject)
    said = _declared(subject, "memory", tuple(passes), "T")
    peaks = {time: meter.peak for time, meter in passes.items()}
    found = growth(list(peaks), list(peaks.values()))
    while found.exponent > said + MARGIN and _added(mixer, passes):
        # Tiles of a fixed size are filled up by and by, and then the memory stays: only growth that goes on is the variant's.
        peaks = {time: passes[time].peak for time in sorted(passes)[-3:]}
        found = growth(list(peaks), list(peaks.values()))
    lengths = tuple(peaks)
    if found.exponent > said + MARGIN:
        raise Failed(
            f"from {_span(lengths)} tokens peak memory grows as {found}; {_fact(subject, 'memory', 'T')} is {power(said)} there "
            f"(allowed {MARGIN} more)"
        )
    return (
        f"{_span(lengths)} tokens, forward and backward: {found}, {peaks[lengths[-1]]:,} bytes at most; {_fact(subject, 'memory', 'T')} is "
        f"{power(said)} there"
    )


@torch.no_grad()
def the_state_grows_as_declared(subject: Subject) -> str:
    """The bytes of a real state, against the fact `state`."""
    _only_as_given(subject)
    mixer, lengths = cached_mixer(subject).float(), _lengths(subject)
    said = _declared(subject, "state", lengths)
    sizes = []
    for time in lengths:
        x = tokens(1, time, mixer.dim, dtype=torch.float32)
        state = kept(mixer(x, state=mixer.init_state(1)).state)
        sizes.append(_positive(state.nbytes))
    found = growth(lengths, sizes)
    if abs(found.exponent - said) > MARGIN:
        raise Failed(
            f"from {_span(lengths)} tokens the state grows as {found}; {_fact(subject, 'state')} is {power(said)} there "
            f"(allowed {MARGIN} more or less)"
        )
    per_token = (sizes[-1] - sizes[0]) / (lengths[-1] - lengths[0])
    return (
        f"{sizes[-1]:,} bytes after {lengths[-1]} tokens, {per_token:g} more for each token, fp32; {power(found.exponent)}, "
        f"{_fact(subject, 'state')}"
    )


def the_chunk_size_changes_nothing(subject: Subject) -> str:
    """Outputs, states and gradients of a full pass and of two pieces are the same for chunks of 1, 2, 16, 64 and the whole sequence."""
    names = [name for name in getattr(variants.get(subject.name), "chunk_options", CHUNK_OPTIONS) if subject.takes(name)]
    if not names:
        raise NotApplicable(f"it has no option {' or '.join(CHUNK_OPTIONS)}")
    time = 19 if subject.fast else 70
    expected = _results(subject.build(), time)
    tried, refused = [], []
    for name in names:
        for size in sorted({1, 2, 16, 64, time, time + 1}):
            try:
                chosen: dict[str, Any] = {name: size}
                mixer = subject.build(**chosen)
            except ValueError:
                refused.append(f"{name}={size}")
                continue
            tried.append(f"{name}={size}")
            _expect_same_results(_results(mixer, time), expected, f"{name}={size}")
    if not tried:
        raise NotApplicable(f"it refuses {', '.join(refused)}")
    return f"{WITHIN}; {', '.join(tried)}{'; it refuses ' if refused else ''}{', '.join(refused)}"


def _results(mixer: Mixer, time: int) -> tuple[dict[str, Tensor], dict[str, Tensor], State | None]:
    """Outputs and gradients by what they are of, and the last state."""
    x = tokens(2, time, mixer.dim).requires_grad_()
    outputs, state = {"the full pass": mixer(x).y}, None
    if mixer.causal:
        first = time // 3
        outputs[f"pieces of {first}+{time - first} tokens"], state, _ = run_in_pieces(mixer, x, [first, time - first])
    weights = tokens(*outputs["the full pass"].shape, seed=1)
    leaves = {"the input": x, **{f"parameter {name}": parameter for name, parameter in trained(mixer).items()}}
    gradients = torch.autograd.grad(sum((y * weights).sum() for y in outputs.values()), list(leaves.values()), allow_unused=True)
    known = {name: gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
    return outputs, known, state


def _expect_same_results(got: Any, expected: Any, where: str) -> None:
    for way, y in expected[0].items():
        expect_same_outputs(got[0][way], y, f"{where}: {way} differs")
    if expected[2] is not None:
        expect_same_state(got[2], expected[2], where)
    for name, gradient in expected[1].items():
        expect_close(got[1].get(name, torch.zeros_like(gradient)), gradient, f"{where}: the gradient of {name} differs")


def _only_as_given(subject: Subject) -> None:
    if not subject.given:
        raise NotApplicable("costs are measured in the form as given")


def _lengths(subject: Subject) -> tuple[int, ...]:
    """Four powers of two, the shortest of them beyond the blocks."""
    largest = max(subject.block_sizes, default=1)
    if largest > LARGEST_BLOCK:
        raise NotApplicable(f"blocks of {largest} are too large to measure lengths beyond them: check again with smaller ones")
    shortest = max(128 if subject.fast else 256, 1 << (4 * largest - 1).bit_length())
    return tuple(shortest << n for n in range(4))


def _countable(subject: Subject) -> Mixer:
    """The mixer in fp32, in the implementation that it chose or, where that one works outside torch, in the next that does not.

    The mixers that a mixer is made of have no option of their own here; they look up at each call what to run.
    """
    _only_as_given(subject)
    mixer = subject.build(torch.float32)
    if getattr(mixer, "implementation", "") in OUTSIDE_TORCH:
        inside = _inside_torch(mixer)
        if inside is None or "impl" in subject.arguments:
            raise NotApplicable(f"{mixer.implementation} works outside torch, where nothing is counted")
        mixer = subject.build(torch.float32, impl=inside)
    for part in mixer.modules():
        if part is not mixer and isinstance(part, Mixer) and getattr(part, "implementation", "") in OUTSIDE_TORCH:
            inside = _inside_torch(part)
            if inside is None:
                raise NotApplicable(f"{part.implementation} works outside torch, where nothing is counted")
            part.implementation = inside  # type: ignore[assignment]
    return mixer


def _inside_torch(mixer: Mixer) -> str | None:
    """The fastest implementation whose work passes torch's dispatcher."""
    return next((name for name in type(mixer).implementations if name not in OUTSIDE_TORCH), None)  # type: ignore[attr-defined]


def _count(mixer: Mixer, time: int, *, backward: bool = False) -> Meter:
    """One sequence through the mixer, and its gradients back."""
    x = tokens(1, time, mixer.dim, dtype=torch.float32).requires_grad_()
    leaves = [x, *trained(mixer).values()]
    with Meter(mixer.parameters()) as meter:
        y = mixer(x).y  # with gradients even if they are not asked for: without, torch may choose other kernels
        if backward:
            torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    return meter


def _passes(subject: Subject) -> dict[int, Meter]:
    """Forward and backward passes by length."""
    mixer = _countable(subject)
    passes = {time: _count(mixer, time, backward=True) for time in _lengths(subject)}
    while not subject.fast and len(passes) < 6 and _added(mixer, passes):
        pass
    return passes


def _added(mixer: Mixer, passes: dict[int, Meter]) -> bool:
    """Whether the longest pass was cheap, so that one of twice its length was added."""
    longest = max(passes)
    if passes[longest].operations > CHEAP[0] or passes[longest].peak > CHEAP[1]:
        return False
    passes[2 * longest] = _count(mixer, 2 * longest, backward=True)
    return True


def _seconds(mixer: Mixer, time: int) -> float:
    """Wall time of a forward and backward pass, the shortest of several: what disturbs a run only makes it longer."""
    x = tokens(1, time, mixer.dim, dtype=torch.float32).requires_grad_()
    leaves = [x, *trained(mixer).values()]
    runs: list[float] = []
    while len(runs) < 3 or (len(runs) < 7 and sum(runs) < 0.1):
        start = clock.perf_counter()
        torch.autograd.grad(mixer(x).y.sum(), leaves, allow_unused=True)
        runs.append(clock.perf_counter() - start)
    return min(runs)


def _expect_growing(mixer: Mixer, lengths: tuple[int, ...]) -> None:
    previous = 0
    for time in lengths:
        flops = mixer.flops(time)
        if not isinstance(flops, int) or flops <= previous:
            raise Failed(f"flops({time}) is {flops!r} and fewer tokens take {previous}; it must be a whole number that grows")
        previous = flops


def _both(meters: dict[int, Meter], lengths: tuple[int, ...]) -> tuple[list[int], list[int]]:
    return [meters[time].products for time in lengths], [meters[time].operations for time in lengths]


def _declared(subject: Subject, fact: str, lengths: tuple[int, ...], default: str | None = None) -> float:
    """The exponent that a fact of the decorator, or of the mixer itself, amounts to here, where a logarithm is still a small power."""
    text = getattr(subject.build(), fact, default)
    if text is None:
        raise NotApplicable(f"its decorator has no fact {fact}")
    try:
        cost = complexity(str(text))
    except ValueError as error:
        raise Failed(f"the fact {fact}={text!r} cannot be read: {error}") from error
    return growth(lengths, [cost(time) for time in lengths]).exponent


def _fact(subject: Subject, fact: str, default: str | None = None) -> str:
    return f"{fact}={getattr(subject.build(), fact, default)!r}"


def _span(lengths: tuple[int, ...]) -> str:
    return f"{lengths[0]} to {lengths[-1]}"


def _positive(count: int) -> int:
    """A count of which a logarithm can be taken."""
    return max(count, 1)
