"""Evolution of LongRoPE's factors: candidates are scored, and the best of them changed and crossed.

    generation 0        the seeds, and mutants of them
    generation g        mutants and crossings of the best so far, none of which was scored before

Ding et al. 2024, "LongRoPE", section 3. Mutants differ from those of its code, which draws a factor between its two neighbours: where all
are equal, as in PI, only the ends could move. Here a factor takes a normal step, as wide as is drawn for each mutant between one step of
the grid and an eighth of the range, and pushes what is in its way.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.longrope.space import Genome, Space
from experiments.runs.files import read_json, write_json
from registry import UserError

FORMAT = "longrope search 1"  # what the state's file is
#: How often a child that was seen before is drawn again.
TRIES = 50


@dataclass(frozen=True)
class Settings:
    """How to search. Raises UserError for numbers with which nothing could be.

    evaluations: how many different candidates are scored, seeds included.
    population: candidates in generation 0.
    mutations, crossovers: children in each later one.
    parents: how many of the best so far have children.
    mutation_probability: of each gene of a mutant.
    seed: of all random choices.
    """

    evaluations: int = 250
    population: int = 32
    mutations: int = 12
    crossovers: int = 12
    parents: int = 8
    mutation_probability: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"evaluations": 1, "population": 1, "mutations": 0, "crossovers": 0, "parents": 1, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UserError(f"{name} must be at least {bound}; got {getattr(self, name)}")
        if not self.mutations + self.crossovers:
            raise UserError("a generation needs children: mutations and crossovers cannot both be 0")
        if not 0 < self.mutation_probability <= 1:
            raise UserError(f"mutation_probability must lie above 0 and not above 1; got {self.mutation_probability}")


class Found(NamedTuple):
    """What a search gave. A score that is not finite is infinite here.

    history: the best score so far after each evaluation, in the order in which candidates were scored.
    seeds: the score of each seed.
    exhausted: the space has fewer members than there were evaluations to spend.
    """

    best: Genome
    score: float
    history: tuple[float, ...]
    evaluations: int
    seeds: tuple[float, ...]
    exhausted: bool


def search(
    space: Space,
    seeds: Sequence[Genome],
    score: Callable[[Sequence[Genome]], Sequence[float]],
    *,
    settings: Settings | None = None,
    state: Path | None = None,
    subject: Mapping[str, Any] | None = None,
    on_generation: Callable[[int, int, float, Genome], None] | None = None,
) -> Found:
    """The member of `space` with the lowest score that was found, from `seeds` on, which are members.

    score: of a generation's candidates, all of them new, at once.
    state: a file that is written after each generation. A search that finds it there goes on from it, and ends as it would have ended.
    subject: what else must be the same for that, as JSON: model, data, objective.
    on_generation: called after each with candidates scored, evaluations in all, the best score and the best candidate.
    Raises UserError for seeds outside the space or too many, and for the state of another search, naming what differs.
    """
    settings = settings or Settings()
    members = [space.genome(given.factors, given.unscaled, given.critical) for given in seeds]
    for number, (given, member) in enumerate(zip(seeds, members, strict=True)):
        if given != member:
            raise UserError(f"seed {number} lies outside the space: {given}; Space.genome gives the member next to it")
    distinct = list(dict.fromkeys(members))
    if not 0 < len(distinct) <= settings.evaluations:
        raise UserError(f"a search needs a seed, and an evaluation for each; got {len(distinct)} and evaluations={settings.evaluations}")
    about = {"space": asdict(space), "settings": asdict(settings), "seeds": [asdict(s) for s in members], "subject": dict(subject or {})}
    scored, generation = ({}, 0) if state is None else _restore(state, about)
    while len(scored) < settings.evaluations:
        # A stream for each generation: going on needs no generator's state.
        rng = np.random.default_rng([settings.seed, generation])
        children = _children(space, settings, distinct, scored, rng)[: settings.evaluations - len(scored)]
        if not children:
            break
        for child, value in zip(children, score(children), strict=True):
            scored[child] = float(value) if math.isfinite(value) else math.inf
        generation += 1
        if state is not None:
            _save(state, about, scored, generation)
        if on_generation is not None:
            best = min(scored, key=scored.__getitem__)
            on_generation(len(scored), settings.evaluations, scored[best], best)
    best = min(scored, key=scored.__getitem__)
    history = tuple(itertools.accumulate(scored.values(), min))
    return Found(best, scored[best], history, len(scored), tuple(scored[s] for s in seeds), len(scored) < settings.evaluations)


def _children(
    space: Space, settings: Settings, seeds: Sequence[Genome], scored: Mapping[Genome, float], rng: np.random.Generator
) -> list[Genome]:
    """The next generation: candidates that are not in `scored`."""
    children: dict[Genome, None] = {} if scored else dict.fromkeys(seeds)
    parents = sorted(scored, key=scored.__getitem__)[: settings.parents] or seeds
    wanted = settings.mutations + settings.crossovers if scored else settings.population - len(seeds)
    for number in range(wanted):

        def draw(number: int = number) -> Genome:
            if number < settings.mutations or not scored or len(parents) == 1:
                # The seeds take turns; parents are drawn.
                parent = parents[int(rng.integers(len(parents))) if scored else number % len(parents)]
                return _mutant(space, parent, settings.mutation_probability, rng)
            one, other = map(int, rng.choice(len(parents), 2, replace=False))
            return _crossing(space, parents[one], parents[other], rng)

        child = _unseen(space, draw, {*scored, *children})
        if child is None:
            break
        children[child] = None
    return list(children)


def _unseen(space: Space, draw: Callable[[], Genome], seen: set[Genome]) -> Genome | None:
    """What `draw` gives that is not in `seen`, else any such member; None where there is none."""
    drawn = (draw() for _ in range(TRIES))
    # Of all members in a row, hardly more than were seen come before the first that was not.
    return next((child for child in itertools.chain(drawn, space.members()) if child not in seen), None)


def _mutant(space: Space, parent: Genome, probability: float, rng: np.random.Generator) -> Genome:
    """The parent with each gene moved by this probability, one at least."""
    unscaled, critical = parent.unscaled, parent.critical
    if rng.random() < probability:
        unscaled = space.unscaled[rng.integers(len(space.unscaled))]
    if rng.random() < probability:
        critical = space.first_pairs[rng.integers(len(space.first_pairs))]
    first = critical or 0
    genes = np.clip(space.steps(parent)[first:], space.low, space.high)
    chosen = np.flatnonzero(rng.random(len(genes)) < probability)
    spread = max(1.0, (space.high - space.low) / 8) ** rng.random()
    for gene in rng.permutation(chosen) if len(chosen) else [rng.integers(len(genes))]:
        moved = np.clip(np.rint(genes[gene] + spread * rng.standard_normal()), space.low, space.high).astype(np.int64)
        genes[:gene], genes[gene:] = np.minimum(genes[:gene], moved), np.maximum(genes[gene:], moved)
        genes[gene] = moved
    return space.complete(np.concatenate([np.zeros(first, np.int64), genes]), unscaled, critical)


def _crossing(space: Space, one: Genome, other: Genome, rng: np.random.Generator) -> Genome:
    """One with a run of the other's factors. Where the two do not join, the larger ones win or the smaller ones, either as likely."""
    begin, end = np.sort(rng.choice(space.pairs + 1, 2, replace=False))
    steps = space.steps(one)
    steps[begin:end] = space.steps(other)[begin:end]
    if rng.random() < 0.5:
        steps = np.minimum.accumulate(steps[::-1])[::-1]
    unscaled, critical = (getattr(one if rng.random() < 0.5 else other, gene) for gene in ("unscaled", "critical"))
    return space.complete(steps, unscaled, critical)


def _save(path: Path, about: Mapping[str, Any], scored: Mapping[Genome, float], generation: int) -> None:
    rows = [{**asdict(genome), "score": value if math.isfinite(value) else None} for genome, value in scored.items()]
    write_json(path, {"format": FORMAT, **about, "generation": generation, "scored": rows})


def _restore(path: Path, about: Mapping[str, Any]) -> tuple[dict[Genome, float], int]:
    """What was scored, and in how many generations; nothing where there is no file."""
    if not path.exists():
        return {}, 0
    saved = read_json(path)
    if saved is None or saved.get("format") != FORMAT:
        raise UserError(f"{path} is not the state of a search; choose another file, or delete it")
    here = json.loads(json.dumps(about))
    differs = [
        f"{part}.{name} is {there.get(name)!r} there and {here[part].get(name)!r} here"
        for part in ("space", "settings", "subject")
        for there in [saved.get(part, {})]
        for name in sorted({*there, *here[part]})
        if there.get(name) != here[part].get(name)
    ] + ["the seeds differ"] * (saved.get("seeds") != here["seeds"])
    if differs:
        raise UserError(f"{path} is the state of another search: {'; '.join(differs)}. Choose another file, or delete it")
    scored = {
        Genome(tuple(row["factors"]), row["unscaled"], row["critical"]): math.inf if row["score"] is None else row["score"]
        for row in saved["scored"]
    }
    return scored, saved["generation"]
