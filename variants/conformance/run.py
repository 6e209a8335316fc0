"""Judge a registered variant: what `attnlab check NAME` runs, and what a test file runs case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from registry import UserError, positions, variants
from registry import options as options_of
from variants import implementations
from variants.conformance.checks import PROPERTIES, Property, sentence
from variants.conformance.subject import BLOCK_ATTRIBUTES, LARGEST_BLOCK, Failed, Subject, first_line
from variants.contract import NotApplicable

Status = Literal["passed", "failed", "not applicable"]

#: Wide enough for every head to differ from the next, small enough for seconds.
SIZES = {"dim": 16, "heads": 4}
#: Stands for every block size in a fast check.
FAST_BLOCK = 8
#: Where several position schemes use the same hooks, one of them is tried: these if they can.
PREFERRED_SCHEMES = ("alibi", "learned", "rope", "self_extend")
#: Of those that do something else for far keys, options that bring far keys into a few tokens' reach.
NEAR_ENOUGH: dict[str, dict[str, Any]] = {"self_extend": {"group": 3, "window": 5}}


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


def as_json(name: str, outcomes: Iterable[Outcome], not_checked: Sequence[str] = ()) -> dict[str, Any]:
    """The document that `attnlab check --json` prints. What the checks leave out is one more row, which does not apply."""
    rows = [*outcomes, *([Outcome("what was not checked", "not applicable", "; ".join(not_checked))] if not_checked else [])]
    return {"name": name, "properties": [{"property": row.property, "status": row.status, "detail": row.detail} for row in rows]}


def left_out(name: str, *, options: Mapping[str, Any] | None = None, fast: bool = False) -> list[str]:
    """What `check` with the same arguments says nothing about, and why: a phrase each."""
    given, forms = _forms(name, options or {}, fast=fast)
    cuda = "every check runs on the CPU" if torch.cuda.is_available() else "there is no such device here"
    phrases = [f"CUDA: {cuda}"]
    for impl in getattr(variants.get(name), "implementations", ()):
        if given.arguments.get("impl", "auto") not in ("auto", impl):
            phrases.append(f"impl={impl}: {given.arguments['impl']} was asked for")
        elif reason := implementations.usable(impl):
            phrases.append(f"impl={impl}: {reason}")
    phrases += [f"{form.label}: {reason}" for form in forms if (reason := _refusal(form))]
    if "position" not in given.arguments:
        tried = [form.arguments.get("position") for form in forms]
        names = {scheme["name"] if isinstance(scheme, Mapping) else scheme for scheme in tried}
        phrases += _untried_schemes(set(variants.get(name).hooks), names)
    large = [str(size) for size in given.block_sizes if size > LARGEST_BLOCK]
    phrases += [f"lengths beyond a block of {', '.join(large)}: above {LARGEST_BLOCK} they take too long"] if large else []
    return [
        *phrases,
        *([f"most lengths, and blocks other than {FAST_BLOCK} where their size is open: --fast leaves them out"] if fast else []),
    ]


def judge(judged: Property, subjects: Sequence[Subject]) -> Outcome:
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
        except (Exception, SystemExit) as error:  # a stranger's mixer may raise anything, and the other properties are still worth knowing
            return Outcome(name, "failed", f"{subject.label}: {type(error).__name__}: {first_line(error)}")
    if passed:
        return Outcome(name, "passed", f"{next(iter(passed.values()))} ({_of_all(list(passed), [subject.label for subject in subjects])})")
    return Outcome(name, "not applicable", next(iter(reasons.values())))


def subjects_of(name: str, options: Mapping[str, Any], *, fast: bool = False) -> list[Subject]:
    """The forms of a variant that are judged: as given, then with each open choice made. Raises UserError where it cannot be built."""
    given, forms = _forms(name, options, fast=fast)
    return [given, *(form for form in forms if _refusal(form) is None)]


def _forms(name: str, options: Mapping[str, Any], *, fast: bool) -> tuple[Subject, list[Subject]]:
    """A variant as given, which can be built, and with each open choice made, which perhaps cannot."""
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
        schemes = [scheme for scheme in _schemes(set(cls.hooks)) if not fast or positions.get(scheme).hooks != ("embed",)]
        choices += [{"position": {"name": name, **NEAR_ENOUGH[name]} if name in NEAR_ENOUGH else name} for name in schemes]
    convolved: dict[str, Any] = {"short_conv": 3} if given.takes("short_conv") and "short_conv" not in options else {}
    choices += [convolved] if convolved else []
    if cls.bidirectional and "causal" not in options:
        choices.append({"causal": False, **convolved})  # together, because the convolution looks ahead then
    return given, [replace(given, arguments={**given.arguments, **choice}, label=_in_words(choice), given=False) for choice in choices]


def _refusal(subject: Subject) -> str | None:
    """Why a form that nobody asked for does not exist, if it does not: an odd head_dim has no rotary one."""
    try:
        subject.build()
    except ValueError as error:
        return first_line(error)
    return None


def _with_small_blocks(given: Subject) -> Subject:
    """The same with blocks of FAST_BLOCK where their size was left open, if the variant can be built so."""
    defaults = {option.name: option.default for option in options_of(variants.get(given.name))}
    sizes = {name: FAST_BLOCK for name in BLOCK_ATTRIBUTES if defaults.get(name) is not None and name not in given.arguments}
    small = replace(given, arguments={**given.arguments, **sizes}, label=f"with {_in_words(sizes)}" if sizes else given.label)
    return small if _refusal(small) is None else given


def _of_all(labels: Sequence[str], known: Sequence[str]) -> str:
    """Some of the labels known, in the shortest words."""
    missing = [label for label in known if label not in labels]
    if len(labels) > 1 and len(missing) < 2:
        return f"all {len(known)} forms{' but ' if missing else ''}{''.join(missing)}"
    return "; ".join(labels)


def _in_words(arguments: Mapping[str, Any]) -> str:
    """Names and values, a scheme's options behind its name."""
    words = []
    for key, value in arguments.items():
        inner = dict(value) if isinstance(value, Mapping) else {}
        words += [f"{key}={inner.pop('name', value)}", *(f"{key}.{option}={chosen}" for option, chosen in inner.items())]
    return ", ".join(words)


def _schemes(hooks: set[str]) -> list[str]:
    """One position scheme for each set of hooks within `hooks`. Those that depend on the length have no parity between lengths."""
    chosen: dict[tuple[str, ...], str] = {}
    for name in sorted(positions.names(), key=lambda name: (name not in PREFERRED_SCHEMES, name)):
        scheme = positions.get(name)
        if scheme.hooks and not scheme.length_dependent and set(scheme.hooks) - {"embed"} <= hooks:
            chosen.setdefault(tuple(sorted(scheme.hooks)), name)
    return sorted(chosen.values())


def _untried_schemes(hooks: set[str], tried: set[Any]) -> list[str]:
    """Phrases on the schemes that the variant can apply and that were not tried with it."""
    reasons: dict[str, list[str]] = {}
    for name in positions.names():
        scheme = positions.get(name)
        if not scheme.hooks or not set(scheme.hooks) - {"embed"} <= hooks or name in tried:
            continue
        stands_for = [other for other in tried if other is not None and set(positions.get(other).hooks) == set(scheme.hooks)]
        if scheme.length_dependent:
            reason = "its frequencies depend on the length"
        else:
            reason = f"{stands_for[0]} has the same hooks" if stands_for else "--fast leaves it out"
        reasons.setdefault(reason, []).append(name)
    return [f"position={', '.join(names)}: {reason}" for reason, names in reasons.items()]
