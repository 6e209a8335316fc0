"""The registry: what a name typed by a user stands for.

Three instances live here, `variants`, `positions` and `tasks`. Entries shipped with attnlab are found by reading the source, not by
importing it, so that listing them costs milliseconds and no torch; a class is imported when it is first built. A third party registers
with the same decorator, in a file or module named by `--plugin`, or behind an entry point of the group `attnlab.plugins`.

    @variants.register("full", time="T^2", state="T", hooks=("rotate", "bias"), implementations=("reference", "sdpa"))
    class FullAttention(Softmax): ...

The keyword arguments of the decorator are the entry's facts. They become class attributes, and must be literals.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

ROOT = Path(__file__).resolve().parent
ENTRY_POINTS = "attnlab.plugins"

Class = TypeVar("Class", bound=type)


class UserError(Exception):
    """A mistake of the person at the keyboard; its message alone says what to do."""


class UnknownName(UserError, LookupError):
    """A name that no entry has."""


class UnknownOption(UserError, TypeError):
    """An option that the named entry does not take."""


class DuplicateName(UserError, ValueError):
    """Two places claim one name."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """A sentence that points from a misspelt word to the valid ones."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Valid: {', '.join(names) or 'none'}."


@dataclass(frozen=True)
class Entry:
    """One registered name. `module` and `qualname` say which class, `source` where a person finds it (file:line)."""

    name: str
    module: str
    qualname: str
    source: str
    summary: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """One keyword-only parameter of a constructor: what a user may set."""

    name: str
    type: Any
    default: Any
    doc: str


class Registry:
    """Names of one kind. `folder` is the package, relative to this file, whose sources are searched for entries."""

    def __init__(self, plural: str, folder: str):
        self.plural = plural
        self.kind = plural.removesuffix("s")
        self._folder = folder
        self._entries: dict[str, Entry] | None = None
        self._classes: dict[str, type] = {}

    def register(self, name: str, **facts: Any) -> Callable[[Class], Class]:
        """Class decorator: make `cls` available as `name`. Raises DuplicateName, naming both places."""
        caller = sys._getframe(1)
        source = f"{caller.f_code.co_filename}:{caller.f_lineno}"

        def decorate(cls: Class) -> Class:
            summary = _first_line(cls.__doc__) or _first_line(sys.modules[cls.__module__].__doc__)
            self._add(Entry(name, cls.__module__, cls.__qualname__, source, summary, facts))
            for key, value in facts.items():
                setattr(cls, key, value)
            self._classes[name] = cls
            return cls

        return decorate

    def names(self) -> list[str]:
        """Every name that can be built, sorted."""
        load_entry_points()
        return sorted(self._index())

    def entry(self, name: str) -> Entry:
        """The entry of `name`; raises UnknownName with the nearest valid one."""
        load_entry_points()
        found = self._index().get(name)
        if found is None:
            lost = "".join(f" Plug-in {source} is unavailable: {reason}." for source, reason in unavailable.items())
            raise UnknownName(f"no {self.kind} is named {name!r}.{nearest(name, self._index())}{lost}")
        return found

    def get(self, name: str) -> type[Any]:
        """The class behind `name`, imported now if it was not yet."""
        entry = self.entry(name)
        if name not in self._classes:
            self._classes[name] = getattr(importlib.import_module(entry.module), entry.qualname)
        return self._classes[name]

    def build(self, name: str, /, **arguments: Any) -> Any:
        """An instance of `name`. Raises UnknownName or UnknownOption with the nearest valid word; the constructor checks values."""
        return self.checked(name, **arguments)(**arguments)

    def checked(self, name: str, /, **arguments: Any) -> type:
        """The class of `name`, which takes such options. Raises UnknownName or UnknownOption, and UserError for one of another type."""
        cls = self.get(name)
        valid = {parameter.name for parameter in _parameters(cls)}
        for key in arguments:
            if key not in valid:
                raise UnknownOption(f"{self.kind} {name!r} has no option {key!r}.{nearest(key, valid)}")
        for option in options(cls):
            if option.name in arguments:
                _check_value(f"{self.kind} {name!r}: {option.name}", arguments[option.name], option.type)
        return cls

    def resolve(self, spec: Any, **given: Any) -> Any:
        """What `spec` stands for: None and instances as they are, a name or a mapping with `name` and options built with `given`."""
        if isinstance(spec, str):
            return self.build(spec, **given)
        if isinstance(spec, Mapping):
            chosen = dict(spec)
            if "name" not in chosen:
                raise UserError(f"a {self.kind} given as a mapping needs the key 'name'; got {sorted(chosen)}")
            return self.build(chosen.pop("name"), **given, **chosen)
        return spec

    def describe(self, name: str) -> dict[str, Any]:
        """Name, summary, source, facts and options (name, type, default, doc) of one entry."""
        entry = self.entry(name)
        taken = [
            {"name": o.name, "type": inspect.formatannotation(o.type), "default": o.default, "doc": o.doc} for o in options(self.get(name))
        ]
        return {"name": name, "summary": entry.summary, "source": entry.source, **entry.facts, "options": taken}

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Registrations made inside are forgotten on leaving."""
        before = self._snapshot()
        try:
            yield
        finally:
            self._entries, self._classes = before

    def _snapshot(self) -> tuple[dict[str, Entry], dict[str, type]]:
        return dict(self._index()), dict(self._classes)

    def _index(self) -> dict[str, Entry]:
        if self._entries is None:
            self._entries = {}
            for entry in _entries_in(ROOT / self._folder, self.plural):
                self._add(entry)
        return self._entries

    def _add(self, entry: Entry) -> None:
        known = self._index().get(entry.name)
        if known is not None and (known.module, known.qualname) != (entry.module, entry.qualname):
            raise DuplicateName(f"{self.kind} {entry.name!r} is registered twice: at {known.source} and at {entry.source}")
        self._index()[entry.name] = entry


variants = Registry("variants", "variants")
positions = Registry("positions", "variants/positions")
tasks = Registry("tasks", "experiments/tasks")

#: Plug-ins that could not be imported: where they were asked for -> why.
unavailable: dict[str, str] = {}
_told: set[str] = set()
_entry_points_loaded = False


def load_plugins(sources: Iterable[str]) -> None:
    """Import files (`path/to/mine.py`) and modules (`package.mine`). One that fails is noted in `unavailable` and leaves nothing behind."""
    for source in sources:
        _load(source, lambda source=source: _import_plugin(source))  # type: ignore[misc]


def load_entry_points() -> None:
    """Import what installed packages offer under `attnlab.plugins`, once."""
    global _entry_points_loaded
    if not _entry_points_loaded:
        _entry_points_loaded = True
        for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
            _load(f"entry point {point.name} = {point.value}", point.load)


def options(cls: type) -> list[Option]:
    """The keyword-only parameters of a constructor, with those that a `**options` hands on to its bases.

    Types are resolved; the text is the line `name: text` under "Options:" in the docstring of the class that takes it.
    """
    found: dict[str, Option] = {}
    for owner, parameter in _owned_parameters(cls):
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in found:
            hints = typing.get_type_hints(owner.__init__)  # type: ignore[misc]
            doc = _option_docs(owner).get(parameter.name, "")
            found[parameter.name] = Option(parameter.name, hints.get(parameter.name, Any), parameter.default, doc)
    return list(found.values())


def _load(source: str, importer: Callable[[], object]) -> None:
    unavailable.pop(source, None)
    registries = (variants, positions, tasks)
    before = [registry._snapshot() for registry in registries]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for what was asked for
            importer()
    except (Exception, SystemExit) as error:  # a stranger's file may raise anything at all, and must break nothing else
        unavailable[source] = f"{type(error).__name__}: {_first_line(str(error))}"
        if source not in _told:
            _told.add(source)
            logging.getLogger("attnlab").warning("plug-in %s is unavailable: %s", source, unavailable[source])
        for registry, (entries, classes) in zip(registries, before, strict=True):
            registry._entries, registry._classes = entries, classes


def _import_plugin(source: str) -> None:
    path = Path(source).expanduser()
    if path.suffix != ".py":
        importlib.import_module(source)
        return
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"attnlab_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _entries_in(folder: Path, plural: str) -> Iterator[Entry]:
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if f"@{plural}.register(" not in text:
            continue
        tree = ast.parse(text, str(file))
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in tree.body:
            for call in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func) == f"{plural}.register":
                    assert isinstance(node, ast.ClassDef)
                    facts = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
                    summary = _first_line(ast.get_docstring(node)) or _first_line(ast.get_docstring(tree))
                    source = f"{file}:{call.lineno}"
                    yield Entry(ast.literal_eval(call.args[0]), module, node.name, source, summary, facts)


def _owned_parameters(cls: type) -> Iterator[tuple[type, inspect.Parameter]]:
    for owner in cls.__mro__:
        if "__init__" not in owner.__dict__ or owner is object:
            continue
        parameters = list(inspect.signature(owner.__init__).parameters.values())[1:]  # type: ignore[misc]
        yield from ((owner, p) for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return


def _parameters(cls: type) -> list[inspect.Parameter]:
    return [parameter for _, parameter in _owned_parameters(cls)]


def _option_docs(cls: type) -> dict[str, str]:
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Options:\n")
    lines = re.findall(r"^ +(\w+): (.+(?:\n {8,}.+)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in lines}


def _check_value(owner: str, value: Any, wanted: Any) -> None:
    """A choice among words, or a plain number, word or truth value; what is annotated otherwise is the constructor's affair."""
    if typing.get_origin(wanted) is Literal:
        _check_choice(owner, value, typing.get_args(wanted))
        return
    kinds = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    if not set(kinds) <= {int, float, bool, str, types.NoneType}:
        return
    # A bool is an int to Python, and an int is as good as a float.
    fits = isinstance(value, (*kinds, int) if float in kinds else kinds) and (not isinstance(value, bool) or bool in kinds)
    if not fits:
        words = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise UserError(f"{owner} takes {words}; got {value!r}")


def _check_choice(owner: str, value: Any, valid: tuple[Any, ...]) -> None:
    if value not in valid:
        raise UnknownOption(f"{owner} cannot be {value!r}.{nearest(str(value), map(str, valid))}")


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0].strip()
