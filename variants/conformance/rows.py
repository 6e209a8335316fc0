"""Checks of what shares a batch: neighbouring rows, padding inside a row, and several segments packed into one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from registry import UserError
from variants.conformance.basics import HUGE, trained
from variants.conformance.caching import WITHIN, cached_mixer, comparable, expect_same_outputs, in_words
from variants.conformance.subject import Failed, Subject, changed, cut, expect_close, first_line, kept, run_in_pieces, tokens
from variants.contract import Context, Mixer, NotApplicable

#: What may lie in a padded slot: padding is often memory that nobody wrote.
JUNK = (0.0, HUGE, float("nan"))
BATCH_TOLERANCE = 1e-5


@torch.no_grad()
def neighbours_in_the_batch_change_nothing(subject: Subject) -> str:
    """Bitwise at a fixed batch size, within 1e-5 against a batch of one, with and without a state; fp32."""
    mixer = subject.build(torch.float32)
    for time in (1, 7, subject.longest):
        x = tokens(4, time, mixer.dim, dtype=torch.float32)
        for how, run in _ways(mixer):
            together = run(x)
            where = f"4 rows of {time} tokens{how}"
            expect_close(run(x[:1]), together[:1], f"{where}: row 0 alone differs from row 0 among others", BATCH_TOLERANCE)
            for seed, scale in ((1, 1.0), (2, HUGE)):
                others = scale * tokens(3, time, mixer.dim, dtype=torch.float32, seed=seed)
                if changed(run(torch.cat([x[:1], others]))[0], together[0]).any():
                    raise Failed(f"{where}: changing rows 1 to 3 to values of size {scale:g} changes row 0")
    return f"bitwise at a fixed batch size; alone against in a batch within {BATCH_TOLERANCE:.0e}, fp32"


def padding_changes_no_output_and_no_gradient(subject: Subject) -> str:
    """Left, right, in the middle, scattered; whatever lies in the padded slots."""
    mixer = subject.build()
    for time in _padded_lengths(subject):
        valid = padded(time)
        for junk in JUNK:
            x = _filled(mixer, valid, junk).requires_grad_()
            y = mixer(x, Context(valid=valid)).y
            rows = [x[i : i + 1, keep] for i, keep in enumerate(valid)]
            alone = [mixer(row.detach()).y for row in rows]
            for (where, _), keep, got, expected in zip(PATTERNS, valid, y, alone, strict=True):
                what = f"{time} slots, padded {where} with {junk:g}, differ from the {int(keep.sum())} valid tokens alone"
                expect_same_outputs(got[keep].unsqueeze(0), expected, what)
            what = f"{time} slots padded with {junk:g}"
            _expect_same_gradients(mixer, y[valid], torch.cat([row[0] for row in alone]), what)
            (gradient,) = torch.autograd.grad(_weighted(y[valid]), x)
            if gradient[~valid].any():
                raise Failed(f"{what}: a padded slot has a gradient")
    return f"{WITHIN}; {', '.join(name for name, _ in PATTERNS)}; padded with {', '.join(f'{junk:g}' for junk in JUNK)}"


@torch.no_grad()
def a_state_stands_still_on_padding(subject: Subject) -> str:
    """A padded cached run, whole and in pieces, continues like the unpadded one; pads alone change no part of a state of fixed size."""
    mixer = cached_mixer(subject)
    more = tokens(1, subject.longest // 2 + 2, mixer.dim, seed=1)
    fixed_size = mixer.state_elements(1) == mixer.state_elements(subject.longest)
    for time in _padded_lengths(subject):
        valid = padded(time)
        x = _filled(mixer, valid, HUGE)
        alone = [mixer(x[row : row + 1, keep], state=mixer.init_state(1)) for row, keep in enumerate(valid)]
        follows = [run_in_pieces(mixer, more, [1, more.shape[1] - 1], state=run.state).y for run in alone]
        for pieces in ([time], [time // 2, time - time // 2], [2, 1, time - 3]):
            together = run_in_pieces(mixer, x, pieces, Context(valid=valid))
            after = run_in_pieces(mixer, more.expand(len(valid), -1, -1), [1, more.shape[1] - 1], state=together.state).y
            for row, ((where, _), keep) in enumerate(zip(PATTERNS, valid, strict=True)):
                what = f"{time} slots padded {where}, in pieces of {in_words(pieces)}"
                got, earlier = together.y[row, keep].unsqueeze(0), int(keep[: comparable(mixer, pieces)].sum())
                expect_same_outputs(got, alone[row].y, f"{what}: the outputs differ from those without padding", earlier)
                expect_same_outputs(after[row : row + 1], follows[row], f"{what}: what follows differs from what follows without padding")
        before = kept(mixer(x, Context(valid=valid), mixer.init_state(len(valid))).state)
        still = kept(mixer(x, Context(valid=torch.zeros_like(valid)), before).state)
        for name, part in before.items() if fixed_size else ():
            expect_close(still[name], part, f"{time} slots of padding change the state's part {name}")
    return f"{WITHIN}; whole and in pieces" + ("; the parts stand still" if fixed_size else "")


def a_row_of_padding_alone_gives_zeros_and_finite_gradients(subject: Subject) -> str:
    """It sees nothing; its neighbours' outputs and the gradients of the parameters are those without it."""
    mixer = subject.build()
    time = subject.longest
    valid = torch.ones(3, time, dtype=torch.bool)
    valid[1] = False
    x = tokens(3, time, mixer.dim)
    y = mixer(x, Context(valid=valid)).y
    if y[1].isnan().any() or y[1].any():
        raise Failed(f"{time} slots of padding alone: the outputs are not 0")
    expected = mixer(x[[0, 2]]).y
    expect_close(y[[0, 2]], expected, "the other rows differ from a batch without the padded row")
    # The loss looks at the dead row too: zero times NaN would be found nowhere else.
    _expect_same_gradients(
        mixer, torch.cat([y[[0, 2]], 0 * y[1:2]]), torch.cat([expected, 0 * expected[:1]]), "with a row of padding alone"
    )
    return f"{WITHIN}; {time} slots"


def packed_segments_equal_separate_runs(subject: Subject) -> str:
    """Outputs and gradients, with padding between and ids that come back; then in pieces, cut inside segments and between. Or a refusal."""
    mixer = subject.build()
    time = subject.longest
    ids, valid = packed(time)
    context = Context(valid=valid, segment_ids=ids.masked_fill(~valid, -1))
    x = _filled(mixer, valid, HUGE)
    try:
        y = mixer(x, context).y
    except (ValueError, NotImplementedError, UserError) as error:
        raise NotApplicable(f"it refuses segments: {first_line(error)}") from error
    spans = [(row, start, stop) for row in range(len(ids)) for start, stop in _runs(ids[row])]
    alone = [mixer(x[row, start:stop][valid[row, start:stop]].unsqueeze(0)).y for row, start, stop in spans]
    for (row, start, stop), expected in zip(spans, alone, strict=True):
        got = y[row, start:stop][valid[row, start:stop]].unsqueeze(0)
        what = f"{time} tokens, row {row}: the segment from token {start} to {stop - 1} differs from a run of its own"
        expect_same_outputs(got, expected, what)
    together = torch.cat([y[row, start:stop][valid[row, start:stop]] for row, start, stop in spans])
    _expect_same_gradients(mixer, together, torch.cat([one[0] for one in alone]), "packed segments")
    if mixer.causal:
        with torch.no_grad():
            for pieces in ([time // 2, time - time // 2], [3, time - 3], [1] * 17):
                here = slice(0, sum(pieces))
                got = run_in_pieces(mixer, x[:, here], pieces, cut(context, here)).y
                expect_same_outputs(got, y[:, here], f"packed segments in pieces of {in_words(pieces)} tokens differ from the full pass")
    return f"{WITHIN}; {len(spans)} segments in {len(ids)} rows of {time} tokens"


#: Where the pads lie in a row: name -> whether slot i of n is a real token.
PATTERNS: tuple[tuple[str, Callable[[int, int], bool]], ...] = (
    ("left", lambda i, n: i >= n // 3),
    ("right", lambda i, n: i < n - n // 3),
    ("middle", lambda i, n: not n // 3 <= i < 2 * n // 3),
    ("scattered", lambda i, n: i % 3 != 1),
    ("nowhere", lambda i, n: True),
)


def padded(time: int) -> Bool[Tensor, "patterns time"]:
    """One row for each pattern."""
    return torch.tensor([[real(i, time) for i in range(time)] for _, real in PATTERNS])


def _padded_lengths(subject: Subject) -> tuple[int, ...]:
    return (9, subject.longest)


def _filled(mixer: Mixer, valid: Bool[Tensor, "rows time"], junk: float) -> Float[Tensor, "rows time dim"]:
    rows, time = valid.shape
    return tokens(rows, time, mixer.dim).masked_fill(~valid.unsqueeze(-1), junk)


def packed(time: int) -> tuple[Int[Tensor, "rows time"], Bool[Tensor, "rows time"]]:
    """Segment ids and validity of three rows: two segments; many, whose ids come back; one with padding inside and around."""
    place = torch.arange(time)
    ids = torch.stack([(place >= 3).long(), 7 - (place // 4) % 2, torch.where(place < time // 2, 5, 2)])
    valid = torch.ones(3, time, dtype=torch.bool)
    valid[2] = (place % 5 != 2) & (place != 0) & (place < time - 1)
    return ids, valid


def _runs(ids: Tensor) -> list[tuple[int, int]]:
    """First token and end of every run of one id."""
    starts = [0, *(int(place) + 1 for place in (ids[1:] != ids[:-1]).nonzero())]
    return list(zip(starts, [*starts[1:], len(ids)], strict=True))


def _ways(mixer: Mixer) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    full = ("", lambda x: mixer(x).y)
    pieces = (" in pieces", lambda x: run_in_pieces(mixer, x, [1] + [x.shape[1] - 1] * (x.shape[1] > 1)).y)
    return [full, pieces] if mixer.causal else [full]


def _weighted(y: Tensor) -> Tensor:
    return (y * tokens(1, y.numel(), 1, seed=2).reshape(y.shape)).sum()


def _expect_same_gradients(mixer: Mixer, got: Tensor, expected: Tensor, what: str) -> None:
    parameters = trained(mixer)
    wanted = list(parameters.values())
    mine, theirs = (torch.autograd.grad(_weighted(y), wanted, retain_graph=True, allow_unused=True) for y in (got, expected))
    for name, a, b in zip(parameters, mine, theirs, strict=True):
        if a is not None and b is not None:
            expect_close(a, b, f"{what}: the gradient of parameter {name} differs")
