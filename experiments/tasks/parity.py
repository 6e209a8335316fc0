"""Parity: bits come one after another; after each, say whether the ones so far are odd in number.

    1 0 0 1 1 0        tokens
    o o o e o o        targets, e even and o odd

The smallest task that takes a state which never settles: one bit, flipped by every one. No amount of attention to the past replaces it,
because each answer depends on every token before it, and a diagonal state whose transitions are positive only fades; a transition with the
eigenvalue -1 solves it at any length (Grazzi et al. 2024, "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues", arXiv
2411.12537). It is scored after every bit: the last answer alone is one bit of learning signal a sequence, and far harder to learn. Early
places are easy for anything, so that a mean over all of them flatters; slice by `place`. A uniform guess is right with probability 1/2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from experiments.tasks.contract import ABSENT, Examples, Predictor, Task, always, pick, roles
from registry import tasks


@tasks.register("parity", group="state", metric="accuracy", chance="1/2", difficulties=())
class Parity(Task):
    """Cumulative parity of random bits: a state of one bit that every 1 flips.

    meta: `place`, how many bits the answer depends on, of each scored token.

    Options:
        length: bits in a training sequence, at most.
        min_length: bits in a training sequence, at least; each batch draws its own length.
    """

    def __init__(self, *, length: int = 24, min_length: int | None = 2, **options: Any):
        super().__init__(length=length, min_length=min_length, **options)
        self.vocabulary = roles(bit=2, answer=2)

    def draws(self, length: int, **difficulty: Any) -> int:
        """One number a bit."""
        return length

    def generate(self, length: int, uniform: Float[ndarray, "count draws"], start: int, **difficulty: Any) -> Examples:
        tokens = pick(uniform, self.vocabulary["bit"])
        place = np.broadcast_to(np.arange(1, length + 1), tokens.shape).copy()
        return Examples(tokens, self.oracle(tokens), {"place": place})

    def oracle(self, tokens: Int[ndarray, "count time"], reach: int | None = None) -> Int[ndarray, "count time"]:
        """Counts the ones; with `reach`, where the first token is still among those."""
        answers = self.vocabulary["answer"].start + np.cumsum(tokens == self.vocabulary["bit"][1], axis=1) % 2
        return answers if reach is None else np.where(np.arange(tokens.shape[1]) <= reach, answers, ABSENT)

    def trivial(self) -> dict[str, Predictor]:
        """The same answer always; what the newest bit alone would make it."""
        bits, answers = self.vocabulary["bit"], self.vocabulary["answer"]
        return {"majority": always(answers.start), "last_bit": lambda tokens: tokens - bits.start + answers.start}

    def expected(self, length: int, **difficulty: Any) -> dict[str, float]:
        """The newest bit alone is right where those before it are even in number, and so always at the first."""
        return {"chance": 0.5, "majority": 0.5, "last_bit": 0.5 + 0.5 / length}
