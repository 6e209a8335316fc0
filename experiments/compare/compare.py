"""Comparing the runs of a study: groups over seeds, and each group's difference to a baseline, paired by seed.

A group is all runs that agree on the keys `by`. A seed counts once: where a group holds several runs of one seed (because `by` leaves out
a setting that varies), they are averaged first, so that intervals and tests speak of seeds and of nothing else. Only finished runs from a
checkpoint that passes the study's gate are averaged; the others are counted. Perplexities are averaged and compared by their logarithms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.compare.gate import gate_words
from experiments.compare.groups import BELOW_GATE, TEST, Cell, Comparison, Group, left_out, outcome
from experiments.compare.keys import Keys, natural, same_axis, spell
from experiments.compare.measures import measure
from experiments.compare.statistics import holm, mean_interval, sign_flip, success_rate, verdict
from experiments.runs import read
from experiments.runs.read import Run, flatten
from registry import UnknownName, UserError, nearest, tasks

#: What tells a run from the others of its group: its seed, and whatever else is averaged within a seed.
Unit = Callable[[Run], tuple[str, str]]
ACCURACY = "accuracy"


def compare(
    study_dir: Path | str,
    by: str | Iterable[str] | None = None,
    metric: str | Iterable[str] | None = None,
    baseline: str | Mapping[str, Any] | None = None,
) -> Comparison:
    """Group, average and compare the runs of a study. Raises UserError for a key, metric or baseline that the study does not have.

    by: keys of the config, a list or words with commas (default: every one that varies, besides seeds). `variant`, `position` and `task`
        stand for a name together with those of its options that vary.
    metric: final metrics, likewise (default: on every evaluation set, the one that the task declares, else the accuracy).
    baseline: {"variant": "full"}, "variant=full" or "full" (then of the first key): what the groups compared against are like. A group is
        compared with the one of them that agrees with it on all other keys (default: `full` among the variants, else the first group).
    """
    return compare_runs(Path(study_dir).resolve().name, read.runs(study_dir), by, metric, baseline)


def compare_runs(
    study: str,
    runs: Sequence[Run],
    by: str | Iterable[str] | None = None,
    metric: str | Iterable[str] | None = None,
    baseline: str | Mapping[str, Any] | None = None,
) -> Comparison:
    """`compare`, of runs already read."""
    readable = [run for run in runs if run.config]
    if not readable:
        raise UserError(f"study {study!r} has no run that began ({len(runs)} planned)")
    keys = Keys(readable)
    chosen = keys.checked(_words(by)) or keys.varying() or ["variant"]
    averaged = keys.varying(chosen)
    metrics = _metrics(readable, _words(metric))
    members: dict[str, list[Run]] = {}
    for run in readable:
        members.setdefault(json.dumps([keys.value(run, key) for key in chosen]), []).append(run)
    groups = [_group({key: keys.value(same[0], key) for key in chosen}, same, metrics, keys) for same in members.values()]
    groups.sort(key=lambda group: [natural(value) for value in group.by.values()])
    conditions = _conditions(baseline, chosen) if baseline else _default_baseline(groups, chosen)
    keys.checked(conditions)
    partners = _partners(groups, keys, conditions)
    paired = [key for key in averaged if not same_axis(key, conditions)]
    groups = _compared(groups, partners, metrics, lambda run: (keys.seed(run), json.dumps([keys.value(run, key) for key in paired])))
    # Whoever is compared against comes first on its own axis.
    first = {key: {name: value for name, value in conditions.items() if same_axis(name, [key])} for key in chosen}
    groups.sort(key=lambda group: [(not keys.fits(group.runs, first[key]), natural(value)) for key, value in group.by.items()])
    return Comparison(study, chosen, metrics, conditions, averaged, groups, left_out(runs))


def _words(given: str | Iterable[str] | None) -> list[str]:
    # A list holds commas of its own: [mamba2*3,full].
    words = re.split(r",(?![^\[]*\])", given) if isinstance(given, str) else list(given or ())
    return [word.strip() for word in words]


def _metrics(runs: Sequence[Run], asked: Sequence[str]) -> list[str]:
    known = {name for run in runs for name in run.metrics}
    for name in asked:
        if name not in known:
            raise UserError(f"no finished run has the metric {name!r}.{nearest(name, known)}")
    return list(asked) or test_metrics(runs)


def test_metrics(runs: Iterable[Run], of: str | None = None) -> list[str]:
    """The metrics of one measure on all evaluation sets, in order; without one, of the measure that each run's task declares."""
    found: dict[str, re.Match[str]] = {}
    for run in runs:
        matches = [match for name in run.metrics if (match := TEST.fullmatch(name))]
        wanted = of or _declared(run)
        if of is None and all(match["measure"] != wanted for match in matches):
            wanted = ACCURACY
        found |= {match[0]: match for match in matches if match["measure"] == wanted}
    return sorted(found, key=lambda name: (found[name]["axis"] != "length", found[name]["axis"], int(found[name]["length"])))


def _declared(run: Run) -> str:
    """The measure that the run's task is judged by."""
    try:
        return str(tasks.entry(run.settings["task.name"]).facts.get("metric", ACCURACY))
    except (UnknownName, KeyError):  # a task from a plug-in that is not loaded here
        return ACCURACY


def _conditions(baseline: str | Mapping[str, Any], by: Sequence[str]) -> dict[str, Any]:
    if isinstance(baseline, Mapping):
        return dict(baseline)
    pairs = [word.partition("=") for word in _words(baseline)]
    # A label may hold "=" itself ("sliding_window window=16"), but then has a space before it; a key has none.
    if not all(sep and " " not in key for key, sep, _ in pairs):
        return {by[0]: baseline}
    return {key: _plain(value) for key, _, value in pairs}


def _plain(text: str) -> Any:
    """The number, list or word that a text spells: 1e-5 and 0.00001 are one."""
    if re.fullmatch(r"\[.*\]", text):
        return [_plain(word.strip().strip("'\"")) for word in text[1:-1].split(",")]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _default_baseline(groups: Sequence[Group], by: Sequence[str]) -> dict[str, Any]:
    """Variant `full` where there is one, with whatever options come first; else what the first group is like on the first key."""
    key = next((key for key in by if key in ("variant", "variant.name")), by[0])
    values = [group.by[key] for group in groups]
    return {key: next((value for value in values if spell(value).partition(" ")[0] == "full"), values[0])}


def _partners(groups: Sequence[Group], keys: Keys, conditions: Mapping[str, Any]) -> list[Group | None]:
    """The group that each group is compared with; None where there is none. Raises UserError for conditions that fit none, or several."""
    candidates = [group for group in groups if keys.fits(group.runs, conditions)]
    said = ", ".join(f"{key}={spell(value)}" for key, value in conditions.items())
    if not candidates:
        raise UserError(f"no group is like the baseline {said}. Groups: {'; '.join(group.label for group in groups)}")
    others = [key for key in groups[0].by if not same_axis(key, conditions)]
    partners: list[Group | None] = []
    for group in groups:
        alike = [candidate for candidate in candidates if all(candidate.by[key] == group.by[key] for key in others)]
        if len(alike) > 1:
            raise UserError(f"several groups are like the baseline {said}: {'; '.join(one.label for one in alike)}. Name one of them")
        partners.append(alike[0] if alike else None)
    return partners


def _group(by: Mapping[str, Any], runs: Sequence[Run], metrics: Sequence[str], keys: Keys) -> Group:
    finished = [run for run in runs if outcome(run) == "finished"]
    steps = [run.result.get("steps_to_solve") for run in finished]
    solving = sorted(float("inf") if step is None else step for step in steps)
    middle = median(solving) if solving else float("inf")
    costs: dict[str, list[float]] = {}
    for run in finished:
        for name, value in flatten({**run.result.get("costs", {}), **run.result.get("counts", {})}).items():
            if isinstance(value, int | float):
                costs.setdefault(name, []).append(value)
    without = "no finished run has this metric" if finished else "no finished run"
    if not finished and (below := [run for run in runs if outcome(run) == BELOW_GATE]):
        without = gate_words(below)
    return Group(
        by=by,
        runs=runs,
        cells={metric: _cell(metric, finished, keys, without) for metric in metrics},
        solved=success_rate(sum(step is not None for step in steps), len(steps)) if steps else None,
        steps_to_solve=None if middle == float("inf") else float(middle),
        costs={name: fmean(values) for name, values in costs.items()},
    )


def _cell(metric: str, finished: Sequence[Run], keys: Keys, without: str) -> Cell:
    """Everything but the differences. `without` is the verdict where no run has the metric."""
    kind = measure(metric)
    values = _values(metric, finished, lambda run: (keys.seed(run), run.run_id))
    means = [fmean(of_seed.values()) for of_seed in values.values()]
    empty = Cell(metric, len(means), better=kind.better, compared_as="ratio" if kind.ratio else "difference")
    if not means:
        return replace(empty, verdict=without)
    match = TEST.fullmatch(metric)
    trivial: dict[str, list[float]] = {}
    if match and match["measure"] == ACCURACY:
        for run in finished:
            for name, value in run.result.get("baselines", {}).get(match["set"], {}).items():
                trivial.setdefault(name, []).append(value)
    averages = {name: fmean(values) for name, values in trivial.items()}
    ceiling = averages.pop("within_reach", None)
    mean, low, high = (None if end is None else kind.shown(end) for end in mean_interval(means))
    least, most = kind.shown(min(means)), kind.shown(max(means))
    return replace(empty, mean=mean, low=low, high=high, min=least, max=most, ceiling=ceiling, trivial=averages or None)


def _values(metric: str, runs: Iterable[Run], unit: Unit) -> dict[str, dict[str, float]]:
    """The metric's mean for each seed and what is averaged within it; of a perplexity, the mean of its logarithm."""
    kind = measure(metric)
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if metric not in run.metrics:
            continue
        value = run.metrics[metric]
        if kind.ratio and value <= 0:
            raise UserError(f"run {run.run_id} says {metric} = {value:g}; a perplexity is never below 1")
        seed, within = unit(run)
        found.setdefault(seed, {}).setdefault(within, []).append(kind.linear(value))
    return {seed: {within: fmean(values) for within, values in of_seed.items()} for seed, of_seed in found.items()}


def _compared(groups: Sequence[Group], partners: Sequence[Group | None], metrics: Sequence[str], unit: Unit) -> list[Group]:
    """The groups, with each cell's difference to its partner's."""
    cells: list[dict[str, Cell]] = [dict(group.cells) for group in groups]
    for metric in metrics:
        tested: list[int] = []
        for i, (group, partner) in enumerate(zip(groups, partners, strict=True)):
            cells[i][metric] = _paired(group, partner, metric, unit)
            if cells[i][metric].p_uncorrected is not None:
                tested.append(i)
        corrected = holm([cells[i][metric].p_uncorrected or 0.0 for i in tested])
        for i, p in zip(tested, corrected, strict=True):
            cell = cells[i][metric]
            assert cell.difference is not None
            words = verdict(measure(metric).linear(cell.difference), p, cell.pairs, len(tested))
            cells[i][metric] = replace(cell, p=p, verdict=words)
    return [
        replace(group, cells=cell, compared_with=partner.by if partner else None)
        for group, partner, cell in zip(groups, partners, cells, strict=True)
    ]


def _paired(group: Group, partner: Group | None, metric: str, unit: Unit) -> Cell:
    cell = group.cells[metric]
    if partner is group:
        return replace(cell, verdict=cell.verdict or "baseline")
    if partner is None:
        return replace(cell, verdict=cell.verdict or "no baseline agrees on the other keys")
    mine, theirs = (_values(metric, side.finished, unit) for side in (group, partner))
    shared = {seed: [within for within in mine[seed] if within in theirs[seed]] for seed in mine if seed in theirs}
    differences = [fmean(mine[seed][key] - theirs[seed][key] for key in common) for seed, common in shared.items() if common]
    if not differences:
        gated = partner.below_gate and not partner.finished
        why = "the baseline's runs are all below the gate" if gated else "no seed in common with the baseline"
        return replace(cell, verdict=cell.verdict or why)
    mean, low, high = (None if end is None else measure(metric).shown(end) for end in mean_interval(differences))
    return replace(
        cell,
        pairs=len(differences),
        difference=mean,
        difference_low=low,
        difference_high=high,
        p_uncorrected=sign_flip(differences),
    )
