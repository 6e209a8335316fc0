"""The search as a part of a run: what it searches, on what, and what is told of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.callbacks import Progress
from experiments.evaluate import perplexity
from experiments.longrope.evolution import Settings, search
from experiments.longrope.fitness import Fitness, rope_of, seeds
from experiments.longrope.space import Genome, Space, critical_pairs
from experiments.model import Decoder
from experiments.tasks.contract import Task


def find_factors(
    config: Mapping[str, Any], task: Task, model: Decoder, state: Path, on_progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `longrope` of the config with the factors that are best for `model`, a trained rotary one; and how the search went.

    Candidates are scored on validation sequences of factor * trained_length tokens; `held_out` tells the perplexity of the seeds and of
    what was found on test sequences, all with the same attention factor, and nothing is chosen by it. state: the file by which
    an interrupted search goes on. Raises UserError for what cannot be searched.
    """
    position, chosen = dict(config["position"]), dict(config["search"])
    trained_length, factor = position["trained_length"], position["factor"]
    rope = rope_of(model)
    critical = critical_pairs(rope.width, rope.base, trained_length) if chosen["form"] == "critical" else None
    space = Space(rope.width // 2, factor, unscaled=tuple(chosen["unscaled"]), critical=critical)
    length = math.ceil(factor * trained_length)
    score, held_out = (
        Fitness(
            model,
            task.batch(split, length, 0, sequences),
            trained_length=trained_length,
            factor=factor,
            objective=chosen["objective"],
            attention_factor=position["attention_factor"],
            batch_tokens=config["evaluation"]["batch_tokens"],
        )
        for split, sequences in (("validation", chosen["sequences"]), ("test", config["evaluation"]["sequences"]))
    )
    first = seeds(space, rope, trained_length)
    numbers = ("evaluations", "population", "mutations", "crossovers", "parents", "seed")

    def tell(done: int, total: int, best: float, genome: Genome) -> None:
        on_progress(done, total, f"search: best perplexity {perplexity(best):.3f}")

    subject = {name: config[name] for name in ("start", "task")}
    subject |= {"trained_length": trained_length, "attention_factor": position["attention_factor"]}
    subject |= {name: chosen[name] for name in ("objective", "sequences")}
    found = search(
        space,
        list(first.values()),
        score,
        settings=Settings(**{name: chosen[name] for name in numbers}),
        state=state,
        subject=subject,
        on_generation=tell,
    )
    judged = zip([*first, "found"], held_out([*first.values(), found.best]), strict=True)
    told = {
        "objective": chosen["objective"],
        "length": length,
        "evaluations": found.evaluations,
        "exhausted": found.exhausted,
        "perplexity": perplexity(found.score),
        "seeds": {name: perplexity(value) for name, value in zip(first, found.seeds, strict=True)},
        "held_out": {name: perplexity(value) for name, value in judged},
        "history": [perplexity(value) for value in found.history],
    }
    return {**position, "long_factors": list(found.best.factors), "unscaled": found.best.unscaled}, told
