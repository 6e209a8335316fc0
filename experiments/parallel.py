"""Processes of this machine that share rows: the caller's own, and others that follow it.

Each has its part of every row (`variants.ops.ranks`). In a run all of them build the same model, see the same batches and take the same
steps; they exchange what crosses from one part to another, the logits of scored tokens, and gradients. So losses, and what is decided by
them, are the same everywhere, bitwise, and only the first keeps a record. A follower ends when the caller does, however that went.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from experiments.sweep.executors import load
from variants.ops.ranks import Processes, Ranks

#: How long followers may take to come to their own end once the caller has.
GRACE_SECONDS = 20.0
#: How long one that has left the exchange may take to be gone: Python puts itself in order first.
LAST_SECONDS = 10.0
HOST = "127.0.0.1"


@contextlib.contextmanager
def processes(size: int, target: str, told: Any, *, device: str = "cpu") -> Iterator[Ranks | None]:
    """The ranks that share each row, the first of them here; None for a `size` of 1, where one has all of them to itself.

    target: "module:function", which the others call with (told, ranks). told: what JSON can hold. device: its type; on cuda each process
    has one of its own. Raises RuntimeError, with its last words, where one ended before the caller.
    """
    if size == 1:
        yield None
        return
    store = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        common = {"target": target, "told": told, "size": size, "device": device, "port": store.port, "threads": torch.get_num_threads()}
        followers = [stack.enter_context(_follower({**common, "rank": rank})) for rank in range(1, size)]
        stack.enter_context(_interruptible([process for process, _ in followers]))
        with _named(followers):
            _await(store, followers)
        with _joined(0, size, device, store) as ranks, _named(followers):
            yield ranks
        for process, _ in followers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # what the caller has made is made
                process.wait(GRACE_SECONDS)


@contextlib.contextmanager
def _interruptible(followers: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """End the followers as soon as this process is asked to end: it may wait for one that has stopped, where no handler of its is run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(heard, 1):
            if before != -1:  # whoever listened before goes on to hear
                os.write(before, number)
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                for process in followers:
                    process.kill()

    watching = threading.Thread(target=watch, name="attnlab signal watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)
        watching.join()
        os.close(heard)


@contextlib.contextmanager
def _named(followers: Sequence[tuple[subprocess.Popen[str], IO[str]]]) -> Iterator[None]:
    """Say of an exchange that failed which follower is gone; an error of the caller's own stays what it is."""
    try:
        yield
    except RuntimeError as error:
        reason = _first_to_end(followers)
        if reason is None:
            raise
        raise RuntimeError(f"of the {len(followers) + 1} processes that share each row {reason}") from error


def _first_to_end(followers: Sequence[tuple[subprocess.Popen[str], IO[str]]]) -> str | None:
    """Which follower has ended and how; None if all go on. One that was killed comes first: the others' words are of its absence."""
    deadline = time.monotonic() + LAST_SECONDS
    while all(process.poll() is None for process, _ in followers) and time.monotonic() < deadline:
        time.sleep(0.02)
    gone = [(process.returncode, rank, said) for rank, (process, said) in enumerate(followers, start=1) if process.poll() is not None]
    if not gone:
        return None
    code, rank, said = min(gone, key=lambda one: (one[0] > 0, one[0]))
    if code < 0:
        return f"number {rank} was ended by {signal.Signals(-code).name}"
    said.seek(0)
    words = said.read().strip().splitlines()
    return f"number {rank} ended: {words[-1] if words and code else f'exit code {code}'}"


def _await(store: dist.Store, followers: Sequence[tuple[subprocess.Popen[str], IO[str]]]) -> None:
    """Wait until all are there. Raises RuntimeError where one has ended before: to join without it would take half an hour to fail."""
    for rank, (process, _) in enumerate(followers, start=1):
        while not store.check([_there(rank)]):
            if process.poll() is not None:
                raise RuntimeError("a process did not start")
            time.sleep(0.02)


def _there(rank: int) -> str:
    return f"there/{rank}"


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
def _joined(rank: int, size: int, device: str, store: dist.Store) -> Iterator[Ranks]:
    """A member of the group."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    try:
        yield Processes()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _follower(told: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process that follows, and the file in which its words are; it reads what to do from a pipe, and ends when that is closed."""
    path = os.pathsep.join(sys.path)  # the same modules, wherever they come from
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "experiments.parallel"],  # -P: nothing from the folder that it happens to be in
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
            yield process, said
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _follow() -> None:
    """A follower's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the caller answers it
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_caller, name="attnlab caller watch", daemon=True).start()
    torch.set_num_threads(told["threads"])
    store = dist.TCPStore(HOST, told["port"], is_master=False)
    target = load(told["target"])
    store.set(_there(told["rank"]), "")
    with _joined(told["rank"], told["size"], told["device"], store) as ranks:
        target(told["told"], ranks)


def _end_with_caller() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _follow()
