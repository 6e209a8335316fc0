"""Rows split over processes that talk to each other over gloo, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.variants import processes


@pytest.mark.parametrize("work", [processes.attention_is_that_of_one_process, processes.mixers_are_those_of_one_process])
def test_two_three_and_four_processes(work, tmp_path: Path) -> None:
    mp.spawn(processes.start, (work, 4, str(tmp_path / "rendezvous")), nprocs=4)


def test_ring_attention_pytorch_agrees(tmp_path: Path) -> None:
    pytest.importorskip("ring_attention_pytorch")
    mp.spawn(processes.start, (processes.attention_is_that_of_ring_attention_pytorch, 2, str(tmp_path / "rendezvous")), nprocs=2)
