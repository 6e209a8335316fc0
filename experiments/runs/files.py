"""How a file of the record is written: strict JSON, whole or not at all, and an error that names the path."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from registry import UserError

TEMPORARY = ".tmp"


class CannotWrite(UserError, OSError):
    """The place where runs are kept does not take what is written; the message names the path."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a CannotWrite that says which path and what to do."""
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CannotWrite(f"no space left to write {path}; free some, or choose another runs_dir") from error
        raise CannotWrite(f"cannot write {path}: {error.strerror or error}; choose another runs_dir, or make this one writable") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, and a crash at any moment, sees the old content or the new. Raises CannotWrite."""
    with writing(path):
        temporary = temporary_beside(path)
        try:
            with temporary.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """A name nobody else uses, in the same directory, so that renaming it to `path` is atomic."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}")


def publish(temporary: Path, path: Path) -> None:
    """Rename a written file into place so that it survives a power cut."""
    synchronise(temporary)
    temporary.replace(path)
    synchronise(path.parent)


def synchronise(path: Path) -> None:
    """Return once the file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON, keys sorted, for people and programs alike."""
    write_whole(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none, or only a part of one."""
    try:
        value = json.loads(path.read_bytes(), parse_constant=_refuse)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as strict JSON takes them: NaN and infinities become null, and "nonfinite" lists their dotted names.

    Scalars of numpy and torch become Python numbers.
    """
    lost: list[str] = []

    def convert(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {str(key): convert(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [convert(item, f"{name}.{i}") for i, item in enumerate(value)]
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            lost.append(name)
            return None
        return value

    result: dict[str, Any] = convert(values, "")
    return {**result, "nonfinite": lost} if lost else result
