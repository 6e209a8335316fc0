"""Repeated segments: random text of which a part is copied from further up; once a copy has begun, name its next token.

    ... q c a f z b k w ... m q c a f z b k w t ...        the second `q c a f z b k w` is a copy
                              z b k w                      targets, each at the token before it

What tells the next token is the `lead` tokens before it and nothing else: the places of copies, their sources and their lengths are random.
A model that solves it looks up what followed those tokens the last time (an induction head), at every distance up to the whole context. So
perplexity on these tokens says how far back a position scheme lets a model look, where the perplexity of all tokens hardly moves: most of
them cannot be told at all. A copied token is scored iff the `lead` tokens before it are of the same copy, and whenever they stood in the
text before were followed by it. A uniform guess is right with probability 1/symbols.

By default a model is trained on every next token, as a language model is; `train_on=repeated` trains on the scored ones alone.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from experiments.tasks.contract import ABSENT, IGNORE, Examples, Predictor, Task, always, pick, roles
from registry import tasks


@tasks.register("repeated_segments", group="extrapolation", metric="perplexity", chance="1/symbols", difficulties=())
class RepeatedSegments(Task):
    """Random text with copied segments: the next token of a copy, to be looked up where its source is.

    meta, of each scored token: `distance`, tokens from the place where the answer stands (last) to the place that is scored (a window of W
    sees it iff distance < W); `depth`, that place as a share of the tokens so far (0 first, 1 last); `place`, its number within the copy.

    Options:
        length: tokens in a training sequence, at most.
        min_length: tokens in a training sequence, at least; each batch draws its own length (default: always `length`).
        symbols: token ids in the text.
        copied: how likely a segment is a copy, 0 to 1.
        shortest: tokens in a segment, at least.
        longest: tokens in a segment, at most.
        lead: how many tokens of a copy are given before its tokens are scored.
        train_on: every next token (`all`), or the scored ones alone (`repeated`).
    """

    def __init__(
        self,
        *,
        length: int = 128,
        symbols: int = 32,
        copied: float = 0.6,
        shortest: int = 8,
        longest: int = 19,
        lead: int = 2,
        train_on: Literal["all", "repeated"] = "all",
        **options: Any,
    ):
        super().__init__(length=length, **options)
        if symbols < 2:
            raise ValueError(f"repeated_segments: symbols must be at least 2; got {symbols}")
        if not 0 < copied <= 1:
            raise ValueError(f"repeated_segments: copied must lie above 0 and not above 1; got {copied}")
        if not 0 < lead < shortest <= longest:
            raise ValueError(
                f"repeated_segments: a copy needs tokens behind its lead, 0 < lead < shortest <= longest; got lead={lead}, "
                f"shortest={shortest}, longest={longest}"
            )
        self.symbols, self.copied, self.shortest, self.longest, self.lead, self.train_on = (
            symbols,
            copied,
            shortest,
            longest,
            lead,
            train_on,
        )
        self.vocabulary = roles(symbol=symbols)
        self.draws(self.min_length)

    def draws(self, length: int, **difficulty: Any) -> int:
        """One number a token, three a segment. Raises ValueError where two segments do not fit."""
        if length < 2 * self.longest:
            raise ValueError(f"repeated_segments: a source and its copy need length >= 2 * longest = {2 * self.longest}; got {length}")
        return length + 3 * self._segments(length)

    def generate(self, length: int, uniform: Float[ndarray, "count draws"], start: int, **difficulty: Any) -> Examples:
        segments = self._segments(length)
        tokens = pick(uniform[:, :length], self.vocabulary["symbol"])
        place = np.zeros_like(tokens)
        here = np.zeros(len(tokens), np.int64)  # where the next segment begins
        choices = uniform[:, length:].reshape(-1, segments, 3)
        step = np.arange(self.longest)
        for number in range(segments):
            copied, size, source = choices[:, number].T
            sizes = self.shortest + (size * (self.longest - self.shortest + 1)).astype(np.int64)
            room = here - sizes + 1  # where a source of that size may begin
            copies = (room > 0) & ((copied < self.copied) | (number == 1))
            sources = (source * np.maximum(room, 0)).astype(np.int64)
            at = here[:, None] + step
            row, offset = np.nonzero(copies[:, None] & (step < sizes[:, None]) & (at < length))
            tokens[row, at[row, offset]] = tokens[row, sources[row] + offset]
            place[row, at[row, offset]] = offset + 1
            here = np.minimum(here + sizes, length)
        return self._judged(tokens, place)

    def training_batch(self, step: int, batch_size: int) -> Examples:
        """The examples of training step `step`; with train_on=all every token but the first is a target."""
        examples = super().training_batch(step, batch_size)
        return examples if self.train_on == "repeated" else examples._replace(targets=next_tokens(examples.tokens))

    def oracle(self, tokens: Int[ndarray, "count time"], reach: int | None = None) -> Int[ndarray, "count time"]:
        """What followed the last `lead` tokens when they stood there last."""
        found = _earlier(tokens, self.lead)
        far = tokens.shape[1] if reach is None else reach
        seen = (found.latest != ABSENT) & (np.arange(tokens.shape[1]) - found.latest + self.lead <= far)
        return np.where(seen, np.take_along_axis(tokens, np.maximum(found.latest, 0), 1), ABSENT)

    def trivial(self) -> dict[str, Predictor]:
        """The same symbol always."""
        return {"majority": always(self.vocabulary["symbol"].start)}

    def expected(self, length: int, **difficulty: Any) -> dict[str, float]:
        """All symbols are alike."""
        return {"chance": 1 / self.symbols, "majority": 1 / self.symbols}

    def _segments(self, length: int) -> int:
        return -(-length // self.shortest)

    def _judged(self, tokens: Int[ndarray, "count time"], place: Int[ndarray, "count time"]) -> Examples:
        """The examples: which of the copied tokens are scored, and where their answers stand."""
        answers, follows = next_tokens(tokens), np.roll(place, -1, 1)
        found = _earlier(tokens, self.lead)
        scored = (answers != IGNORE) & (follows > self.lead) & (found.latest != ABSENT) & found.always
        at = np.arange(tokens.shape[1])
        facts = {"distance": at - found.latest, "depth": found.latest / np.maximum(at, 1), "place": follows}
        return Examples(
            np.ascontiguousarray(tokens), np.where(scored, answers, IGNORE), {k: np.where(scored, v, IGNORE) for k, v in facts.items()}
        )


def next_tokens(tokens: Int[ndarray, "count time"]) -> Int[ndarray, "count time"]:
    """At every place the token that follows; IGNORE at the last."""
    return np.concatenate([tokens[:, 1:], np.full_like(tokens[:, :1], IGNORE)], axis=1)


class _Earlier(NamedTuple):
    """For every place: where the token stands that followed the same last tokens the last time (ABSENT: there was no such time), and
    whether what follows now is what followed each time before."""

    latest: Int[ndarray, "count time"]
    always: Bool[ndarray, "count time"]


def _earlier(tokens: Int[ndarray, "count time"], lead: int) -> _Earlier:
    count, time = tokens.shape
    latest, always = np.full((count, time), ABSENT), np.zeros((count, time), bool)
    if time < lead:
        return _Earlier(latest, always)
    grams = np.lib.stride_tricks.sliding_window_view(tokens, lead, axis=1)  # gram g ends at place g + lead - 1
    _, codes = np.unique(grams.reshape(-1, lead), axis=0, return_inverse=True)
    codes = codes.reshape(count, -1)
    order = np.argsort(codes, axis=1, kind="stable")
    sorted_codes, ends = np.take_along_axis(codes, order, 1), order + lead - 1
    follows = np.take_along_axis(next_tokens(tokens), ends, 1)
    same = np.zeros_like(sorted_codes, bool)
    same[:, 1:] = sorted_codes[:, 1:] == sorted_codes[:, :-1]
    differs = np.zeros_like(same)
    differs[:, 1:] = same[:, 1:] & (follows[:, 1:] != follows[:, :-1])
    # How many changes of what follows lie between the first of a group and each of its members.
    changes = np.cumsum(differs, axis=1)
    first = np.maximum.accumulate(np.where(same, 0, np.arange(same.shape[1])), axis=1)
    steady = changes == np.take_along_axis(changes, first, 1)
    previous = np.where(same, np.roll(ends, 1, 1) + 1, ABSENT)
    np.put_along_axis(latest, ends, previous, 1)
    np.put_along_axis(always, ends, steady & same, 1)
    return _Earlier(latest, always)
