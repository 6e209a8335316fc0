"""The frequencies of a study's rotary schemes, against those of plain `rope`.

    wavelength_i = 2 pi / theta_i  tokens        lambda_i = theta_rope_i / theta_i        t = ceil(d/2 log_b(L / 2 pi))

A pair beyond t, the critical one, never finished a turn within the trained length L: positions farther off are angles that it has not seen
(Shang et al. 2025, "LongRoPE2", section 3). Frequencies come from the registered scheme itself, as the run's variant builds it, and from
nothing that is restated here. Only this module of the comparison needs torch, and only where a scheme may differ from `rope`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import registry
from experiments.compare.groups import TEST, Group, trained_length
from experiments.compare.keys import Keys, natural, same_axis, spell
from experiments.runs.read import Run
from registry import UnknownName

if TYPE_CHECKING:
    from variants.positions.rotary import Rotary

PLAIN = "rope"
#: What the page is given of a line.
SHOWN = ("wavelengths", "factors", "temperature", "unscaled", "tested")


def spectra(groups: Sequence[Group]) -> dict[str, Any] | None:
    """A line for every spectrum that the groups' finished runs have, one for each seed where factors were searched; strict JSON.

    None where no rotary scheme differs from plain rope. `left_out` names the schemes that cannot be built here, and says why.
    """
    runs = [(i, run) for i, group in enumerate(groups) for run in sorted(group.finished, key=lambda run: natural(run.config.get("seed")))]
    if all(_position(run).get("name") == PLAIN or not _may_turn(run) for _, run in runs):
        return None
    keys = Keys([run for group in groups for run in group.runs])
    built: dict[str, dict[str, Any] | str] = {}
    lines: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for i, run in runs:
        if not _may_turn(run):
            continue
        recipe = json.dumps(_recipe(run), sort_keys=True)
        if recipe not in built:
            built[recipe] = _spectrum(run)
        found, name = built[recipe], str(keys.value(run, "position"))
        if isinstance(found, str):
            left_out[name] = found
        elif found:
            line = lines.setdefault(json.dumps(found), {**found, "of": []})
            line["of"].append((i, name, run))
    if not left_out and not any(_departs(line) for line in lines.values()):
        return None
    return {
        "lines": _named(list(lines.values()), groups),
        "plain": _distinct([line["plain"] for line in lines.values()]),
        "trained": sorted({line["trained"] for line in lines.values()}),
        "targets": sorted({line["target"] for line in lines.values() if line["target"]} - {line["trained"] for line in lines.values()}),
        "factors": sorted({line["factor"] for line in lines.values() if line["factor"] > 1}),
        "critical": sorted({line["critical"] for line in lines.values() if line["critical"] is not None}),
        "left_out": [{"label": name, "reason": reason} for name, reason in left_out.items()],
    }


def critical_pair(width: int, base: float, trained: int) -> int | None:
    """t = ceil(width/2 log_base(trained / 2 pi)), the first pair that does not finish a turn; None where every pair does, or none."""
    if base <= 1 or trained <= 2 * math.pi:
        return None
    t = math.ceil(width / 2 * math.log(trained / (2 * math.pi), base))
    return t if t < width // 2 else None


def _position(run: Run) -> Mapping[str, Any]:
    """The scheme that the run was tested with: what its search found, else what its config says."""
    searched = run.result.get("position")
    found = searched if isinstance(searched, Mapping) else run.config.get("position")
    return found if isinstance(found, Mapping) else {}


def _may_turn(run: Run) -> bool:
    """Whether the scheme is rotary, as far as its registration tells; one that is not registered here may be."""
    try:
        hooks = registry.positions.entry(_position(run).get("name", "none")).facts.get("hooks", ())
        return bool({"rotate", "relate"} & set(hooks))
    except UnknownName:
        return True


def _recipe(run: Run) -> list[Any]:
    """All that a spectrum is made of."""
    model = run.config.get("model", {})
    return [_position(run), run.config.get("variant"), model.get("dim"), model.get("heads"), trained_length(run), _tested_length(run)]


def _spectrum(run: Run) -> dict[str, Any] | str:
    """What to draw of one run: one number a pair, None for a pair that stands still. Empty: not rotary. A text: why there is nothing."""
    trained = trained_length(run)
    if trained is None:
        return "the run does not say what length it was trained on"
    tested = _tested_length(run) or trained
    try:
        scheme = _scheme(run)
        if scheme is None:
            return {}
        turning, plain = _frequencies(scheme, tested)
    except UnknownName:
        return "no position scheme of this name is registered here; the plug-in that has it is not loaded"
    except (ValueError, TypeError, KeyError) as error:
        return str(error).partition("\n")[0]
    factor = getattr(scheme, "factor", 1.0)
    return {
        "trained": trained,
        "tested": tested,
        "factor": factor,
        "target": round(factor * trained) if factor > 1 else None,
        "critical": critical_pair(scheme.width, scheme.base, trained),
        "wavelengths": [2 * math.pi / theta if theta else None for theta in turning],
        "factors": [before / theta if theta else None for before, theta in zip(plain, turning, strict=True)],
        "temperature": float(scheme.magnitude * math.sqrt(scheme.logit_scale)),
        "unscaled": int(getattr(scheme, "unscaled", 0)),
        "plain": {"base": scheme.base, "wavelengths": [2 * math.pi / theta for theta in plain]},
    }


def _scheme(run: Run) -> Rotary | None:
    """The run's scheme as its variant builds it, which alone knows how many of its channels are turned; None where it is not rotary."""
    import torch

    from variants.positions.rotary import Rotary

    model, variant, position = run.config["model"], dict(run.config["variant"]), dict(_position(run))
    sizes = {"dim": model["dim"], "heads": model["heads"]}
    name, head_dim = variant.pop("name"), variant.get("head_dim") or sizes["dim"] // sizes["heads"]
    variant.pop("impl", None)  # one that cannot be had on this machine turns by the same angles
    try:
        with torch.device("meta"):
            found = registry.variants.build(name, position=position, **sizes, **variant).position
    except UnknownName:  # a variant that is not registered here: its heads are taken to be as wide as they say
        found = registry.positions.resolve(position, head_dim=head_dim, **sizes)
    return found if isinstance(found, Rotary) else None


def _frequencies(scheme: Rotary, length: int) -> tuple[list[float], list[float]]:
    """Radians a token of every pair in a sequence of this length: the scheme's, and those of `rope` with its base and width."""
    import torch

    from variants.positions.rotary import frequencies

    turning = scheme.frequencies(torch.tensor([length]), "cpu").to(torch.float64).flatten()
    return turning.tolist(), frequencies(scheme.width, scheme.base, "cpu").tolist()


def _tested_length(run: Run) -> int | None:
    """The longest sequences that the run was tested on along the axis of lengths."""
    matches = (TEST.fullmatch(name) for name in run.metrics)
    return max((int(match["length"]) for match in matches if match and match["axis"] == "length"), default=None)


def _departs(line: Mapping[str, Any]) -> bool:
    return any(factor is None or abs(factor - 1) > 1e-9 for factor in line["factors"])


def _named(lines: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The lines under the names of their schemes, or of their groups where schemes do not tell them apart, and of their seeds likewise."""
    homes: dict[str, set[tuple[int, ...]]] = {}
    for line in lines:
        homes.setdefault(_schemes(line), set()).add(_members(line))
    named = []
    for line in lines:
        members, label = _members(line), _schemes(line)
        if len(homes[label]) > 1:
            told = any(same_axis(key, ["position"]) for key in groups[members[0]].by)
            label = " / ".join(groups[i].label for i in members) + ("" if told else f" · {label}")
        mine = {run.run_id for _, _, run in line["of"]}
        if not all(run.run_id in mine for i in members for run in groups[i].finished):
            seeds = list(dict.fromkeys(spell(run.config.get("seed")) for _, _, run in line["of"]))
            label += f" (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})"
        named.append({"label": label, "groups": list(members), **{name: line[name] for name in SHOWN}})
    return named


def _schemes(line: Mapping[str, Any]) -> str:
    return ", ".join(dict.fromkeys(name for _, name, _ in line["of"]))


def _members(line: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for i, _, _ in line["of"]))


def _distinct(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(item): item for item in items}.values())
