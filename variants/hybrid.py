"""Hybrid stacks: another mixer from layer to layer, or several side by side in one.

    pattern="mamba2*7 full"             seven layers of one, one of the other, and again
    pattern="mamba2+full mamba2*2"      the first layer has both in parallel: y = the mean of their outputs, each behind an RMS norm

An entry is a name, or a mapping of `name`, options, and a `position` of its own; a list of entries inside the pattern is a parallel
layer. An entry without a position takes that of the layer if it can: a state-space model beside it goes without. Interleaved stacks are
those of Lieber et al. 2024, "Jamba", Ren et al. 2024, "Samba", De et al. 2024, "Griffin", and Kimi Team 2025, "Kimi Linear"; parallel
heads those of Dong et al. 2024, "Hymba". Costs and state are those of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from registry import UserError, options, positions, variants
from variants.cache import Slots
from variants.contract import Context, Mixer, NotApplicable, State

#: Jamba's Mamba has norms on what its steps, writing and reading are made from.
_NORMED = {"name": "mamba", "norms": True}
#: Stacks from the literature, of the parts that there are, Jamba's and Kimi's attention without positions; Griffin's recurrence stands for
#: any that decays by channel, here GLA.
PRESETS: Mapping[str, Any] = {
    "jamba": [_NORMED] * 4 + [{"name": "full", "position": None}] + [_NORMED] * 3,
    "samba": "mamba sliding_window",
    "griffin": "gla*2 sliding_window",
    "kimi": ["kda"] * 3 + [{"name": "mla", "position": None}],
}
#: What a state holds beside the parts of its mixer.
COUNTERS = ("seen", "in_segment", "segment")

#: One layer: the parts that stand side by side in it, each a name and options.
Layer = tuple[Mapping[str, Any], ...]


@variants.register("hybrid", time="T^2", state="T", hooks=("rotate", "relate", "bias"), implementations=())
class Hybrid(Mixer):
    """One layer of a stack whose layers differ: the mixers of a pattern in turn, or side by side.

    Options:
        pattern: `mamba2*7 full`, or a list of names, of mappings with `name` and options, and of lists whose entries stand side by side.
        settings: options of the pattern's mixers by name, `{mamba2: {state_dim: 64}}`, for entries that do not set them themselves.
        preset: a pattern by name instead: `jamba` (attention fifth of eight, without positions), `samba`, `griffin` or `kimi`.
        layer: index of the layer (default: 0; the model fills it in).
        layers: depth of the stack, for mixers that ask for it.
    """

    hooks: ClassVar[tuple[str, ...]] = ("rotate", "relate", "bias")
    bidirectional = True

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        pattern: Any = "mamba2*7 full",
        settings: Mapping[str, Any] | None = None,
        preset: Literal["none", "jamba", "samba", "griffin", "kimi"] = "none",
        layer: int | None = None,
        layers: int | None = None,
        **options: Any,
    ):
        scheme = position if position is None or not isinstance(position, str | Mapping) else positions.get(_name(position))
        embedded = scheme is not None and set(scheme.hooks) <= {"embed"}
        super().__init__(dim, heads, position if embedded else None, **options)
        stack = _set(parse(pattern if preset == "none" else PRESETS[preset]), settings or {})
        free = [part for each in stack for part in each if "position" not in part]
        if scheme is not None and not embedded and not any(_takes(part, scheme) for part in free):
            raise NotApplicable(f"Hybrid: no mixer of its pattern takes position {_name(position)}; choose another position or pattern")
        told = {"dim": dim, "heads": heads} | ({} if self.causal else {"causal": False})
        place = {"layer": layer or 0, "layers": layers}
        here = stack[place["layer"] % len(stack)]  # type: ignore[operator]
        self.parts = nn.ModuleList(_built(part, None if embedded else position, scheme, told, place) for part in here)
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-5) for _ in self.parts) if len(self.parts) > 1 else None
        self.normalises_rows = self.norms is None and self.mixers[0].normalises_rows
        #: Declared costs are those of the part that has the most.
        self.time, self.state = (max((getattr(mixer, fact) for mixer in self.mixers), key=_growth) for fact in ("time", "state"))

    @property
    def mixers(self) -> list[Mixer]:
        """The parts of this layer."""
        return [part for part in self.parts if isinstance(part, Mixer)]

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], Mapping[str, Tensor | Slots], dict[str, Tensor]]:
        """The one part, or the mean of all, each behind its norm."""
        if self.norms is None:
            return self.mixers[0].mix(_embedded(self.mixers[0], x, context), context, state)
        total, parts, aux = torch.zeros_like(x), dict[str, Tensor | Slots](), dict[str, Tensor]()
        for n, (mixer, norm) in enumerate(zip(self.mixers, self.norms, strict=True)):
            y, new, seen = mixer.mix(_embedded(mixer, x, context), context, None if state is None else _of_part(state, n))
            total = total + norm(y) / len(self.mixers)
            parts |= {f"{n}.{name}": part for name, part in new.items()}
            aux |= {f"{name}/{n}": value for name, value in seen.items()}
        return total, parts, aux

    def _check(self, x: Tensor, context: Context, state: State | None) -> None:
        super()._check(x, context, state)
        for mixer in self.mixers:
            mixer._check(x, context, state)

    def whole_rows(self) -> str | None:
        """The first reason that a part has."""
        return next((reason for mixer in self.mixers if (reason := mixer.must_be_whole()) is not None), None)

    def init_parts(self, batch: int, **like: Any) -> dict[str, Tensor]:
        """Those of the one part, or of all under their numbers."""
        if self.norms is None:
            return self.mixers[0].init_parts(batch, **like)
        return {f"{n}.{name}": part for n, mixer in enumerate(self.mixers) for name, part in mixer.init_parts(batch, **like).items()}

    def flops(self, time: int) -> int:
        """Those of the parts."""
        return sum(mixer.flops(time) for mixer in self.mixers)

    def state_elements(self, time: int) -> int:
        """Those of the parts."""
        return sum(mixer.state_elements(time) for mixer in self.mixers)

    def read_elements(self, time: int) -> int:
        """Those of the parts."""
        return sum(mixer.read_elements(time) for mixer in self.mixers)

    def reach(self) -> int | None:
        """The furthest of the parts."""
        reaches = [mixer.reach() for mixer in self.mixers]
        return None if None in reaches else max(reach for reach in reaches if reach is not None)

    def undecayed(self) -> Iterable[nn.Parameter]:
        """Those of the parts."""
        return [parameter for mixer in self.mixers for parameter in mixer.undecayed()]

    def block_sizes(self) -> tuple[int, ...]:
        """Lengths at whose multiples a part does something else."""
        sizes = (getattr(mixer, name, None) for mixer in self.mixers for name in ("block", "chunk", "window"))
        return tuple(size for size in sizes if isinstance(size, int))


def parse(pattern: Any) -> list[Layer]:
    """The layers of a pattern, before it begins again. Raises UserError for what is none."""
    entries = pattern.split() if isinstance(pattern, str) else pattern
    if not isinstance(entries, list | tuple) or not entries:
        raise UserError(f"variant.pattern is text such as 'mamba2*7 full', or a list of entries; got {pattern!r}")
    layers: list[Layer] = []
    for entry in entries:
        count = 1
        if isinstance(entry, str):
            found = re.fullmatch(r"([^*]+)(?:\*([1-9]\d*))?", entry)
            if found is None:
                raise UserError(f"variant.pattern: {entry!r} is not a name, name*count or name+name")
            side_by_side: list[Any] = found[1].split("+")
            count = int(found[2] or 1)
        else:
            side_by_side = list(entry) if isinstance(entry, list | tuple) else [entry]
        if not side_by_side:
            raise UserError("variant.pattern: a layer of several mixers side by side needs at least one")
        layers += [tuple(map(_part, side_by_side))] * count
    return layers


def _set(stack: Sequence[Layer], settings: Mapping[str, Any]) -> list[Layer]:
    """The stack with `settings` under the options of its entries. Raises UserError for options that there are not, in any layer.

    Settings may be of a variant outside this pattern: a sweep may have one mapping for all its patterns.
    """
    if not isinstance(settings, Mapping):
        raise UserError(f"variant.settings is a mapping of names to options; got {settings!r}")
    for name, given in settings.items():
        if not isinstance(given, Mapping):
            raise UserError(f"variant.settings.{name} is a mapping of options; got {given!r}")
        _require_options({"name": name, **given})
    whole: list[Layer] = [tuple({**settings.get(part["name"], {}), **part} for part in layer) for layer in stack]
    for layer in whole:
        for part in layer:
            _require_options(part)
    return whole


def _require_options(part: Mapping[str, Any]) -> None:
    """Raises UserError for options that the mixer does not have, or that the hybrid gives to all of its mixers."""
    name, given = part["name"], {option: value for option, value in part.items() if option != "name"}
    common = sorted({"dim", "heads", "causal", "layer", "layers"} & set(given))
    if common:
        raise UserError(f"variant.pattern: {name} cannot have {common[0]} of its own; all mixers of a hybrid share it")
    variants.checked(name, **given)


def _embedded(mixer: Mixer, x: Tensor, context: Context) -> Tensor:
    """What a mixer is given whose own position is added to x."""
    if mixer.position is None or "embed" not in mixer.position.hooks:
        return x
    assert context.positions is not None
    return mixer.position.embed(x, context.positions)


def _part(entry: Any) -> Mapping[str, Any]:
    """A name and its options. Raises UserError for an entry that is neither, or names no mixer of one layer."""
    part = {"name": entry} if isinstance(entry, str) else dict(entry) if isinstance(entry, Mapping) else {}
    if not isinstance(part.get("name"), str):
        raise UserError(f"an entry of variant.pattern is a name, or a mapping with the key 'name'; got {entry!r}")
    if variants.get(part["name"]) is Hybrid:
        raise UserError("variant.pattern: a hybrid stands in no hybrid; write its layers out")
    return part


def _takes(part: Mapping[str, Any], scheme: Any) -> bool:
    """Whether the mixer can apply the scheme."""
    mixer = variants.get(part["name"])
    hooked = set(scheme.hooks) - {"embed"} <= set(mixer.hooks)
    return hooked and (mixer.keeps_keys or not scheme.length_dependent) and (scheme.isometric or not mixer.unit_keys)


def _built(part: Mapping[str, Any], position: Any, scheme: Any, told: Mapping[str, Any], place: Mapping[str, Any]) -> Mixer:
    """The mixer: with a position of its own, or that of the layer if it takes it."""
    chosen = dict(part)
    name = chosen.pop("name")
    chosen.setdefault("position", position if scheme is not None and _takes(part, scheme) else None)
    asked = {option.name for option in options(variants.get(name))}
    mixer: Mixer = variants.build(name, **told, **{key: value for key, value in place.items() if key in asked}, **chosen)
    return mixer


def _name(position: Any) -> str:
    """What a position is called."""
    if isinstance(position, str):
        return position
    return str(position.get("name")) if isinstance(position, Mapping) else type(position).__name__


def _of_part(state: State, number: int) -> State:
    """The counters, and what part `number` keeps under names of its own."""
    prefix = f"{number}."
    counters = {name: state[name] for name in COUNTERS if name in state}
    return State(**counters, **{name.removeprefix(prefix): state.slots(name) for name in state if name.startswith(prefix)})


def _growth(cost: str) -> tuple[int, int]:
    """Orders costs such as "1", "W", "T", "T W" and "T^2"."""
    return cost.count("T") + cost.count("^2"), len(cost)
