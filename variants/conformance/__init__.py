"""What makes a registered variant trustworthy, checked from outside: `check(name)`, `pytest_cases(names)` for test files, and
`pytest --conformance NAME` without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from variants.conformance.cases import pytest_cases
    from variants.conformance.run import Outcome, as_json, check

__all__ = ["Outcome", "as_json", "check", "pytest_cases"]


def __getattr__(name: str) -> Any:
    # Not imported with the package: pytest loads `plugin` at every start, wherever attnlab is installed, and torch takes seconds.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from variants.conformance import cases, run

    return getattr(cases if name == "pytest_cases" else run, name)
