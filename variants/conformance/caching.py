"""Checks that a state carries everything: however a sequence is cut, outputs and states are those of the full pass.

Under a position scheme whose frequencies depend on the length, an output of an earlier piece is that of a shorter sequence, and differs by
right. There the last piece alone is compared: the one after which both have the same length.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from variants.conformance.subject import TOLERANCE, Failed, Subject, difference, expect_close, kept, run_in_pieces, tokens
from variants.contract import Context, Mixer, NotApplicable, State

WITHIN = f"fp64, within {TOLERANCE:.0e}"


@torch.no_grad()
def single_steps_give_the_full_pass_of_every_length(subject: Subject) -> str:
    """One cached run, token by token, against a full pass of each length."""
    mixer = cached_mixer(subject)
    x = tokens(2, subject.longest, mixer.dim)
    steps = run_in_pieces(mixer, x, [1] * subject.longest).y
    for time in subject.lengths:
        what = f"the full pass of {time} tokens differs from single steps"
        expect_same_outputs(mixer(x[:, :time]).y, steps[:, :time], what, comparable(mixer, [1] * time))
    return f"{WITHIN}; {subject.lengths_in_words()}"


@torch.no_grad()
def split_passes_give_the_full_pass(subject: Subject) -> str:
    """Every cut in two of a short sequence, then cuts at the edges of blocks, then random cuts in many."""
    mixer = cached_mixer(subject)
    x = tokens(2, subject.longest, mixer.dim)
    full = cache(lambda time: mixer(x[:, :time]).y)
    tried = list(splits(subject))
    for pieces in tried:
        time = sum(pieces)
        got = run_in_pieces(mixer, x[:, :time], pieces).y
        what = f"pieces of {in_words(pieces)} tokens differ from the full pass"
        expect_same_outputs(got, full(time), what, comparable(mixer, pieces))
    return f"{WITHIN}; {len(tried)} ways to split up to {subject.longest} tokens"


@torch.no_grad()
def states_agree_however_the_sequence_was_split(subject: Subject) -> str:
    """Part by part, against the state that one piece leaves."""
    mixer = cached_mixer(subject)
    x = tokens(2, subject.longest, mixer.dim)
    whole = cache(lambda time: kept(run_in_pieces(mixer, x[:, :time], [time]).state))
    state = mixer.init_state(2)
    for time in range(1, (17 if subject.fast else subject.longest) + 1):
        state = kept(mixer(x[:, time - 1 : time], state=state).state)
        if time in subject.lengths:
            expect_same_state(state, whole(time), f"after {time} single steps and after one piece of {time} tokens")
    for pieces in splits(subject):
        time = sum(pieces)
        split = kept(run_in_pieces(mixer, x[:, :time], pieces).state)
        expect_same_state(split, whole(time), f"after pieces of {in_words(pieces)} tokens and after one of {time}")
    return f"{WITHIN}; parts {', '.join(name for name, part in state.items() if part.is_floating_point())}"


@torch.no_grad()
def a_state_may_be_continued_twice_and_its_rows_reordered(subject: Subject) -> str:
    """One continuation does not disturb another of the same state, and beam search may shuffle the rows."""
    mixer = cached_mixer(subject)
    start, first, second, end = (tokens(2, time, mixer.dim, seed=time) for time in (9, 5, 6, 3))
    state = kept(mixer(start, state=mixer.init_state(2)).state)
    after_first = kept(mixer(first, state=state).state)
    after_second = kept(mixer(second, state=state).state)
    expected = [mixer(torch.cat([start, middle, end], 1)).y[:, -3:] for middle in (first, second)]
    what = "a state that was continued twice: the {} continuation differs from a run of its own"
    expect_close(mixer(end, state=after_first).y, expected[0], what.format("first"))
    expect_close(mixer(end, state=after_second).y, expected[1], what.format("second"))
    order = torch.tensor([1, 0, 0])
    expect_close(
        mixer(end[order], state=after_first.reorder(order)).y, expected[0][order], "a state with rows in the order 1, 0, 0 differs"
    )
    return WITHIN


@torch.no_grad()
def positions_are_those_given_and_otherwise_counted(subject: Subject) -> str:
    """Spelling out the default changes nothing; others change the outputs, and pieces with a state agree on them with the full pass."""
    mixer = subject.build()
    if mixer.position is None or not mixer.position.hooks:
        raise NotApplicable("it has no position scheme")
    time = 9
    x = tokens(2, time, mixer.dim)
    default, stretched = torch.arange(time).expand(2, -1), torch.tensor([[3], [11]]) + torch.arange(time) ** 2 // 2
    counted, given = mixer(x).y, mixer(x, Context(positions=stretched)).y
    expect_same_outputs(mixer(x, Context(positions=default)).y, counted, f"positions 0 to {time - 1} differ from none given")
    if difference(given, counted) <= TOLERANCE and mixer.reach() != 0:  # what sees itself alone has nothing to be positioned against
        raise Failed(f"positions {stretched[0].tolist()} give the outputs of positions 0 to {time - 1}")
    for pieces in ([4, 5], [1] * time) if mixer.causal else ():
        got = run_in_pieces(mixer, x, pieces, Context(positions=stretched)).y
        what = f"positions {stretched[0].tolist()}: pieces of {in_words(pieces)} tokens differ from the full pass"
        expect_same_outputs(got, given, what, comparable(mixer, pieces))
    return WITHIN


@torch.no_grad()
def the_bidirectional_form_takes_no_state(subject: Subject) -> str:
    """`causal=False` runs at every length without a state and raises ValueError for one, or it is refused when built."""
    if not subject.takes("causal"):
        raise NotApplicable("it has no option causal")
    try:
        mixer = subject.build(causal=False)
    except NotApplicable as refusal:
        return str(refusal)
    for time in subject.lengths:
        x = tokens(2, time, mixer.dim)
        if not mixer(x).y.isfinite().all():
            raise Failed(f"causal=False: outputs for {time} tokens are not finite")
    state = subject.build(causal=True).init_state(2)
    for what, call in (("init_state", partial(mixer.init_state, 2)), ("a call with a state", partial(mixer, x, state=state))):
        try:
            call()
        except ValueError:
            continue
        raise Failed(f"causal=False: {what} should raise ValueError")
    return f"{subject.lengths_in_words()} run; a state is refused"


def cached_mixer(subject: Subject) -> Mixer:
    """The mixer, which must have a cache."""
    mixer = subject.build()
    if not mixer.causal:
        raise NotApplicable("causal=False has no cache")
    return mixer


def splits(subject: Subject) -> Iterator[list[int]]:
    """Ways to cut sequences, short ones first."""
    short = 5 if subject.fast else 17
    yield from ([cut, short - cut] for cut in range(1, short))
    longest = subject.longest
    for block in (1, *subject.block_sizes):
        for cut in {block - 1, block, block + 1, longest - block} & set(range(1, longest)):
            yield [cut, longest - cut]
    yield [longest - 4, 1, 1, 1, 1]
    draw = random.Random(0)
    for _ in range(2 if subject.fast else 8):
        cuts = sorted(draw.sample(range(1, longest), draw.randint(2, min(8, longest - 1))))
        yield [end - start for start, end in zip([0, *cuts], [*cuts, longest], strict=True)]


def comparable(mixer: Mixer, pieces: list[int]) -> int:
    """The first output from which on a sequence in these pieces must give the full pass of all of them."""
    by_length = mixer.position is not None and mixer.position.length_dependent
    return sum(pieces[:-1]) if by_length else 0


def expect_same_outputs(got: Float[Tensor, "batch time dim"], expected: Float[Tensor, "batch time dim"], what: str, first: int = 0) -> None:
    """Failed, naming the first token at which they differ; those before `first` may."""
    if difference(got[:, first:], expected[:, first:]) > TOLERANCE:
        for t in range(first, expected.shape[1]):
            expect_close(got[:, t], expected[:, t], f"{what}: output {t}")


def expect_same_state(got: State, expected: State, when: str) -> None:
    """Failed, naming the part that differs."""
    if set(got) != set(expected):
        raise Failed(f"{when}: the states have parts {sorted(got)} and {sorted(expected)}")
    for name, part in got.items():
        expect_close(part, expected[name], f"{when}: the state's part {name} differs")


def in_words(pieces: list[int]) -> str:
    """`1+1+1+1` is long for a hundred steps."""
    return f"1 (x {len(pieces)})" if len(pieces) > 12 and set(pieces) == {1} else "+".join(map(str, pieces))
