"""Whole mixers with their default options: a pass over a sequence, or one token against a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from experiments.bench.candidate import Candidate, Group, Notes, Point, Timing, measure
from experiments.bench.sizes import Sizes
from registry import UserError, variants

MODES = ("forward", "train", "decode")
LENGTHS = (512, 1024, 2048, 4096)
#: Tokens in a cache that one more is decoded against.
CACHED = (1024, 4096, 16384)
#: Tokens decoded in one timed round: few against the cache, which they make longer.
STEPS = 8
BASELINE = "full"


def run(
    sizes: Sizes, only: Sequence[str], modes: Sequence[str], lengths: Sequence[int], repeats: int | None, notes: Notes
) -> Iterator[Timing | Point]:
    """Every length in turn, all variants interleaved."""
    names = list(dict.fromkeys(variants.entry(name).name for name in only)) or variants.names()
    mixers = build(names, sizes, notes)
    passes = [mode for mode in modes if mode != "decode"]
    if passes:
        yield from over(sorted(lengths or LENGTHS), "layer", sequence, mixers, sizes, passes, repeats, notes)
    if "decode" in modes:
        yield from over(sorted(lengths or CACHED), "decode", decoding, mixers, sizes, ["decode"], repeats, notes)


def over(
    lengths: Sequence[int],
    name: str,
    make: Callable[..., Candidate],
    mixers: dict[str, Any],
    sizes: Sizes,
    modes: Sequence[str],
    repeats: int | None,
    notes: Notes,
) -> Iterator[Timing]:
    """One kind of candidate at every length. Verified at the shortest alone: a reference may take O(T^2) memory."""
    baseline = BASELINE if BASELINE in mixers else next(iter(mixers), "")
    for length in lengths:
        candidates = []
        for variant, mixer in mixers.items():
            try:
                candidates.append(make(variant, mixer, sizes, length, length == lengths[0]))
            except (NotImplementedError, ValueError) as error:  # no cache, or no such length
                notes.left_out(name, variant, str(error))
        tokens = sizes.batch * (1 if make is decoding else length)
        yield from measure("layer", Group(name, length, tokens, baseline, candidates), modes, repeats, notes)


def build(names: Sequence[str], sizes: Sizes, notes: Notes) -> dict[str, Any]:
    """The mixers of these sizes that can be built with default options."""
    built = {}
    for name in names:
        torch.manual_seed(0)
        try:
            built[name] = variants.build(name, dim=sizes.dim, heads=sizes.heads)
        except (UserError, ValueError, TypeError) as error:
            notes.left_out("layer", name, str(error))
    return built


def sequence(name: str, mixer: Any, sizes: Sizes, length: int, verified: bool) -> Candidate:
    """A full pass, verified against the variant's reference implementation where it has one."""
    x = inputs(sizes, length).requires_grad_()
    right = reference(name, sizes) if verified else None
    return Candidate(
        name,
        lambda: mixer(x).y,
        None if right is None else lambda: functional_call(right, {**dict(mixer.named_parameters()), **dict(mixer.named_buffers())}, x).y,
        (x, *(parameter for parameter in mixer.parameters() if parameter.requires_grad)),
        flops=sizes.batch * mixer.flops(length),
        state_bytes=sizes.batch * mixer.state_elements(length) * x.element_size(),
    )


def reference(name: str, sizes: Sizes) -> Any:
    """The variant by its reference implementation; None where it has no such choice."""
    if "reference" not in variants.entry(name).facts.get("implementations", ()):
        return None
    return variants.build(name, dim=sizes.dim, heads=sizes.heads, impl="reference")


def decoding(name: str, mixer: Any, sizes: Sizes, length: int, verified: bool) -> Candidate:
    """One token against a cache of `length`, verified against the last output of a full pass."""
    x = inputs(sizes, length + STEPS)
    decoder = Decoder(mixer, x, length)
    return Candidate(
        name,
        decoder,
        (lambda: mixer(x[:, : length + 1]).y[:, length:]) if verified else None,
        flops=sizes.batch * (mixer.flops(length + 1) - mixer.flops(length)),
        state_bytes=lambda: int(decoder.state.nbytes),
        calls=STEPS,
    )


class Decoder:
    """A mixer with a filled cache. Each call is one more token; the first one, x[:, length], is verified."""

    def __init__(self, mixer: Any, x: Tensor, length: int):
        self.mixer, self.x, self.length = mixer, x, length
        with torch.no_grad():
            self.state = mixer(x[:, :length], state=mixer.init_state(len(x))).state
        self._next = count()

    def __call__(self) -> Tensor:
        index = self.length + next(self._next) % (self.x.shape[1] - self.length)
        found = self.mixer(self.x[:, index : index + 1], state=self.state)
        self.state = found.state
        return found.y


def inputs(sizes: Sizes, length: int) -> Tensor:
    """x (batch, length, dim), the same at every call."""
    return torch.randn(sizes.batch, length, sizes.dim, generator=torch.Generator().manual_seed(0))
