"""Scoring a model on a task's test sets: a row a sequence, so that any slice can be made later."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import nn

from experiments.module import as_tensors
from experiments.tasks.contract import IGNORE, Evaluation, Examples, Task
from registry import UserError


@dataclass(frozen=True)
class Score:
    """What one test set gave: shares of scored tokens and of whole sequences that are right, and the mean loss per scored token in nats."""

    accuracy: float
    sequence_accuracy: float
    loss: float
    table: pa.Table

    @property
    def perplexity(self) -> float:
        """exp(loss): how many answers, equally likely, would leave as much doubt."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large for a number."""
    return math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def score(
    model: nn.Module,
    task: Task,
    split: str,
    evaluation: Evaluation,
    *,
    sequences: int,
    batch_tokens: int,
    device: str = "cpu",
    precision: str = "fp32",
) -> Score:
    """Run `model`, called as a Decoder is, over the first `sequences` sequences of a split."""
    was_training = model.training
    model.eval()
    tables = []
    for examples, start in batches(task, split, evaluation, sequences, batch_tokens):
        tokens, targets = (part.to(device) for part in as_tensors(examples))
        scored = targets != IGNORE
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens, scored=scored).logits.float()
        answers = targets[scored]
        losses = F.cross_entropy(logits, answers, reduction="none").cpu().numpy().astype(np.float64)
        right = (logits.argmax(-1) == answers).cpu().numpy()
        tables.append(rows(split, evaluation, examples, start, right, losses))
    model.train(was_training)
    table = pa.concat_tables(tables)
    scored_tokens = int(np.sum(table["tokens_scored"].to_numpy()))
    if not scored_tokens:
        raise UserError(
            f"nothing is scored in {sequences} {split} sequences of {evaluation.length} tokens; choose others by the task's options"
        )
    return Score(
        accuracy=int(np.sum(table["tokens_correct"].to_numpy())) / scored_tokens,
        sequence_accuracy=float(np.mean(table["correct"].to_numpy())),
        loss=float(np.sum(table["loss"].to_numpy() * table["tokens_scored"].to_numpy())) / scored_tokens,
        table=table,
    )


def batches(task: Task, split: str, evaluation: Evaluation, sequences: int, batch_tokens: int) -> Iterator[tuple[Examples, int]]:
    """(examples, index of the first) in batches of about `batch_tokens` tokens."""
    size = max(1, batch_tokens // evaluation.length)
    for start in range(0, sequences, size):
        yield task.batch(split, evaluation.length, start, min(size, sequences - start), **evaluation.difficulty), start


def rows(split: str, evaluation: Evaluation, examples: Examples, start: int, right: ndarray, losses: ndarray) -> pa.Table:
    """A row a sequence in which anything is scored; facts of scored tokens become lists.

    `right` and `losses` belong to the scored tokens in row-major order.
    """
    scored = examples.targets != IGNORE
    count, per_row = len(scored), scored.sum(1)
    row_of = np.repeat(np.arange(count), per_row)
    correct = np.bincount(row_of, weights=right, minlength=count).astype(np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(per_row)]), pa.int32())
    columns: dict[str, Any] = {
        "split": pa.array([split] * count, pa.string()),
        "axis": pa.array([evaluation.axis] * count, pa.string()),
        "length": pa.array(np.full(count, evaluation.length)),
        "index": pa.array(np.arange(start, start + count)),
        "correct": pa.array(correct == per_row),
        "tokens_scored": pa.array(per_row),
        "tokens_correct": pa.array(correct),
        "loss": pa.array(np.bincount(row_of, weights=losses, minlength=count) / np.maximum(per_row, 1)),
        "token_correct": pa.ListArray.from_arrays(offsets, pa.array(right)),
    }
    for name, value in examples.meta.items():
        columns[name] = pa.array(value) if value.ndim == 1 else pa.ListArray.from_arrays(offsets, pa.array(value[scored]))
    return pa.table(columns).filter(pa.array(per_row > 0))


def baselines(task: Task, evaluation: Evaluation, *, sequences: int, reach: int | None) -> dict[str, float]:
    """What can be scored without solving the test set: the trivial predictors, and the ceiling of a model that sees `reach` tokens back."""
    examples = task.batch("test", evaluation.length, 0, sequences, **evaluation.difficulty)
    scored = examples.targets != IGNORE
    answers = examples.targets[scored]
    found = {"chance": task.expected(evaluation.length, **evaluation.difficulty)["chance"]}
    found.update({name: float(np.mean(predict(examples.tokens)[scored] == answers)) for name, predict in task.trivial().items()})
    if reach is not None:
        # One token more than the reach: an answer in sight whose question lies just out of it can be told by elimination.
        read = float(np.mean(task.oracle(examples.tokens, reach=reach + 1)[scored] == answers))
        found["within_reach"] = read + (1 - read) * found["chance"]
    return found


def summary(scores: Mapping[str, Score], prefix: str) -> dict[str, float]:
    """Scores by test set as flat metrics: `test/length/32/accuracy`."""
    return {
        f"{prefix}/{name}/{metric}": getattr(value, metric)
        for name, value in scores.items()
        for metric in ("accuracy", "sequence_accuracy", "loss", "perplexity")
    }
