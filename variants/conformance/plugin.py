"""`pytest --conformance NAME`: the checks of a variant among the tests of any project, without a test file.

pytest loads this module at every start; torch is imported when a variant is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import registry
from registry import UserError


def pytest_addoption(parser: pytest.Parser) -> None:
    """The three options."""
    group = parser.getgroup("attnlab", "conformance of attention variants")
    group.addoption("--conformance", metavar="NAME", action="append", default=[], help="check a registered variant (repeatable)")
    group.addoption(
        "--conformance-plugin", metavar="FILE", action="append", default=[], help="file or module that registers variants (repeatable)"
    )
    group.addoption("--conformance-fast", action="store_true", help="fewer lengths, small blocks")


def pytest_configure(config: pytest.Config) -> None:
    """Load the plug-ins and find the variants named. `-m conformance` runs the checks alone.

    Raises UsageError for a plug-in that cannot be imported and for a variant that nobody registered or that cannot be built: here, since
    under xdist what the workers raise reads like a crash.
    """
    config.addinivalue_line("markers", "conformance: a property of an attention variant, added by --conformance")
    sources = [_from(config.invocation_params.dir, source) for source in config.getoption("--conformance-plugin")]
    registry.load_plugins(sources)
    for source in sources:
        if source in registry.unavailable:
            raise pytest.UsageError(f"--conformance-plugin {source}: {registry.unavailable[source]}")
    for name in config.getoption("--conformance"):
        try:
            _forms(name, config)
        except UserError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose among the items
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """One item for each property of each variant named."""
    for name in config.getoption("--conformance"):
        items.extend(Variant.from_parent(session, name=name, nodeid=f"conformance::{name}").collect())


class Variant(pytest.Collector):
    """A variant named by --conformance."""

    def collect(self) -> Iterator[Property]:
        """An item for each property."""
        from variants.conformance.checks import PROPERTIES

        forms = _forms(self.name, self.config)
        for judged in PROPERTIES:
            yield Property.from_parent(self, name=judged.__name__, judged=judged, forms=forms)


class Property(pytest.Item):
    """A property of a variant."""

    def __init__(self, *, judged: Any, forms: Any, **given: Any):
        super().__init__(**given)
        self.judged, self.forms = judged, forms
        self.add_marker("conformance")

    def runtest(self) -> None:
        """Pass, skip with the reason, or fail with the counter-example."""
        from variants.conformance.run import judge

        outcome = judge(self.judged, self.forms)
        if outcome.status == "not applicable":
            pytest.skip(outcome.detail)
        if outcome.status == "failed":
            pytest.fail(outcome.detail, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where it is said to come from: no file of the project."""
        return self.path, None, self.nodeid


def _forms(name: str, config: pytest.Config) -> Any:
    from variants.conformance.run import subjects_of

    return subjects_of(name, {}, fast=config.getoption("--conformance-fast"))


def _from(folder: Path, source: str) -> str:
    """A file as seen from the folder in which pytest was started; a module as it is."""
    return str(folder / source) if source.endswith(".py") else source
