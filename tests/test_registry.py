"""The registry: names, near misses, plug-ins that work and plug-ins that do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

import registry
from registry import DuplicateName, Registry, UnknownName, UnknownOption, variants

GOOD = '''
from registry import variants
from variants.contract import Mixer


@variants.register("{name}", time="T", state="1", hooks=(), implementations=("torch",))
class Stranger(Mixer):
    """A stranger's mixer."""
'''


@pytest.fixture(autouse=True)
def forget():
    with variants.scope():
        yield
    registry.unavailable.clear()


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_shipped_names_are_found_without_importing_torch():
    code = "import sys, registry; assert 'full' in registry.variants.names() and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=registry.ROOT)


def test_facts_of_a_shipped_name_are_those_of_its_class():
    for names in (registry.variants, registry.positions, registry.tasks):
        for name in names.names():
            facts = names.entry(name).facts
            cls = names.get(name)
            assert facts and all(getattr(cls, key) == value for key, value in facts.items())


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="Did you mean 'sliding_window'"):
        variants.get("slidng_window")


@pytest.mark.parametrize(
    "names, given", [("variants", {"dim": 8, "heads": 2}), ("positions", {"dim": 8, "heads": 2, "head_dim": 4}), ("tasks", {})]
)
def test_an_unknown_option_is_refused_with_its_owner_and_the_nearest(names, given):
    for name in getattr(registry, names).names():
        with pytest.raises(UnknownOption, match=rf"'{name}' has no option 'windw_size'\."):
            getattr(registry, names).build(name, windw_size=64, **given)
    with pytest.raises(TypeError, match="Did you mean 'window'"):
        variants.build("sliding_window", dim=8, heads=2, windw=64)


def test_a_name_taken_twice_names_both_places(tmp_path):
    with pytest.raises(DuplicateName, match=r"full\.py:\d+ and at .*test_registry\.py:\d+"):

        @variants.register("full")
        class Full:
            pass


def test_a_class_may_be_registered_again_from_its_own_place():
    for _ in range(2):

        @variants.register("again", colour="red")
        class Again:
            """First line.

            More.
            """

    entry = variants.entry("again")
    assert (entry.summary, Again.colour) == ("First line.", "red")  # type: ignore[attr-defined]


def test_a_file_registers_by_path_and_once(tmp_path):
    file = write(tmp_path / "mine.py", GOOD.format(name="mine"))
    registry.load_plugins([file, file])
    assert registry.unavailable == {}
    assert variants.entry("mine").source.startswith(file)


def test_a_module_registers_by_name(tmp_path, monkeypatch):
    write(tmp_path / "stranger_module.py", GOOD.format(name="by_module"))
    monkeypatch.syspath_prepend(tmp_path)
    registry.load_plugins(["stranger_module"])
    assert "by_module" in variants.names()


@pytest.mark.parametrize(
    "error", ["RuntimeError('no driver')", "OSError('libcudart.so.99')", "ImportError('no module')", "KeyError('x')", "SystemExit(0)"]
)
def test_a_plugin_that_fails_leaves_nothing_behind_and_says_why(tmp_path, error):
    file = write(tmp_path / "broken.py", GOOD.format(name="half") + f"\nraise {error}\n")
    good = write(tmp_path / "good.py", GOOD.format(name="good"))
    registry.load_plugins([file, good])
    assert error.partition("(")[0] in registry.unavailable[file]
    assert "half" not in variants.names() and "good" in variants.names()
    with pytest.raises(UnknownName, match=r"broken\.py is unavailable"):
        variants.get("half")


def test_what_a_plugin_prints_stays_off_standard_output(tmp_path, capsys):
    registry.load_plugins([write(tmp_path / "noisy.py", "print('noise')")])
    assert capsys.readouterr() == ("", "noise\n")


def test_a_plugin_that_is_not_there_is_unavailable_and_said_to_be_once(caplog):
    for _ in range(2):
        registry.load_plugins(["/nowhere/at_all.py", "no_such_module_anywhere"])
    assert [record.getMessage() for record in caplog.records].count(
        "plug-in /nowhere/at_all.py is unavailable: FileNotFoundError: no file /nowhere/at_all.py"
    ) == 1
    assert "no file" in registry.unavailable["/nowhere/at_all.py"]
    assert "no_such_module_anywhere" in registry.unavailable


def test_a_plugin_that_takes_a_shipped_name_is_unavailable(tmp_path):
    file = write(tmp_path / "thief.py", GOOD.format(name="full"))
    registry.load_plugins([file])
    assert "registered twice" in registry.unavailable[file]
    assert variants.entry("full").module == "variants.softmax.full"


def test_installed_packages_register_through_an_entry_point(tmp_path):
    write(tmp_path / "offered.py", GOOD.format(name="offered"))
    info = tmp_path / "offered-1.0.dist-info"
    info.mkdir()
    write(info / "METADATA", "Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    write(info / "entry_points.txt", "[attnlab.plugins]\noffered = offered\nbroken = no_such_thing\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import registry as r; print(r.variants.names(), r.unavailable)"
    said = subprocess.run([sys.executable, "-c", code], check=True, cwd=registry.ROOT, capture_output=True, text=True).stdout
    assert "'offered'" in said and "entry point broken = no_such_thing" in said


def test_options_come_from_the_constructor_and_its_bases_with_their_text():
    names = Registry("animals", "no_such_folder")

    class Base:
        """Base.

        Options:
            legs: how many,
                all counted.
        """

        def __init__(self, size, *, legs: int = 4):
            self.legs = legs

    @names.register("dog")
    class Dog(Base):
        """A dog.

        Options:
            bark: how it sounds.
        """

        def __init__(self, size, *, bark: Literal["loud", "soft"] = "loud", **options):
            super().__init__(size, **options)
            self.bark = bark

    described = {option["name"]: (option["default"], option["doc"]) for option in names.describe("dog")["options"]}
    assert described == {"bark": ("loud", "how it sounds."), "legs": (4, "how many, all counted.")}
    assert names.build("dog", size=1, legs=3).legs == 3
    assert names.resolve({"name": "dog", "bark": "soft"}, size=1).bark == "soft"
    with pytest.raises(UnknownOption, match="bark cannot be 'lod'.*Did you mean 'loud'"):
        names.build("dog", size=1, bark="lod")
