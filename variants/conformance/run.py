"""Judge a registered variant: what `attnlab check NAME` runs, and what a test file runs case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from registry import UserError, positions, variants
from variants.conformance.checks import PROPERTIES, Property, sentence
from variants.conformance.subject import BLOCK_ATTRIBUTES, Failed, Subject, first_line
from variants.contract import NotApplicable

Status = Literal["passed", "failed", "not applicable"]

#: Wide enough for every head to differ from the next, small enough for seconds.
SIZES = {"dim": 16, "heads": 4}
#: Stands for every block size in a fast check.
FAST_BLOCK = 8
#: Where several position schemes use the same hooks, one of them is tried: these if they can.
PREFERRED_SCHEMES = ("alibi", "learned", "rope")


@dataclass(frozen=True)
class Outcome:
    """One property judged. `detail`: what was verified, the counter-example, or the reason why it does not apply."""

    property: str
    status: Status
    detail: str


def check(
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    fast: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[Outcome]:
    """Judge every property of the variant `name`.

    options: arguments for `variants.build`, `dim`, `heads` and `position` included. What is left open is varied: one position scheme for
    each set of hooks the variant takes, a short convolution, the bidirectional form.
    fast: fewer lengths, and blocks of 8 where their size is left open: a bug at the edge of a block does not ask how large it is.
    on_progress: called with (property about to be judged, number judged, number in all).
    Raises UserError for an unknown name or option, and where the variant cannot be built.
    """
    subjects = subjects_of(name, options or {}, fast=fast)
    outcomes = []
    for done, judged in enumerate(PROPERTIES):
        if on_progress is not None:
            on_progress(sentence(judged), done, len(PROPERTIES))
        outcomes.append(judge(judged, subjects))
    return outcomes


def as_json(name: str, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """The document that `attnlab check --json` prints."""
    properties = [{"property": outcome.property, "status": outcome.status, "detail": outcome.detail} for outcome in outcomes]
    return {"name": name, "properties": properties}


def judge(judged: Property, subjects: Iterable[Subject]) -> Outcome:
    """One property of a variant in all its forms: the first failure decides, else the first pass."""
    name = sentence(judged)
    passed: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for subject in subjects:
        try:
            with torch.random.fork_rng(devices=[]):
                passed[subject.label] = judged(subject)
        except NotApplicable as reason:
            reasons[subject.label] = first_line(reason)
        except Failed as failure:
            return Outcome(name, "failed", f"{subject.label}: {first_line(failure)}")
        except Exception as error:  # a stranger's mixer may raise anything at all, and the other properties are still worth knowing
            return Outcome(name, "failed", f"{subject.label}: {type(error).__name__}: {first_line(error)}")
    if passed:
        return Outcome(name, "passed", f"{next(iter(passed.values()))} ({'; '.join(passed)})")
    return Outcome(name, "not applicable", next(iter(reasons.values())))


def subjects_of(name: str, options: Mapping[str, Any], *, fast: bool = False) -> list[Subject]:
    """The forms of a variant that are judged: as given, then with each open choice made. Raises UserError where it cannot be built."""
    given = Subject(name, {**SIZES, **options}, "as given", fast)
    try:
        given.build()
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"variant {name!r} cannot be built with {_in_words(given.arguments)}: {first_line(error)}") from error
    if fast:
        given = _with_small_blocks(given)
    cls = variants.get(name)
    choices: list[dict[str, Any]] = []
    if "position" not in options:
        # The contract adds embeddings before the variant is called, so that a fast check leaves them out.
        choices += [{"position": scheme} for scheme in _schemes(set(cls.hooks)) if not fast or positions.get(scheme).hooks != ("embed",)]
    convolved: dict[str, Any] = {"short_conv": 3} if given.takes("short_conv") and "short_conv" not in options else {}
    choices += [convolved] if convolved else []
    if cls.bidirectional and "causal" not in options:
        choices.append({"causal": False, **convolved})  # together, because the convolution looks ahead then
    forms = [replace(given, arguments={**given.arguments, **choice}, label=_in_words(choice)) for choice in choices]
    return [given, *filter(_can_be_built, forms)]


def _can_be_built(subject: Subject) -> bool:
    """Whether a form that nobody asked for exists: an odd head_dim has no rotary one."""
    try:
        subject.build()
    except ValueError:
        return False
    return True


def _with_small_blocks(given: Subject) -> Subject:
    """The same with blocks of FAST_BLOCK where their size was left open, if the variant can be built so."""
    sizes = {name: FAST_BLOCK for name in BLOCK_ATTRIBUTES if given.takes(name) and name not in given.arguments}
    small = replace(given, arguments={**given.arguments, **sizes}, label=f"with {_in_words(sizes)}" if sizes else given.label)
    return small if _can_be_built(small) else given


def _in_words(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in arguments.items())


def _schemes(hooks: set[str]) -> list[str]:
    """One position scheme for each set of hooks within `hooks`. Those that depend on the length have no parity between lengths."""
    chosen: dict[tuple[str, ...], str] = {}
    for name in sorted(positions.names(), key=lambda name: (name not in PREFERRED_SCHEMES, name)):
        scheme = positions.get(name)
        if scheme.hooks and not scheme.length_dependent and set(scheme.hooks) - {"embed"} <= hooks:
            chosen.setdefault(tuple(sorted(scheme.hooks)), name)
    return sorted(chosen.values())
