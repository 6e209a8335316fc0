"""What a comparison is made of: groups of runs, and a cell for each group and metric."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from experiments.compare.gate import below_gate, has_gate
from experiments.compare.keys import label
from experiments.compare.measures import Better
from experiments.compare.statistics import Rate
from experiments.runs.read import Run
from experiments.runs.status import STATES

#: A final metric on one evaluation set, `axis/length`.
TEST = re.compile(r"test/(?P<set>(?P<axis>[^/]+)/(?P<length>\d+))/(?P<measure>\w+)")
LEFT_OUT = [state for state in STATES if state != "finished"]
BELOW_GATE = "below the gate"


@dataclass(frozen=True)
class Cell:
    """One metric of one group. Means average over `n` seeds, differences over the `pairs` seeds shared with the baseline.

    `difference` is what `compared_as` says: mine - theirs, or, of a perplexity, the ratio mine / theirs. All that a cell says of a
    perplexity is averaged in logarithms (`measures`). `p` is Holm-corrected over the groups compared in this metric. Where a number is
    None there is none, and `verdict` says why.
    """

    metric: str
    n: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    min: float | None = None
    max: float | None = None
    pairs: int = 0
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p: float | None = None
    p_uncorrected: float | None = None
    verdict: str = ""
    #: The direction that is better; None where the metric's name does not tell.
    better: Better | None = None
    compared_as: Literal["difference", "ratio"] = "difference"
    #: The best that a reader limited to the model's reach could do; None where the reach is unlimited.
    ceiling: float | None = None
    #: What predictors reach that do not solve the task; "chance" is a uniform guess.
    trivial: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Group:
    """The runs that agree on `by`. Costs and the steps to solve are taken over the finished ones."""

    by: Mapping[str, Any]
    runs: Sequence[Run]
    cells: Mapping[str, Cell]
    #: How many finished runs reached the accuracy at which training stops.
    solved: Rate | None
    #: Median, an unsolved run counting as infinite; None where that makes the median infinite.
    steps_to_solve: float | None
    #: The mean of each cost and count under its dotted name.
    costs: Mapping[str, float]
    #: The baseline's group, by its keys: this very group, another one, or none.
    compared_with: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        """The group in a few words."""
        return label(self.by)

    @property
    def finished(self) -> list[Run]:
        """The runs that the numbers come from: finished, and not from a checkpoint below the study's gate."""
        return [run for run in self.runs if outcome(run) == "finished"]

    @property
    def below_gate(self) -> list[Run]:
        """The finished runs whose numbers are not looked at, because of the checkpoint that they started from."""
        return [run for run in self.runs if outcome(run) == BELOW_GATE]

    @property
    def left_out(self) -> dict[str, int]:
        """How many runs the numbers do not come from, by outcome."""
        return left_out(self.runs)


@dataclass(frozen=True)
class Comparison:
    """A study's groups, in order. `baseline` is what the groups compared against are like."""

    study: str
    by: Sequence[str]
    metrics: Sequence[str]
    baseline: Mapping[str, Any]
    #: Settings that vary within a group and are averaged within each seed.
    averaged: Sequence[str]
    groups: Sequence[Group]
    left_out: Mapping[str, int]

    @property
    def finished(self) -> int:
        """How many runs the numbers come from."""
        return sum(len(group.finished) for group in self.groups)

    @property
    def averages_over(self) -> str:
        """What a number averages over, in words."""
        counts = sorted({cell.n for group in self.groups for cell in group.cells.values() if cell.n})
        n = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0] if counts else 0)
        within = f", each averaged over {', '.join(self.averaged)} first" if self.averaged else ""
        return f"n = {n} seed{'s' * (n != '1')}{within}"

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON. `groups` has a row for each group and metric."""
        rows = []
        for group in self.groups:
            solved = group.solved._asdict() if group.solved else None
            counts = {"runs": len(group.runs), "finished": len(group.finished), "left_out": group.left_out}
            shared = {**counts, "solved": solved, "steps_to_solve": group.steps_to_solve}
            rows += [{"by": dict(group.by), **asdict(cell), **shared} for cell in group.cells.values()]
        about = {"study": self.study, "by": self.by, "baseline": self.baseline, "averages_over": self.averages_over}
        return {**about, "groups": rows, "finished": self.finished, "left_out": self.left_out}


def outcome(run: Run) -> str:
    """What a run is counted as: its status, or BELOW_GATE."""
    return BELOW_GATE if run.status == "finished" and below_gate(run) else run.status


def left_out(runs: Sequence[Run]) -> dict[str, int]:
    """How many runs the numbers do not come from, by outcome; BELOW_GATE is among them where the study sets a gate."""
    outcomes = [outcome(run) for run in runs]
    names = [*LEFT_OUT, BELOW_GATE] if any(map(has_gate, runs)) else LEFT_OUT
    return {name: outcomes.count(name) for name in names}


def trained_length(run: Run) -> int | None:
    """Tokens in the sequences that the run's model, or the checkpoint it started from, was trained on; tests are multiples of it."""
    for key in ("evaluation.unit", "task.length"):
        if isinstance(length := run.settings.get(key), int):
            return length
    return None
