"""Multi-query associative recall: read pairs of a key and its value, then name the value of each key when it comes back.

    k1 v1 k2 v2 k3 v3 . . k2 . k1 . . k3 .        tokens; dots are filler
                          v2   v1     v3          targets, each at the very place of its query

Keys and values are distinct within a sequence, and every key is asked exactly once, so each query has one answer and it lies behind it.
Keys, values and filler have token ids of their own. A uniform guess is right with probability 1/values, a guess among the values in
context with 1/pairs.

Isolates associative recall. Its two axes ask different things and are never mixed: `length` keeps the pairs and stretches the distance,
which tests reach and positions; `load` lets the pairs grow with the length, which tests how much a state can hold.

Arora et al. 2023, "Zoology" (arXiv 2312.04927), section 3. Their figure 2 is `keys=4095 values=4096 noise=0 placement=power`, a
vocabulary of 8,192, at (length, pairs) = (64, 4), (128, 8), (256, 16), (512, 64). Their random filler, drawn from the whole vocabulary,
is left out on purpose: it collides with keys and makes answers ambiguous.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from experiments.tasks.contract import (
    ABSENT,
    IGNORE,
    Evaluation,
    Examples,
    Predictor,
    Task,
    always,
    among,
    choose_distinct,
    last_seen,
    pick,
    roles,
)
from registry import tasks


class Placement(NamedTuple):
    """Queries stand at every `spacing`-th place behind the context; the i-th of these is asked in proportion to i^(power - 1)."""

    spacing: int
    power: float


#: Nothing follows a query, so only Zoology's own placement keeps queries (like the keys in the context) to even places.
PLACEMENTS = {"uniform": Placement(1, 1.0), "power": Placement(2, 0.01)}


@tasks.register("mqar", group="recall", metric="accuracy", chance="1/values", difficulties=("pairs",))
class MultiQueryRecall(Task):
    """Multi-query associative recall: the value of each key, asked once.

    meta: `distance`, tokens from the value back in the context to its query (a window of W sees it iff distance < W), and `pair`, the
    pair's place in the context, both (count, time).

    Options:
        length: tokens in a training sequence, at most.
        pairs: keys and values bound in the context, each asked once.
        keys: token ids that serve as keys.
        values: token ids that serve as values.
        noise: token ids that serve as filler; 0 fills with the one id 0.
        placement: where queries stand. "uniform": any place behind the context is equally likely, so that distances are spread evenly.
            "power": Zoology's, at even places and mostly near the context; at length 64 with 4 pairs half the distances are at most 13,
            and pairs tend to be asked in their order.
    """

    def __init__(
        self,
        *,
        length: int = 64,
        pairs: int = 8,
        keys: int = 64,
        values: int = 64,
        noise: int = 16,
        placement: Literal["uniform", "power"] = "uniform",
        **options: Any,
    ):
        super().__init__(length=length, **options)
        self.pairs, self.keys, self.values, self.noise, self.placement = pairs, keys, values, noise, placement
        self.vocabulary = roles(pad=1, key=keys, value=values, noise=noise)
        self.draws(self.min_length, pairs=pairs)

    def draws(self, length: int, **difficulty: Any) -> int:
        """Two numbers a pair, one a slot, one a filler. Raises ValueError when the pairs do not fit, with the numbers."""
        pairs: int = difficulty["pairs"]
        if not 0 < pairs <= min(self.keys, self.values):
            raise ValueError(f"mqar: pairs={pairs} must be at least 1 and at most keys={self.keys} and values={self.values}")
        slots = len(self._slots(length, pairs))
        if slots < pairs:
            needed = pairs * (2 + PLACEMENTS[self.placement].spacing)
            raise ValueError(f"mqar: pairs={pairs} with placement={self.placement} need length >= {needed}; got length={length}")
        return 2 * pairs + slots + (length - 2 * pairs if self.noise else 0)

    def generate(self, length: int, uniform: Float[ndarray, "count draws"], start: int, **difficulty: Any) -> Examples:
        pairs: int = difficulty["pairs"]
        slots = self._slots(length, pairs)
        for_keys, for_values, for_slots, for_noise = np.split(uniform, np.cumsum([pairs, pairs, len(slots)]), axis=1)
        keys = self.vocabulary["key"].start + choose_distinct(for_keys, self.keys)
        values = self.vocabulary["value"].start + choose_distinct(for_values, self.values)
        queries = slots[_first(for_slots, self._weights(len(slots)), pairs)]

        tokens = np.zeros((len(uniform), length), dtype=np.int64)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        if self.noise:
            tokens[:, 2 * pairs :] = pick(for_noise, self.vocabulary["noise"])
        np.put_along_axis(tokens, queries, keys, axis=1)

        order = np.arange(pairs)
        facts = {"targets": values, "distance": queries - (2 * order + 1), "pair": np.broadcast_to(order, queries.shape)}
        placed = {name: np.full(tokens.shape, IGNORE) for name in facts}
        for name, fact in facts.items():
            np.put_along_axis(placed[name], queries, fact, axis=1)
        return Examples(tokens, placed.pop("targets"), placed)

    def oracle(self, tokens: Int[ndarray, "count time"], reach: int | None = None) -> Int[ndarray, "count time"]:
        """The value bound to the key at each place, ABSENT if the key is new; `reach` must cover the pair, key included (distance + 1)."""
        is_binding = among(tokens[:, :-1], self.vocabulary["key"]) & among(tokens[:, 1:], self.vocabulary["value"])
        rows = np.arange(len(tokens))
        bound_at = np.full((len(tokens), self.vocab_size), ABSENT)
        answers = np.full_like(tokens, ABSENT)
        for place in range(tokens.shape[1]):
            if place >= 2:
                bound = rows[is_binding[:, place - 2]]
                bound_at[bound, tokens[bound, place - 2]] = place - 2
            key_at = bound_at[rows, tokens[:, place]]
            known = (key_at != ABSENT) & (reach is None or place - key_at <= reach)
            answers[known, place] = tokens[known, key_at[known] + 1]
        return answers

    def trivial(self) -> dict[str, Predictor]:
        """The same value always; a value in context picked without regard to the key's place; the last value in context."""
        value = self.vocabulary["value"]

        def in_context(tokens: ndarray) -> ndarray:
            candidates = tokens[among(tokens, value)].reshape(len(tokens), -1)
            return np.take_along_axis(candidates, tokens % candidates.shape[1], axis=1)

        return {"majority": always(value.start), "in_context": in_context, "last_seen": last_seen(value)}

    def expected(self, length: int, **difficulty: Any) -> dict[str, float]:
        pairs = self.complete(difficulty)["pairs"]
        return {"chance": 1 / self.values, "majority": 1 / self.values, "in_context": 1 / pairs, "last_seen": 1 / pairs}

    def evaluations(self, multiples: tuple[int, ...] = (1, 2, 4, 8), unit: int | None = None) -> list[Evaluation]:
        """`length`: longer with the same pairs. `load`: pairs in proportion to the length, as far as there are keys and values.

        The set at `length` itself is the first point of both, and is made once.
        """
        loads = [((unit or self.length) * m, self.pairs * m) for m in multiples if m > 1]
        loads = [(length, pairs) for length, pairs in loads if pairs <= min(self.keys, self.values)]
        return super().evaluations(multiples, unit) + [Evaluation("load", length, {"pairs": pairs}) for length, pairs in loads]

    def _slots(self, length: int, pairs: int) -> Int[ndarray, " slots"]:
        """Places where a query may stand."""
        spacing = PLACEMENTS[self.placement].spacing
        return 2 * pairs + spacing * np.arange((length - 2 * pairs) // spacing)

    def _weights(self, slots: int) -> Float[ndarray, " slots"]:
        return np.arange(1, slots + 1) ** (PLACEMENTS[self.placement].power - 1)


def _first(uniform: Float[ndarray, "count slots"], weights: Float[ndarray, " slots"], number: int) -> Int[ndarray, "count number"]:
    """Slots drawn one after the other without replacement, in proportion to their weights.

    Exponential waiting times with the weights as rates ring in exactly that order (Efraimidis and Spirakis 2006).
    """
    return np.argsort(-np.log1p(-uniform) / weights, axis=1)[:, :number]
