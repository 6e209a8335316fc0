"""The LightningModule: one training step, the optimizer's groups, and a data stream that a resumed run joins where it was."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import settings
from experiments.model import Decoder
from experiments.parallel import average_gradients
from experiments.tasks.contract import IGNORE, Examples, Task
from variants.contract import Mixer


class TrainingStream:
    """Batches of (tokens, targets) from training step `start` on, without end."""

    def __init__(self, task: Task, batch_size: int, start: int):
        self.task, self.batch_size, self.start = task, batch_size, start

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = self.start
        while True:
            yield as_tensors(self.task.training_batch(step, self.batch_size))
            step += 1


class TrainingModule(L.LightningModule):
    """Trains a decoder on the scored tokens of a task. Step s sees batch s and random stream s, whether or not the run was interrupted."""

    def __init__(self, model: Decoder, task: Task, *, seed: int, optimizer: settings.Optimizer, trainer: settings.Trainer):
        super().__init__()
        self.model, self.task, self.seed = model, task, seed
        self.optimizer_settings, self.trainer_settings = optimizer, trainer
        self.tokens_seen = 0
        #: loss and accuracy of the last step that was logged
        self.last: dict[str, float] = {}

    def train_dataloader(self) -> TrainingStream:
        """The stream from the current step on (Lightning has restored the step by the time it asks)."""
        return TrainingStream(self.task, self.trainer_settings.batch_size, self.trainer.global_step)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy over the scored tokens, plus the mixers' auxiliary losses."""
        tokens, targets = batch
        step = self.trainer.global_step
        rank = 0 if self.model.ranks is None else self.model.ranks.held[0]
        seed_step(step_seed(self.seed, step, rank), self.device)
        logits, answers, aux = self.scored(tokens, targets)
        loss = mean_loss(logits, answers)
        for name, value in aux.items():
            if name.startswith("loss/"):
                loss = loss + value
        self.tokens_seen += tokens.numel()
        if (step + 1) % self.trainer_settings.log_every == 0:
            correct = (logits.argmax(-1) == answers).sum().item()
            self.last = {"train/loss": loss.item(), "train/accuracy": correct / max(len(answers), 1)}
        return loss

    def scored(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(logits, answers, aux) at the scored tokens, in row-major order."""
        scored = targets != IGNORE
        output = self.model(tokens, scored=scored)
        return output.logits, targets[scored], output.aux

    def on_after_backward(self) -> None:
        """Where rows are split over processes, put together what each has of the gradient."""
        if self.model.ranks is not None:
            average_gradients(self.model, self.model.ranks)

    def configure_optimizers(self) -> Any:
        """AdamW over two groups, with warm-up and cosine decay by step."""
        chosen = self.optimizer_settings
        optimizer = torch.optim.AdamW(
            parameter_groups(self.model, chosen.weight_decay), lr=chosen.lr, betas=(chosen.betas[0], chosen.betas[1]), fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, chosen, self.trainer_settings.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip the norm of all gradients together. Lightning's own clipping refuses fused optimizers under bf16."""
        if self.trainer_settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters(), self.trainer_settings.clip_norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the token count across an interruption."""
        checkpoint["tokens_seen"] = self.tokens_seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the token count up again."""
        self.tokens_seen = checkpoint["tokens_seen"]


def mean_loss(logits: Tensor, answers: Tensor) -> Tensor:
    """Mean cross entropy; 0 with zero gradients where nothing is scored."""
    return F.cross_entropy(logits.float(), answers, reduction="sum") / max(len(answers), 1)


def as_tensors(examples: Examples) -> tuple[Tensor, Tensor]:
    """(tokens, targets) as torch tensors."""
    return torch.from_numpy(examples.tokens), torch.from_numpy(examples.targets)


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """The seed of one step's random stream (dropout): a function of seed and step alone, so that resuming needs no RNG state.

    rank: of the processes that share a row, each drops by numbers of its own.
    """
    name = f"{seed}/{step}/{rank}" if rank else f"{seed}/{step}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the generators a step draws from. `torch.manual_seed` would keep a stack trace for every absent kind of device, at each call."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters with and without weight decay. Biases, norms, embeddings of fewer than two axes and what a mixer protects go without."""
    protected = {id(p) for module in model.modules() if isinstance(module, Mixer) for p in module.undecayed()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.ndim >= 2 and id(p) not in protected]
    kept = {id(p) for p in decayed}
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) not in kept], "weight_decay": 0.0},
    ]


def learning_rate(step: int, optimizer: settings.Optimizer, steps: int) -> float:
    """The factor on the peak rate: linear warm-up, then a cosine from 1 to `final_lr_ratio`."""
    if step < optimizer.warmup_steps:
        return (step + 1) / optimizer.warmup_steps
    progress = min(1.0, (step - optimizer.warmup_steps) / max(1, steps - optimizer.warmup_steps))
    return optimizer.final_lr_ratio + (1 - optimizer.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
