"""A whole training step against the same model with logits everywhere, which is what the peers compute.

Ours is measured through the harness: data generation, LightningModule, clipping, optimizer, schedule and callbacks. The peer is the barest
loop possible over the same model, data and optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F

from experiments import settings
from experiments.config import resolve
from experiments.module import TrainingModule, TrainingStream, parameter_groups
from experiments.tasks.contract import IGNORE
from experiments.train import make_trainer, prepare

#: The sizes of figure 2 of Zoology (Arora et al. 2023): length, pairs, width, batch; vocabulary 8,192, two layers, one head, no MLP.
SIZES = ((64, 4, 64, 256), (256, 16, 128, 32))


def figure_two(length: int, pairs: int, dim: int, batch: int) -> dict[str, Any]:
    """The config of one size."""
    return resolve(
        [
            "variant=full",
            "position=learned",
            "task=mqar",
            f"task.length={length}",
            f"task.pairs={pairs}",
            *("task.keys=4095", "task.values=4096", "task.noise=0", "task.placement=power"),
            *(f"model.dim={dim}", "model.heads=1", "model.mlp_ratio=0"),
            *(f"trainer.batch_size={batch}", "trainer.steps=1000000", "trainer.stop_at=null", "optimizer.lr=1e-3"),
        ]
    )


class StepTimes(L.Callback):
    """The time from the start of one training step to the start of the next, everything between included."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.starts.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Step times, the first three left out as warm-up."""
        return [b - a for a, b in zip(self.starts[3:], self.starts[4:], strict=False)]


def harness(config: dict[str, Any], steps: int) -> list[float]:
    """Seconds of each step of ours."""
    task, model = prepare(config)
    chosen = settings.Trainer(**{**config["trainer"], "steps": steps + 4})
    module = TrainingModule(model, task, seed=0, optimizer=settings.Optimizer(**config["optimizer"]), trainer=chosen)
    times = StepTimes()
    make_trainer(chosen, [times]).fit(module)
    return times.seconds()


def logits_everywhere(config: dict[str, Any], steps: int) -> list[float]:
    """Seconds of each step of a bare loop that computes every logit."""
    task, model = prepare(config)
    chosen = settings.Optimizer(**config["optimizer"])
    optimizer = torch.optim.AdamW(parameter_groups(model, chosen.weight_decay), lr=chosen.lr, fused=True)
    times = []
    start = time.perf_counter()
    for _, (tokens, targets) in zip(range(steps + 1), TrainingStream(task, config["trainer"]["batch_size"], 0), strict=False):
        logits = model(tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["trainer"]["clip_norm"])
        optimizer.step()
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    return times[1:]


def verify(config: dict[str, Any]) -> None:
    """Both compute the same loss; raises AssertionError otherwise."""
    task, model = prepare(config)
    tokens, targets = next(iter(TrainingStream(task, 4, 0)))
    scored = targets != IGNORE
    everywhere = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    gathered = F.cross_entropy(model(tokens, scored=scored).logits, targets[scored])
    torch.testing.assert_close(gathered, everywhere)


def candidates(repeats: int) -> Iterator[dict[str, Any]]:
    """Per size and candidate: name, whether it is a peer, length, tokens and flops a step, and seconds of every step."""
    for size in SIZES:
        config = figure_two(*size)
        verify(config)
        length, pairs, dim, batch = size
        _, model = prepare(config)
        ours: list[float] = []
        peer: list[float] = []
        for _ in range(repeats):
            ours += harness(config, 8)
            peer += logits_everywhere(config, 2)
        for name, is_peer, seconds, scored in (("attnlab", False, ours, pairs), ("logits everywhere", True, peer, length)):
            yield {
                "candidate": f"{name}, width {dim}",
                "peer": is_peer,
                "length": length,
                "tokens": batch * length,
                "flops": 3 * batch * model.flops(length, scored),
                "seconds": seconds,
                "state_bytes": 4 * model.state_elements(length),
            }
