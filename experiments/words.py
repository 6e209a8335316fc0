"""Configs as the words of a command line: a stored config spelled as overrides, and group choices read from YAML files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from registry import UserError

#: Words that Hydra reads as themselves; everything else is quoted.
BARE = re.compile(r"[A-Za-z_][\w.-]*(?:/[\w.-]+)*", re.ASCII)
RESERVED = ("null", "true", "false", "nan", "inf")


def spell(value: Any) -> str:
    """A plain value as it is typed in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(spell(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and not (BARE.fullmatch(value) and value.lower() not in RESERVED):
        return "'" + re.sub(r"(\\*)'", lambda m: m[1] * 2 + r"\'", re.sub(r"(\\+)$", r"\1\1", value)) + "'"
    return str(value)


def words_of(config: Mapping[str, Any], groups: Iterable[str]) -> list[str]:
    """Overrides that compose to `config`; `groups` are its keys that are chosen by name."""
    chosen = set(groups)
    words = []
    for key, value in config.items():
        if key in chosen:
            words.append(f"{key}={spell(value['name'])}")
            words += [f"{key}.{option}={spell(item)}" for option, item in value.items() if option != "name"]
        else:
            words.append(f"{key}={spell(value)}")
    return words


def changed(words: Sequence[str], changes: Sequence[str]) -> list[str]:
    """`words`, and in place of those of the same key, `changes`. A group chosen anew loses the options it had."""
    given = [_key(word) for word in changes]
    kept = [word for word in words if not any(_key(word) == key or _key(word).startswith(f"{key}.") for key in given)]
    return [*kept, *changes]


def plain_options(name: str, words: Sequence[str]) -> dict[str, Any]:
    """`window=8`, an option of the variant `name` alone, as {"window": 8}, read as YAML reads it. Raises UserError."""
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"cannot read {word!r}; an option of {name} is written option=value")
        options[key] = yaml.safe_load(value)
    return options


def read_choices(words: Sequence[str], groups: Iterable[str]) -> list[str]:
    """The words, with `position=found.yaml`, a mapping of a name and its options, written out. Raises UserError for a file without one."""
    chosen = set(groups)
    found: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if key not in chosen or not value.endswith((".yaml", ".yml")):
            found.append(word)
            continue
        try:
            content = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not YAML"
            raise UserError(f"{word!r}: {value} cannot be read ({reason})") from None
        if not isinstance(content, dict) or not isinstance(content.get("name"), str):
            raise UserError(f"{word!r}: {value} must hold a mapping with the key 'name', and the options of that name")
        # Options that were typed as well count more than those of the file.
        found += [
            choice for choice in words_of({key: content}, chosen) if _key(choice) not in map(_key, words) or choice.startswith(f"{key}=")
        ]
    return found


def _key(word: str) -> str:
    return word.partition("=")[0]


__all__ = ["changed", "read_choices", "spell", "words_of"]
