"""The checks as pytest cases. A test file that judges a variant is four lines:

import pytest
from variants.conformance import pytest_cases
@pytest.mark.parametrize("conforms", pytest_cases(["my_variant"]))
def test_my_variant(conforms): conforms()
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from registry import variants
from variants.conformance.checks import PROPERTIES, Property, sentence
from variants.conformance.run import judge, subjects_of


def pytest_cases(names: Iterable[str] | None = None, *, fast: bool = True, **options: Any) -> list[Any]:
    """A `pytest.param` for each property of each variant (default: of all): a function that returns, fails or skips.

    options: arguments for `variants.build`, the same for every variant named.
    """
    import pytest

    return [
        pytest.param(partial(_conforms, name, judged, fast, options), id=f"{name}: {sentence(judged)}")
        for name in (variants.names() if names is None else names)
        for judged in PROPERTIES
    ]


def _conforms(name: str, judged: Property, fast: bool, options: dict[str, Any]) -> None:
    import pytest

    outcome = judge(judged, subjects_of(name, options, fast=fast))
    if outcome.status == "not applicable":
        pytest.skip(outcome.detail)
    assert outcome.status == "passed", outcome.detail
