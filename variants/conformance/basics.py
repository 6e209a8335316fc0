"""Checks of single calls: shapes, gradients, evaluation mode, extreme inputs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from registry import options, variants
from variants.conformance.subject import Failed, Subject, changed, expect_close, kept, tokens
from variants.contract import Mixer, MixerOutput, NotApplicable, State

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
HUGE = 1e4
#: Products of two tokens of this size, which logits are, are as large as HUGE.
LARGE = HUGE**0.5


@torch.no_grad()
def outputs_have_the_shape_and_dtype_of_the_input(subject: Subject) -> str:
    """With and without a state, whose parts have one row a sequence."""
    for dtype in DTYPES:
        mixer = subject.build(dtype)
        for batch, time in ((1, 1), (2, 7), (3, subject.longest)):
            x = tokens(batch, time, mixer.dim, dtype=dtype)
            where = f"{str(dtype).removeprefix('torch.')} input of shape {tuple(x.shape)}"
            full = mixer(x)
            _expect_like(full.y, x, where)
            if full.state is not None:
                raise Failed(f"{where}: a full pass gave a state")
            if mixer.causal:
                cached = mixer(x, state=mixer.init_state(batch))
                _expect_like(cached.y, x, f"{where} with a state")
                _expect_rows(kept(cached.state), batch, where)
    return f"fp32, bf16 and fp64, up to {subject.longest} tokens"


def gradients_reach_every_parameter(subject: Subject) -> str:
    """From the outputs and the auxiliary losses together."""
    mixer = subject.build()
    parameters = trained(mixer)
    if not parameters:
        raise NotApplicable("it has no parameters")
    loss = _loss(mixer(tokens(2, subject.longest, mixer.dim)))
    for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True), strict=True):
        if gradient is None or not gradient.any():
            raise Failed(f"parameter {name} gets no gradient")
        if not gradient.isfinite().all():
            raise Failed(f"the gradient of parameter {name} is not finite")
    return f"{len(parameters)} parameters, {subject.longest} tokens"


@torch.no_grad()
def evaluation_is_deterministic_and_drops_nothing_out(subject: Subject) -> str:
    """Two calls agree bitwise; every kind of dropout is gone in eval mode and back in training mode."""
    mixer = subject.build()
    x = tokens(2, subject.longest, mixer.dim)
    expected = mixer(x).y
    if changed(mixer(x).y, expected).any():
        raise Failed("two calls in eval mode differ")
    kinds = [option.name for option in options(variants.get(subject.name)) if "dropout" in option.name]
    for kind in kinds:
        without: dict[str, Any] = {kind: 0.0}
        dropping: dict[str, Any] = {kind: 0.5}
        expected, mixer = subject.build(**without)(x).y, subject.build(**dropping)
        for training in (False, True, False):
            mixer.train(training)
            first, second = mixer(x).y, mixer(x).y
            if training and torch.equal(first, second):
                raise Failed(f"{kind}=0.5: training drops nothing out, two calls are the same")
            if not training:
                expect_close(first, expected, f"{kind}=0.5: eval mode differs from {kind}=0")
    return f"two calls agree bitwise; {', '.join(kinds) or 'it has no dropout'}{' is off in eval mode' if kinds else ''}"


def extreme_inputs_give_finite_outputs_and_gradients(subject: Subject) -> str:
    """All zeros, all large, all the same, and one large token among ordinary ones; outputs also where logits pass all that is sensible."""
    mixer = subject.build(torch.float32)
    for time in (1, subject.longest):
        x = tokens(1, time, mixer.dim, dtype=torch.float32)
        kinds = {"zeros": torch.zeros_like(x), "equal tokens": x[:, :1].expand_as(x)}
        for size in (LARGE, HUGE):
            kinds[f"inputs of {size:g}"] = size * x
            kinds[f"equal tokens of {size:g}"] = size * x[:, :1].expand_as(x)
            kinds[f"one token of {size:g}"] = torch.cat([size * x[:, :1], x[:, 1:]], 1)
        for kind, values in kinds.items():
            # A logit of 1e8 is known to fp32 within 8, and no more of its weight than e^8: there a gradient has no meaning.
            _expect_finite(mixer, values, f"{time} tokens, {kind}", gradients=f"{HUGE:g}" not in kind)
    return f"zeros, equal tokens, inputs of {LARGE:g} and, for outputs alone, of {HUGE:g}, fp32"


def input_gradients(mixer: Mixer, time: int, places: list[int]) -> Float[Tensor, "places time"]:
    """How strongly the outputs at `places` of one sequence depend on each of its tokens, by automatic differentiation."""
    x = tokens(1, time, mixer.dim).repeat(len(places), 1, 1).requires_grad_()
    y = mixer(x).y[range(len(places)), places]
    weights = tokens(1, 1, mixer.dim, seed=1)[0, 0]
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    return gradient.abs().amax(-1)


def places(subject: Subject, time: int) -> list[int]:
    """Tokens of a sequence to try in turn: all of a short one, else those at the edges of blocks and some between."""
    if time <= 40:
        return list(range(time))
    edges = {block * k + d for block in subject.block_sizes for k in range(time // block + 1) for d in (-1, 0, 1)}
    edges = {edge for edge in edges if 0 <= edge < time}
    spread = max(1, len(edges) // 12)  # many small blocks in a long sequence: some of their edges will do
    return sorted({0, time - 2, time - 1, *range(0, time, max(1, time // 12)), *sorted(edges)[::spread]})


def trained(mixer: Mixer) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: parameter for name, parameter in mixer.named_parameters() if parameter.requires_grad}


def _loss(output: MixerOutput) -> Tensor:
    weights = tokens(*output.y.shape, dtype=output.y.dtype, seed=1)
    auxiliary = [value for name, value in output.aux.items() if name.startswith("loss/")]
    return torch.stack([(output.y * weights).sum(), *auxiliary]).sum()


def _expect_like(y: Tensor, x: Tensor, where: str) -> None:
    if y.shape != x.shape or y.dtype != x.dtype:
        raise Failed(f"{where}: the output is {tuple(y.shape)}, {str(y.dtype).removeprefix('torch.')}")


def _expect_rows(state: State, batch: int, where: str) -> None:
    for name, part in state.items():
        if part.shape[:1] != (batch,):
            raise Failed(f"{where}: the first axis of the state's part {name}, {tuple(part.shape)}, is not the batch")


def _expect_finite(mixer: Mixer, x: Tensor, where: str, *, gradients: bool) -> None:
    x = x.clone().requires_grad_()
    output = mixer(x)
    if not output.y.isfinite().all():
        bad = int((~output.y.isfinite()).any(-1).nonzero()[0, 1])
        raise Failed(f"{where}: output {bad} is not finite")
    if not gradients:
        return
    inputs: dict[str, Tensor] = {"the input": x, **trained(mixer)}
    for name, gradient in zip(inputs, torch.autograd.grad(_loss(output), list(inputs.values()), allow_unused=True), strict=True):
        if gradient is not None and not gradient.isfinite().all():
            raise Failed(f"{where}: the gradient of {name} is not finite")
