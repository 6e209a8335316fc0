"""`attnlab bench`: rows in one stable form, whatever is timed."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from experiments.bench import training_step
from experiments.bench.machine import machine
from registry import UserError, nearest

#: What can be timed at each level: a generator of candidates with `repeats` rounds.
LEVELS: dict[str, tuple[str, Callable[..., Any]]] = {"model": ("train", training_step.candidates)}


def bench(level: str, *, repeats: int, threads: int, report: Callable[[Any], None] | None) -> None:
    """Time a level and show it. Raises UserError for a level that there is not."""
    if level not in LEVELS:
        raise UserError(f"--level cannot be {level!r}.{nearest(level, LEVELS)}")
    if repeats < 1 or threads < 1:
        raise UserError(f"--repeats and --threads must be at least 1; got {repeats} and {threads}")
    torch.set_num_threads(threads)
    limits = machine()
    mode, timed = LEVELS[level]
    rows = [row(candidate, mode, level, limits) for candidate in timed(repeats)]
    document = {"machine": limits, "rows": rows, "exponents": []}
    report(document) if report else show(document)


def row(candidate: dict[str, Any], mode: str, level: str, limits: dict[str, Any]) -> dict[str, Any]:
    """seconds: median of a step; spread: interquartile range; share_of_limit: least time for its products over time taken."""
    seconds = statistics.median(candidate["seconds"])
    quartiles = statistics.quantiles(candidate["seconds"], n=4) if len(candidate["seconds"]) > 1 else [seconds] * 3
    return {
        "candidate": candidate["candidate"],
        "peer": candidate["peer"],
        "mode": mode,
        "level": level,
        "length": candidate["length"],
        "seconds": seconds,
        "spread": quartiles[2] - quartiles[0],
        "tokens_per_second": candidate["tokens"] / seconds,
        "share_of_limit": candidate["flops"] / limits["matmul_flops"] / seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "state_bytes": candidate["state_bytes"],
    }


def show(document: dict[str, Any]) -> None:
    """Rows, each beside its ratio to the slowest of its length."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("candidate", "length", "ms", "spread", "tokens/s", "of limit", "faster"):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    for entry in document["rows"]:
        slowest = max(other["seconds"] for other in document["rows"] if other["length"] == entry["length"])
        table.add_row(
            entry["candidate"],
            str(entry["length"]),
            f"{1e3 * entry['seconds']:.1f}",
            f"{1e3 * entry['spread']:.1f}",
            f"{entry['tokens_per_second']:,.0f}",
            f"{entry['share_of_limit']:.0%}",
            f"{slowest / entry['seconds']:.1f}x",
        )
    console = Console()
    console.print(table)
    limits = document["machine"]
    console.print(f"{limits['threads']} threads, {limits['matmul_flops'] / 1e9:.0f} GFLOP/s, copy {limits['copy_bytes'] / 1e9:.1f} GB/s")
