"""`attnlab evaluate` and `longrope-search`: a finished run's weights under other settings. Either is a run of its own in the same study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import registry
from experiments.config import REGISTRIES, SCHEMAS
from experiments.runs.files import read_json
from experiments.runs.status import RESULT, is_finished
from experiments.start import trained_length
from experiments.verbs import launching
from experiments.words import changed, spell, words_of
from registry import UserError, nearest

#: Candidates that a search scores where nothing else is said.
EVALUATIONS = 250


def evaluate(run: str, words: Sequence[str], report: launching.Report | None) -> None:
    """Test a run's weights as `words` would have it."""
    directory = find_run(run, words)
    launching.train(changed(starting_from(directory), [*kept_of_position(directory, words), *words]), report)


def longrope_search(words: Sequence[str], report: launching.Report | None) -> None:
    """Search the factors of `longrope` for the run that `checkpoint=` names, and test them on sequences that the search never saw."""
    own = {key: [word.partition("=")[2] for word in words if word.startswith(f"{key}=")] for key in ("checkpoint", "factor")}
    if not own["checkpoint"] or not own["factor"]:
        raise UserError("longrope-search needs checkpoint=, a trained rotary run's directory, and factor=, target / trained length")
    others = [word for word in words if word.partition("=")[0] not in own]
    if "search.evaluations=0" in others:
        raise UserError("search.evaluations=0 searches nothing; leave it out, or give a number of candidates")
    directory = find_run(own["checkpoint"][-1], others)
    factor = _factor(own["factor"][-1])
    config = read_json(directory / "config.json") or {}
    position = config["position"]
    if position["name"] != "rope":
        raise UserError(f"longrope-search slows the pairs of a model trained with position=rope; {directory} has {position['name']}")
    before = starting_from(directory)
    multiples = sorted({*config["evaluation"]["multiples"], math.ceil(factor)})
    options = {key: position[key] for key in ("base", "layout", "fraction")}
    longrope = {"name": "longrope", "factor": factor, "trained_length": trained_length(config), **options}
    chosen = [
        *words_of({"position": longrope}, REGISTRIES),
        f"search.evaluations={EVALUATIONS}",
        f"evaluation.multiples={spell(multiples)}",
    ]
    job, result = launching.carry_out(changed(changed(before, chosen), others))
    if report is not None:
        report({"run_id": job.run_id, "directory": str(job.directory), "position": result["position"], "search": result["search"]})
        return
    found, searched = result["position"], result["search"]
    print(f"{searched['evaluations']} candidates" + (", all there are" if searched["exhausted"] else ""))
    print("factors " + " ".join(f"{value:g}" for value in found["long_factors"]) + f"  unscaled {found['unscaled']}")
    print(f"perplexity ({searched['objective']}) at {searched['length']} tokens, searched on / held out:")
    for name, value in searched["seeds"].items():
        print(f"  {name:12} {value:8.3f}  {searched['held_out'][name]:8.3f}")
    print(f"  {'found':12} {searched['perplexity']:8.3f}  {searched['held_out']['found']:8.3f}")
    print(f"saved in {job.directory / 'position.yaml'}; train and evaluate take it as position={job.directory / 'position.yaml'}")


def find_run(name: str, words: Sequence[str]) -> Path:
    """The directory of a finished run: as given, with or without its checkpoint's name, or below runs_dir. Raises UserError for another."""
    given = Path(name)
    given = given.parent.parent if given.suffix == ".ckpt" else given
    runs_dir = next((Path(word.partition("=")[2]) for word in words if word.startswith("runs_dir=")), Path("runs"))
    for directory in (given, runs_dir / given):
        if is_finished(directory) and read_json(directory / "config.json"):
            return directory if directory.parent.parent.name else directory.resolve()
    known = [str(path.parent.relative_to(runs_dir)) for path in runs_dir.glob(f"*/*/{RESULT}")]
    raise UserError(f"no finished run {name!r}, here or in {runs_dir}.{nearest(name, known)}")


def starting_from(directory: Path) -> list[str]:
    """Overrides for a run like that in `directory` that starts from its weights and trains no further."""
    config = dict(read_json(directory / "config.json") or {})
    config["position"] = (read_json(directory / RESULT) or {}).get("position", config["position"])
    start: dict[str, Any] = {"start": directory.name, "study": directory.parent.name, "runs_dir": str(directory.parent.parent)}
    start |= {"trainer.steps": 0, "search.evaluations": 0, "evaluation.unit": trained_length(config)}
    return changed(words_of(config, (*REGISTRIES, *SCHEMAS)), [f"{key}={spell(value)}" for key, value in start.items()])


def kept_of_position(directory: Path, words: Sequence[str]) -> list[str]:
    """What another rotary scheme keeps of the trained one unless `words` say otherwise: base, layout, fraction, and the trained length."""
    name = next((word.partition("=")[2] for word in words if word.startswith("position=")), None)
    if name is None or name.endswith((".yaml", ".yml")):
        return []
    config = read_json(directory / "config.json") or {}
    options = {option.name for option in registry.options(registry.positions.get(name))}
    trained = {key: config["position"][key] for key in ("base", "layout", "fraction") if key in config["position"]}
    trained["trained_length"] = trained_length(config)
    given = {word.partition("=")[0] for word in words}
    kept = {f"position.{key}": value for key, value in trained.items() if key in options}
    return [f"{key}={spell(value)}" for key, value in kept.items() if key not in given]


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 1 < factor <= 1024:
        raise UserError(f"factor={text}: a number above 1 is needed, target / trained length, up to 1024")
    return factor
