"""What all tests share. Property tests run the same examples every time, and may be slow on their first."""

from __future__ import annotations

import signal
import sys
from types import ModuleType

import jaxtyping
import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("repeatable")

# A suite that is started in the background has the interrupt ignored, and so would have every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def unchecked():
    """What torch traces must be free of checks of types."""
    checks = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", checks)


#: What has been imported of mamba_ssm.
_mamba_ssm: dict[str, ModuleType] = {}


@pytest.fixture
def mamba_ssm(monkeypatch):
    """A function that imports a module of mamba_ssm, whose compiled parts, which need CUDA, are put there empty.

    Afterwards it is gone: transformers would take its kernels.
    """
    for part in ("selective_scan_cuda", "causal_conv1d_cuda"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    sys.modules.update(_mamba_ssm)
    yield lambda module: pytest.importorskip(f"mamba_ssm.{module}", exc_type=ImportError)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        _mamba_ssm[name] = sys.modules.pop(name)
