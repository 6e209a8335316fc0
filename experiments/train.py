"""One run, from its resolved config to its result: weights of its own or of another run, a search if one is asked for, training, tests."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import torch
import yaml

import registry
from experiments import evaluate, parallel, selection, settings, start
from experiments.callbacks import BEST, LAST, Checkpoints, Clock, Diverged, Progress, Record, Validate
from experiments.checked import checked_task
from experiments.model import Decoder, build, require_parts, require_positions
from experiments.module import TrainingModule
from experiments.runs.files import write_whole
from experiments.runs.write import RunWriter, Unrecorded
from experiments.tasks.contract import Task
from registry import UserError
from variants.contract import NotApplicable
from variants.ops.precision import flushed_denormals
from variants.ops.ranks import Ranks

#: What the other processes do where several share each row.
FOLLOW = "experiments.train:follow_job"
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}


@flushed_denormals()  # arithmetic on the tiniest numbers takes a hundred times as long
def run_job(config: dict[str, Any], on_progress: Progress = lambda step, total, text: None) -> dict[str, Any]:
    """Train and test one config in `runs_dir/study/run_id`, from its last checkpoint if it was interrupted. Returns the result.

    Raises AlreadyFinished, AlreadyClaimed, Diverged, or UserError for a config that cannot be built.
    """
    registry.load_plugins(config["plugins"])
    task, model = prepare(config)
    with RunWriter.open(Path(config["runs_dir"]) / config["study"], config, environment(config, model)) as run:
        found: dict[str, Any] = {}
        if config["search"]["evaluations"]:
            found = search_factors(config, task, run, on_progress)
            model = initialised({**config, "position": found["position"]}, task)
        try:
            chosen = config["trainer"]
            with parallel.processes(chosen["context_parallel"], FOLLOW, config, device=chosen["device"]) as model.ranks:
                result, table = train_and_test(config, task, model, run, on_progress)
        except Diverged as diverged:
            run.diverged(str(diverged))
            raise
        result = {**result, **found}
        run.finish(result, table)
    return result


@flushed_denormals()
def follow_job(config: dict[str, Any], ranks: Ranks) -> None:
    """Take part in a run as one of the processes that share its rows, and keep no record of it."""
    registry.load_plugins(config["plugins"])
    task, model = prepare(config)
    model.ranks = ranks
    with contextlib.suppress(Diverged):
        train_and_test(config, task, model, Unrecorded(config), lambda step, total, text: None)


def prepare(config: Mapping[str, Any]) -> tuple[Task, Decoder]:
    """The task, and the model as the run begins with it. Raises UserError for what cannot be built, trained or tested."""
    try:
        task, tests = checked_task(config)
    except NotApplicable as reason:
        raise UserError(str(reason)) from None
    processes = config["trainer"]["context_parallel"]
    if config["trainer"]["device"] == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.device=cuda, but torch sees no GPU here; use trainer.device=cpu")
    if config["trainer"]["device"] == "cuda" and torch.cuda.device_count() < processes:
        raise UserError(f"trainer.context_parallel={processes} takes as many GPUs; torch sees {torch.cuda.device_count()}")
    model = initialised(config, task)
    require_positions(model, task, tests)
    try:
        require_parts(model, task, tests, processes)
    except NotApplicable as reason:
        raise UserError(str(reason)) from None
    if config["start"] is not None:
        start.gate(config, {})  # a gate that cannot be judged is said now
    return task, model


def initialised(config: Mapping[str, Any], task: Task) -> Decoder:
    """The model as the seed initialises it, with the weights of the run it starts from if it starts from one."""
    torch.manual_seed(config["seed"])
    try:
        model = build(config, task.vocab_size)
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from None
    start.load_weights(model, config)
    return model


def search_factors(config: Mapping[str, Any], task: Task, run: RunWriter, on_progress: Progress) -> dict[str, Any]:
    """{"position", "search"}: the scheme with the factors that were found, kept as position.yaml too, and how the search went."""
    from experiments.longrope.run import find_factors

    rope = {"name": "rope", **{key: config["position"][key] for key in ("base", "layout", "fraction")}}
    model = initialised({**config, "position": rope}, task)
    position, told = find_factors(config, task, model, run.checkpoints / "search.json", on_progress)
    write_whole(run.directory / "position.yaml", yaml.safe_dump(position, sort_keys=False).encode())
    return {"position": position, "search": told}


def train_and_test(
    config: Mapping[str, Any], task: Task, model: Decoder, run: RunWriter | Unrecorded, on_progress: Progress
) -> tuple[dict[str, Any], pa.Table]:
    """Fit, then score every test set; (result, evaluation table)."""
    chosen, evaluation = settings.Trainer(**config["trainer"]), settings.Evaluation(**config["evaluation"])
    module = TrainingModule(model, task, seed=config["seed"], optimizer=settings.Optimizer(**config["optimizer"]), trainer=chosen)
    clock = Clock()
    record = Record(run, clock, on_progress)
    validate = Validate(record, chosen, evaluation)
    callbacks: list[L.Callback] = [clock, record, validate]
    if isinstance(run, RunWriter):
        callbacks.append(Checkpoints(run.checkpoints, chosen.checkpoint_every, validate))
    trainer = make_trainer(chosen, callbacks)
    last = run.checkpoints / LAST
    if last.exists():
        run.truncate(step_of(last))
    if chosen.steps:
        fit(trainer, module, last if last.exists() else None)
    else:
        validate.measure(trainer, module)
    clock.stop()
    model.to(chosen.device)  # where training has ended, Lightning takes it back to the CPU
    tests = task.evaluations(tuple(evaluation.multiples), evaluation.unit)
    scores = {}
    for test in tests:
        on_progress(trainer.global_step, chosen.steps, f"test {test.name}")
        scores[test.name] = evaluate.score(
            model,
            task,
            "test",
            test,
            sequences=evaluation.sequences,
            batch_tokens=evaluation.batch_tokens,
            device=chosen.device,
            precision=chosen.precision,
        )
    selection.write(run.directory, model, task, device=chosen.device, precision=chosen.precision)
    metrics = {"validation/accuracy": validate.accuracy, "validation/loss": validate.loss, **evaluate.summary(scores, "test")}
    gate = start.gate(config, metrics)
    result = {
        "metrics": metrics,
        **({} if gate is None else {"gate": gate}),
        "baselines": {test.name: evaluate.baselines(task, test, sequences=evaluation.sequences, reach=model.reach()) for test in tests},
        "costs": costs(model, task, module, clock.seconds, sorted({test.length for test in tests})),
        "counts": {"steps": trainer.global_step, "tokens": module.tokens_seen, "sequences": trainer.global_step * chosen.batch_size},
        "stopped": "solved" if validate.solved_at is not None else "budget",
        "steps_to_solve": validate.solved_at,
        "implementations": implementations(model),
    }
    return result, pa.concat_tables([value.table for value in scores.values()], promote_options="default")


def step_of(checkpoint: Path) -> int:
    """The step at which a checkpoint was saved. Raises UserError if it cannot be read."""
    try:
        return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"])
    except Exception as error:  # torch raises half a dozen kinds, each with a long story
        raise UserError(f"{checkpoint} is damaged ({type(error).__name__}); remove it, and the run starts afresh") from None


def make_trainer(chosen: settings.Trainer, callbacks: list[L.Callback]) -> L.Trainer:
    """Lightning's trainer, with its own logging, checkpoints, bars and validation schedule switched off: the callbacks do these."""
    quiet()
    # Deterministic kernels are wanted. Filling fresh memory, which comes with them, costs a tenth of a step and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return L.Trainer(
        max_steps=chosen.steps,
        accelerator={"cpu": "cpu", "cuda": "gpu"}[chosen.device],
        devices=[torch.cuda.current_device()] if chosen.device == "cuda" else 1,
        precision=PRECISIONS[chosen.precision],  # type: ignore[arg-type]
        callbacks=callbacks,
        logger=False,
        deterministic=True if chosen.device == "cpu" else None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(trainer: L.Trainer, module: TrainingModule, checkpoint: Path | None) -> None:
    """Train, from `checkpoint` if there is one."""
    try:
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    except SystemExit as left:  # what Lightning makes of an interrupt, which is for the verb to answer
        if isinstance(left.__context__, KeyboardInterrupt):
            raise left.__context__ from None
        raise


def costs(model: Decoder, task: Task, module: TrainingModule, seconds: float, lengths: list[int]) -> dict[str, Any]:
    """What the run cost. FLOPs are forward and backward (three times forward); bytes are of one sequence in fp32."""
    parameters = {id(p): p.numel() for p in model.parameters()}
    embedding = {id(p): p.numel() for p in (model.embedding.weight, model.output.weight)}
    examples = task.batch("train", task.length, 0, 1)
    per_sequence = model.flops(task.length, int((examples.targets >= 0).sum()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "parameters": sum(parameters.values()),
        "parameters_non_embedding": sum(parameters.values()) - sum(embedding.values()),
        "train_flops": 3.0 * per_sequence * module.tokens_seen / task.length,
        "state_bytes": {str(length): 4 * model.state_elements(length) for length in lengths},
        "read_bytes": {str(length): 4 * model.read_elements(length) for length in lengths},
        "seconds": seconds,
        "tokens_per_second": module.tokens_seen / seconds if seconds else 0.0,
        "peak_bytes": torch.cuda.max_memory_allocated() if module.device.type == "cuda" else peak,
    }


def implementations(model: Decoder) -> list[str]:
    """The numerical implementation that each layer's mixer runs on."""
    return [getattr(mixer, "implementation", "torch") for mixer in model.mixers()]


def environment(config: Mapping[str, Any], model: Decoder) -> dict[str, Any]:
    """Where and on what the run is made."""
    packages = ("torch", "lightning", "numpy", "hydra-core", "attnlab")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "git": _git_state(),
        "device": _device_name(config["trainer"]["device"]),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "implementations": implementations(model),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    return str(torch.cuda.get_device_name()) if device == "cuda" else platform.processor() or platform.machine()


def _git_state() -> dict[str, Any] | None:
    """Commit and whether the sources differ from it; None outside a checkout."""
    try:
        return {"commit": _git("rev-parse", "HEAD"), "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(registry.ROOT), *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def quiet() -> None:
    """Leave out Lightning's remarks on choices that are made here on purpose."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for remark in (
        ".*does not have many workers.*",
        ".*`IterableDataset` has `__len__`.*",
        ".*litlogger.*",
        ".*isinstance.treespec, LeafSpec.*",
    ):
        warnings.filterwarnings("ignore", remark)


__all__ = ["BEST", "LAST", "Diverged", "environment", "prepare", "run_job"]
