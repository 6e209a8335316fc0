"""Checks that gradients are right: against finite differences, through a cache, and whatever lies where in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.nn import functional

from variants.conformance.basics import trained
from variants.conformance.caching import WITHIN, cached_mixer, comparable, in_words
from variants.conformance.rows import padded
from variants.conformance.subject import Failed, Subject, expect_close, first_line, kept, run_in_pieces, tokens
from variants.contract import Context, Mixer, MixerOutput, NotApplicable, State

#: fp64 loses 1e-16 of a loss of about 10 to rounding, and a step of 1e-7 magnifies that to 1e-8; a hundred times as much is no rounding.
#: A longer step would see how much the gradient of a norm over a head that reads almost nothing bends.
STEP = 1e-7
GRADCHECK_TOLERANCE = 1e-6

#: Ways in which a tensor of this shape may lie in memory; what is expanded repeats one of its parts without storing it again.
LAYOUTS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("stored with its first two axes exchanged", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    ("stored with its last two axes exchanged", lambda x: x.mT.contiguous().mT),
    ("cut out of a larger tensor", lambda x: functional.pad(x, (3, 2, 1, 2, 2, 1))[2:-1, 1:-2, 3:-2]),
    ("taken from every other channel", lambda x: x.repeat_interleave(2, dim=-1)[..., ::2]),
    ("one row expanded", lambda x: x[:1].expand_as(x)),
    ("one token expanded", lambda x: x[:, :1].expand_as(x)),
    ("one number expanded", lambda x: x[:1, :1, :1].expand_as(x)),
)


def analytic_gradients_equal_numerical_ones(subject: Subject) -> str:
    """Along a random direction of each tensor, by `torch.autograd.gradcheck`: inputs, parameters and, where there is one, the state."""
    mixer = subject.build()
    if not mixer.exact_gradients:
        raise NotApplicable("it declares gradients that are not the slopes of its outputs")
    time = subject.longest
    valid = Context(valid=padded(time))
    x = tokens(len(padded(time)), time, mixer.dim)
    _gradcheck(mixer, x, None, None, f"{time} tokens")
    _gradcheck(mixer, x, valid, None, f"{time} slots with padding")
    if mixer.causal:
        _gradcheck(mixer, x, valid, started(mixer, len(x)), f"{time} slots with padding after a state")
    return f"fp64, within {GRADCHECK_TOLERANCE:.0e}; {time} tokens, with padding" + (", with a state" if mixer.causal else "")


def gradients_through_a_cache_are_those_of_the_full_pass(subject: Subject) -> str:
    """Of inputs and parameters, for a sequence that came in pieces, with and without padding."""
    mixer = cached_mixer(subject)
    longest = subject.longest
    tried = [[3, 4], [1] * 7, [longest // 2, longest - longest // 2], [longest - 2, 1, 1]]
    for pieces in tried:
        time = sum(pieces)
        for context, padding in ((None, ""), (Context(valid=padded(time)), " with padding")):
            x, _, wanted = leaves(mixer, tokens(len(padded(time)), time, mixer.dim), None)
            first = comparable(mixer, pieces)
            full, joined = mixer(x, context)._replace(aux={}), run_in_pieces(mixer, x, pieces, context)
            expected, got = (backward(run._replace(y=run.y[:, first:]), wanted) for run in (full, joined))
            expect_same_gradients(got, expected, f"pieces of {in_words(pieces)} tokens{padding}")
    return f"{WITHIN}; pieces of {', '.join(map(in_words, tried))}"


def strides_of_inputs_and_output_gradients_change_nothing(subject: Subject) -> str:
    """Inputs, states, contexts and output gradients in every layout against contiguous copies: a kernel that reads memory must ask how."""
    mixer = subject.build()
    x = tokens(3, subject.longest, mixer.dim).contiguous()
    arriving = tokens(*x.shape, seed=1).contiguous()
    starts = [(None, ""), *([(started(mixer, len(x)), " before a call with a state")] if mixer.causal else [])]
    for layout, lay in LAYOUTS:
        for state, when in starts:
            _expect_same(mixer, (lay(x), None, state, arriving), f"an input that is {layout}{when}")
            _expect_same(mixer, (x, None, state, lay(arriving)), f"an output gradient that is {layout}{when}")
    for layout, lay in (("one row expanded", lambda part: part[:1].expand_as(part)), ("stored with the batch last", _batch_last)):
        for state, _ in starts[1:]:
            laid = State(**{name: lay(part) for name, part in kept(state).items()})
            _expect_same(mixer, (x, None, laid, arriving), f"a state that is {layout}")
    row = torch.arange(subject.longest).unsqueeze(0)
    context = Context(positions=(2 * row).expand(len(x), -1), valid=(row % 3 != 1).expand(len(x), -1))
    _expect_same(mixer, (x, context, None, arriving), "a context whose one row is expanded")
    return f"{WITHIN}; {', '.join(layout for layout, _ in LAYOUTS)}"


def started(mixer: Mixer, batch: int) -> State:
    """The state after a few tokens."""
    with torch.no_grad():
        return kept(mixer(tokens(batch, 5, mixer.dim, seed=2), state=mixer.init_state(batch)).state)


def leaves(mixer: Mixer, x: Tensor, state: State | None) -> tuple[Tensor, State | None, dict[str, Tensor]]:
    """x and the state's floating-point parts without their history, strides kept, and by name all that there are gradients for."""
    x = x.detach().requires_grad_()
    parts = {} if state is None else {n: part.detach().requires_grad_() for n, part in state.items() if part.is_floating_point()}
    parameters = {f"parameter {name}": parameter for name, parameter in trained(mixer).items()}
    wanted = {"the input": x, **parameters, **{f"the state's part {name}": part for name, part in parts.items()}}
    return x, None if state is None else state.replace(**parts), wanted


def backward(output: MixerOutput, wanted: Mapping[str, Tensor], arriving: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients of y, weighted by `arriving` (default: standard normal), and of the auxiliary losses; 0 for what they do not depend on."""
    losses = [value for name, value in output.aux.items() if name.startswith("loss/") and value.requires_grad]
    if arriving is None:
        arriving = tokens(*output.y.shape, dtype=output.y.dtype, seed=1)
    arriving_all = [arriving, *map(torch.ones_like, losses)]
    gradients = torch.autograd.grad([output.y, *losses], list(wanted.values()), arriving_all, allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(wanted.items(), gradients, strict=True)
    }


def expect_same_gradients(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Failed, naming the tensor whose gradient differs."""
    for name, gradient in got.items():
        expect_close(gradient, expected[name], f"{what}: the gradient of {name} differs")


def _gradcheck(mixer: Mixer, x: Float[Tensor, "batch time dim"], context: Context | None, state: State | None, what: str) -> None:
    """Failed where a step of each tensor in a random direction does not change the weighted outputs as its gradient says.

    gradcheck's own `fast_mode` projects in the same way, but its tolerance grows with the tensors, and where they fail it tries each of
    their elements.
    """
    x, state, points = leaves(mixer, x, state)
    points = {name: point.detach() for name, point in points.items()}
    directions = [_like(point, seed=number + 1) for number, point in enumerate(points.values())]
    outputs: list[str] = []

    def along(*steps: Tensor) -> tuple[Tensor, ...]:
        moved = {name: point + step * way for (name, point), step, way in zip(points.items(), steps, directions, strict=True)}
        carried = None if state is None else state.replace(**_named("the state's part ", moved))
        output = torch.func.functional_call(mixer, _named("parameter ", moved), (moved["the input"], context, carried))
        parts = {f"the state's part {name}": part for name, part in (output.state or {}).items()}
        results = {name: part for name, part in {"y": output.y, **parts}.items() if part.is_floating_point() and part.requires_grad}
        outputs[:] = results
        return tuple((result * _like(result, seed=0)).sum() for result in results.values())

    start = [torch.zeros((), dtype=x.dtype, requires_grad=True) for _ in points]
    try:
        torch.autograd.gradcheck(along, start, eps=STEP, atol=GRADCHECK_TOLERANCE, rtol=GRADCHECK_TOLERANCE, nondet_tol=GRADCHECK_TOLERANCE)
    except GradcheckError as error:
        found = re.search(r"mismatch for output (\d+) with respect to input (\d+),\s*numerical:(.*)\s*analytical:(.*)", str(error))
        if found is None:
            raise Failed(f"{what}: {first_line(error)}") from error
        output, point = outputs[int(found[1])], list(points)[int(found[2])]
        raise Failed(f"{what}: the gradient of {output} for {point} is {_number(found[4])}, numerically {_number(found[3])}") from error


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose name begins so, by the rest of it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _like(x: Tensor, seed: int) -> Tensor:
    return tokens(1, x.numel(), 1, seed=seed).reshape(x.shape)


def _number(printed: str) -> str:
    """The number in a printed tensor of one element."""
    found = re.search(r"-?\d[\d.]*(e[+-]?\d+)?", printed)
    return found[0] if found else printed


def _batch_last(part: Tensor) -> Tensor:
    return part.movedim(0, -1).contiguous().movedim(-1, 0)


def _expect_same(mixer: Mixer, call: tuple[Tensor, Context | None, State | None, Tensor], what: str) -> None:
    """Failed unless outputs and gradients are those of contiguous copies of everything in the call."""
    x, context, state, arriving = call
    dense_context = None if context is None else Context(*map(_dense, (context.positions, context.valid, context.segment_ids)))
    dense_state = None if state is None else State(**{name: part.contiguous() for name, part in state.items()})
    got, got_gradients = _call(mixer, x, context, state, arriving)
    expected, expected_gradients = _call(mixer, x.contiguous(), dense_context, dense_state, arriving.contiguous())
    expect_close(got, expected, f"{what}: the outputs differ from those of a contiguous copy")
    expect_same_gradients(got_gradients, expected_gradients, f"{what}, against a contiguous copy")


def _call(mixer: Mixer, x: Tensor, context: Context | None, state: State | None, arriving: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x, state, wanted = leaves(mixer, x, state)
    output = mixer(x, context, state)
    return output.y, backward(output, wanted, arriving)


def _dense(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.contiguous()
