"""What a metric's name says of its numbers: which way is better, and how they are averaged and compared.

A perplexity is exp of a mean loss and is averaged as that loss: the mean, its t interval and the paired differences are those of the
logarithms, and exp of them is shown. So a mean is the geometric one, its interval reaches as far up as down in factors, and what stands for
a difference is the ratio to the baseline. A seed that lost its way weighs as much as its loss, and not as much as exp of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]

#: exp of more is no number that JSON can hold.
LARGEST = 700.0


@dataclass(frozen=True)
class Measure:
    """`better`: the direction that is better, None where the name does not tell. `ratio`: compared by ratios and averaged by logarithms."""

    better: Better | None
    ratio: bool

    def linear(self, value: float) -> float:
        """The number that is averaged. Raises ValueError for a perplexity that is not positive."""
        return math.log(value) if self.ratio else value

    def shown(self, value: float) -> float:
        """The inverse: what is shown of an average or of a difference."""
        return math.exp(min(max(value, -LARGEST), LARGEST)) if self.ratio else value


def measure(metric: str) -> Measure:
    """By the last word of a metric's name: `test/length/64/perplexity`."""
    word = metric.rpartition("/")[2]
    if word.endswith("perplexity"):
        return Measure("lower", ratio=True)
    if word.endswith("loss"):
        return Measure("lower", ratio=False)
    return Measure("higher" if word.endswith("accuracy") else None, ratio=False)
