"""What makes a registered variant trustworthy, checked from outside: `check(name)`, and `pytest_cases(names)` for test files."""

from variants.conformance.cases import pytest_cases
from variants.conformance.run import Outcome, as_json, check

__all__ = ["Outcome", "as_json", "check", "pytest_cases"]
