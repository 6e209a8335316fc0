"""Which implementation runs, and what is said of those that cannot."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from registry import variants
from variants import implementations
from variants.implementations import NotUsable, choose, usable


@pytest.fixture(autouse=True)
def asked_afresh():
    """Answers and announcements are remembered for the process."""
    implementations._import_error.cache_clear()
    implementations._announce.cache_clear()
    yield
    implementations._import_error.cache_clear()


@pytest.fixture
def broken_package(tmp_path, monkeypatch):
    """A flash_attn whose import runs the given line, where there is a CUDA device."""
    monkeypatch.setattr(implementations, "_cuda", lambda: True)

    def write(line: str) -> None:
        (tmp_path / "flash_attn.py").write_text(line)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "flash_attn", raising=False)

    yield write
    sys.modules.pop("flash_attn", None)


@pytest.fixture
def blocked_package(monkeypatch):
    """A machine without flash_attn."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)


@pytest.mark.parametrize("name", ["reference", "torch", "sdpa"])
def test_what_needs_torch_alone_is_always_usable(name) -> None:
    assert usable(name) is None


def test_a_missing_package_is_named_with_the_extra_that_installs_it(blocked_package) -> None:
    assert usable("flash_attn") == "not installed: pip install 'attnlab[cuda]'"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("raise RuntimeError('no driver')", "unavailable: no driver"),
        ("raise OSError('libcudart.so.12: cannot open')", "unavailable: libcudart.so.12: cannot open"),
        ("raise ImportError('undefined symbol')", "unavailable: undefined symbol"),
        ("import a_module_it_needs", "unavailable: No module named 'a_module_it_needs'"),
        ("raise SystemExit", "unavailable: SystemExit"),
        ("raise AssertionError", "unavailable: AssertionError"),
    ],
)
def test_a_package_that_breaks_on_import_is_unavailable_and_breaks_nothing(broken_package, line, reason) -> None:
    broken_package(line)
    assert usable("flash_attn") == reason
    assert choose("Broken", "auto", ("flash_attn", "sdpa")) == "sdpa"


def test_a_package_that_imports_still_needs_its_device(broken_package) -> None:
    broken_package("")
    assert usable("flash_attn", "cpu") == "runs on cuda, not on cpu"


def test_auto_takes_the_first_that_is_usable_and_says_so_once(blocked_package, caplog) -> None:
    with caplog.at_level(logging.INFO):
        picked = [choose("Mixer", "auto", ("flash_attn", "sdpa", "reference")) for _ in range(3)]
    assert picked == ["sdpa"] * 3
    assert caplog.messages == ["Mixer runs 'sdpa'; flash_attn is not usable: not installed: pip install 'attnlab[cuda]'"]


def test_a_name_that_is_not_usable_stops_with_package_extra_and_alternative(blocked_package) -> None:
    with pytest.raises(
        NotUsable, match=r"impl='flash_attn' is not usable: not installed: .*attnlab\[cuda\].*; use impl='sdpa' or impl='auto'"
    ):
        choose("Mixer", "flash_attn", ("flash_attn", "sdpa"))


def test_options_may_rule_a_candidate_out() -> None:
    assert choose("Mixer", "auto", ("sdpa", "reference"), excluded={"sdpa": "of dropout"}) == "reference"
    with pytest.raises(NotUsable, match="impl='sdpa' is not usable: of dropout; use impl='reference'"):
        choose("Mixer", "sdpa", ("sdpa", "reference"), excluded={"sdpa": "of dropout"})


def test_when_nothing_is_usable_every_reason_is_given(blocked_package) -> None:
    with pytest.raises(NotUsable, match="flash_attn: not installed"):
        choose("Mixer", "auto", ("flash_attn",))


@pytest.mark.parametrize("name", ["full", "mqa", "gqa", "sliding_window", "linear"])
def test_a_mixer_shows_what_it_runs_and_refuses_what_it_has_not(name) -> None:
    fastest, *_ = (impl for impl in variants.entry(name).facts["implementations"] if usable(impl) is None)
    assert variants.build(name, dim=8, heads=2).implementation == fastest
    assert variants.build(name, dim=8, heads=2, impl="reference").implementation == "reference"
    with pytest.raises(NotUsable, match=r"has no implementation 'referense'. Did you mean 'reference'\?"):
        variants.build(name, dim=8, heads=2, impl="referense")


def test_asking_imports_no_torch() -> None:
    code = "import sys, variants.implementations as i; i.usable('sdpa'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
