"""`attnlab bench`: rows in one stable form, whatever is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from experiments.bench import core, layer, training_step
from experiments.bench.candidate import Notes, Timing
from experiments.bench.machine import machine
from experiments.bench.rows import exponents, growths, rows, show
from experiments.bench.sizes import Sizes
from registry import UserError, nearest
from variants.ops.precision import flushed_denormals

#: What can be timed at each level: a room with MODES and `run`.
LEVELS: dict[str, ModuleType] = {"core": core, "layer": layer, "model": training_step}


def bench(
    level: str,
    *,
    only: Sequence[str],
    mode: str | None,
    lengths: str | None,
    sizes: dict[str, int],
    repeats: int | None,
    threads: int,
    report: Callable[[Any], None] | None,
) -> None:
    """Time a level and show it; leave with 1 if a candidate computed something else. Raises UserError for words that mean nothing."""
    if level not in LEVELS:
        raise UserError(f"--level cannot be {level!r}.{nearest(level, LEVELS)}")
    room = LEVELS[level]
    if mode is not None and mode not in room.MODES:
        raise UserError(f"--mode cannot be {mode!r} at {level} level.{nearest(mode, room.MODES)}")
    if threads < 1 or (repeats is not None and repeats < 1):
        raise UserError(f"--repeats and --threads must be at least 1; got {repeats} and {threads}")
    if sizes.get("processes", 1) != 1 and level != "layer":
        raise UserError(f"--processes shares the rows of layers: use it with --level layer, not with --level {level}")
    chosen, names, at = Sizes(**sizes), split(only), parse_lengths(lengths)
    torch.set_num_threads(threads)
    notes = Notes()
    with flushed_denormals():  # as training does
        found = list(room.run(chosen, names, [mode] if mode else room.MODES, at, repeats, notes))
        limits = machine()  # last, because a mistake in the words shows when a room begins
    timings = [entry for entry in found if isinstance(entry, Timing)]
    document = {"machine": limits, "rows": rows(timings, limits), "exponents": exponents([*growths(timings), *found])}
    report(document) if report else show(document)
    if notes.wrong:
        sys.exit(1)


def split(words: Sequence[str]) -> list[str]:
    """Names given one by one or comma separated."""
    return [name.strip() for word in words for name in word.split(",") if name.strip()]


def parse_lengths(text: str | None) -> list[int]:
    """ "512,2048" as numbers. Raises UserError."""
    words = split([text or ""])
    try:
        lengths = [int(word) for word in words]
    except ValueError:
        raise UserError(f"--lengths takes whole numbers, comma separated, such as 512,2048; got {text!r}") from None
    if any(length < 1 for length in lengths):
        raise UserError(f"--lengths must be at least 1; got {text!r}")
    return lengths
