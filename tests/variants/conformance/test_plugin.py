"""`pytest --conformance` in a project of someone else's: no test file, an item a property, counter-examples without a trace."""

from __future__ import annotations

import pytest

from variants.conformance.checks import PROPERTIES

pytest_plugins = ["pytester"]

MINE = """
import torch
from torch import nn
from registry import variants
from variants.contract import Mixer

@variants.register("mine", time="T", state="1")
class Mine(Mixer):
    def __init__(self, dim, heads, position=None, **options):
        super().__init__(dim, heads, position, **options)
        self.out = nn.Linear(dim, dim)

    def mix(self, x, context, state):
        return self.out(x), {}, {}

    def init_parts(self, batch, **like):
        return {}

    def flops(self, time):
        return 2 * time * self.dim**2

    def state_elements(self, time):
        return 1
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder with a test and a variant, outside of this project and its settings."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(test_theirs="def test_theirs(): pass", mine=MINE)
    return pytester


def run(project, *words):
    return project.runpytest_subprocess("-p", "no:xdist", "-p", "no:cacheprovider", *words)


def test_one_item_a_property_joins_the_tests_of_the_project(project):
    listed = run(project, "--collect-only", "-q", "--conformance", "mine", "--conformance-plugin", "mine.py", "--conformance", "full")
    items = [f"conformance::{name}::{judged.__name__}" for name in ("mine", "full") for judged in PROPERTIES]
    assert [line for line in listed.outlines if "::" in line] == ["test_theirs.py::test_theirs", *items]


def test_a_failure_shows_its_counter_example_and_no_trace(project):
    words = ("--conformance", "mine", "--conformance-plugin", "mine.py", "--conformance-fast", "-m", "conformance")
    done = run(project, *words, "-k", "declared_size or shape_and_dtype or position_scheme or positions", "-rs")
    done.assert_outcomes(passed=1, failed=1, skipped=1, deselected=len(PROPERTIES) - 2)
    done.stdout.fnmatch_lines(
        ["as given: after 1 tokens a row's state has 0 elements; state_elements(1) says 1", "*it has no position scheme"]
    )
    assert "Error" not in done.stdout.str() and "conformance/run.py" not in done.stdout.str()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--conformance", "mien", "--conformance-plugin", "mine.py"], "ERROR: no variant is named 'mien'. Did you mean 'mine'?*"),
        (["--conformance", "mine", "--conformance-plugin", "yours.py"], "ERROR: --conformance-plugin *yours.py: FileNotFoundError: *"),
    ],
)
def test_a_mistake_is_answered_before_anything_runs(project, words, said):
    done = run(project, *words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([said])
    assert "test_theirs" not in done.stdout.str()


def test_without_the_option_pytest_starts_without_torch(project):
    project.makeconftest(
        "import sys\ndef pytest_unconfigure():\n    assert 'variants.conformance.plugin' in sys.modules and 'torch' not in sys.modules"
    )
    done = run(project)
    done.assert_outcomes(passed=1)
    assert done.ret == 0, done.stderr.str()
