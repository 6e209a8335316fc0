"""Runs on this machine: a fresh process each, forked from a server that has the heavy imports behind it, a few at a time.

A process that is killed, raises or exits costs its own run only. When the sweep's process is gone, however it went, its runs end by
themselves.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext

from experiments.runs.files import read_json, writing
from experiments.runs.status import ENDED, STATUS, status_of
from experiments.runs.write import AlreadyClaimed, AlreadyFinished, CannotWrite, mark, one_line
from experiments.sweep.executors import load
from experiments.sweep.job import TARGET, Job, OnEvent, Outcome, Progress, ignore
from registry import UserError

#: Imported once by the fork server: seconds and hundreds of megabytes that no run pays again.
PRELOAD = ("torch", "lightning.pytorch", "pyarrow.parquet", "experiments.train")
#: How long a run may take to put itself in order after it was asked to end.
GRACE_SECONDS = 20.0
#: A run reports its progress at most this often, so that a fast one does not spend its time on it.
REPORT_SECONDS = 0.2
#: Exit code of a run that turned out to be another process's.
ELSEWHERE = os.EX_TEMPFAIL
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def run_local(
    jobs: Sequence[Job],
    *,
    target: str = TARGET,
    processes: int = 2,
    threads: int = 1,
    preload: Sequence[str] = PRELOAD,
    on_event: OnEvent = ignore,
) -> list[Outcome]:
    """Carry out jobs, at most `processes` at once, each with `threads` threads; one outcome a job, in the order they ended.

    A job that another process works on, or ended meanwhile, is not started. KeyboardInterrupt asks the active runs to end, waits for
    them, and is raised again.
    """
    for name, value in (("processes", processes), ("threads", threads)):
        if value < 1:
            raise UserError(f"executor.{name} must be at least 1; got {value}")
    context = _fork_server(preload, threads)
    waiting = deque((job, _words(job)) for job in jobs)
    active: list[_Worker] = []
    outcomes: list[Outcome] = []

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        on_event(outcome)

    try:
        while waiting or active:
            while waiting and len(active) < processes:
                job, words = waiting.popleft()
                elsewhere = _done_elsewhere(job, words)
                if elsewhere is not None:
                    ended(elsewhere)
                    continue
                active.append(_Worker(context, job, words, target, threads))
                on_event(Progress(job, 0, 0, "starting"))
            if active:  # there may be none: the last jobs were others'
                wait([source for worker in active for source in worker.sources])
            for worker in active[:]:
                worker.hand_on(on_event)
                if worker.process.exitcode is not None:
                    active.remove(worker)
                    ended(worker.outcome())
    except BaseException:
        try:
            for worker in active:
                on_event(Progress(worker.job, 0, 0, "ending"))
        finally:
            _stop(active)
        raise
    return outcomes


class _Worker:
    """A run's process, seen from the sweep."""

    def __init__(self, context: ForkServerContext, job: Job, words: object, target: str, threads: int):
        with writing(job.directory):
            job.directory.mkdir(parents=True, exist_ok=True)
        self.job = job
        self._words_before = words
        self._events, theirs = context.Pipe(duplex=False)
        self._open = True
        self._reason = ""
        self.process = context.Process(target=_carry_out, args=(job, target, threads, theirs), name=f"attnlab {job.run_id}")
        self.process.start()
        theirs.close()

    @property
    def sources(self) -> list[Connection | int]:
        """What becomes ready when there is something to hand on, or the process has ended."""
        return [self._events, self.process.sentinel] if self._open else [self.process.sentinel]

    def hand_on(self, on_event: OnEvent) -> None:
        """Pass on the progress that has arrived."""
        try:
            while self._open and self._events.poll():
                message = self._events.recv()
                if isinstance(message, str):
                    self._reason = message
                else:
                    on_event(Progress(self.job, *message))
        except (EOFError, OSError):  # the process has ended, perhaps in the middle of a message
            self._open = False
            self._events.close()

    def outcome(self) -> Outcome:
        """What became of the run: what its record says if it got that far, else how its process ended, which is then recorded."""
        self.hand_on(ignore)
        code = self.process.exitcode
        status = status_of(self.job.directory)
        words = _words(self.job)
        its_own = words != self._words_before and words is not None and words[1] in ENDED
        if status.status in ("finished", "running") or its_own:
            return Outcome(self.job, status.status, status.reason)
        if code == ELSEWHERE:  # and left again just now: the sweep looks once more
            return Outcome(self.job, "running")
        assert code is not None
        if code < 0:
            outcome = Outcome(self.job, "interrupted", f"its process was ended by {signal.Signals(-code).name}")
        else:
            outcome = Outcome(self.job, "failed", self._reason or (f"exited with code {code}" if code else "ended without a result"))
        # Another sweep may have taken it up already; a full disk cannot note that it is full.
        with contextlib.suppress(AlreadyClaimed, AlreadyFinished, CannotWrite):
            mark(self.job.directory, outcome.status, outcome.reason)
        return outcome


def _words(job: Job) -> tuple[int, str] | None:
    """What the run's record says, and when it was said."""
    path = job.directory / STATUS
    try:
        when = path.stat().st_mtime_ns
    except OSError:
        return None
    return when, (read_json(path) or {}).get("status", "")


def _done_elsewhere(job: Job, words_before: object) -> Outcome | None:
    """What another process made of the job since it was planned; None if it is ours to carry out."""
    status = status_of(job.directory)
    new = status.status in ("failed", "diverged") and _words(job) != words_before
    return Outcome(job, status.status, status.reason) if new or status.status in ("finished", "running") else None


def _stop(workers: Sequence[_Worker]) -> None:
    """Ask the runs to end, wait for it, and end those that do not. A second interrupt shortens the waiting."""
    for worker in workers:
        worker.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for worker in workers:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
            worker.outcome()


def _fork_server(preload: Sequence[str], threads: int) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with _environment(dict.fromkeys(THREADS, str(threads))):  # OpenMP reads it when torch is loaded
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# From here on: inside the run's process.


def _carry_out(job: Job, target: str, threads: int, events: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the sweep's answer to it is SIGTERM
    _write_output_to(job)
    _end_with_parent()
    _pin(threads)
    try:
        load(target)(job.config, _reporter(events))
    except (AlreadyClaimed, AlreadyFinished) as error:
        print(error, flush=True)
        sys.exit(ELSEWHERE)
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            events.send(one_line(error))
        sys.exit(1)


def _write_output_to(job: Job) -> None:
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a killed run's last words count most
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {job.label}", flush=True)


def _end_with_parent() -> None:
    """End this run when the sweep is gone, even by SIGKILL: politely first, so that the record says "interrupted"."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="attnlab parent watch", daemon=True).start()


def _pin(threads: int) -> None:
    """Hold the run to its threads, also where the fork server was started for another number."""
    os.environ.update(dict.fromkeys(THREADS, str(threads)))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def _reporter(events: Connection) -> Callable[[int, int, str], None]:
    last = 0.0

    def report(step: int, total: int, text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= REPORT_SECONDS or step == total:
            last = now
            with contextlib.suppress(OSError):  # the sweep is gone; the watch ends this run
                events.send((step, total, text))

    return report
