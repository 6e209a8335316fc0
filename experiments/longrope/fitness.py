"""What a candidate of LongRoPE's search scores: the loss of a frozen rotary model on sequences longer than those it was trained on.

    score(genome) = mean over counted tokens of -ln p(target)        with angles p f_i / lambda_i, everything else as it was trained

Only angles differ between candidates, so that many of them run as one batch: its rows are the sequences under the first candidate, then
the same under the second. What is counted is the objective: every next token, as in LongRoPE (Ding et al. 2024); the tokens that the task
scores; or those whose answer lies further back than the trained length, as the needles of LongRoPE2 do (Shang et al. 2025).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from experiments.longrope.space import Genome, Space
from experiments.model import Decoder
from experiments.module import as_tensors
from experiments.tasks.contract import IGNORE, Examples
from registry import UserError, nearest, positions
from variants.positions.rotary import Rotary, frequencies, turn

OBJECTIVES = ("mean", "repeated", "needle")


class Candidates(Rotary):
    """What `longrope` does in long rows, for several lists of factors at once: row r of a batch goes by candidate r // (rows a candidate).

    trained: the scheme of the model, which gives base, layout and width.
    factors: what divides each pair's speed.
    unscaled: positions below this number keep their angles.
    magnitude: what cosines and sines are multiplied by, the same for all candidates.
    """

    def __init__(
        self, trained: Rotary, factors: Float[Tensor, "candidates pairs"], unscaled: Int[Tensor, " candidates"], *, magnitude: float
    ):
        super().__init__(trained.head_dim, trained.heads, trained.dim, base=trained.base, layout=trained.layout)
        self.width, self.magnitude = trained.width, magnitude
        self.factors, self.unscaled = factors.to(torch.float64), unscaled
        if factors.shape[1] != self.width // 2:
            raise ValueError(f"Candidates: each needs a factor for each of the {self.width // 2} pairs; got {factors.shape[1]}")

    def rotate(
        self,
        q: Float[Tensor, "batch heads q_time head_dim"],
        k: Float[Tensor, "batch kv_heads k_time head_dim"],
        q_positions: Int[Tensor, "batch q_time"],
        k_positions: Int[Tensor, "batch k_time"],
    ) -> tuple[Float[Tensor, "batch heads q_time head_dim"], Float[Tensor, "batch kv_heads k_time head_dim"]]:
        """Queries and keys, each turned by its own position as its row's candidate would have it."""
        q_angles = self.angles(q_positions)
        k_angles = q_angles if k_positions is q_positions else self.angles(k_positions)
        return self._turn(q, q_angles), self._turn(k, k_angles)

    def angles(
        self, positions: Int[Tensor, "batch time"], lengths: Int[Tensor, " #batch"] | None = None
    ) -> Float[Tensor, "rows time pairs"]:
        """In radians, fp64; one row a candidate where all rows are one expanded row. Rows of any length are long ones."""
        plain, candidates = frequencies(self.width, self.base, positions.device), len(self.factors)
        if len(positions) % candidates:
            raise ValueError(f"Candidates: {len(positions)} rows cannot be shared out evenly among {candidates}")
        each = 1 if positions.stride(0) == 0 else len(positions) // candidates
        rows = positions[: candidates * each].unsqueeze(-1)
        scaled = rows * (plain / self.factors).repeat_interleave(each, 0).unsqueeze(1)
        if not self.unscaled.any():
            return scaled
        return torch.where(rows < self.unscaled.repeat_interleave(each, 0)[:, None, None], rows * plain, scaled)

    def _turn(self, x: Float[Tensor, "batch heads time head_dim"], angles: Float[Tensor, "rows time pairs"]) -> Tensor:
        # Rows with the same angles lie side by side as if they were heads: cosines are made once a candidate, and not once a row.
        together = x.reshape(len(angles), -1, *x.shape[2:])
        return turn(together, angles, self.layout, self.magnitude).view_as(x)


class Fitness:
    """fitness(genomes) -> the loss of each, in nats per counted token. The model is as it was afterwards.

    model: a decoder that was trained with `rope`, on its device.
    examples: sequences of the target length.
    trained_length: tokens in the sequences that the model was trained on.
    factor: target length / trained_length.
    objective: `mean` counts every next token, `repeated` those that the task scores, `needle` those of them whose meta `distance` exceeds
        trained_length.
    attention_factor: what cosines and sines are multiplied by (default: sqrt(1 + ln factor / ln trained_length), as `longrope`).
    batch_tokens: tokens in one forward pass, at most, if one sequence has no more.
    Raises UserError for a model with other positions, an objective that there is not, examples that are not longer than trained_length, and
    where nothing is counted.
    """

    def __init__(
        self,
        model: Decoder,
        examples: Examples,
        *,
        trained_length: int,
        factor: float,
        objective: str = "mean",
        attention_factor: float | None = None,
        batch_tokens: int = 16384,
    ):
        self.model, self.trained = model, rope_of(model)
        if objective not in OBJECTIVES:
            raise UserError(f"there is no objective {objective!r}.{nearest(objective, OBJECTIVES)}")
        if examples.tokens.shape[1] <= trained_length:
            raise UserError(
                f"factors are searched on sequences longer than the {trained_length} tokens trained on; got {examples.tokens.shape[1]}"
            )
        grown = math.sqrt(1 + math.log(factor) / math.log(trained_length))
        self.attention_factor = grown if attention_factor is None else attention_factor
        device = model.embedding.weight.device
        tokens, targets = judged(examples, objective, trained_length)
        counts = (targets != IGNORE).any(1)
        if not counts.any():
            raise UserError(f"objective={objective!r} counts no token of these examples; choose another, or give others")
        # A sequence of which nothing is counted need not run.
        self.tokens, self.targets = tokens[counts].to(device), targets[counts].to(device)
        self.counted = self.targets != IGNORE
        self.rows = max(1, min(len(self.tokens), batch_tokens // self.tokens.shape[1]))
        self.together = max(1, batch_tokens // (self.rows * self.tokens.shape[1]))

    def __call__(self, genomes: Sequence[Genome]) -> list[float]:
        """The loss of each, in order. Equal calls give equal numbers; in other company a candidate's may differ in its last digits."""
        with frozen(self.model):
            parts = [self._losses(genomes[start : start + self.together]) for start in range(0, len(genomes), self.together)]
        return [loss for part in parts for loss in part]

    def _losses(self, genomes: Sequence[Genome]) -> list[float]:
        """The loss of so many candidates as fit into one batch."""
        device = self.tokens.device
        factors = torch.tensor([genome.factors for genome in genomes], dtype=torch.float64, device=device)
        unscaled = torch.tensor([genome.unscaled for genome in genomes], device=device)
        scheme = Candidates(self.trained, factors, unscaled, magnitude=self.attention_factor)
        for mixer in self.model.mixers():
            if isinstance(mixer.position, Rotary):
                mixer.position = scheme
        total = torch.zeros(len(genomes), dtype=torch.float64, device=device)
        for start in range(0, len(self.tokens), self.rows):
            tokens, targets, counted = (part[start : start + self.rows] for part in (self.tokens, self.targets, self.counted))
            logits = self.model(tokens.repeat(len(genomes), 1), scored=counted.repeat(len(genomes), 1)).logits
            losses = F.cross_entropy(logits, targets[counted].repeat(len(genomes)), reduction="none")
            total += losses.view(len(genomes), -1).sum(1, dtype=torch.float64)
        found: list[float] = (total / self.counted.sum()).tolist()
        return found


@contextlib.contextmanager
def frozen(model: Decoder) -> Iterator[None]:
    """No gradients, no dropout, fp32; what is exchanged inside is put back: every mixer's position, every module's mode."""
    schemes = [(mixer, mixer.position) for mixer in model.mixers()]
    modes = [(module, module.training) for module in model.modules()]
    device = model.embedding.weight.device.type
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            model.eval()
            yield
    finally:
        for mixer, scheme in schemes:
            mixer.position = scheme
        for module, training in modes:
            module.training = training


def rope_of(model: Decoder) -> Rotary:
    """The scheme that all mixers with a position share. Raises UserError where it is not `rope`, or layers turn differently."""
    wanted, found = "the search slows the pairs of a model trained with position=rope", []
    for scheme in (model.position, *(mixer.position for mixer in model.mixers())):
        if isinstance(scheme, Rotary) and type(scheme) is Rotary:
            found.append(scheme)
        elif scheme is not None and scheme.hooks:
            raise UserError(f"{wanted}; this one has {type(scheme).__name__}")
    if not found:
        raise UserError(f"{wanted}; this one has no position in any layer")
    kinds = {(scheme.width, scheme.base, scheme.layout) for scheme in found}
    if len(kinds) > 1:
        raise UserError(f"one list of factors must do for all layers, but they turn differently: (width, base, layout) = {sorted(kinds)}")
    return found[0]


def judged(examples: Examples, objective: str, trained_length: int) -> tuple[Int[Tensor, "count time"], Int[Tensor, "count time"]]:
    """Tokens, and the targets that the objective counts; IGNORE elsewhere."""
    tokens, targets = as_tensors(examples)
    if objective == "mean":
        return tokens, torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)], 1)
    if objective == "repeated":
        return tokens, targets
    if "distance" not in examples.meta:
        raise UserError("objective='needle' counts answers by their distance, which this task's examples do not tell")
    distance = torch.from_numpy(examples.meta["distance"])
    far = (distance if distance.ndim == 2 else distance.unsqueeze(1)) > trained_length
    return tokens, targets.masked_fill(~far, IGNORE)


def seeds(space: Space, trained: Rotary, trained_length: int) -> dict[str, Genome]:
    """Where a search begins, by name: the members next to PI, NTK and YaRN.

    With critical pairs these differ in the pair alone: NTK below it, and s from it on. So there is one for each, `critical 5`.
    """
    found = scheme_factors(trained, trained_length, space.factor)
    if space.critical is None:
        return {name: space.genome(factors) for name, factors in found.items()}
    return {f"critical {pair}": space.genome(found["pi"], critical=pair) for pair in space.critical}


def scheme_factors(trained: Rotary, trained_length: int, factor: float) -> dict[str, list[float]]:
    """By what PI, NTK and YaRN divide the pairs' speeds, theta_rope / theta_scheme; without those that width or base do not allow."""
    options: dict[str, dict[str, int]] = {"pi": {}, "ntk": {}, "yarn": {"trained_length": trained_length}}
    if trained.width < 4:
        del options["ntk"]
    if trained.base <= 1:
        del options["yarn"]
    found = {}
    for name, given in options.items():
        scheme = positions.build(
            name, head_dim=trained.width, heads=trained.heads, dim=trained.dim, base=trained.base, factor=factor, **given
        )
        found[name] = (frequencies(trained.width, trained.base) / scheme.frequencies()).tolist()
    return found
