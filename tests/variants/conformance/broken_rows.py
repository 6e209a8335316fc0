"""Mixers broken on purpose in what shares a batch: neighbouring rows, padding, packed segments."""

from __future__ import annotations

import torch

from tests.variants.conformance.toys import Mean
from variants.contract import Context


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


class PadsSeenInPieces(Mean):
    """Right without padding and right without a state, but not with both."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y + (state is not None and context.valid is not None), parts, aux


class PadsSpeak(Mean):
    """An offset that is added to pads as well."""

    def forward(self, x, context=None, state=None):
        output = super().forward(x, context, state)
        return output._replace(y=output.y + 1)


class EmptyRowsCounted(Mean):
    """Scaled by the share of rows that hold anything."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return y if context.valid is None else y * context.valid.any(1).double().mean(), parts, aux


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


class SplitHonoured(Mean):
    """Not broken: puts rows that are split together, and gives back its part of what comes out."""

    def whole_rows(self):
        return None

    def mix(self, x, context, state):
        if context.split is None:
            return super().mix(x, context, state)
        y, parts, aux = super().mix(context.split.ring.whole(x), context.split.whole, state)
        return context.split.ring.part(y), parts, aux


class SplitIgnored(Mean):
    """Takes its part of the rows for all of them."""

    def whole_rows(self):
        return None


class GradientDoubledWhenSplit(SplitHonoured):
    """The right outputs of rows that are split, with twice the gradient."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return (y if context.split is None else 2 * y - y.detach()), parts, aux
