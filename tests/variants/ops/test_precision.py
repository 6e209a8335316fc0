"""What keeps its precision, and what does without."""

from __future__ import annotations

import torch

from variants.ops.precision import flushed_denormals, flushes_denormals, without_autocast


def test_denormals_count_as_zero_inside_and_as_themselves_again_outside() -> None:
    with flushed_denormals():
        assert flushes_denormals()
        with flushed_denormals():
            pass
        assert flushes_denormals()
    assert not flushes_denormals()


def test_autocast_is_off_inside_and_meta_tensors_know_none() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    with without_autocast(torch.ones(2, 2, device="meta")):
        pass
