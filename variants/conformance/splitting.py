"""The check that a row may be split over processes: what each has of it comes out as if one had it all."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from variants.conformance.caching import WITHIN
from variants.conformance.gradients import backward, expect_same_gradients, leaves
from variants.conformance.rows import expect_same_outputs, packed, padded
from variants.conformance.subject import Subject, tokens
from variants.context import split_rows
from variants.contract import Context, Mixer, MixerOutput, NotApplicable, default_positions, left_align
from variants.ops.ranks import Simulated

#: Numbers of ranks that rows are split over; two slices each.
RANKS = (2, 3, 4)


def rows_split_over_processes_give_those_of_one(subject: Subject) -> str:
    """Outputs and gradients, with padding and segments too, for ranks that are imitated in this process. Or a refusal."""
    mixer = subject.build()
    reason = mixer.must_be_whole()
    if reason is not None:
        raise NotApplicable(reason)
    time = max(subject.longest, 2 * max(RANKS))
    ids, valid = packed(time)
    contexts = {
        "": Context(),
        " with padding": Context(valid=padded(time)),
        " with segments": Context(valid=valid, segment_ids=ids.masked_fill(~valid, -1)),
        " with gaps between positions": Context(positions=(3 * torch.arange(time) + 1).expand(2, -1)),
    }
    for what, context in contexts.items():
        given = next((part for part in (context.valid, context.positions) if part is not None), torch.empty(2, time))
        x, _, wanted = leaves(mixer, tokens(len(given), time, mixer.dim), None)
        expected = mixer(x, context)
        for ranks in RANKS:
            got = split_pass(mixer, x, context, ranks)
            where = f"{time} tokens{what} over {ranks} ranks"
            expect_same_outputs(got, expected.y, f"{where} differ from one")
            mine, theirs = (backward(MixerOutput(y, None, {}), wanted) for y in (got, mixer(x, context).y))
            expect_same_gradients(mine, theirs, where)
    return f"{WITHIN}; {time} tokens over {', '.join(map(str, RANKS))} ranks, with padding, segments and gaps between positions"


def split_pass(mixer: Mixer, x: Float[Tensor, "batch time dim"], context: Context, ranks: int) -> Float[Tensor, "batch time dim"]:
    """A full pass of rows split over so many imitated ranks."""
    order = None
    if context.valid is not None:
        x, context, order = left_align(x, context)
    part, told = split_rows(x, default_positions(x, context, None), Simulated(ranks))
    assert told.split is not None
    y = told.split.ring.whole(mixer(part, told).y)
    return y if order is None else y.gather(1, order.argsort(dim=1).unsqueeze(-1).expand_as(y))
