"""What all tests share. Property tests run the same examples every time, and may be slow on their first."""

from __future__ import annotations

import signal

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
