"""Whole mixers: a pass over a sequence, or one token against a cache.

A candidate is the name of a variant, with options behind it where they are not the defaults: `mamba2 state_dim=64`. Beside it stand public
layers that take its parameters, under the name of whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from experiments.bench import peers, shared
from experiments.bench.candidate import Candidate, Group, Notes, Point, Timing, measure
from experiments.bench.sizes import Sizes
from experiments.words import plain_options
from registry import UserError, variants

MODES = ("forward", "train", "decode")
LENGTHS = (512, 1024, 2048, 4096)
#: Tokens in a cache that one more is decoded against.
CACHED = (1024, 4096, 16384)
#: Tokens decoded in one timed round: few against the cache, which they make longer.
STEPS = 8
BASELINE = "full"


class Built(NamedTuple):
    """A mixer, its reference implementation if it has one, public layers that take its parameters, and others that have their own."""

    mixer: Any
    reference: Any
    public: dict[str, nn.Module]
    apart: dict[str, nn.Module]


def run(
    sizes: Sizes, only: Sequence[str], modes: Sequence[str], lengths: Sequence[int], repeats: int | None, notes: Notes
) -> Iterator[Timing | Point]:
    """Every length in turn, all variants interleaved."""
    mixers = build(only or variants.names(), sizes, notes)
    passes, at = [mode for mode in modes if mode != "decode"], sorted(lengths or LENGTHS)
    if passes:
        with shared.layers([*mixers], sizes, notes) as split:
            make = partial(sequence, split=split)
            yield from over(at, "layer", make, mixers, sizes, passes, repeats, notes)
    if "decode" in modes:
        yield from over(sorted(lengths or CACHED), "decode", decoding, mixers, sizes, ["decode"], repeats, notes)


def over(
    lengths: Sequence[int],
    name: str,
    make: Callable[..., Iterable[Candidate]],
    mixers: Mapping[str, Built],
    sizes: Sizes,
    modes: Sequence[str],
    repeats: int | None,
    notes: Notes,
) -> Iterator[Timing]:
    """One kind of candidate at every length. Verified at the shortest alone: a reference may take O(T^2) memory."""
    baseline = BASELINE if BASELINE in mixers else next(iter(mixers), "")
    for length in lengths:
        candidates: list[Candidate] = []
        for variant, mixer in mixers.items():
            try:
                candidates += make(variant, mixer, sizes, length, length == lengths[0])
            except (NotImplementedError, ValueError) as error:  # no cache, or no such length
                notes.left_out(name, variant, str(error))
        tokens = sizes.batch * (1 if make is decoding else length)
        yield from measure("layer", Group(name, length, tokens, baseline, candidates), modes, repeats, notes)


def build(asked: Sequence[str], sizes: Sizes, notes: Notes) -> dict[str, Built]:
    """The mixers of these sizes that can be built, by label; each with its oracle and the public layers of the same parameters."""
    built = {}
    for word, *words in map(str.split, asked):
        name = variants.entry(word).name
        label, options = " ".join([name, *words]), plain_options(name, words)
        for size in sorted({"dim", "heads"} & set(options)):
            raise UserError(f"--only {label!r}: all layers have one {size}, which --{size} sets")
        torch.manual_seed(0)
        try:
            mixer = variants.build(name, **{"dim": sizes.dim, "heads": sizes.heads} | options)
        except (UserError, ValueError, TypeError) as error:
            notes.left_out("layer", label, str(error))
            continue
        built[label] = Built(mixer, reference(name, sizes, options), {}, {})
        public = {} if "impl" in options else peers.LAYERS.get(name, {})  # they stand beside the variant, not beside each of its forms
        for whose, (make, alike) in public.items():
            try:
                theirs = make(mixer)
                if alike:
                    theirs.load_state_dict(mixer.state_dict())
                (built[label].public if alike else built[label].apart)[f"{label} ({whose})"] = theirs
            except Exception as reason:  # missing, or without such an option: no reason to time nothing else
                notes.left_out("layer", f"{label} ({whose})", str(reason).splitlines()[0])
    return built


def sequence(
    name: str, built: Built, sizes: Sizes, length: int, verified: bool, *, split: shared.Layers | None = None
) -> Iterator[Candidate]:
    """A full pass of ours and of the public layers, verified against the variant's reference implementation where it has one.

    split: the same layers where several processes share each row.
    """
    mixer, right, public, apart = built
    x = inputs(sizes, length).requires_grad_()
    parameters = dict(mixer.named_parameters())
    oracle = None
    if verified and right is not None:
        oracle = lambda: functional_call(right, {**parameters, **dict(mixer.named_buffers())}, x).y  # noqa: E731
    leaves = (x, *(parameter for parameter in parameters.values() if parameter.requires_grad))
    flops = sizes.batch * mixer.flops(length)
    state_bytes = sizes.batch * mixer.state_elements(length) * x.element_size()
    yield Candidate(name, lambda: mixer(x).y, oracle, leaves, flops=flops, state_bytes=state_bytes)
    if split is not None:
        label = f"{name} ({sizes.processes} processes)"
        if reason := split.why_not(mixer, length):
            split.notes.left_out("layer", label, reason)
        else:
            whole, parts = partial(split.call, name, mixer, x), partial(split.timed, name, mixer, x)
            yield Candidate(label, whole, oracle, leaves, flops=flops, state_bytes=state_bytes, timed=parts)
    for label, theirs in public.items():
        call = lambda theirs=theirs: functional_call(theirs, parameters, x)  # noqa: E731
        yield Candidate(label, call, oracle, leaves, flops=flops, peer=True)
    for label, theirs in apart.items():  # it computes something else: what is compared is the cost
        yield Candidate(label, partial(theirs, x), None, (x, *(p for p in theirs.parameters() if p.requires_grad)), flops=flops, peer=True)


def reference(name: str, sizes: Sizes, options: Mapping[str, Any]) -> Any:
    """The variant by its reference implementation; None where it has no such choice."""
    if "reference" not in variants.entry(name).facts.get("implementations", ()):
        return None
    return variants.build(name, **{"dim": sizes.dim, "heads": sizes.heads} | {**options, "impl": "reference"})


def decoding(name: str, built: Built, sizes: Sizes, length: int, verified: bool) -> Iterator[Candidate]:
    """One token against a cache of `length`, verified against the last output of a full pass."""
    mixer = built.mixer
    x = inputs(sizes, length + STEPS)
    decoder = Decoder(mixer, x, length)
    yield Candidate(
        name,
        decoder,
        (lambda: mixer(x[:, : length + 1]).y[:, length:]) if verified else None,
        flops=sizes.batch * (mixer.flops(length + 1) - mixer.flops(length)),
        state_bytes=lambda: int(decoder.state.nbytes),
        read_bytes=sizes.batch * mixer.read_elements(length) * x.element_size(),
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
