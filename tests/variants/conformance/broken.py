"""Mixers broken on purpose, each in one way that a property must find."""

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


class StateIgnoredByTheBidirectionalForm(Mean):
    """Takes a state that it cannot use."""

    def forward(self, x, context=None, state=None):
        return super().forward(x, context, state if self.causal else None)


class BatchMean(Mean):
    """Centres the inputs over the batch."""

    def mix(self, x, context, state):
        return super().mix(x - x.mean(0, keepdim=True), context, state)


class NeighboursInTheLastDigit(Mean):
    """A trace of the other rows, far below any tolerance."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y + 1e-7 * x.sum((0, 1)), parts, aux


class JunkRead(Mean):
    """Scales each row by its largest input, pads included."""

    def forward(self, x, context=None, state=None):
        return super().forward(x / x.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1), context, state)


class GradientOfPads(Mean):
    """Padded slots change nothing but are told to change."""

    def forward(self, x, context=None, state=None):
        output = super().forward(x, context, state)
        everything = x.sum(1, keepdim=True)
        return output._replace(y=torch.where(everything.isnan(), output.y, output.y + (everything - everything.detach())))


class GradientDoubled(Mean):
    """The right outputs with twice the gradient once some fact of the context is given."""

    fact = "valid"

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return (y if getattr(context, self.fact) is None else 2 * y - y.detach()), parts, aux


class GradientDoubledBySegments(GradientDoubled):
    """The same for packed segments."""

    fact = "segment_ids"


class PadsSeen(Mean):
    """The bidirectional form averages over pads too."""

    def mask(self, number, context):
        return super().mask(number, Context())


class PadsCounted(Mean):
    """The state after the last slot, not after the last valid token."""

    def average(self, v, w, number, context, state):
        return super().average(v, w, number, Context(), state)


class HiddenPartDecaysOnPads(Mean):
    """A part of the state that moves on pads, though no output shows it."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y, parts | ({} if state is None else {"hidden": state["hidden"] + x.shape[1]}), aux

    def init_parts(self, batch, **like):
        return super().init_parts(batch, **like) | {"hidden": torch.ones(batch, **like)}


class NothingSeen(Mean):
    """Zero over zero where a row sees nothing."""

    def average(self, v, w, number, context, state):
        y, parts = super().average(v, w, number, context, state)
        return y + 0 / self.mask(number, context).any(-1, keepdim=True).to(y.dtype), parts


class SegmentsIgnored(Mean):
    """One segment sees the ones before."""

    def average(self, v, w, number, context, state):
        return super().average(v, w, torch.zeros_like(number), context, state)


class SegmentsById(Mean):
    """An id that comes back continues the segment that had it first."""

    def average(self, v, w, number, context, state):
        return super().average(v, w, number if context.segment_ids is None else context.segment_ids, context, state)


class SegmentsForgottenBetweenPieces(Mean):
    """The first segment of a piece always continues the state."""

    def average(self, v, w, number, context, state):
        return super().average(v, w, number - number[:, :1], context, state)


class SegmentsRefused(Mean):
    """Not broken: it says that it cannot."""

    def mix(self, x, context, state):
        if context.segment_ids is not None:
            raise ValueError("segments are not supported")
        return super().mix(x, context, state)


class StateUnderstated(Mean):
    """Leaves the normaliser out."""

    def state_elements(self, time):
        return super().state_elements(time) - 1


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
