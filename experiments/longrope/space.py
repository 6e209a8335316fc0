"""What a search for LongRoPE's factors chooses from.

    1 <= lambda_i <= 1.25 s on a grid of 0.01,   lambda_i <= lambda_{i+1},   and how many first positions keep their angles

Ding et al. 2024, "LongRoPE", section 3. In the form of Shang et al. 2025, "LongRoPE2", a critical pair c is chosen as well: from it on
s <= lambda_i <= 2 s, and the pairs below follow NTK, lambda_i = lambda_c^(i / c).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from registry import UserError


@dataclass(frozen=True)
class Genome:
    """One candidate: a factor for each pair, fastest first, and how many first positions keep their angles.

    critical: the pair from which on factors are genes, in the form of LongRoPE2. What is scored does not depend on it, so that candidates
    that differ in nothing else are one.
    """

    factors: tuple[float, ...]
    unscaled: int = 0
    critical: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Space:
    """What is searched: genomes with factors on a grid, in bounds, none smaller than that of a faster pair.

    pairs: how many factors.
    factor: s, target length / trained length.
    beyond: the largest factor in units of s (default: 1.25, or 2 with critical pairs).
    step: of the grid, which holds 1.
    unscaled: choices of how many first positions keep their angles.
    critical: choices of the critical pair, for the form of LongRoPE2 (see `critical_pairs`); None: all pairs are searched.
    Raises UserError for what cannot be searched.
    """

    pairs: int
    factor: float
    beyond: float | None = None
    step: float = 0.01
    unscaled: tuple[int, ...] = (0,)
    critical: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise UserError(f"a search needs at least one pair; got pairs={self.pairs}")
        if not 1 <= self.factor < math.inf:
            raise UserError(f"factor stretches and must be at least 1; got {self.factor}")
        if self.beyond is not None and not 1 <= self.beyond < math.inf:
            raise UserError(f"beyond is in units of factor and must be at least 1; got {self.beyond}")
        if not 0 < self.step <= 1 or abs(1 / self.step - self.per_unit) > 1e-6:
            raise UserError(f"step must divide 1 into equal parts, as 0.01 does; got {self.step}")
        if not self.unscaled or min(self.unscaled) < 0 or len({*self.unscaled}) < len(self.unscaled):
            raise UserError(f"unscaled needs different numbers of positions, 0 for none; got {self.unscaled}")
        if self.critical is not None and not {*self.critical} <= {*range(self.pairs)}:
            raise UserError(f"critical pairs must lie between 0 and {self.pairs - 1}; got {self.critical}")
        if self.critical is not None and (not self.critical or len({*self.critical}) < len(self.critical)):
            raise UserError(f"critical needs different pairs, one at least; got {self.critical}")

    @property
    def per_unit(self) -> int:
        """Grid steps in 1."""
        return round(1 / self.step)

    @property
    def low(self) -> int:
        """The smallest gene, in grid steps: 1, or s with critical pairs."""
        return self.per_unit if self.critical is None else self._up(self.factor)

    @property
    def high(self) -> int:
        """The largest, in grid steps."""
        beyond = self.beyond if self.beyond is not None else 1.25 if self.critical is None else 2.0
        return max(self.low, math.floor(round(beyond * self.factor * self.per_unit, 6)))

    @property
    def first_pairs(self) -> tuple[int | None, ...]:
        """The choices of a critical pair, None alone where there is none."""
        return (None,) if self.critical is None else self.critical

    def genome(self, factors: Sequence[float], unscaled: int | None = None, critical: int | None = None) -> Genome:
        """The member near these factors: rounded up to the grid, in bounds, no factor below that of a faster pair.

        unscaled and critical: among the choices (default: the first, and the last). Raises UserError for others.
        """
        if len(factors) != self.pairs:
            raise UserError(f"a genome needs one factor for each of the {self.pairs} pairs; got {len(factors)}")
        unscaled = self.unscaled[0] if unscaled is None else unscaled
        critical = self.first_pairs[-1] if critical is None else critical
        if unscaled not in self.unscaled or critical not in self.first_pairs:
            raise UserError(f"unscaled={unscaled} and critical={critical} are not both among {self.unscaled} and {self.first_pairs}")
        return self.complete(np.array([self._up(factor) for factor in factors]), unscaled, critical)

    def steps(self, genome: Genome) -> Int[ndarray, " pairs"]:
        """Its factors in grid steps."""
        found: ndarray = np.rint(np.array(genome.factors) * self.per_unit).astype(np.int64)
        return found

    def complete(self, steps: Int[ndarray, " pairs"], unscaled: int, critical: int | None) -> Genome:
        """The genome of these genes, in grid steps: clipped, made monotone, and those below the critical pair as NTK would have them."""
        first = critical or 0
        found = np.maximum.accumulate(np.clip(steps[first:], self.low, self.high))
        if first:
            below = (found[0] / self.per_unit) ** (np.arange(first) / first)
            found = np.concatenate([np.rint(below * self.per_unit).astype(np.int64), found])
        return Genome(tuple(int(step) / self.per_unit for step in found), unscaled, critical)

    def members(self) -> Iterator[Genome]:
        """All of them, some twice if they have several critical pairs."""
        for critical in self.first_pairs:
            below = (0,) * (critical or 0)
            for genes in itertools.combinations_with_replacement(range(self.low, self.high + 1), self.pairs - len(below)):
                for unscaled in self.unscaled:
                    yield self.complete(np.array(below + genes), unscaled, critical)

    def _up(self, factor: float) -> int:
        # What is a grid step but for the rounding of a quotient stays one.
        return math.ceil(round(factor * self.per_unit, 6))


def critical_pairs(width: int, base: float, trained_length: int) -> tuple[int, ...]:
    """Candidates for the critical pair: from the first that turned at most ten times in training to the first that turned at most once.

    The latter is the theoretical one, ceil(width / 2 * log_base(trained_length / 2 pi)). Where no pair turned more often, they begin with
    pair 0; where all did, they end with the last pair.
    """
    if base <= 1:
        raise UserError(f"later pairs are slower only with a base above 1; got base={base}")
    pairs = width // 2
    first, last = (math.ceil(pairs * math.log(trained_length / (2 * math.pi * turns)) / math.log(base)) for turns in (10, 1))
    return tuple(range(min(max(first, 0), pairs - 1), min(max(last, 0), pairs - 1) + 1))
