"""What a run's configuration may say, besides the options of the registered variant, position scheme and task.

These dataclasses are the schemas behind the Hydra groups of the same names: a key that is not here, or a value of another type, is refused
before anything is built. No torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class Model:
    """The decoder stack (experiments.model.Decoder)."""

    name: str = "decoder"
    dim: int = 64
    layers: int = 2
    heads: int = 2
    #: Width of the MLP in units of dim; 0 leaves the MLP out.
    mlp_ratio: float = 2.0
    #: Mixers by layer, repeated to the stack's depth: names, or mappings of a name and options; "variant" is the configured one.
    pattern: list[Any] = field(default_factory=lambda: ["variant"])
    #: Which layers get the position scheme, repeated to the stack's depth.
    position_layers: list[bool] = field(default_factory=lambda: [True])
    #: Dropout on embeddings and residual branches.
    dropout: float = 0.0
    #: Whether the output layer shares the embedding's weights.
    tie_embeddings: bool = True


@dataclass
class Optimizer:
    """AdamW with a linear warm-up and a cosine decay to `final_lr_ratio` times the peak."""

    name: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    warmup_steps: int = 50
    final_lr_ratio: float = 0.1


@dataclass
class Trainer:
    """The training loop. Everything is counted in optimizer steps."""

    name: str = "default"
    steps: int = 1000
    batch_size: int = 64
    clip_norm: float = 1.0
    #: fp32, or bf16 (autocast; parameters stay in fp32).
    precision: str = "fp32"
    #: cpu or cuda.
    device: str = "cpu"
    #: Processes that each row is split over, on this machine; on cuda each takes a device of its own.
    context_parallel: int = 1
    log_every: int = 10
    validate_every: int = 50
    validation_sequences: int = 256
    checkpoint_every: int = 200
    #: Stop once validation accuracy at the training length reaches this; null trains to the end.
    stop_at: float | None = 0.995


@dataclass
class Evaluation:
    """The test that ends a run."""

    name: str = "default"
    #: Lengths, in units of the training length.
    multiples: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    #: The length that the multiples count, in tokens; null: task.length. A run that goes on at another length keeps its parent's.
    unit: int | None = None
    #: Accuracy at that length, from 0 to 1, that a run, or the one it starts from, must reach before its numbers are compared.
    gate: float | None = None
    #: Sequences in each test set.
    sequences: int = 512
    #: Tokens in an evaluation batch.
    batch_tokens: int = 16384


@dataclass
class Search:
    """The search for the factors of position=longrope, on validation sequences, before the run trains or is tested."""

    name: str = "longrope"
    #: Candidates to score; 0 leaves the search out.
    evaluations: int = 0
    #: What a candidate is judged by: perplexity of every next token (mean), of the task's scored tokens (repeated), or of those of them
    #: whose answer lies farther back than the trained length (needle).
    objective: str = "repeated"
    #: free: a factor for each pair (LongRoPE); critical: only from a critical pair on, which is searched too (LongRoPE2).
    form: str = "free"
    #: Numbers of first tokens to leave unscaled that are tried; [0] leaves that out.
    unscaled: list[int] = field(default_factory=lambda: [0])
    #: Validation sequences, of trained length times factor tokens.
    sequences: int = 8
    #: Candidates in the first generation; mutants and crossings in each later one, of so many of the best.
    population: int = 32
    mutations: int = 12
    crossovers: int = 12
    parents: int = 8
    seed: int = 0


@dataclass
class Executor:
    """Where a sweep's runs go."""

    name: str = "local"
    #: Runs at a time.
    processes: int = 2
    #: Threads of each run.
    threads: int = 1


@dataclass
class Compare:
    """How a study is compared where nothing else is asked for, in the words of `attnlab compare`."""

    by: str | None = None
    metric: str | None = None
    baseline: str | None = None


@dataclass
class Run:
    """One run, whole. `variant`, `position` and `task` hold the options of the registered name; the resolved config repeats the run."""

    study: str = "default"
    seed: int = 0
    runs_dir: str = "runs"
    #: Files or modules that register more variants, position schemes or tasks.
    plugins: list[str] = field(default_factory=list)
    variant: Any = MISSING
    position: Any = MISSING
    task: Any = MISSING
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    trainer: Trainer = field(default_factory=Trainer)
    evaluation: Evaluation = field(default_factory=Evaluation)
    search: Search = field(default_factory=Search)
    executor: Executor = field(default_factory=Executor)
    #: The run whose last checkpoint this one starts from: its run_id in the same study; null starts afresh.
    start: str | None = None
    #: Overrides that turn this run's config into that of the run to start from, which `attnlab sweep` then runs first.
    parent: list[str] = field(default_factory=list)
    #: What `attnlab sweep` varies: key -> choices; a choice may carry overrides of its own ("sliding_window variant.window=8").
    sweep: dict[str, Any] = field(default_factory=dict)
    compare: Compare = field(default_factory=Compare)
