"""What this machine can do at best, so that a time can be read as a share of a limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def machine(repeats: int = 5) -> dict[str, Any]:
    """matmul_flops: floating-point operations a second of a large fp32 product; copy_bytes: bytes a second read and written."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source = torch.randn(1 << 24)
    target = torch.empty_like(source)
    return {
        "matmul_flops": 2 * 1024**3 / median_seconds(lambda: a @ b, repeats),
        "copy_bytes": 2 * source.numel() * source.element_size() / median_seconds(lambda: target.copy_(source), repeats),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of `work`, after one call that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
