"""The gate of a context-extension study: what a checkpoint must be able to do before its extensions are compared.

    result["gate"] = {"needed": 0.9, "reached": 0.97, "length": 128}        accuracy at the checkpoint's own trained length

Schemes that stretch a model which has not learned the task differ by noise alone, whatever their numbers look like.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.runs.read import Run

#: How the verdict of a group begins whose runs are all below the gate.
GATED = "the checkpoint is right on only"


def has_gate(run: Run) -> bool:
    """Whether the study set a gate for this run."""
    return _gate(run) is not None


def below_gate(run: Run) -> bool:
    """Whether the run's checkpoint is worse than the gate asks; never where there is none."""
    gate = _gate(run)
    return gate is not None and gate[1] < gate[0]


def gate_words(runs: Sequence[Run]) -> str:
    """Why these runs, all below the gate, say nothing."""
    gates = [gate for run in runs if (gate := _gate(run)) is not None]
    reached = sorted({percent(reached) for _, reached in gates}, key=float)
    needed = sorted({percent(needed) for needed, _ in gates}, key=float)
    return f"{GATED} {_span(reached)} % within its trained length (gate {_span(needed)} %): differences between schemes would be noise"


def percent(share: float) -> str:
    """A share in percent, rounded down: what is short of a gate must not read as if it had reached it."""
    return f"{math.floor(round(1000 * share, 6)) / 10:g}"


def _span(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _gate(run: Run) -> tuple[float, float] | None:
    """(needed, reached)."""
    gate = run.result.get("gate")
    if not isinstance(gate, dict) or not all(isinstance(gate.get(name), int | float) for name in ("needed", "reached")):
        return None
    return gate["needed"], gate["reached"]
