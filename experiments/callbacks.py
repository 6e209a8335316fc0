"""What happens between training steps: the record, validation, checkpoints, and the reasons to stop.

All of it is counted in optimizer steps by the trainer's `global_step`, which a resume restores, so a resumed run validates, saves and stops
at the steps at which the straight run does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

from experiments import settings
from experiments.evaluate import score
from experiments.module import TrainingModule
from experiments.runs.files import publish, writing
from experiments.runs.write import LAST, RunWriter, Unrecorded
from experiments.tasks.contract import Evaluation

Progress = Callable[[int, int, str], None]

BEST = "best.ckpt"


class Diverged(Exception):
    """The loss is no longer a finite number."""


class Clock(L.Callback):
    """Seconds spent training, interruptions and validation left out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._since:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop counting until the next training step."""
        if self._since:
            self.seconds += time.perf_counter() - self._since
            self._since = 0.0

    def now(self) -> float:
        """Seconds so far."""
        return self.seconds + (time.perf_counter() - self._since if self._since else 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.now()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds = state_dict["seconds"]


class Record(L.Callback):
    """Writes training metrics to the run record, tells the progress bar, and stops a run that diverged."""

    def __init__(self, run: RunWriter | Unrecorded, clock: Clock, on_progress: Progress):
        self.run, self.clock, self.on_progress = run, clock, on_progress

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, TrainingModule)
        step, last = trainer.global_step, pl_module.last
        if step % pl_module.trainer_settings.log_every or not last:
            return
        if not math.isfinite(last["train/loss"]):
            raise Diverged(f"the training loss is {last['train/loss']} at step {step}")
        self.write(trainer, pl_module, last)
        self.on_progress(step, pl_module.trainer_settings.steps, f"loss {last['train/loss']:.3f}")

    def write(self, trainer: L.Trainer, module: TrainingModule, metrics: dict[str, float]) -> None:
        """One row of the record."""
        self.run.log(step=trainer.global_step, tokens=module.tokens_seen, seconds=round(self.clock.now(), 4), **metrics)


class Validate(L.Callback):
    """Scores the model on the validation split every so many steps; stops training once the task is solved."""

    def __init__(self, record: Record, trainer_settings: settings.Trainer, evaluation: settings.Evaluation):
        self.record, self.settings, self.evaluation = record, trainer_settings, evaluation
        #: Validation loss at best, loss and accuracy of the last validation, and the step at which the task was solved.
        self.best_loss = self.loss = math.inf
        self.accuracy = 0.0
        self.solved_at: int | None = None
        self.improved = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = self.solved_at is not None  # a run broken off between its last step and its result

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, TrainingModule)
        step = trainer.global_step
        self.improved = False
        if step % self.settings.validate_every and step != self.settings.steps:
            return
        self.record.clock.stop()
        self.measure(trainer, pl_module)
        if self.settings.stop_at is not None and self.accuracy >= self.settings.stop_at:
            self.solved_at = step
            trainer.should_stop = True

    def measure(self, trainer: L.Trainer, pl_module: TrainingModule) -> None:
        """Score the model as it is, and write it to the record."""
        task, step = pl_module.task, trainer.global_step
        result = score(
            pl_module.model,
            task,
            "validation",
            Evaluation("length", task.length),
            sequences=self.settings.validation_sequences,
            batch_tokens=self.evaluation.batch_tokens,
            device=pl_module.device.type,
            precision=self.settings.precision,
        )
        self.loss, self.accuracy = result.loss, result.accuracy
        self.improved = result.loss < self.best_loss
        self.best_loss = min(self.best_loss, result.loss)
        self.record.write(trainer, pl_module, {"validation/loss": result.loss, "validation/accuracy": result.accuracy})
        self.record.on_progress(step, self.settings.steps, f"validation {result.accuracy:.3f}")

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("best_loss", "loss", "accuracy", "solved_at")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value)


class Checkpoints(L.Callback):
    """Saves `last.ckpt` every so many steps and at the end, `best.ckpt` at the best validation loss; each whole or not at all."""

    def __init__(self, folder: Path, every: int, validate: Validate):
        self.folder, self.every, self.validate = folder, every, validate

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.validate.improved:
            self.save(trainer, BEST)
        if trainer.global_step % self.every == 0:
            self.save(trainer, LAST)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save(trainer, LAST)

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Write beside the old checkpoint, then put the new one in its place."""
        unfinished = self.folder / f"{name}.tmp"
        with writing(self.folder / name):
            trainer.save_checkpoint(unfinished)
            publish(unfinished, self.folder / name)
