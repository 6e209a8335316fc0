"""A run whose rows are split over processes of this machine: the run's own, which keeps the record, and others that follow it.

All of them build the same model, see the same batches and take the same steps. Each has its part of every row (`variants.ops.ranks`); they
exchange what crosses from one part to another, the logits of scored tokens, and gradients. So losses, and what is decided by them, are the
same everywhere, bitwise. A follower ends when the run does, however that went.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from experiments.runs.identity import run_id
from variants.ops.ranks import Processes, Ranks

#: How long followers may take to come to their own end once the run has.
GRACE_SECONDS = 20.0
HOST = "127.0.0.1"


class Follower:
    """Stands for the record of a run in a process that keeps none."""

    def __init__(self, config: Mapping[str, Any]):
        self.directory = Path(config["runs_dir"]) / config["study"] / run_id(config)
        self.checkpoints = self.directory / "checkpoints"

    def log(self, **row: Any) -> None:
        """Nothing: the run's own process writes it."""

    def truncate(self, step: int) -> None:
        """Nothing, likewise."""


@contextlib.contextmanager
def processes(config: Mapping[str, Any]) -> Iterator[Ranks | None]:
    """The ranks that share each row of this run, the first of them here; None where it has all rows to itself.

    Raises RuntimeError, saying what its last words were, where a follower ended before the run.
    """
    size = config["trainer"]["context_parallel"]
    if size == 1:
        yield None
        return
    store = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        followers = [stack.enter_context(_follower(config, rank, store.port)) for rank in range(1, size)]
        try:
            with _joined(config, 0, store) as ranks:
                yield ranks
            for process, _ in followers:
                process.wait(GRACE_SECONDS)
        except Exception as error:
            for rank, (process, said) in enumerate(followers, start=1):
                if process.poll():
                    said.seek(0)
                    last = (said.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                    raise RuntimeError(f"process {rank} of the {size} that share each row has ended: {last}") from error
            raise


def average_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Give every process the mean of all: the gradient of the one loss, to which each has contributed what its own tokens do."""
    if not isinstance(ranks, Processes):
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    together = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    dist.all_reduce(together, group=ranks.group)
    for p, mean in zip(parameters, (together / ranks.size).split([p.numel() for p in parameters]), strict=True):
        assert p.grad is not None
        p.grad.copy_(mean.view_as(p))


@contextlib.contextmanager
def _joined(config: Mapping[str, Any], rank: int, store: dist.Store) -> Iterator[Ranks]:
    """A member of the group, on a device of its own where there are several."""
    on_cuda = config["trainer"]["device"] == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=config["trainer"]["context_parallel"])
    try:
        yield Processes()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _follower(config: Mapping[str, Any], rank: int, port: int) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process that follows, and the file in which its words are; it reads what to do from a pipe, and ends when that is closed."""
    path = os.pathsep.join(sys.path)  # the same modules, wherever they come from
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.parallel"],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            assert process.stdin is not None
            told = {"config": config, "rank": rank, "port": port, "threads": torch.get_num_threads()}
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
            yield process, said
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]


def _follow() -> None:
    """A follower's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the run's own answers it
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_run, name="attnlab run watch", daemon=True).start()
    torch.set_num_threads(told["threads"])
    from experiments import train

    with _joined(told["config"], told["rank"], dist.TCPStore(HOST, told["port"], is_master=False)) as ranks:
        train.follow_job(told["config"], ranks)


def _end_with_run() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _follow()
