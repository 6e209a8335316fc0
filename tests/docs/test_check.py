"""docs/check.md: it names every property, and its wrong variant fails as shown."""

from __future__ import annotations

import contextlib
import re

from typer.testing import CliRunner

import registry
from experiments.cli import app
from variants.conformance.checks import PROPERTIES, sentence

TEXT = (registry.ROOT / "docs" / "check.md").read_text()


def test_every_property_is_described_in_the_order_of_the_report():
    table = TEXT.partition("## The properties\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|`]+) \| [^|]+ \|$", table, flags=re.MULTILINE)
    assert rows[0] == "property"
    assert rows[1:] == [sentence(judged) for judged in PROPERTIES]


def test_the_wrong_variant_fails_as_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "shift.py").write_text(re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)[0])
    with contextlib.chdir(tmp_path):
        done = CliRunner().invoke(app, ["check", "shift", "--plugin", "shift.py", "--fast"])
    assert done.exit_code == 1, done.stderr
    shown = re.findall(r"```text\n(.*?)```", TEXT, flags=re.DOTALL)[0]
    said = iter([line.rstrip() for line in done.stdout.splitlines()])
    missing = [line for line in shown.splitlines() if line != "..." and line not in said]
    assert not missing, "paste what the check says now"
