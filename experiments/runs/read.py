"""Reading run records: every run of a study, its curves and its scored sequences.

    runs(study_dir)         a `Run` for each run, whatever became of it
    table(runs)             the same, tidy: a row a run, a column a setting or result
    metrics(study_dir)      long: run_id, step, tokens, seconds, name, value
    evaluations(study_dir)  SQL over the scored sequences of the finished runs
    selection(study_dir, run_id)    what a run's model chose, if it chooses

DuckDB reads, in memory; it is never the live store. Nothing is cut short: all runs, all columns, all rows. Nothing outside the study's
directory is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow
from pyarrow import parquet

from experiments.runs.claim import FOLDER as CLAIMS
from experiments.runs.files import read_json
from experiments.runs.status import MANIFEST, RESULT, STATUS, State, status_of
from registry import UserError, nearest

CONFIG, METRICS, EVALUATION, SELECTION = "config.json", "metrics.jsonl", "evaluation.parquet", "selection.json"

#: What every evaluation.parquet has. Its other columns are what the task tells of a sequence, or, as lists, of each scored token.
EVALUATION_COLUMNS = {
    "run_id": "VARCHAR",
    "split": "VARCHAR",
    "axis": "VARCHAR",
    "length": "BIGINT",
    "index": "BIGINT",
    "correct": "BOOLEAN",
    "tokens_scored": "BIGINT",
    "tokens_correct": "BIGINT",
    "loss": "DOUBLE",
    "token_correct": "BOOLEAN[]",
}


@dataclass(frozen=True)
class Run:
    """One run as its directory tells it. `config` and `result` are as stored.

    `result` is empty unless the run is finished, `config` if the run has not begun or its config.json is damaged.
    """

    run_id: str
    status: State
    reason: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The config, flattened."""
        return flatten(self.config)

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics that are numbers."""
        found = self.result.get("metrics", {})
        return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots. Lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        nested = isinstance(item, Mapping) and len(item) > 0
        flat.update(flatten(item, f"{prefix}{key}.") if nested else {f"{prefix}{key}": item})
    return flat


def runs(study_dir: Path | str) -> list[Run]:
    """Every run of a study by run_id, then those that are only planned, which have their overrides as reason.

    Raises UserError where there is no such study, and for a link that leads out of it.
    """
    begun = [_run(directory) for directory in _directories(study_dir)]
    known = {run.run_id for run in begun}
    return begun + [
        _without_config(study_dir, run_id, plan) for run_id, plan in _manifest(study_dir)["runs"].items() if run_id not in known
    ]


def not_applicable(study_dir: Path | str) -> list[tuple[str, str]]:
    """The combinations that the sweep left out because they have no meaning: overrides, and why."""
    return [(" ".join(entry.get("overrides", ())), entry.get("reason", "")) for entry in _manifest(study_dir)["dropped"]]


def table(found: Iterable[Run]) -> pyarrow.Table:
    """A row a run: run_id, status, reason, each setting under its dotted name, each result under `result.` and its dotted name.

    A run has null where it lacks what another one has. Lists, and columns whose values differ in type, hold JSON text.
    """
    rows = [_row(run) for run in found]
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: _column([row.get(name) for row in rows]) for name in names})


def metrics(study_dir: Path | str) -> pyarrow.Table:
    """The rows of every metrics.jsonl, one for each value: run_id, step, tokens, seconds, name, value.

    A line that a killed process left torn is skipped; so is a value that is not a number (null: it was not finite).
    """
    root, files = _files(study_dir, METRICS, _directories(study_dir))
    query = """
        WITH logged AS (
            SELECT parse_filename(parse_dirpath(filename)) AS run_id, json, unnest(map_entries(json::MAP(VARCHAR, JSON))) AS entry
            FROM read_ndjson_objects($files, ignore_errors = true, filename = true)
            WHERE json_type(json) = 'OBJECT' AND json_type(json->'step') IN ('UBIGINT', 'BIGINT'))
        SELECT run_id, (json->'step')::BIGINT AS step, (json->'tokens')::BIGINT AS tokens, (json->'seconds')::DOUBLE AS seconds,
            entry.key AS name, entry.value::DOUBLE AS value
        FROM logged
        WHERE entry.key NOT IN ('step', 'tokens', 'seconds') AND json_type(entry.value) IN ('UBIGINT', 'BIGINT', 'DOUBLE')
        ORDER BY run_id, name, step"""
    if not files:
        query = (
            "SELECT ''::VARCHAR AS run_id, 0::BIGINT AS step, 0::BIGINT AS tokens, 0.0::DOUBLE AS seconds, '' AS name, 0.0 AS value LIMIT 0"
        )
    return _connect(root).sql(query, params={"files": files} if files else None).to_arrow_table()


def evaluations(study_dir: Path | str, sql: str = "SELECT * FROM evaluation") -> pyarrow.Table:
    """What a query finds in two views: `evaluation`, the scored sequences of all finished runs, and `runs`, as `table` gives them.

    A query can read nothing else. Raises UserError for one that DuckDB cannot make sense of.
    """
    found = runs(study_dir)
    finished = {run.run_id for run in found if run.status == "finished"}
    root, files = _files(study_dir, EVALUATION, [path for path in _directories(study_dir) if path.name in finished])
    connection = _connect(root)
    connection.register("runs", table(found))
    columns = ", ".join(f'"{name}" {kind}' for name, kind in EVALUATION_COLUMNS.items())
    source = f"CREATE TABLE evaluation ({columns})"
    try:
        if files:
            source = f"CREATE VIEW evaluation AS {_sequences(files)}"
        connection.execute(source)
        return connection.sql(sql).to_arrow_table()
    except (duckdb.Error, pyarrow.ArrowException) as error:
        raise UserError(f"the query cannot be answered: {str(error).splitlines()[0]}") from error


def _sequences(files: list[str]) -> str:
    """SQL for the rows of several evaluation.parquet. What some tell of each scored token is told so by all."""
    fields = {file: {field.name: pyarrow.types.is_list(field.type) for field in parquet.read_schema(file)} for file in files}
    of_tokens = {name for found in fields.values() for name, is_list in found.items() if is_list}
    alike: dict[tuple[str, ...], list[str]] = {}
    for file, found in fields.items():
        alike.setdefault(tuple(name for name, is_list in found.items() if name in of_tokens and not is_list), []).append(file)
    queries = []
    for names, same in alike.items():
        columns = ['"' + name.replace('"', '""') + '"' for name in names]
        repeated = ", ".join(f"list_resize([{column}], tokens_scored, {column}) AS {column}" for column in columns)
        paths = ", ".join(_quoted(file) for file in same)  # literals, because a view takes no parameters
        queries.append(
            "SELECT parse_filename(parse_dirpath(filename)) AS run_id, * EXCLUDE (filename) "
            f"{f'REPLACE ({repeated}) ' if repeated else ''}FROM read_parquet([{paths}], union_by_name = true, filename = true)"
        )
    return " UNION ALL BY NAME ".join(queries)


def selection(study_dir: Path | str, run_id: str) -> dict[str, Any] | None:
    """A run's selection.json as stored (experiments/selection.py); None where it has none."""
    _, files = _files(study_dir, SELECTION, [Path(study_dir).resolve() / run_id])
    return read_json(Path(files[0])) if files else None


def _directories(study_dir: Path | str) -> list[Path]:
    """The directories of a study's runs, by name."""
    root = Path(study_dir).resolve()
    if not root.is_dir():
        siblings = [path.name for path in root.parent.glob("*/")]
        raise UserError(f"no study {root.name!r} in {root.parent}.{nearest(root.name, siblings)}")
    return sorted(path for path in root.iterdir() if path.is_dir() and (path / CONFIG).exists())


def _manifest(study_dir: Path | str) -> dict[str, Any]:
    root = Path(study_dir).resolve()
    _inside(root, root / MANIFEST)
    found = read_json(root / MANIFEST) or {}
    runs, dropped = found.get("runs"), found.get("dropped")
    return {"runs": runs if isinstance(runs, dict) else {}, "dropped": dropped if isinstance(dropped, list) else []}


def _inside(root: Path, path: Path) -> bool:
    if not path.resolve().is_relative_to(root):
        raise UserError(f"{path} leads out of the study's directory and is not read; put the run itself there, or remove the link")
    return True


def _files(study_dir: Path | str, name: str, directories: list[Path]) -> tuple[Path, list[str]]:
    """The study's directory, and the files of one name in those of its runs that have it."""
    root = Path(study_dir).resolve()
    paths = [directory / name for directory in directories]
    return root, [str(path) for path in paths if path.is_file() and _inside(root, path)]


def _run(directory: Path) -> Run:
    for name in (CONFIG, RESULT, STATUS, CLAIMS):
        _inside(directory.parent, directory / name)
    config = read_json(directory / CONFIG)
    if config is None:
        return Run(directory.name, "failed", f"{CONFIG} is damaged")
    status = status_of(directory)
    result = read_json(directory / RESULT) if status.status == "finished" else None
    return Run(directory.name, status.status, status.reason, config, result or {})


def _without_config(study_dir: Path | str, run_id: str, plan: Mapping[str, Any]) -> Run:
    """A run of the plan that never wrote its config: not begun, or ended before it could."""
    status = status_of(Path(study_dir) / run_id)
    overrides = " ".join(plan.get("overrides", ()))
    return Run(run_id, status.status, f"{overrides} ({status.reason})" if status.reason else overrides)


def _row(run: Run) -> dict[str, Any]:
    results = {f"result.{name}": value for name, value in flatten(run.result).items()}
    return {"run_id": run.run_id, "status": run.status, "reason": run.reason, **run.settings, **results}


def _column(values: list[Any]) -> pyarrow.Array:
    kinds = {type(value) for value in values if value is not None}
    plain = len(kinds) <= 1 or kinds == {int, float}
    if not plain or kinds & {list, dict}:
        return pyarrow.array([None if value is None else json.dumps(value) for value in values], pyarrow.string())
    return pyarrow.array([float(value) if value is not None and float in kinds else value for value in values])


def _connect(root: Path) -> duckdb.DuckDBPyConnection:
    """A database in memory that can read the study's directory and nothing else."""
    connection = duckdb.connect()
    connection.execute(f"SET allowed_directories = [{_quoted(str(root))}]")
    connection.execute("SET enable_external_access = false")
    return connection


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
