"""Which run a config stands for: configs that must give the same result share one identifier, whatever machine and folder they ran in."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from registry import UserError

#: Top-level keys that say where and how a run is carried out and what else is told of it, not what it computes.
NOT_IDENTITY = ("study", "runs_dir", "logger", "executor", "plugins")


def canonical(config: Mapping[str, Any]) -> str:
    """The one spelling of a config: strict JSON, keys sorted, no spaces, a number with a whole value as an integer.

    Raises UserError, naming the dotted key, for NaN, infinities and what JSON has no word for.
    """
    return json.dumps(_plain(config, ""), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def run_id(config: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits, the same for every spelling and order of the same experiment."""
    kept = {key: value for key, value in config.items() if key not in NOT_IDENTITY}
    return hashlib.sha256(canonical(kept).encode()).hexdigest()[:12]


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise UserError(f"config {key or 'root'}: keys must be text; got {name!r}")
        return {name: _plain(item, f"{key}.{name}" if key else name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}.{i}") for i, item in enumerate(value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"config {key}: a setting must be a finite number; got {value}")
        # 1.0, 1 and 1e0 are one setting; so are 0.0 and -0.0.
        return int(value) if value.is_integer() else value
    if value is None or isinstance(value, str | bool | int):
        return value
    raise UserError(f"config {key}: {type(value).__name__} is not a plain value (text, number, true or false, null, list, mapping)")
