"""What the documents say is true: their commands run, their tables are the registry's, their variant works."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import registry
from experiments.cli import app

DOCUMENTS = [registry.ROOT / "README.md", *sorted((registry.ROOT / "docs").glob("*.md"))]
SMALL = [
    *("model.dim=16", "model.layers=1", "task.length=32", "task.pairs=2", "trainer.steps=2", "trainer.batch_size=2"),
    *("trainer.validation_sequences=2", "evaluation.sequences=2", "evaluation.multiples=[1]"),
]
EXTENSION = [
    *("seed=0", "position=rope,pi", "trainer.steps=0", "parent=['position=rope','trainer.steps=2']", "trainer.batch_size=2"),
    *("trainer.validation_sequences=2", "evaluation.sequences=2"),
]
#: Commands that each have a test of their own.
ELSEWHERE = ("make ", "source ", "pip ", "attnlab bench")


def commands() -> list[str]:
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```bash\n(.*?)```", document.read_text(), flags=re.DOTALL):
            found += [line.partition(" #")[0].strip() for line in block.splitlines() if line.strip()]
    return [command for command in dict.fromkeys(found) if not command.startswith(ELSEWHERE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the documents speak of: the leaky variant and a finished quickstart."""
    path = tmp_path_factory.mktemp("documents")
    text = (registry.ROOT / "docs" / "add-a-variant.md").read_text()
    for name, block in zip(("leaky.py", "slope.py"), re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL), strict=True):
        (path / name).write_text(block)
    run("attnlab sweep experiment=quickstart", path)
    return path


def run(command: str, cwd: Path) -> str:
    """A documented command; what trains is made small by further overrides."""
    program, *words = shlex.split(command)
    assert program == "attnlab", command
    if "experiment=context_extension" in words:
        words += EXTENSION
    elif words[0] in ("train", "sweep") and "--dry-run" not in words:
        given = {word.partition("=")[0] for word in words}
        paired = not {"task=passkey", "experiment=state_tracking", "experiment=sparse_recall"} & set(words)
        words += [word for word in SMALL if word.partition("=")[0] not in given and (paired or not word.startswith("task.pairs"))]
        if any(word.startswith("experiment=") for word in words):
            words += ["seed=0"]
    if words[0] == "check":
        words.append("--fast")
    if words[0] == "bench":
        words += ["--repeats", "1"]
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{done.exception!r}"
    return done.stdout


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_runs(command, folder):
    assert run(command.replace("...", ""), folder)


def test_the_documented_variant_passes_every_check(folder):
    found = json.loads(run("attnlab check leaky --plugin leaky.py --json", folder))
    assert {row["status"] for row in found["properties"]} <= {"passed", "not applicable"}
    assert sum(row["status"] == "passed" for row in found["properties"]) >= 8


def test_the_tables_of_the_readme_are_the_registry():
    text = (registry.ROOT / "README.md").read_text()
    shown = text.partition("<!-- names: attnlab list --markdown -->\n")[2].partition("\n<!-- end of names -->")[0]
    command = [sys.executable, "-m", "experiments.cli", "list", "--markdown"]  # anew: this process knows plug-ins by now
    listed = subprocess.run(command, cwd=registry.ROOT, capture_output=True, text=True, check=True).stdout
    assert shown == listed.rstrip("\n"), "paste the output of `attnlab list --markdown`"


def test_links_and_pictures_of_the_documents_are_there():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
