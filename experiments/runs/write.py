"""Writing a run's record: one directory a run, `runs/<study>/<run_id>/`, written by one process at a time.

with RunWriter.open(study_dir, config, environment) as run:
    run.log(step=10, tokens=640, seconds=1.5, loss=2.3)
    run.finish({"accuracy": 0.9}, evaluation)

config.json environment.json      what was asked for, and where it ran
status.json                       {"status", "reason"}; read it through `status_of`
metrics.jsonl                     {"step", "tokens", "seconds", name: value, ...} a line; a resumed run continues it
evaluation.parquet                a row a scored sequence
selection.json                    what the model chose over one test sequence, if its mixers choose
result.json                       renamed into place last: a run is finished if and only if it can be read
checkpoints/ claims/ error.txt    the trainer's; who works on it; the traceback of a failure
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from experiments.runs.claim import AlreadyClaimed, Claim, ClaimLost
from experiments.runs.files import TEMPORARY, CannotWrite, finite, publish, read_json, temporary_beside, write_json, write_whole, writing
from experiments.runs.identity import run_id
from experiments.runs.status import RESULT, STATUS, State, Status, is_finished, status_of
from registry import UserError

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "AlreadyClaimed",
    "AlreadyFinished",
    "CannotWrite",
    "ClaimLost",
    "RunWriter",
    "Status",
    "is_finished",
    "mark",
    "one_line",
    "status_of",
]


#: The checkpoint from which a run goes on.
LAST = "last.ckpt"


class AlreadyFinished(UserError):
    """The run has its result; nothing is written to it again."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


class RunWriter:
    """The record of one run. Made by `open`, used as a context manager.

    Leaving the context by KeyboardInterrupt or SIGTERM marks the run interrupted, by another exception failed.
    """

    def __init__(self, directory: Path, claim: Claim):
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        self._claim = claim
        self._closed = False
        self._owner = os.getpid()
        self._previous_handler: Any = None
        self._metrics = os.open(directory / "metrics.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    @classmethod
    def open(cls, study_dir: Path, config: Mapping[str, Any], environment: Mapping[str, Any]) -> RunWriter:
        """Take up the run that `config` stands for, new or broken off.

        Raises AlreadyFinished, AlreadyClaimed (by a live process) or CannotWrite, each naming the directory.
        """
        directory = Path(study_dir) / run_id(config)
        _refuse_finished(directory)
        with writing(directory):
            (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        claim = Claim.acquire(directory)
        with contextlib.ExitStack() as undo, writing(directory):
            undo.callback(claim.release)
            _refuse_finished(directory)  # it may have been finished, and its claim released, between the look and the claim
            _refuse_foreign(directory, config)
            for leftover in (*directory.glob(f".*{TEMPORARY}"), directory / "error.txt"):
                leftover.unlink(missing_ok=True)
            run = cls(directory, claim)
            undo.callback(os.close, run._metrics)
            # With no checkpoint to go on from, the run starts afresh, and so do its rows.
            run._truncate(math.inf if (run.checkpoints / LAST).exists() else -math.inf)
            write_json(directory / "config.json", config)
            write_json(directory / "environment.json", finite(environment))
            _write_status(directory, "running")
            undo.pop_all()
        return run

    def log(self, *, step: int, tokens: int, seconds: float, **metrics: Any) -> None:
        """Append one row. What is not finite is stored as null and named under "nonfinite". Raises ClaimLost or CannotWrite."""
        if self._claim.lost:
            self._claim.check()
        row = finite({"step": step, "tokens": tokens, "seconds": seconds, **metrics})
        line = memoryview((json.dumps(row, allow_nan=False) + "\n").encode())
        with writing(self.directory / "metrics.jsonl"):
            while line:  # a disk that fills up takes a part of a line before it refuses
                line = line[os.write(self._metrics, line) :]

    def truncate(self, step: int) -> None:
        """Drop the rows after `step`, the step of the checkpoint from which the run goes on (-1: all of them)."""
        with writing(self.directory / "metrics.jsonl"):
            self._truncate(step)

    def finish(self, result: Mapping[str, Any], evaluation: pyarrow.Table | None = None) -> None:
        """Store the evaluation, then the result, which makes the run finished. Raises ClaimLost or CannotWrite."""
        self._claim.check()
        self._refuse_closed()
        if evaluation is not None:
            _write_parquet(self.directory / "evaluation.parquet", evaluation)
        with writing(self.directory / "metrics.jsonl"):
            os.fsync(self._metrics)
        write_json(self.directory / RESULT, finite(result))
        self._close("finished")

    def fail(self, reason: str) -> None:
        """End the run as failed; it runs again when asked for again."""
        self._close("failed", reason)

    def diverged(self, reason: str) -> None:
        """End the run as diverged: an outcome of the experiment, not of the machine."""
        self._close("diverged", reason)

    def interrupted(self, reason: str) -> None:
        """End the run as broken off; it goes on from its last checkpoint when asked for again."""
        self._close("interrupted", reason)

    def __enter__(self) -> RunWriter:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._terminate) or signal.SIG_DFL
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second request must not cut off the answer to the first
        try:
            if not self._closed:
                self._close_after(error)
        except CannotWrite:
            if error is None:
                raise  # else the first error says more, and the full disk is most likely its cause
        finally:
            os.close(self._metrics)
            self._claim.release()
            if self._previous_handler is not None:
                signal.signal(signal.SIGTERM, self._previous_handler)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self.directory} has ended; a run ends once")

    def _close_after(self, error: BaseException | None) -> None:
        if error is None:
            self.fail("ended without a result")
        elif interrupt := _interrupt_behind(error):
            self.interrupted(one_line(interrupt))
        elif not isinstance(error, ClaimLost):  # then the record belongs to another process
            self.fail(one_line(error))
            write_whole(self.directory / "error.txt", "".join(traceback.format_exception(error)))

    def _close(self, status: State, reason: str = "") -> None:
        self._refuse_closed()
        self._closed = True
        _write_status(self.directory, status, reason)

    def _truncate(self, step: int | float) -> None:
        """Cut the metrics before the first row that is torn or later than `step`."""
        with (self.directory / "metrics.jsonl").open("rb") as file:
            end = 0
            for line in file:
                row = _row(line)
                if row is None or row["step"] > step:
                    break
                end += len(line)
        os.ftruncate(self._metrics, end)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a data worker, forked while the handler was in place
            os._exit(128 + number)
        raise Terminated("asked to end (SIGTERM)")


class Unrecorded:
    """Stands for the record of a run in a process that takes part in it and keeps none."""

    def __init__(self, config: Mapping[str, Any]):
        self.directory = Path(config["runs_dir"]) / config["study"] / run_id(config)
        self.checkpoints = self.directory / "checkpoints"

    def log(self, **row: Any) -> None:
        """Nothing: another process writes it."""

    def truncate(self, step: int) -> None:
        """Nothing, likewise."""


def mark(directory: Path, status: State, reason: str) -> None:
    """Note what became of a run whose process could not say so itself. Raises AlreadyFinished, AlreadyClaimed or CannotWrite."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    claim = Claim.acquire(directory)
    try:
        _refuse_finished(directory)
        _write_status(directory, status, reason)
    finally:
        claim.release()


def one_line(error: BaseException) -> str:
    """An error in one line: the first of its message, after its type where that says more."""
    text = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    if isinstance(error, UserError | Terminated) and text:
        return text
    return f"{name}: {text}" if text else name


def _write_status(directory: Path, status: State, reason: str = "") -> None:
    write_json(directory / STATUS, {"status": status, "reason": reason})


def _interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interrupt that led to an error, if one did: Lightning answers it with SystemExit."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _refuse_finished(directory: Path) -> None:
    if is_finished(directory):
        raise AlreadyFinished(f"{directory} is finished; to run it again, remove that folder first")


def _refuse_foreign(directory: Path, config: Mapping[str, Any]) -> None:
    """A directory of that name which holds something else is nobody's to write over."""
    present = read_json(directory / "config.json")
    if present is not None and run_id(present) != run_id(config):
        raise UserError(f"{directory} holds another run's config.json; move that folder away")


def _row(line: bytes) -> dict[str, Any] | None:
    """A row of the metrics; None for what a killed process left of one."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def _write_parquet(path: Path, table: pyarrow.Table) -> None:
    import pyarrow.parquet

    temporary = temporary_beside(path)
    with writing(path):
        try:
            pyarrow.parquet.write_table(table, temporary)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
