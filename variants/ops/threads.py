"""Compiled loops spread over torch's own threads.

Between its parallel operations OpenMP's threads spin for milliseconds, waiting for the next one: threads of another kind have to share the
cores with them (a forward and a backward scan of 20 ms took 32). So the loops run in the team of threads that torch runs its operations
in. Where torch brings no OpenMP that can be asked for it, threads are started for each call.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: What OpenMP calls in each of its threads.
Part = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def spread(loop: Callable[[int, int], None], tasks: int, *, parallel: bool = True) -> None:
    """Call loop(first, end) on consecutive parts of `tasks` tasks, in as many threads as torch uses, or in this one alone.

    The loop must let go of Python's lock. What it raises is raised here.
    """
    threads = min(tasks, torch.get_num_threads()) if parallel else 1
    if threads < 2:
        loop(0, tasks)
        return
    borders = [tasks * n // threads for n in range(threads + 1)]
    parts = itertools.pairwise(borders)
    errors: list[BaseException] = []

    def work(_: object = None) -> None:
        part = next(parts, None)
        while part is not None:  # a team may be smaller than was asked for
            try:
                loop(*part)
            except BaseException as error:
                errors.append(error)
            part = next(parts, None)

    team = _team()
    if team is not None:
        team(Part(work), None, threads, 0)
    else:
        others = [threading.Thread(target=work) for _ in range(threads - 1)]
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()
    if errors:
        raise errors[0]


@functools.cache
def _team() -> Callable[..., Any] | None:
    """OpenMP's entry `GOMP_parallel(function, data, threads, flags)` in the library that torch has loaded, if it has one."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        entry = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    entry.argtypes, entry.restype = (Part, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    found: Callable[..., Any] = entry
    return found
