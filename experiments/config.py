"""Configs: from the words on a command line to one resolved dictionary.

Hydra composes. The schema of every registered name comes from its constructor, so a variant in a plug-in is selectable without a YAML
file; `configs/` holds presets and experiments. Everything that is not in a schema is refused, with the nearest valid word.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

import configs
import registry
from experiments import settings
from experiments.words import read_choices
from registry import UserError, nearest

REGISTRIES = {"variant": registry.variants, "position": registry.positions, "task": registry.tasks}
SCHEMAS: dict[str, Any] = {
    "model": settings.Model,
    "optimizer": settings.Optimizer,
    "trainer": settings.Trainer,
    "evaluation": settings.Evaluation,
    "search": settings.Search,
    "executor": settings.Executor,
}


def parse(words: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them. Raises UserError for one that has no meaning here."""
    overrides = []
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:
            raise UserError(
                f"cannot read {word!r}; an override is written key=value, a sweep key=a,b,c, special characters in quotes"
            ) from None
        if word[0] in "+~":
            raise UserError(f"{word!r}: keys are neither added nor deleted here; write key=value for a key of the schema")
        key = override.key_or_group
        if key.split(".")[0] == "hydra":
            raise UserError(f"{word!r}: Hydra only composes the config here; its own settings have no effect. Output goes to runs_dir=")
        group, _, rest = key.partition(".")
        if rest == "name" and group in (*REGISTRIES, *SCHEMAS):
            raise UserError(f"{word!r} would change the name and keep the options of another; write {group}={override.value()}")
        if key in (*REGISTRIES, *SCHEMAS) and not override.is_sweep_override() and not isinstance(override.value(), str):
            valid = REGISTRIES[key].names() if key in REGISTRIES else [SCHEMAS[key].name]
            raise UserError(f"{word!r}: {key} is chosen by name.{nearest(str(override.value()), valid)}")
        overrides.append(override)
    return overrides


def resolve(words: Sequence[str]) -> dict[str, Any]:
    """The whole config that `words` (overrides, no sweeps) stand for, as plain containers. Raises UserError in a few lines."""
    words = read_choices(words, (*REGISTRIES, *SCHEMAS))
    overrides = parse(words)
    _load_plugins(overrides)
    for override in overrides:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line!r} names several values; `attnlab sweep` takes it")
    _store_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(configs.__file__).parent), version_base="1.3"):
        try:
            composed = compose("run", words)
            config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise UserError(_explain(error)) from None
    assert isinstance(config, dict)
    return typing.cast(dict[str, Any], config)


def fields_of(cls: type) -> type:
    """The schema of a registered class: its name and its options, in types that OmegaConf can check."""
    fields: list[Any] = [("name", str, MISSING)]
    for option in registry.options(cls):
        default = MISSING if option.default is inspect.Parameter.empty else option.default
        if isinstance(default, (list, dict, tuple)):
            value = default if isinstance(default, dict) else list(default)
            default = dataclasses.field(default_factory=functools.partial(copy.copy, value))
        fields.append((option.name, _checkable(option.type), default))
    return dataclasses.make_dataclass(cls.__name__, fields)


def _checkable(hint: Any) -> Any:
    """The nearest type to `hint` that OmegaConf knows; Any where it has none. Literals are checked when the thing is built."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float, bool, str):
        return hint
    if origin is typing.Literal and all(isinstance(value, str) for value in arguments):
        return str
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        inner = _checkable(next(a for a in arguments if a is not type(None)))
        return inner if inner is Any else typing.Optional[inner]  # noqa: UP045 (a type built at run time)
    if origin in (list, tuple, Sequence) and arguments:
        return list[_checkable(arguments[0])]  # type: ignore[misc]
    return Any


def _store_schemas() -> None:
    store = ConfigStore.instance()
    for group, schema in SCHEMAS.items():
        _store(store, group, schema.name, schema)
    for group, names in REGISTRIES.items():
        for name in names.names():
            _store(store, group, name, names.get(name))
    store.store(name="schema", node=settings.Run)


#: What Hydra's store holds already; making a schema takes longer than everything else in `resolve`.
_stored: dict[tuple[str, str], type] = {}


def _store(store: ConfigStore, group: str, name: str, cls: type) -> None:
    if _stored.get((group, name)) is cls:
        return
    node = OmegaConf.structured(cls if group in SCHEMAS else fields_of(cls))
    node.name = name
    store.store(group=group, name=name, node=node)
    _stored[group, name] = cls


def _load_plugins(overrides: Sequence[Override]) -> None:
    for override in overrides:
        if override.key_or_group == "plugins":
            value = override.value()
            registry.load_plugins([str(source) for source in value] if isinstance(value, list) else [str(value)])


def _explain(error: Exception) -> str:
    """What was wrong, where it was said, what would be right."""
    if isinstance(error, MissingConfigException):
        return _explain_choice(str(error.missing_cfg_file or ""), error.options or [])
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for cause in chain:
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
            owner = str(cause.full_key).removesuffix(str(cause.key)).rstrip(".")
            valid = {str(key) for key in cause.parent_node} - {"name"}
            return f"{owner or 'the config'} has no key {str(cause.key)!r}.{nearest(str(cause.key), valid)}"
        if isinstance(cause, MissingMandatoryValue):
            return f"a value is missing: {str(cause).splitlines()[0]}"
    last = next((c for c in chain if isinstance(c, OmegaConfBaseException)), chain[-1])
    key = getattr(last, "full_key", None)
    said = str(last).splitlines()[0]
    if isinstance(error, ConfigCompositionException) and key is None:
        said = str(error).splitlines()[0]
    return f"{key}: {said}" if key else said


def _explain_choice(file: str, options: Sequence[str]) -> str:
    group, _, name = file.rpartition("/")
    if not group:
        return f"no config is named {name!r}"
    lost = "".join(f" Plug-in {source} is unavailable: {reason}." for source, reason in registry.unavailable.items())
    return f"no {group} is named {name!r}.{nearest(name, options)}{lost}"


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A copy that lacks some top-level keys."""
    return {key: value for key, value in config.items() if key not in keys}
