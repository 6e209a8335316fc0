"""Layers whose rows are split over processes: every call here is a call in all of them, on what each has of the rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments import parallel
from experiments.bench.candidate import Notes, output_gradient
from experiments.bench.sizes import Sizes
from variants.context import split_rows
from variants.contract import Context, default_positions
from variants.ops.precision import flushed_denormals
from variants.ops.ranks import Ranks, Ring

#: What the first process tells the others to do: a pass, a pass to be differentiated, its backward pass; a pass, or both, of which nothing
#: is put together; to end.
FORWARD, TRAIN, BACKWARD, PASS, STEP, END = range(6)


@contextlib.contextmanager
def layers(labels: Sequence[str], sizes: Sizes, notes: Notes) -> Iterator[Layers | None]:
    """These layers in `sizes.processes` processes; None for 1."""
    told = {"labels": list(labels), "sizes": asdict(sizes)}
    with parallel.processes(sizes.processes, "experiments.bench.shared:follow", told) as ranks:
        if ranks is None:
            yield None
            return
        yield Layers(labels, ranks, notes)
        _tell(END)


class Layers:
    """Calls of layers, in the first process, which has the whole input and gets the whole output."""

    def __init__(self, labels: Sequence[str], ranks: Ranks, notes: Notes):
        self.labels, self.ranks, self.notes = list(labels), ranks, notes

    def why_not(self, mixer: Any, length: int) -> str | None:
        """Why rows of this layer, or of this length, cannot be split; None: they can."""
        try:
            Ring(self.ranks, length)
        except ValueError as error:
            return str(error)
        reason: str | None = mixer.must_be_whole()
        return reason

    def timed(self, label: str, mixer: Any, x: Tensor, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        """What each process does in a run: no more than its part, and parameters' gradients put together."""

        def step() -> tuple[Tensor, ...]:
            _tell(STEP, self.labels.index(label), x.shape[1])
            part = _Part(mixer, x, self.ranks, True)
            return part.y.detach(), *part.gradients()

        def forward() -> tuple[Tensor, ...]:
            _tell(PASS, self.labels.index(label), x.shape[1])
            return (_Part(mixer, x, self.ranks, False).y,)

        return step if mode == "train" else forward

    def call(self, label: str, mixer: Any, x: Tensor) -> Tensor:
        """y, for an x that is `layer.inputs` and a gradient of y that is `candidate.output_gradient`."""
        parameters = [p for p in mixer.parameters() if p.requires_grad]
        y: Tensor = _Shared.apply(self, self.labels.index(label), mixer, x, *parameters)
        return y


class _Shared(torch.autograd.Function):
    """A layer's pass and its backward pass in all processes."""

    @staticmethod
    def forward(ctx: Any, layers: Layers, number: int, mixer: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        training = any(ctx.needs_input_grad)
        _tell(TRAIN if training else FORWARD, number, x.shape[1])
        ctx.part = _Part(mixer, x, layers.ranks, training)
        ctx.training = training
        return ctx.part.output()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _tell(BACKWARD)
        by_x, *by_parameters = ctx.part.gradients()
        return None, None, None, ctx.part.ring.whole(by_x), *by_parameters


class _Part:
    """One pass over what this process has of the rows."""

    def __init__(self, mixer: Any, x: Tensor, ranks: Ranks, training: bool):
        self.mixer, self.shape = mixer, x.shape
        part, told = split_rows(x.detach(), default_positions(x, Context(), None), ranks)
        assert told.split is not None
        self.ring, self.x = told.split.ring, part.requires_grad_(training)
        with torch.set_grad_enabled(training):
            self.y = mixer(self.x, told).y

    def output(self) -> Tensor:
        """Whole rows."""
        return self.ring.whole(self.y.detach())

    def gradients(self) -> tuple[Tensor, ...]:
        """By what is here of x, and by each parameter."""
        parameters = [p for p in self.mixer.parameters() if p.requires_grad]
        by_x, *found = torch.autograd.grad(
            self.y, [self.x, *parameters], self.ring.part(output_gradient(self.shape)), materialize_grads=True
        )
        together = torch.cat([grad.flatten() for grad in found])
        dist.all_reduce(together)
        found = [grad.view_as(p) for grad, p in zip(together.split([p.numel() for p in parameters]), parameters, strict=True)]
        return by_x, *found


def follow(told: dict[str, Any], ranks: Ranks) -> None:
    """Do what the first process says until it says that this is all."""
    from experiments.bench import layer

    sizes, labels = Sizes(**told["sizes"]), told["labels"]
    mixers = [layer.build([label], sizes, Notes())[label].mixer for label in labels]
    part: _Part | None = None
    with flushed_denormals():
        while True:
            what, number, length = _heard()
            if what == END:
                return
            if what == BACKWARD:
                assert part is not None
                by_x, *_ = part.gradients()
                part.ring.whole(by_x)
                part = None
                continue
            part = _Part(mixers[number], layer.inputs(sizes, length), ranks, what in (TRAIN, STEP))
            if what in (FORWARD, TRAIN):
                part.output()
            elif what == STEP:
                part.gradients()


def _tell(what: int, number: int = 0, length: int = 0) -> None:
    dist.broadcast(torch.tensor([what, number, length]), src=0)


def _heard() -> list[int]:
    words = torch.zeros(3, dtype=torch.long)
    dist.broadcast(words, src=0)
    return [int(word) for word in words]
