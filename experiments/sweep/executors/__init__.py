"""Executors by name: where a sweep's runs are carried out.

An executor is a function (jobs, *, target, on_event, **options) -> list[Outcome], one outcome a job. `target` names the function that
carries out one run, "module:function" of (config, on_progress); options are the keys of the config's `executor` group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from experiments.sweep.job import Outcome
from registry import UserError, nearest

#: The name on the command line -> where the function is, imported when it is chosen.
EXECUTORS = {"local": "experiments.sweep.executors.local:run_local"}


def find(name: str) -> Callable[..., list[Outcome]]:
    """The executor called `name`; raises UserError with the nearest valid name."""
    if name not in EXECUTORS:
        raise UserError(f"no executor is named {name!r}.{nearest(name, EXECUTORS)}")
    return load(EXECUTORS[name])


def load(where: str) -> Callable[..., Any]:
    """The function at "module:function"."""
    module, _, function = where.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded
