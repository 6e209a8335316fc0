"""What is timed, and how: every candidate is verified, then metered, then timed in turns with its peers, in one process."""

from __future__ import annotations

import functools
import sys
import time as clock
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from variants.conformance.costs import Meter

#: By how much an output or a gradient may differ from the oracle's, as a share of the largest number there.
BOUND = 1e-4
#: Timed rounds where none are asked for: so many, or fewer once they have taken so many seconds, but no fewer than the last number.
ROUNDS, SECONDS, FEWEST = 7, 4.0, 3


@dataclass(frozen=True)
class Candidate:
    """One way to compute something.

    call: computes it. leaves: what a training step differentiates it by. oracle: what it must equal, outputs and gradients by the same
    leaves. timed: mode -> what is timed instead, where a call does more so that it can be compared. flops: operations of the products of
    one call, forward. read_bytes: of the state, by one call that decodes a token. calls: how many of them are timed as one, where one is
    very short.
    """

    name: str
    call: Callable[[], Tensor]
    oracle: Callable[[], Tensor] | None = None
    leaves: Sequence[Tensor] = ()
    peer: bool = False
    flops: int = 0
    state_bytes: int | Callable[[], int] = 0
    read_bytes: int = 0
    calls: int = 1
    timed: Callable[[str], Callable[[], tuple[Tensor, ...]]] | None = None


@dataclass(frozen=True)
class Group:
    """Candidates on the same inputs. baseline: the name of the one that the others are compared with. tokens: of one call."""

    name: str
    length: int
    tokens: int
    baseline: str
    candidates: Sequence[Candidate]
    left_out: dict[str, str] = field(default_factory=dict)


class Timing(NamedTuple):
    """seconds: of each round. peak_bytes: alive at once in tensors that the call made, what it returns left out."""

    level: str
    group: str
    baseline: str
    candidate: str
    peer: bool
    mode: str
    length: int
    tokens: int
    flops: int
    seconds: list[float]
    peak_bytes: int
    state_bytes: int
    read_bytes: int = 0


class Point(NamedTuple):
    """One measurement of a quantity that grows with the length."""

    level: str
    group: str
    candidate: str
    mode: str
    quantity: str
    length: int
    value: float


@dataclass
class Notes:
    """What is not timed, said on standard error at once. wrong: (group, candidate) of what differs from its oracle."""

    wrong: set[tuple[str, str]] = field(default_factory=set)

    def left_out(self, group: str, name: str, reason: str) -> None:
        """A candidate that cannot be had here."""
        print(f"attnlab: {group}: {name} is left out: {reason}", file=sys.stderr)

    def differs(self, group: str, name: str, reason: str) -> None:
        """A candidate that computes something else."""
        self.wrong.add((group, name))
        print(f"attnlab: {group}: {name} is wrong and not timed: {reason}", file=sys.stderr)


def differentiate(candidate: Callable[[], Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Output and gradients, for a gradient of the output that is the same for every candidate."""
    y = candidate()
    if not leaves:
        return (y,)
    return y.detach(), *torch.autograd.grad(y, leaves, output_gradient(y.shape), materialize_grads=True)


@functools.lru_cache(maxsize=1)
def output_gradient(shape: torch.Size) -> Tensor:
    """Numbers that differ everywhere; kept, because drawing them may take as long as what is timed, and made where no meter counts them."""
    return torch.from_numpy(np.random.default_rng(2).standard_normal(shape, dtype=np.float32))


def work(candidate: Candidate, mode: str) -> Callable[[], tuple[Tensor, ...]]:
    """What is timed: a call without gradients, or with a backward pass."""
    if candidate.timed is not None:
        return candidate.timed(mode)
    if mode == "train":
        return lambda: differentiate(candidate.call, candidate.leaves)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (candidate.call(),)

    return forward


class Verdict(NamedTuple):
    """wrong: what differs from the oracle, if anything does. peak_bytes: of the output and the gradients that were compared."""

    wrong: str | None
    peak_bytes: int


def verify(candidates: Iterable[Candidate]) -> dict[str, Verdict]:
    """The verdict on each candidate that has an oracle. Candidates may share one."""
    known: dict[int, tuple[Tensor, ...]] = {}
    verdicts = {}
    for candidate in candidates:
        if candidate.oracle is None:
            continue
        with torch.set_grad_enabled(bool(candidate.leaves)):
            if id(candidate.oracle) not in known:
                known[id(candidate.oracle)] = differentiate(candidate.oracle, candidate.leaves)
            found, peak = metered(lambda candidate=candidate: differentiate(candidate.call, candidate.leaves))  # type: ignore[misc]
        verdicts[candidate.name] = Verdict(disagreement(found, known[id(candidate.oracle)]), peak)
    return verdicts


def disagreement(found: Sequence[Tensor], right: Sequence[Tensor]) -> str | None:
    """The first of output and gradients that is further than BOUND from what is right.

    A gradient that is 0 but for rounding has no size of its own: none is measured by less than a thousandth of the largest of all.
    """
    most = max((float(gradient.abs().max()) for gradient in right[1:]), default=0.0)
    for index, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        part = "output" if index == 0 else f"gradient {index} of {len(found) - 1}"
        if ours.shape != theirs.shape:
            return f"{part} has shape {tuple(ours.shape)}, and should have {tuple(theirs.shape)}"
        error, largest = float((ours - theirs).abs().max()), max(float(theirs.abs().max()), most / 1000 if index else 0.0)
        if not error <= BOUND * largest:  # NaN is not
            return f"{part} is off by {error:.2g}, where the largest number is {largest:.2g} (allowed: {BOUND:g} of it)"
    return None


def metered(job: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], int]:
    """What a job returns, and the most bytes alive at once in tensors that it makes besides. A fused kernel's scratch space is not seen."""
    meter = Meter()
    with meter:
        returned = job()
    return returned, max(0, meter.peak - sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in returned}.values()))


def in_turns(jobs: dict[str, tuple[Callable[[], object], int]], repeats: int | None) -> dict[str, list[float]]:
    """Seconds a call of each job in each round; every round has every job once, so that a slow spell of the machine meets them all."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    begin = clock.perf_counter()
    for done in range(repeats or ROUNDS):
        if repeats is None and done >= FEWEST and clock.perf_counter() - begin > SECONDS:
            break
        for name, (job, calls) in jobs.items():
            start = clock.perf_counter()
            for _ in range(calls):
                job()
            seconds[name].append((clock.perf_counter() - start) / calls)
    return seconds


def measure(level: str, group: Group, modes: Sequence[str], repeats: int | None, notes: Notes) -> Iterator[Timing]:
    """Verify a group, meter and time what is right, and go on without what was wrong before."""
    for name, reason in group.left_out.items():
        notes.left_out(group.name, name, reason)
    verdicts = verify(group.candidates)
    for name, verdict in verdicts.items():
        if verdict.wrong:
            notes.differs(group.name, name, verdict.wrong)
    right = [candidate for candidate in group.candidates if (group.name, candidate.name) not in notes.wrong]
    for mode in modes:
        jobs = {candidate.name: work(candidate, mode) for candidate in right}
        # Verification has metered training already, if it did what is timed. Either run warms up as well.
        others = {candidate.name for candidate in right if candidate.timed is not None}
        seen = {name: verdict for name, verdict in verdicts.items() if name not in others} if mode == "train" else {}
        peaks = {name: seen[name].peak_bytes if name in seen else metered(job)[1] for name, job in jobs.items()}
        seconds = in_turns({candidate.name: (jobs[candidate.name], candidate.calls) for candidate in right}, repeats)
        for candidate in right:
            state = candidate.state_bytes
            yield Timing(
                level=level,
                group=group.name,
                baseline=group.baseline,
                candidate=candidate.name,
                peer=candidate.peer,
                mode=mode,
                length=group.length,
                tokens=group.tokens,
                # A backward pass has twice the products of the forward pass.
                flops=candidate.flops * (3 if mode == "train" else 1),
                seconds=seconds[candidate.name],
                peak_bytes=peaks[candidate.name],
                state_bytes=state if isinstance(state, int) else state(),
                read_bytes=candidate.read_bytes,
            )
