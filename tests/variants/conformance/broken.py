"""Mixers broken on purpose, each in one way that a property must find. Those of padding and segments are in `broken_rows.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from tests.variants.conformance.toys import Mean, WindowMean
from variants.contract import Context, State


class WrongDtype(Mean):
    """Computes in fp32 and forgets to go back."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y.float(), parts, aux


class WrongDtypeWithState(Mean):
    """Forgets only where there is a cache."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return (y if state is None else y.float()), parts, aux


class StateWithheld(Mean):
    """Takes a state and gives none back."""

    def forward(self, x, context=None, state=None):
        return super().forward(x, context, state)._replace(state=None)


class BatchNotFirst(Mean):
    """One part for all rows, which `reorder` cannot pick from."""

    def init_parts(self, batch, **like):
        return super().init_parts(batch, **like) | {"shared": torch.zeros(1, batch, **like)}


class StateUnasked(Mean):
    """A full pass that hands out a state."""

    def forward(self, x, context=None, state=None):
        return super().forward(x, context, state or self.init_state(len(x)))


class UnusedParameter(Mean):
    """A layer that nothing reads."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.forgotten = nn.Linear(2, 2)


class Overflow(Mean):
    """exp of a number without a bound."""

    def weights(self, x):
        return torch.exp(self.gate(x))


class InfiniteSlope(Mean):
    """A square root at zero: finite values, infinite gradient."""

    def values(self, x, number, state):
        return super().values(x, number, state) + x.abs().sqrt()


class ParameterWithoutSlope(Mean):
    """A square root of nothing: the parameter's gradient is not a number."""

    def weights(self, x):
        return super().weights(x) + (0 * self.gate.weight.sum()).abs().sqrt()


class Noisy(Mean):
    """Noise in eval mode."""

    def values(self, x, number, state):
        return super().values(x, number, state) + torch.randn_like(x)


class DropoutAlwaysOn(Mean):
    """The functional form, whose `training` defaults to True."""

    def values(self, x, number, state):
        return functional.dropout(super().values(x, number, state), self.dropout.p)


class DropoutNeverOn(Mean):
    """Takes the option and ignores it."""

    def values(self, x, number, state):
        return self.value(x)


class LeakInLastBlock(Mean):
    """Tokens of a partly filled last block see each other both ways."""

    def mask(self, number, context):
        mask, time = super().mask(number, context), number.shape[1]
        start = time - time % self.block
        if start:
            mask[:, start:, start:] = True
        return mask


class LeakByOne(Mean):
    """A diagonal too many."""

    def mask(self, number, context):
        return torch.ones(number.shape[1], number.shape[1], dtype=torch.bool).tril(1).expand(len(number), -1, -1)


class FiniteMask(Mean):
    """Masks by adding a large number, which larger scores outweigh."""

    def average(self, v, w, number, context, state):
        scores = self.gate(v).transpose(1, 2) - 1e4 * ~super().mask(number, context)
        return torch.softmax(scores, -1) @ v, {}


class LeakByGradient(Mean):
    """The values are right, but learning sees the next token."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        future = x.roll(-1, dims=1)
        return y + (future - future.detach()), parts, aux


class LeakInTraining(Mean):
    """Causal wherever it is evaluated."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y + x.flip(1) if self.training else y, parts, aux


class LeakWhenLong(Mean):
    """Sees one token too far, in long sequences only."""

    def mask(self, number, context):
        mask = super().mask(number, context)
        return mask | mask.roll(-1, dims=1) if number.shape[1] > 64 else mask


class ReachUnderstated(WindowMean):
    """Forgets that the window begins window - 1 tokens back."""

    def reach(self):
        return self.window - 2


class WindowOffByOneInSteps(WindowMean):
    """A step sees one token less than the full pass."""

    def average(self, v, w, number, context, state):
        if state is not None and v.shape[1] == 1:
            weights = state["weights"]
            state = state.replace(weights=torch.cat([torch.zeros_like(weights[:, :1]), weights[:, 1:]], 1))
        return super().average(v, w, number, context, state)


class CacheDropped(Mean):
    """Every call with a state starts afresh."""

    def average(self, v, w, number, context, state):
        return super().average(v, w, number + 1, context, state)


class PositionsFromShape(Mean):
    """Counts positions from the start of each call."""

    def values(self, x, number, state):
        return super().values(x + torch.arange(x.shape[1]).unsqueeze(1), number, state)


class StateOnlyForFirstToken(Mean):
    """A piece of several tokens continues the state in its first one alone; single steps are right."""

    def average(self, v, w, number, context, state):
        y, parts = super().average(v, w, number, context, state)
        return torch.cat([y[:, :1], super().average(v, w, number, context, None)[0][:, 1:]], 1), parts


class TapsNotHandedOn(Mean):
    """The convolution of every piece begins with zeros."""

    def values(self, x, number, state):
        return super().values(x, number, None)


class StateCountsPieces(Mean):
    """A part that no output shows and that depends on how the sequence was cut."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y, parts | ({} if state is None else {"pieces": state["pieces"] + 1}), aux

    def init_parts(self, batch, **like):
        return super().init_parts(batch, **like) | {"pieces": torch.zeros(batch, **like)}


class StateGrowsByPieces(Mean):
    """The same in the shape of a part."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y, parts | ({} if state is None else {"pieces": functional.pad(state["pieces"], (0, 1))}), aux

    def init_parts(self, batch, **like):
        return super().init_parts(batch, **like) | {"pieces": torch.zeros(batch, 1, **like)}


class StateRemembersLongPieces(Mean):
    """Single steps leave what one piece leaves; a long piece after a first one leaves something else, which no output shows."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        if state is not None:
            parts["hidden"] = state["hidden"] + state["seen"] * (x.shape[1] > 1)
        return y, parts, aux

    def init_parts(self, batch, **like):
        return super().init_parts(batch, **like) | {"hidden": torch.zeros(batch, **like)}


class PartsComeAndGo(Mean):
    """A step leaves a part that a longer piece does not."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y, parts | ({"step": x[:, 0]} if x.shape[1] == 1 else {}), aux


class StateSpoiled(Mean):
    """Leaves the state that it was given in disorder."""

    def average(self, v, w, number, context, state):
        y, parts = super().average(v, w, number, context, state)
        if state is not None:
            state["total"].add_(1)
        return y, parts


class StateChangedInPlace(Mean):
    """Writes the new sums over the old ones."""

    def average(self, v, w, number, context, state):
        y, parts = super().average(v, w, number, context, state)
        return y, {name: state[name].copy_(part) for name, part in parts.items()}


class RowsStoredBackwards(Mean):
    """Keeps its rows in another order than the batch."""

    def average(self, v, w, number, context, state):
        flipped = None if state is None else State(**{name: part.flip(0) for name, part in state.items()})
        y, parts = super().average(v, w, number, context, flipped)
        return y, {name: part.flip(0) for name, part in parts.items()}


class PositionsCountedFromOne(Mean):
    """Counts otherwise than the contract where it is told nothing."""

    def forward(self, x, context=None, state=None):
        counted = torch.arange(1, x.shape[1] + 1).expand(x.shape[:2])
        return super().forward(x, context or Context(positions=counted), state)


class PositionsIgnored(Mean):
    """Counts for itself, whatever it is told."""

    def forward(self, x, context=None, state=None):
        return super().forward(x, replace(context or Context(), positions=None), state)


class PositionsIgnoredInPieces(Mean):
    """Counts on from the state, whatever it is told."""

    def forward(self, x, context=None, state=None):
        return super().forward(x, context if state is None else replace(context or Context(), positions=None), state)


class CacheOfTheFuture(Mean):
    """Hands out a cache although every output depends on the future."""

    def init_state(self, batch):
        return State.empty(batch, self.out.weight.device).replace(**self.init_parts(batch))


class NothingBehind(Mean):
    """Both sides of a single token are empty, and their mean is not a number."""

    def weights(self, x):
        return super().weights(x) * (1.0 if self.causal or x.shape[1] > 1 else float("nan"))


class StateIgnoredByTheBidirectionalForm(Mean):
    """Takes a state that it cannot use."""

    def forward(self, x, context=None, state=None):
        return super().forward(x, context, state if self.causal else None)


class StateUnderstated(Mean):
    """Leaves the normaliser out."""

    def state_elements(self, time):
        return super().state_elements(time) - 1


class MoreReadThanKept(Mean):
    """Counts what two heads share twice."""

    def read_elements(self, time):
        return 2 * self.state_elements(time)


class FlopsConstant(Mean):
    """The cost of one token, whatever the length."""

    def flops(self, time):
        return 4 * self.dim * self.dim


class DenominatorLost(Mean):
    """Says that it normalises, and sums."""

    def average(self, v, w, number, context, state):
        return self.mask(number, context).to(v.dtype) @ (w * v), {}


class ImplementationsDisagree(Mean):
    """Two implementations, one of them halved.

    Options:
        impl: which.
    """

    implementations = ("reference", "torch")

    def __init__(self, *args: Any, impl: Literal["auto", "reference", "torch"] = "auto", **options: Any):
        super().__init__(*args, **options)
        self.impl = impl

    def weights(self, x):
        return super().weights(x if self.impl == "reference" else x / 2)


class Crash(Mean):
    """Raises in every call."""

    def mix(self, x, context, state):
        raise RuntimeError("no such kernel\nand a long trace")
