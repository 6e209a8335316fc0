"""What a trained model chose: which blocks or tokens every layer looked at over one test sequence, in a small file beside the result.

    selection.json      {"length", "index", "queries", "scored", "answers", "layers": [{"layer", "part", "block", "keys", "percent"}]}

percent[i][j] is how many of 100 choices were made, over the heads that choose for themselves, the queries of bin i (`queries` tokens) and
the blocks of bin j (`keys` tokens, one block of `block` tokens or several): 100 where every head chose it for every query. `scored` are
the places of scored tokens, `answers` those of what each of them asks for, or null where the task does not tell. Mixers that choose say
what in `aux`: "blocks", whose size is their `block`, or "tokens", (batch, heads that choose, time, count) with -1 for none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import registry
from experiments import start
from experiments.checked import checked_task
from experiments.model import Decoder, build
from experiments.module import as_tensors
from experiments.runs.files import read_json, write_json
from experiments.runs.read import SELECTION
from experiments.runs.status import RESULT, is_finished
from experiments.tasks.contract import IGNORE, Examples, Task
from registry import UserError
from variants.contract import Mixer

#: Bins of queries, and of keys, in a map: more are not seen on a page, and would make it large.
BINS = 128
INDEX = 0
#: What a mixer may say that it chose.
KINDS = ("blocks", "tokens")


def write(directory: Path, model: Decoder, task: Task, *, device: str = "cpu", precision: str = "fp32") -> None:
    """Write the map of test sequence INDEX, of the training length, into a run's directory; nothing where no mixer chooses."""
    examples = task.sample("test", task.length, INDEX)
    layers = chosen(model, as_tensors(examples)[0].to(device), precision)
    if layers:
        queries = bin_size(task.length, 1)
        write_json(directory / SELECTION, {"length": task.length, "index": INDEX, "queries": queries, **asked(examples), "layers": layers})


def write_afterwards(directory: Path) -> None:
    """The same for a finished run, from its last checkpoint. Raises UserError where that cannot be had."""
    directory = directory.resolve()
    config = read_json(directory / "config.json")
    if config is None or not is_finished(directory):
        raise UserError(f"{directory} is no finished run")
    registry.load_plugins(config["plugins"])
    tested = {"position": (read_json(directory / RESULT) or {}).get("position", config["position"])}
    here = {"runs_dir": str(directory.parent.parent), "study": directory.parent.name, "start": directory.name}
    config = {**config, **tested, **here}
    task, _ = checked_task(config)
    model = build(config, task.vocab_size)
    start.load_weights(model, config)
    write(directory, model, task)


@torch.no_grad()
def chosen(model: Decoder, tokens: Int[Tensor, "1 time"], precision: str = "fp32") -> list[dict[str, Any]]:
    """A map for each layer, and each of its parts, that chooses."""
    was_training = model.training
    model.eval()
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bf16"):
        aux = model(tokens, scored=torch.zeros_like(tokens, dtype=torch.bool)).aux
    model.train(was_training)
    found = []
    for name, value in aux.items():
        kind, *parts, layer = name.split("/")
        part = int(parts[0]) if kind in KINDS and parts else 0
        size = block_size(model.mixers()[int(layer)], part, kind)
        if size is not None and value.ndim == 4 and not value.is_floating_point():
            keys = bin_size(tokens.shape[1], size)
            shares = binned(value[0], -(-tokens.shape[1] // size), bin_size(tokens.shape[1], 1), keys // size)
            percent = (100 * shares).round().to(torch.int64).tolist()
            found.append({"layer": int(layer), "part": part, "block": size, "keys": keys, "percent": percent})
    return found


def block_size(mixer: Mixer, part: int, kind: str) -> int | None:
    """Tokens in what a mixer, or one of its parts, says that it chose; None where it says something else."""
    size = getattr(getattr(mixer, "mixers", [mixer])[part], "block", None) if kind == "blocks" else 1
    return size if kind in KINDS and isinstance(size, int) else None


def bin_size(time: int, block: int) -> int:
    """Tokens in a bin: as few whole blocks as leave no more than BINS."""
    return block * -(-time // (block * BINS))


def binned(chosen: Int[Tensor, "heads time count"], blocks: int, queries: int, together: int) -> Float[Tensor, "query_bins key_bins"]:
    """How often a head chose a block, means over bins of so many queries and so many blocks; -1 is none. The last bins may be smaller."""
    parts = chosen.split(queries, dim=1)
    rows = torch.stack([torch.bincount(part[part >= 0], minlength=blocks)[:blocks] / (part.shape[0] * part.shape[1]) for part in parts])
    return torch.stack([columns.mean(1) for columns in rows.split(together, dim=1)], dim=1)


def asked(examples: Examples) -> dict[str, list[Any]]:
    """The scored places of one sequence, and where what each asks for stands."""
    scored = (examples.targets[0] != IGNORE).nonzero()[0]
    distance = examples.meta.get("distance")
    if distance is None:
        return {"scored": scored.tolist(), "answers": [None] * len(scored)}
    return {"scored": scored.tolist(), "answers": (scored - (distance[0][scored] if distance.ndim == 2 else distance[0])).tolist()}
