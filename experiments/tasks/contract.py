"""What a task must satisfy: examples as a pure function of an index, an oracle, and predictors that know nothing.

    task.sample(split, length, index, **difficulty) -> Examples of one sequence
    task.batch(split, length, start, count, **difficulty) -> Examples of `count` sequences, the same ones

Every random number comes from a counter (Philox, keyed by task, generator version, data seed, split, length and difficulty; the counter is
the index), so any example can be made alone, in any order, by any process, and no two splits share a stream.

A target stands at the place whose output is judged: nothing is shifted, here or later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from registry import UnknownOption, nearest

IGNORE = -100  # a target that is not scored
ABSENT = -1  # a prediction that no token can equal
SPLITS = ("train", "validation", "test")

Predictor = Callable[[ndarray], ndarray]


class Examples(NamedTuple):
    """Sequences and what is asked of them.

    tokens: (count, time) int64.
    targets: (count, time) int64, IGNORE except at scored tokens, where the model's output at that very place is judged.
    meta: what slicing needs; (count,) for a fact of the sequence, (count, time) for a fact of each scored token (IGNORE elsewhere).
    """

    tokens: Int[ndarray, "count time"]
    targets: Int[ndarray, "count time"]
    meta: dict[str, ndarray]


@dataclass(frozen=True)
class Evaluation:
    """One test set: `length` tokens, harder along one named axis only."""

    axis: str
    length: int
    difficulty: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.axis}/{self.length}"


class Task:
    """Base of every task. A subclass sets `vocabulary` and defines `draws`, `generate`, `oracle`, `trivial` and `expected`.

    Options:
        length: tokens in a training sequence, at most.
        min_length: tokens in a training sequence, at least; each batch draws its own length (default: always `length`).
        data_seed: chooses the data; runs that share it see the same sequences whatever their own seed.
    """

    #: Raise when the same index gives other examples than before.
    version: ClassVar[int] = 1
    #: Options that `batch` takes as well, for one call; `draws` and `generate` are always given all of them.
    difficulties: ClassVar[tuple[str, ...]] = ()
    #: Whether answers may be read with attention to both sides.
    bidirectional: ClassVar[bool] = False
    #: Role -> its token ids; see `roles`.
    vocabulary: dict[str, range]

    def __init__(self, *, length: int, min_length: int | None = None, data_seed: int = 0):
        self.length, self.min_length, self.data_seed = length, length if min_length is None else min_length, data_seed
        if not 0 < self.min_length <= self.length:
            raise ValueError(f"{type(self).__name__}: min_length must lie between 1 and length={length}; got {min_length}")

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to here."""
        return max(ids.stop for ids in self.vocabulary.values())

    def sample(self, split: str, length: int, index: int, **difficulty: Any) -> Examples:
        """Sequence number `index` of a split, as a batch of one."""
        return self.batch(split, length, index, 1, **difficulty)

    def batch(self, split: str, length: int, start: int, count: int, **difficulty: Any) -> Examples:
        """Sequences start .. start + count - 1 of a split. Raises ValueError for a length or difficulty that cannot be made."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative; got start={start}, count={count}")
        difficulty = self.complete(difficulty)
        draws = self.draws(length, **difficulty)
        stream = json.dumps([self.stream_name(), split, length, difficulty], sort_keys=True)
        examples = self.generate(length, _uniform(stream, start, count, draws), start, **difficulty)
        if not examples.tokens.shape == examples.targets.shape == (count, length):
            raise ValueError(f"{type(self).__name__} was asked for {count} x {length} tokens and made {examples.tokens.shape}")
        return examples

    def training_batch(self, step: int, batch_size: int) -> Examples:
        """The examples of training step `step`: an endless stream that never repeats."""
        length = self.length
        if self.min_length < length:
            draw = _uniform(json.dumps([self.stream_name(), "lengths"]), step, 1, 1)[0, 0]
            length = self.min_length + int(draw * (length - self.min_length + 1))
        return self.batch("train", length, step * batch_size, batch_size)

    def stream_name(self) -> list[Any]:
        """What names this task's streams, besides split, length and difficulty."""
        return [type(self).__name__, self.version, self.data_seed]

    def complete(self, difficulty: Mapping[str, Any]) -> dict[str, Any]:
        """Every difficulty: as given, else (or if None) as the task was built. Raises UnknownOption with the nearest valid word."""
        for key in difficulty:
            if key not in self.difficulties:
                raise UnknownOption(f"{type(self).__name__} has no difficulty {key!r}.{nearest(key, self.difficulties)}")
        given = {key: value for key, value in difficulty.items() if value is not None}
        return {key: getattr(self, key) for key in self.difficulties} | given

    def draws(self, length: int, **difficulty: Any) -> int:
        """How many random numbers one sequence takes; raises ValueError where no such sequence exists."""
        raise NotImplementedError

    def generate(self, length: int, uniform: Float[ndarray, "count draws"], start: int, **difficulty: Any) -> Examples:
        """Sequences from uniform numbers in [0, 1), one row a sequence, numbered from `start`."""
        raise NotImplementedError

    def oracle(self, tokens: Int[ndarray, "count time"], reach: int | None = None) -> Int[ndarray, "count time"]:
        """The right answer at every scored place, read from the tokens up to it; with `reach`, from the last `reach` + 1 of them.

        ABSENT where what it needs is not among them; anything at places that are not scored.
        """
        raise NotImplementedError

    def trivial(self) -> dict[str, Predictor]:
        """Predictors that do not solve the task: name -> (tokens -> a prediction at every place)."""
        raise NotImplementedError

    def expected(self, length: int, **difficulty: Any) -> dict[str, float]:
        """The accuracy each trivial predictor is expected to reach; "chance" is a uniform guess among all answers."""
        raise NotImplementedError

    def evaluations(self, multiples: tuple[int, ...] = (1, 2, 4, 8), unit: int | None = None) -> list[Evaluation]:
        """The test sets: `unit` tokens (default: `length`) times each multiple along every axis."""
        return [Evaluation("length", (unit or self.length) * multiple) for multiple in multiples]


def roles(**sizes: int) -> dict[str, range]:
    """A vocabulary: each role gets so many token ids, one role after the other from 0. Raises ValueError for a negative size."""
    vocabulary, start = {}, 0
    for role, size in sizes.items():
        if size < 0:
            raise ValueError(f"a vocabulary cannot have {size} ids for {role}")
        vocabulary[role] = range(start, start + size)
        start += size
    return vocabulary


def among(tokens: Int[ndarray, "count time"], ids: range) -> Bool[ndarray, "count time"]:
    """Which tokens belong to a role."""
    return (tokens >= ids.start) & (tokens < ids.stop)


def pick(uniform: Float[ndarray, "*shape"], ids: range) -> Int[ndarray, "*shape"]:
    """Token ids of a role, with replacement."""
    return ids.start + (uniform * len(ids)).astype(np.int64)


def latest(tokens: Int[ndarray, "count time"], mask: Bool[ndarray, "count time"]) -> tuple[ndarray, ndarray]:
    """For every place, the newest masked token up to it and that token's place; both ABSENT before the first."""
    places = np.maximum.accumulate(np.where(mask, np.arange(tokens.shape[1]), ABSENT), axis=1)
    return np.where(places == ABSENT, ABSENT, np.take_along_axis(tokens, places, axis=1)), places


def always(answer: int) -> Predictor:
    """The predictor that gives one answer whatever it sees."""
    return lambda tokens: np.full_like(tokens, answer)


def last_seen(ids: range) -> Predictor:
    """The predictor that repeats the newest token of a role."""
    return lambda tokens: latest(tokens, among(tokens, ids))[0]


def choose_distinct(uniform: Float[ndarray, "count chosen"], population: int) -> Int[ndarray, "count chosen"]:
    """For each row, distinct numbers below `population` in random order, every such choice equally likely.

    Each uniform number becomes a rank among the numbers not yet taken (a Lehmer code), which costs nothing per member of the population.
    """
    chosen = uniform.shape[1]
    if chosen > population:
        raise ValueError(f"cannot choose {chosen} distinct of {population}")
    numbers = np.ascontiguousarray((uniform * (population - np.arange(chosen))).astype(np.int64).T)
    for i in reversed(range(chosen)):
        later = numbers[i + 1 :]
        later += later >= numbers[i]
    return numbers.T


def _uniform(stream: str, start: int, count: int, draws: int) -> Float[ndarray, "count draws"]:
    """Uniform numbers in [0, 1); row i depends on (stream, start + i) alone."""
    blocks = -(-draws // 4)  # one step of Philox's counter gives four 64-bit words
    key = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:16], "little")
    generator = np.random.Philox(key=key, counter=start * blocks)
    words = generator.random_raw(count * blocks * 4).reshape(count, blocks * 4)[:, :draws]
    return (words >> np.uint64(11)) * 2.0**-53
