"""A whole training step against the same model with logits everywhere, which is what the peers compute.

Ours is measured through the harness: data generation, LightningModule, clipping, optimizer, schedule and callbacks. The peer is the barest
loop possible over the same model, data and optimizer.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F

from experiments import settings
from experiments.bench.candidate import ROUNDS, Notes, Point, Timing
from experiments.bench.sizes import Sizes
from experiments.config import resolve
from experiments.module import TrainingModule, TrainingStream, parameter_groups
from experiments.tasks.contract import IGNORE
from experiments.train import make_trainer, prepare
from registry import UserError

MODES = ("train",)
PEER = "logits everywhere"
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


def run(
    sizes: Sizes, only: Sequence[str], modes: Sequence[str], lengths: Sequence[int], repeats: int | None, notes: Notes
) -> Iterator[Timing | Point]:
    """Both at every size, or at those of the given lengths. Batch, heads and widths are the figure's."""
    if only:
        raise UserError(f"--only chooses groups at core level and variants at layer level; at model level --lengths chooses: {_lengths()}")
    for length in lengths:
        if length not in {size[0] for size in SIZES}:
            raise UserError(f"--lengths: the model level has the lengths {_lengths()}; got {length}")
    for size in SIZES:
        if not lengths or size[0] in lengths:
            yield from both(size, repeats or ROUNDS)


def both(size: tuple[int, int, int, int], repeats: int) -> Iterator[Timing]:
    """Ours and the peer at one size."""
    config = figure_two(*size)
    verify(config)
    length, pairs, dim, batch = size
    _, model = prepare(config)
    ours: list[float] = []
    peer: list[float] = []
    for _ in range(repeats):
        ours += harness(config, 8)
        peer += logits_everywhere(config, 2)
    for name, is_peer, seconds, scored in ((PEER, True, peer, length), ("attnlab", False, ours, pairs)):
        yield Timing(
            level="model",
            group=f"width {dim}",
            baseline=PEER,
            candidate=name,
            peer=is_peer,
            mode="train",
            length=length,
            tokens=batch * length,
            flops=3 * batch * model.flops(length, scored),
            seconds=seconds,
            # Of the process, which never gives any back: a whole training step does not stay within one torch call.
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            state_bytes=4 * batch * model.state_elements(length),
        )


def _lengths() -> str:
    return ", ".join(str(size[0]) for size in SIZES)
