"""What all tests share."""

from __future__ import annotations

import signal

# A suite that is started in the background has the interrupt ignored, and so would have every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
