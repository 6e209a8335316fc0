"""Passkey: a marker and its value lie somewhere in noise; when the marker comes back at the end, name the value.

    . . . . M v . . . . . . M        tokens; dots are noise, at least one before the question
                            v        target, at the very place of the second marker

One fact, one question, one uniform depth: it isolates whether information from any depth reaches the end at all, within the trained length
and beyond it. Read it as a gate, not as a ranking: most mixers pass, and what fails it fails everything that reaches as far. A uniform
guess is right with probability 1/values.

With `noise=None`, the default, noise is drawn from the values themselves, so that nothing but the marker tells which of them is asked for
and no predictor that skips the match does much better than chance. Passkeys in text are easier: a number among words is found by its type
alone (Mohtashami and Jaggi 2023, "Landmark Attention", arXiv 2305.16300). `noise=16` gives that form. The harder one is the default as it
costs nothing: two layers of attention with a short convolution learn either within 200 steps of 64 sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from experiments.tasks.contract import ABSENT, IGNORE, Evaluation, Examples, Predictor, Task, always, among, last_seen, latest, pick, roles
from registry import tasks

#: The depths of a depth x length grid, as shares of the legal places.
DEPTHS = tuple(eighth / 8 for eighth in range(9))


@tasks.register("passkey", group="extrapolation", metric="accuracy", chance="1/values", difficulties=("depth",))
class Passkey(Task):
    """One needle in noise: the value behind the marker, asked at the end.

    meta: `depth`, the place of the marker as a share of the legal ones (0 first, 1 last), and `distance`, tokens from the value to the
    question (a window of W sees it iff distance < W), both (count,).

    Options:
        length: tokens in a training sequence, at most.
        min_length: tokens in a training sequence, at least; each batch draws its own length.
        values: token ids that serve as values.
        noise: token ids that serve as noise, besides the values; None draws noise from the values, which is harder.
        depth: where the marker stands, 0 to 1 (default: any legal place is equally likely). As a difficulty it may be several depths,
            which the sequences take in turn by their index.
    """

    def __init__(
        self,
        *,
        length: int = 32,
        min_length: int | None = 8,
        values: int = 64,
        noise: int | None = None,
        depth: float | None = None,
        **options: Any,
    ):
        super().__init__(length=length, min_length=min_length, **options)
        if values < 1 or noise == 0:
            raise ValueError(f"passkey: values and noise must be at least 1; got values={values}, noise={noise}")
        self.values, self.noise, self.depth = values, noise, depth
        self.vocabulary = roles(pad=1, marker=1, value=values, noise=noise or 0)
        self.draws(self.min_length, depth=depth)

    def draws(self, length: int, **difficulty: Any) -> int:
        """One number for the depth, one for the value, one a token. Raises ValueError for a length below 5 or a depth outside 0 to 1."""
        if length < 5:
            raise ValueError(f"passkey: marker, value, noise, question and a choice of depth need length >= 5; got length={length}")
        depth = difficulty["depth"]
        if depth is not None and not (np.size(depth) and np.all((np.asarray(depth) >= 0) & (np.asarray(depth) <= 1))):
            raise ValueError(f"passkey: depth must lie between 0 and 1; got {depth}")
        return 2 + length

    def generate(self, length: int, uniform: Float[ndarray, "count draws"], start: int, **difficulty: Any) -> Examples:
        depth, count = difficulty["depth"], len(uniform)
        last = length - 4  # the value is never next to the question, where copying the last token would find it
        if depth is None:
            markers = (uniform[:, 0] * (last + 1)).astype(np.int64)
        else:
            markers = _places(depth, last)[(start + np.arange(count)) % np.size(depth)]
        values = pick(uniform[:, 1], self.vocabulary["value"])

        tokens = pick(uniform[:, 2:], self.vocabulary["value" if self.noise is None else "noise"])
        rows, marker = np.arange(count), self.vocabulary["marker"].start
        tokens[rows, markers], tokens[rows, markers + 1], tokens[:, -1] = marker, values, marker
        targets = np.full_like(tokens, IGNORE)
        targets[:, -1] = values
        return Examples(tokens, targets, {"depth": markers / last, "distance": length - 2 - markers})

    def oracle(self, tokens: Int[ndarray, "count time"], reach: int | None = None) -> Int[ndarray, "count time"]:
        """The value behind the newest marker. `reach` must cover the value and, where noise looks like values, the marker before it."""
        is_value = among(tokens, self.vocabulary["value"])
        if self.noise is None:
            is_value[:, 1:] &= among(tokens[:, :-1], self.vocabulary["marker"])
        answers, places = latest(tokens, is_value)
        needed = np.arange(tokens.shape[1]) - places + (self.noise is None)
        return answers if reach is None else np.where(needed <= reach, answers, ABSENT)

    def trivial(self) -> dict[str, Predictor]:
        """The same value always; any token that could be a value, picked without regard to the marker; the last such token."""
        value = self.vocabulary["value"]

        def in_context(tokens: ndarray) -> ndarray:
            candidates = tokens[among(tokens, value)].reshape(len(tokens), -1)
            # The sum of all tokens is the same wherever the marker stands, so it picks a place that knows nothing of it.
            chosen = tokens.sum(axis=1, keepdims=True) % candidates.shape[1]
            return np.broadcast_to(np.take_along_axis(candidates, chosen, axis=1), tokens.shape)

        return {"majority": always(value.start), "in_context": in_context, "last_seen": last_seen(value)}

    def expected(self, length: int, **difficulty: Any) -> dict[str, float]:
        """With noise of its own kind the only value in context is the answer, and the predictors that look for one say so: 1.0."""
        chance = 1 / self.values
        if self.noise is not None:
            return {"chance": chance, "majority": chance, "in_context": 1.0, "last_seen": 1.0}
        hit = 1 / (length - 2)  # among all tokens but the markers
        return {"chance": chance, "majority": chance, "in_context": hit + (1 - hit) * chance, "last_seen": chance}

    def evaluations(self, multiples: tuple[int, ...] = (1, 2, 4, 8), unit: int | None = None) -> list[Evaluation]:
        """`length`: longer, each set running through DEPTHS by index, so that every depth gets the same number of sequences."""
        return [replace(test, difficulty={"depth": DEPTHS}) for test in super().evaluations(multiples, unit)]


def _places(depth: float | Sequence[float], last: int) -> Int[ndarray, " depths"]:
    """The legal places of the marker, 0 to `last`, nearest to each depth."""
    return np.floor(np.atleast_1d(depth) * last + 0.5).astype(np.int64)
