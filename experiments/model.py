"""The decoder every mixer is trained in: pre-norm residual blocks, an optional MLP, and logits only where they are asked for.

    x = embed(tokens)       x = x + mixer(norm(x))       x = x + mlp(norm(x))       logits = norm(x[scored]) E^T

At a vocabulary of 8,192 the output layer costs more than everything else together, so hidden states are gathered before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import registry
from experiments import settings
from experiments.tasks.contract import Evaluation, Task
from registry import UserError
from variants.context import split_rows
from variants.contract import Context, Mixer, NotApplicable, State, advance, default_positions, left_align
from variants.ops.ranks import Ranks, Ring

__all__ = ["Decoder", "DecoderOutput", "DecoderState", "build", "mixer_specs"]


class DecoderState(NamedTuple):
    """The cache of a whole stack. `counters` hold the one position count of the model; no layer's cache is asked for it."""

    counters: State
    layers: tuple[State, ...]

    @property
    def nbytes(self) -> int:
        """Bytes carried by all layers, over the whole batch."""
        return self.counters.nbytes + sum(layer.nbytes for layer in self.layers)

    @property
    def elements(self) -> int:
        """Floating-point numbers carried by all layers, over the whole batch."""
        return sum(layer.elements for layer in self.layers)

    def reorder(self, index: Int[Tensor, " new_batch"]) -> DecoderState:
        """Rows picked by `index`."""
        return DecoderState(self.counters.reorder(index), tuple(layer.reorder(index) for layer in self.layers))

    def detach(self) -> DecoderState:
        """The same numbers without their history."""
        return DecoderState(self.counters.detach(), tuple(layer.detach() for layer in self.layers))


class DecoderOutput(NamedTuple):
    """logits: (batch, time, vocab), or (scored tokens, vocab) when `scored` was given, in row-major order."""

    logits: Tensor
    state: DecoderState | None
    aux: dict[str, Tensor]


class Block(nn.Module):
    """One layer: a mixer and, if `mlp_ratio` is not 0, an MLP, each behind its norm and added to the residual stream."""

    def __init__(self, mixer: Mixer, dim: int, mlp_ratio: float, dropout: float):
        super().__init__()
        self.mixer_norm, self.mixer = nn.LayerNorm(dim), mixer
        self.dropout = nn.Dropout(dropout)
        hidden = round(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) if hidden else None

    def forward(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Tensor, State | None, dict[str, Tensor]]:
        y, state, aux = self.mixer(self.mixer_norm(x), context, state)
        x = x + self.dropout(y)
        if self.mlp is not None:
            x = x + self.dropout(self.mlp(x))
        return x, state, aux


class Decoder(nn.Module):
    """A stack of `mixers` over token ids below `vocab_size`.

    `position` is a scheme with the hook "embed", added once to the embeddings; schemes with other hooks live in the mixers.
    """

    def __init__(
        self,
        vocab_size: int,
        mixers: Sequence[Mixer],
        *,
        dim: int,
        position: nn.Module | None = None,
        mlp_ratio: float = 2.0,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = position
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(mixer, dim, mlp_ratio, dropout) for mixer in mixers)
        #: The processes that each row of a full pass is split over, if it is.
        self.ranks: Ranks | None = None
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            self.output.weight = self.embedding.weight

    def forward(
        self,
        tokens: Int[Tensor, "batch time"],
        context: Context | None = None,
        state: DecoderState | None = None,
        scored: Bool[Tensor, "batch time"] | None = None,
    ) -> DecoderOutput:
        """Logits for every token, or only for those that `scored` marks."""
        context = context or Context()
        order = None
        if context.valid is not None:
            tokens, context, order = left_align(tokens, context)
            tokens = tokens.masked_fill(~context.valid, 0)  # type: ignore[operator]  # a pad may be any number, also one without an embedding
        counters = None if state is None else state.counters
        context = default_positions(tokens, context, counters)
        if self.ranks is not None and state is None:
            tokens, context = split_rows(tokens, context, self.ranks)
        x = self.embedding(tokens)
        if self.position is not None:
            x = self.position.embed(x, context.positions)  # type: ignore[operator]
        x = self.dropout(x)
        layers, aux = [], {}
        for index, block in enumerate(self.blocks):
            x, layer_state, seen = block(x, context, None if state is None else state.layers[index])
            layers.append(layer_state)
            aux.update({f"{name}/{index}": value for name, value in seen.items()})
        if context.split is not None:
            return DecoderOutput(self._joined(x, context.split.ring, order, scored), None, aux)
        if order is not None:
            x = x.gather(1, order.argsort(1).unsqueeze(-1).expand_as(x))
        logits = self.output(self.norm(x if scored is None else x[scored]))
        if state is not None:
            state = DecoderState(advance(state.counters, context, tokens.shape[1]), tuple(layers))
        return DecoderOutput(logits, state, aux)

    def _joined(self, x: Tensor, ring: Ring, order: Tensor | None, scored: Tensor | None) -> Tensor:
        """Logits of whole rows, in every process, where each has its part of the rows; order: where their tokens were before."""
        marks = torch.ones(len(x), ring.time, dtype=torch.bool, device=x.device) if scored is None else scored
        numbers = torch.arange(marks.numel(), device=x.device).view_as(marks)
        if order is not None:
            marks, numbers = marks.gather(1, order), numbers.gather(1, order)
        parts = zip(ring.by_rank(x), ring.by_rank(ring.part(marks)), strict=True)
        logits = ring.marked([self.output(self.norm(part[mark])) for part, mark in parts], marks, numbers)
        return logits if scored is not None else logits.view(len(x), ring.time, -1)

    def whole_rows(self) -> str | None:
        """Why rows cannot be split over processes; None: they can."""
        return next((reason for mixer in self.mixers() if (reason := mixer.must_be_whole()) is not None), None)

    def init_state(self, batch: int) -> DecoderState:
        """An empty cache for `batch` rows."""
        return DecoderState(State.empty(batch, self.embedding.weight.device), tuple(mixer.init_state(batch) for mixer in self.mixers()))

    def layers(self) -> list[Block]:
        """The blocks, bottom to top."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def mixers(self) -> list[Mixer]:
        """The mixers, bottom to top."""
        return [block.mixer for block in self.layers()]

    def flops(self, time: int, scored: int) -> int:
        """Forward floating-point operations of one sequence with `scored` scored tokens, 2 a multiply-add."""
        mlps = [block.mlp for block in self.layers() if block.mlp is not None]
        weights = sum(layer.weight.numel() for mlp in mlps for layer in mlp if isinstance(layer, nn.Linear))
        return sum(mixer.flops(time) for mixer in self.mixers()) + 2 * time * weights + 2 * scored * self.output.weight.numel()

    def state_elements(self, time: int) -> int:
        """Floating-point numbers in the cache of one sequence after `time` tokens."""
        return sum(mixer.state_elements(time) for mixer in self.mixers())

    def read_elements(self, time: int) -> int:
        """Floating-point numbers of that cache that the next token reads."""
        return sum(mixer.read_elements(time) for mixer in self.mixers())

    def reach(self) -> int | None:
        """How many tokens back an output can depend on its input; None: all of them."""
        reaches = [mixer.reach() for mixer in self.mixers()]
        return None if None in reaches else sum(reach for reach in reaches if reach is not None)


def mixer_specs(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Name and options of each layer's mixer, bottom to top: `model.pattern` repeated to `model.layers`."""
    model, variant = config["model"], dict(config["variant"])
    pattern = [
        dict(variant) if entry == "variant" else {"name": entry} if isinstance(entry, str) else dict(entry) for entry in model["pattern"]
    ]
    if not pattern or not model["position_layers"]:
        raise UserError("model.pattern and model.position_layers need at least one entry")
    if "variant" not in model["pattern"]:
        raise UserError(f"model.pattern={model['pattern']} never uses the variant {variant['name']!r}; write 'variant' where it belongs")
    for entry in pattern:
        if "name" not in entry:
            raise UserError(f"an entry of model.pattern that is a mapping needs the key 'name'; got {sorted(entry)}")
    return [pattern[layer % len(pattern)] for layer in range(model["layers"])]


def build(config: Mapping[str, Any], vocab_size: int) -> Decoder:
    """The model of a resolved config. Raises NotApplicable for a variant and a position scheme that do not go together."""
    model = settings.Model(**config["model"])
    scheme = registry.positions.get(config["position"]["name"])
    embeds = "embed" in scheme.hooks
    if embeds and not all(model.position_layers):
        raise UserError(
            f"position {config['position']['name']!r} is added once, to the embeddings; model.position_layers cannot switch it off"
        )
    mixers = []
    for layer, spec in enumerate(mixer_specs(config)):
        positioned = not embeds and model.position_layers[layer % len(model.position_layers)]
        arguments = dict(spec, position=config["position"] if positioned else None)
        for option, told in (("layer", layer), ("layers", model.layers)):
            if arguments.get(option) is None and option in _options(spec["name"]):
                arguments[option] = told  # a variant that differs from layer to layer is told which one of how many it is
        mixers.append(registry.variants.build(arguments.pop("name"), dim=model.dim, heads=model.heads, **arguments))
    position = (
        registry.positions.resolve(config["position"], head_dim=model.dim // model.heads, heads=model.heads, dim=model.dim)
        if embeds
        else None
    )
    return Decoder(
        vocab_size,
        mixers,
        dim=model.dim,
        position=position,
        mlp_ratio=model.mlp_ratio,
        dropout=model.dropout,
        tie_embeddings=model.tie_embeddings,
    )


def _options(name: str) -> set[str]:
    return {option.name for option in registry.options(registry.variants.get(name))}


def on_meta(config: Mapping[str, Any], vocab_size: int) -> Decoder:
    """The same model without memory or numbers: to see whether it can be built, and to count its parameters."""
    with torch.device("meta"):
        return build(config, vocab_size)


def require_positions(model: Decoder, task: Task, tests: Sequence[Evaluation]) -> None:
    """Raises UserError where a position scheme ends before the longest sequence, trained or tested."""
    longest = max(task.length, *(test.length for test in tests))
    for scheme in {model.position, *(mixer.position for mixer in model.mixers())}:
        limit = getattr(scheme, "max_positions", None)
        if limit is not None and longest > limit:
            raise UserError(f"position.max_positions={limit} is too small for the longest sequence, of {longest} tokens")


def require_parts(model: Decoder, task: Task, tests: Sequence[Evaluation], processes: int) -> None:
    """Raises NotApplicable where rows cannot be split over so many processes, UserError where one is too short for it."""
    if processes == 1:
        return
    reason = model.whole_rows()
    if reason is not None:
        raise NotApplicable(f"trainer.context_parallel={processes}: {reason}")
    shortest = min(task.length, *(test.length for test in tests))
    if shortest < 2 * processes:
        raise UserError(f"trainer.context_parallel={processes} takes rows of {2 * processes} tokens or more; the shortest has {shortest}")
