"""Checks that no output depends on what comes later, or on what lies further back than declared."""

from __future__ import annotations

import torch
from torch import Tensor

from variants.conformance.basics import HUGE, input_gradients, places
from variants.conformance.subject import Failed, Subject, changed, tokens
from variants.contract import NotApplicable

#: Size of the tokens, and those of what one of them is changed to. Huge scores see through a mask that is only a large number.
SCALES = ((1.0, (1.0, HUGE)), (HUGE, (HUGE,)))

#: A length at which a leak would show that short sequences hide.
LONG = 131


@torch.no_grad()
def changing_a_token_changes_no_earlier_output(subject: Subject) -> str:
    """Bitwise. Row i of a batch has one token changed and is compared with row i of an equal batch without: same kernels, same order."""
    mixer = subject.build(torch.float32)
    _require_causal(mixer.causal)
    for time in _lengths(subject):
        tried = places(subject, time)
        x = tokens(1, time, mixer.dim, dtype=torch.float32)
        new = tokens(1, 1, mixer.dim, dtype=torch.float32, seed=1)[0, 0]
        for size, new_sizes in SCALES:
            rows = (size * x).repeat(len(tried), 1, 1)
            y = mixer(rows).y
            for new_size in new_sizes:
                one_changed = rows.clone()
                one_changed[range(len(tried)), tried] = new_size * new
                moved = changed(mixer(one_changed).y, y).any(-1)
                _expect_none_earlier(moved, tried, time, f"to a value of size {new_size:g} among tokens of size {size:g}")
    return f"fp32, bitwise; {subject.lengths_in_words()}; tokens of size 1 and {HUGE:g}"


def no_output_has_a_gradient_from_a_later_token(subject: Subject) -> str:
    """Exactly zero, for the outputs of every place; in training mode too, where other code may run."""
    mixer = subject.build()
    _require_causal(mixer.causal)
    for time, training in [*((time, False) for time in _lengths(subject)), (subject.longest, True)]:
        tried = places(subject, time)
        gradient = input_gradients(mixer.train(training), time, tried)
        later = torch.arange(time) > torch.tensor(tried).unsqueeze(1)
        bad = (later & (gradient != 0)).nonzero()
        if len(bad):
            row, s = bad[0].tolist()
            mode = " in training mode" if training else ""
            raise Failed(
                f"of {time} tokens{mode}: the gradient of output {tried[row]} from token {s} is {float(gradient[row, s]):.2g}, not 0"
            )
    return f"exactly 0; {subject.lengths_in_words()}"


def no_output_reaches_further_back_than_declared(subject: Subject) -> str:
    """By gradient: beyond `reach()` it is exactly zero."""
    mixer = subject.build()
    _require_causal(mixer.causal)
    reach = mixer.reach()
    if reach is None:
        raise NotApplicable("reach() is None: outputs may depend on every token before them")
    time = max(subject.longest, min(2 * reach + 3, 257))
    if reach >= time - 1:
        raise NotApplicable(f"reach() is {reach}, more than the {time} tokens tried")
    gradient = input_gradients(mixer, time, [time - 1])[0]
    seen = gradient.nonzero().flatten()
    furthest = time - 1 - int(seen[0]) if len(seen) else 0
    if furthest > reach:
        raise Failed(f"of {time} tokens: the last output depends on the token {furthest} before it; reach() says {reach}")
    return f"reach() is {reach}, the gradient reaches {furthest} back"


def _expect_none_earlier(moved: Tensor, tried: list[int], time: int, how: str) -> None:
    """moved: (place tried, output)."""
    bad = (moved & (torch.arange(time) < torch.tensor(tried).unsqueeze(1))).nonzero()
    if len(bad):
        row, t = bad[0].tolist()
        raise Failed(f"of {time} tokens: changing token {tried[row]} {how} changes output {t}")


def _lengths(subject: Subject) -> tuple[int, ...]:
    """The lengths to try, and one beyond them for what a variant may do to long sequences only."""
    return subject.lengths if subject.fast or subject.longest > LONG else (*subject.lengths, LONG)


def _require_causal(causal: bool) -> None:
    if not causal:
        raise NotApplicable("causal=False: outputs may depend on the future")
