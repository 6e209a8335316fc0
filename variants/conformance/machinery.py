"""Checks that a mixer is a module like any other to torch: saving, casting, compiling, recomputing, grouping its parameters."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from registry import options, variants
from variants.conformance.agreement import NUDGES, nudged
from variants.conformance.basics import trained
from variants.conformance.caching import WITHIN, cached_mixer
from variants.conformance.gradients import backward, expect_same_gradients, leaves, started
from variants.conformance.rows import padded
from variants.conformance.subject import Failed, Subject, changed, difference, expect_close, kept, tokens
from variants.contract import Context, Mixer, MixerOutput, NotApplicable, State

#: bf16 keeps 4e-3 of each parameter, and an output is a product of several of them.
CAST_BOUND = 2e-2
#: A norm over a head that reads almost nothing makes more of a rounding: so many times what other roundings of the parameters change is
#: allowed, up to where the outputs are no longer the same.
ROUNDINGS, CAST_LIMIT = 2, 1e-1

Call = Callable[[Tensor, Context | None, State | None], MixerOutput]


@torch.no_grad()
def a_saved_state_dict_restores_every_output(subject: Subject) -> str:
    """Bitwise, in an instance built from another seed; saved and loaded with weights_only=True."""
    mixer, other = subject.build(torch.float32), _built_from_another_seed(subject, torch.float32)
    file = io.BytesIO()
    torch.save(mixer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    try:
        other.load_state_dict(saved, strict=True)
    except RuntimeError as error:
        raise Failed(" ".join(str(error).split())) from error
    restored = dict(other.named_parameters())
    for name, parameter in mixer.named_parameters():
        if changed(restored[name], parameter).any():
            raise Failed(f"parameter {name} is another after loading the state_dict")
    x = tokens(2, subject.longest, mixer.dim, dtype=torch.float32)
    if changed(other(x).y, mixer(x).y).any():
        raise Failed(f"{subject.longest} tokens: an instance of another seed gives other outputs after loading the state_dict")
    return f"fp32, bitwise; {len(saved)} tensors saved"


@torch.no_grad()
def casting_to_bf16_and_back_loses_only_rounding(subject: Subject) -> str:
    """The outputs are as close as other roundings of the parameters leave them, and the same bitwise with the parameters restored.

    So no table was rounded for good.
    """
    mixer = subject.build()
    x = tokens(2, subject.longest, mixer.dim)
    expected = mixer(x).y
    cast = copy.deepcopy(mixer).to(torch.bfloat16).to(torch.float64)
    size = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    moved = max(difference(nudged(mixer, n)(x).y / size, expected / size) for n in range(NUDGES))
    bound = max(CAST_BOUND, min(ROUNDINGS * moved, CAST_LIMIT))
    expect_close(cast(x).y / size, expected / size, f"{subject.longest} tokens: after a cast to bf16 and back the outputs differ", bound)
    cast.load_state_dict(mixer.state_dict())
    restored = cast(x).y
    if changed(restored, expected).any():
        raise Failed(
            f"{subject.longest} tokens: after a cast to bf16 and back, with every parameter restored, the outputs differ "
            f"by {difference(restored, expected):.2g}: something outside the state_dict was rounded"
        )
    return f"{subject.longest} tokens; within {bound:.0e}, and bitwise with the parameters restored"


@torch.no_grad()
def parts_of_a_state_are_as_fine_as_the_model_or_fp32(subject: Subject) -> str:
    """And keep the dtype that `init_state` gave them, under autocast too."""
    cached_mixer(subject)
    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        mixer = subject.build(dtype)
        where = f"{_name(dtype)} model" + (" under autocast to bf16" if autocast else "")
        empty = mixer.init_state(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            state = empty
            for time in (3, 1, 5):
                state = kept(mixer(tokens(2, time, mixer.dim, dtype=dtype), state=state).state)
        for name, part in state.items():
            if part.is_floating_point() and part.dtype not in {dtype, torch.promote_types(dtype, torch.float32), torch.float64}:
                raise Failed(f"{where}: the state's part {name} is {_name(part.dtype)}")
            if name in empty and part.dtype != empty[name].dtype:
                raise Failed(f"{where}: the state's part {name} is {_name(empty[name].dtype)} when empty, then {_name(part.dtype)}")
    held = sorted({f"{name} {_name(part.dtype)}" for name, part in state.items() if part.is_floating_point()})
    return f"fp32 and bf16 models, and autocast: {', '.join(held) or 'no floating-point parts'}"


def torch_compile_changes_nothing(subject: Subject) -> str:
    """Outputs and gradients of a full pass and, unless fast, of one step with a state. The backend aot_eager needs no compiler of C++."""
    if not subject.given:  # seconds a form, for code that the forms share
        raise NotApplicable("only the form as given is compiled")
    mixer = subject.build()
    x = tokens(2, subject.longest, mixer.dim)
    calls: list[tuple[str, Tensor, State | None]] = [(f"{subject.longest} tokens", x, None)]
    if mixer.causal and not subject.fast:
        calls.append(("one token after a state", x[:, :1], started(mixer, len(x))))
    with _nothing_but_the_mixer_compiled():
        compiled = torch.compile(mixer, backend="aot_eager", dynamic=False)
        for what, x, state in calls:
            _expect_same(compiled, mixer, (x, None, state), f"{what}, compiled")
    return f"{WITHIN}; backend aot_eager; {' and '.join(what for what, *_ in calls)}; the other forms were not compiled"


def activation_checkpointing_changes_nothing(subject: Subject) -> str:
    """Outputs and gradients are the same where the forward pass is run again for the backward pass, with everything dropped out too."""
    kinds: dict[str, Any] = {option.name: 0.5 for option in options(variants.get(subject.name)) if "dropout" in option.name}
    mixer = subject.build(**kinds).train()

    def recomputed(x: Tensor, context: Context | None, state: State | None) -> MixerOutput:
        output: MixerOutput = checkpoint(mixer, x, context, state, use_reentrant=False)
        return output

    time = subject.longest
    x = tokens(len(padded(time)), time, mixer.dim)
    _expect_same(recomputed, mixer, (x, None, None), f"{time} tokens, checkpointed")
    _expect_same(recomputed, mixer, (x, Context(valid=padded(time)), None), f"{time} slots with padding, checkpointed")
    if mixer.causal:
        _expect_same(recomputed, mixer, (x[:, :1], None, started(mixer, len(x))), "one token after a state, checkpointed")
    return f"{WITHIN}; training mode{''.join(f', {kind}={share}' for kind, share in kinds.items())}"


def parameters_without_weight_decay_are_its_own(subject: Subject) -> str:
    """`undecayed()` gives parameters of the mixer, each once and the same at every call; a copy gives its own."""
    mixer = subject.build()
    parameters = trained(mixer)
    if not parameters:
        raise NotApplicable("it has no parameters")
    protected = _names_of_undecayed(mixer, "undecayed()")
    _names_of_undecayed(copy.deepcopy(mixer), "undecayed() of a copy")
    decayed = [name for name, parameter in parameters.items() if parameter.ndim >= 2 and name not in protected]
    return f"of {len(parameters)} parameters {len(decayed)} decay; protected: {', '.join(protected) or 'none'}"


@contextlib.contextmanager
def _nothing_but_the_mixer_compiled() -> Iterator[None]:
    """Leaves no compiled code behind. Type checks at run time are off inside, because the compiler would trace them and trips over them."""
    checks = jaxtyping.config.jaxtyping_disable
    torch._dynamo.reset()
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", checks)
        torch._dynamo.reset()


def _built_from_another_seed(subject: Subject, dtype: torch.dtype) -> Mixer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        mixer: Mixer = variants.build(subject.name, **copy.deepcopy(dict(subject.arguments)))
    return mixer.to(dtype).eval()


def _expect_same(got: Call, expected: Mixer, call: tuple[Tensor, Context | None, State | None], what: str) -> None:
    """Failed unless both give the same outputs, states and gradients of inputs, parameters and state, from the same random numbers."""
    mine, theirs = (_results(function, expected, call) for function in (got, expected))
    expect_close(mine[0].y, theirs[0].y, f"{what}: the outputs differ")
    for name, part in (theirs[0].state or {}).items():
        expect_close(kept(mine[0].state)[name], part, f"{what}: the state's part {name} differs")
    expect_same_gradients(mine[1], theirs[1], what)


def _results(function: Call, mixer: Mixer, call: tuple[Tensor, Context | None, State | None]) -> tuple[MixerOutput, dict[str, Tensor]]:
    x, context, state = call
    x, state, wanted = leaves(mixer, x, state)
    torch.manual_seed(0)
    output = function(x, context, state)
    return output, backward(output, wanted)


def _names_of_undecayed(mixer: Mixer, what: str) -> list[str]:
    names = {id(parameter): name for name, parameter in mixer.named_parameters()}
    calls = [list(mixer.undecayed()) for _ in range(2)]
    if len(calls[0]) != len(calls[1]):
        raise Failed(f"{what} gives {len(calls[0])} parameters, and {len(calls[1])} when called again")
    for number, parameter in enumerate(calls[0]):
        if id(parameter) not in names:
            raise Failed(f"{what}: number {number}, of shape {tuple(parameter.shape)}, is not a parameter of the mixer")
    found = [names[id(parameter)] for parameter in calls[0]]
    for name in found:
        if found.count(name) > 1:
            raise Failed(f"{what} gives {name} twice")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
