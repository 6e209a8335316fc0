"""The check that a variant's implementations are one function: forward and backward, in every precision they are run in."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from registry import options, variants
from variants import implementations
from variants.conformance.gradients import backward, leaves
from variants.conformance.subject import Subject, expect_close, run_in_pieces, tokens
from variants.contract import Mixer, NotApplicable

#: fp32 keeps 6e-8 of a number. Sums of a few hundred terms in another order differ by about the square root of their count times that,
#: 1e-6, and a backward pass has a few such sums in a row.
FP32_BOUND = 1e-5
#: bf16 keeps 4e-3 of a number. Some ten roundings lie between an input and a gradient: projections, weights, values, and the way back.
BF16_BOUND = 5e-2
#: A norm over few channels, or a difference of near numbers, makes more of a rounding: so many times what one rounding of the input and
#: the parameters changes in the reference is allowed in any case; the most that any of NUDGES such roundings changes.
ROUNDINGS, NUDGES = 10, 4

Results = dict[str, dict[str, Tensor]]


def implementations_agree(subject: Subject) -> str:
    """Outputs and gradients of every implementation that can be used here, against the reference in fp32: in fp32, bf16 and autocast."""
    if not subject.takes("impl") or "impl" in subject.arguments:
        raise NotApplicable("one implementation")
    usable = _usable(subject, {})
    if len(usable) < 2:
        raise NotApplicable(f"one implementation is usable here: {', '.join(usable) or 'none'}")
    for time in _lengths(subject):
        _expect_agreement(subject, usable, time, f"{time} tokens")
    for kv_heads in _groups(subject, usable):
        grouped = _usable(subject, {"kv_heads": kv_heads})
        if len(grouped) > 1:
            _expect_agreement(subject, grouped, subject.longest, f"{subject.longest} tokens, kv_heads={kv_heads}")
    return (
        f"{', '.join(usable)}; outputs and gradients within {FP32_BOUND:.0e} in fp32, {BF16_BOUND:.0e} in bf16 and under autocast, or "
        f"{ROUNDINGS} times what a rounding of all that goes in changes"
    )


def _expect_agreement(subject: Subject, usable: Mapping[str, Mixer], time: int, where: str) -> None:
    """Failed, naming the implementation and the precision. bf16 has one bound whatever the length, so that the two ends will do."""
    first = "reference" if "reference" in usable else next(iter(usable))
    rounded = {impl: copy.deepcopy(mixer).bfloat16() for impl, mixer in usable.items()} if time in (1, subject.longest) else {}
    x = tokens(2, time, usable[first].dim, dtype=torch.bfloat16)
    for pieces in _pieces(usable[first], time):
        how = f"{where} in pieces with a state" if pieces else where
        expected = _results(usable[first], x.float(), pieces)
        for impl, mixer in usable.items():
            if impl != first:
                _expect_same(_results(mixer, x.float(), pieces), expected, f"{how}: {impl} differs from {first}", FP32_BOUND)
        once = [_results(nudged(usable[first], n), _nudge(x.float(), n), pieces) for n in range(NUDGES if rounded else 0)]
        for impl, mixer in rounded.items():
            against = f"{impl} differs from {first} in fp32"
            _expect_same(_results(mixer, x, pieces), expected, f"{how}, bf16: {against}", BF16_BOUND, once)
            autocast = _results(usable[impl], x.float(), pieces, autocast=True)
            _expect_same(autocast, expected, f"{how}, autocast to bf16: {against}", BF16_BOUND, once)


def _groups(subject: Subject, usable: Mapping[str, Mixer]) -> list[int]:
    """In how many groups heads could share keys and values where every head has its own: the most, or none."""
    mixer = next(iter(usable.values()))
    if not subject.takes("kv_heads") or "kv_heads" in subject.arguments or getattr(mixer, "kv_heads", None) != mixer.heads:
        return []
    return [n for n in range(1, mixer.heads) if mixer.heads % n == 0][-1:]


def _usable(subject: Subject, changed: Mapping[str, Any]) -> dict[str, Mixer]:
    """A mixer for each implementation that runs on the CPU, in fp32, with nothing dropped out.

    bf16 holds their parameters exactly, so that what it rounds is the computation alone.
    """
    dropout = {option.name: 0.0 for option in options(variants.get(subject.name)) if "dropout" in option.name}
    usable = {}
    for impl in getattr(variants.get(subject.name), "implementations", ()):
        if implementations.usable(impl, "cpu") is not None:
            continue
        try:
            usable[impl] = subject.build(torch.bfloat16, impl=impl, **changed, **dropout).float()
        except ValueError:
            continue  # not usable for these options, which the mixer says itself
    return usable


def _lengths(subject: Subject) -> list[int]:
    """Short ones, and those at the edges of blocks."""
    edges = {block + beside for block in subject.block_sizes for beside in (-1, 0, 1)}
    return [time for time in subject.lengths if time in edges | {1, 2, 7, subject.longest}]


def _pieces(mixer: Mixer, time: int) -> list[list[int] | None]:
    """A full pass, and a cached run of two pieces and a single step."""
    half = time // 2
    pieces = [piece for piece in (half, time - half - 1, 1) if piece]
    return [None, pieces] if mixer.causal else [None]


def _results(mixer: Mixer, x: Float[Tensor, "batch time dim"], pieces: list[int] | None, *, autocast: bool = False) -> Results:
    """Outputs and gradients, sorted by what may be compared in size."""
    x, _, wanted = leaves(mixer, x, None)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = mixer(x) if pieces is None else run_in_pieces(mixer, x, pieces)
    arriving = tokens(*x.shape, dtype=torch.bfloat16, seed=1).to(output.y.dtype)
    gradients = backward(output._replace(aux={}), wanted, arriving)
    return {
        "outputs": {"the outputs": output.y.detach().float()},
        "input": {"the gradient of the input": gradients.pop("the input").float()},
        "parameters": {f"the gradient of {name}": gradient.float() for name, gradient in gradients.items()},
    }


def _nudge(x: Tensor, seed: int) -> Tensor:
    """x with every number moved by up to 2^-8 of it, as a rounding to the eight bits of bf16 may."""
    generator = torch.Generator().manual_seed(seed)
    return x * (1 + 2.0**-7 * (torch.rand(x.shape, generator=generator, dtype=x.dtype) - 0.5))


def nudged(mixer: Mixer, seed: int) -> Mixer:
    """The same with every parameter moved by up to 2^-8 of it."""
    moved = copy.deepcopy(mixer)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.copy_(_nudge(parameter, seed))
    return moved


def _expect_same(got: Results, expected: Results, what: str, bound: float, nudges: Sequence[Results] = ()) -> None:
    """Relative to the largest number of its kind: a gradient that is zero but for rounding has no size of its own to be measured by.

    nudges: `expected` after roundings of everything that went in, which widen the bound where one of them changed much.
    """
    for kind, tensors in expected.items():
        size = max((float(tensor.abs().max()) for tensor in tensors.values()), default=0.0) or 1.0
        moved = max((float((moved[kind][name] - tensor).abs().max()) for moved in nudges for name, tensor in tensors.items()), default=0.0)
        for name, tensor in tensors.items():
            expect_close(got[kind][name] / size, tensor / size, f"{what}: {name}", max(bound, ROUNDINGS * moved / size))
