"""Which implementation runs: the one place that looks for optional packages.

A mixer lists its implementations fastest first and calls `choose` in its constructor. `auto` takes the first that is usable and says so
once; a name asked for and not usable stops there, with the package, the extra that brings it, and what would work instead. A package that
is installed but broken is "unavailable" and breaks nothing else.

Importing this module imports neither torch nor any optional package.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from registry import UserError, nearest

logger = logging.getLogger(__name__)


class Package(NamedTuple):
    """What an implementation needs: a module besides torch, a CUDA device or not.

    extra: that of attnlab which installs it; "": it comes with attnlab.
    """

    module: str | None
    extra: str
    cuda: bool


#: Every other name (`reference`, `torch`, `sdpa`) needs torch alone, on any device.
PACKAGES = {
    "flash_attn": Package("flash_attn", extra="cuda", cuda=True),
    "fla": Package("fla.ops.simple_gla", extra="cuda", cuda=True),
    "mamba_ssm": Package("mamba_ssm.ops.selective_scan_interface", extra="cuda", cuda=True),
    "causal_conv1d": Package("causal_conv1d", extra="cuda", cuda=True),
    "numba": Package("numba", extra="", cuda=False),
    "flex": Package(None, extra="", cuda=True),  # torch has it, but on a CPU it gives no gradients
}


class NotUsable(UserError, ValueError):
    """An implementation asked for by name that cannot run here."""


def usable(name: str, device: str | None = None, *, quick: bool = False) -> str | None:
    """None if implementation `name` can run, else the reason why not. device: its type; default: any device of this machine.

    quick: believe that what comes with attnlab can be imported.
    """
    package = PACKAGES.get(name)
    if package is None:
        return None
    absent = None if package.module is None else _absence(package.module, package.extra)
    if absent is not None:
        return absent
    if package.cuda and device is not None and not device.startswith("cuda"):
        return f"runs on cuda, not on {device}"
    if package.cuda and not _cuda():
        return "needs a CUDA device, and there is none"
    # Last, because an import may take seconds and complain of a device that is not there.
    return None if package.module is None or (quick and not package.extra) else _import_error(package.module)


def choose(
    owner: str, requested: str, candidates: Sequence[str], *, device: str | None = None, excluded: Mapping[str, str] | None = None
) -> str:
    """The implementation `owner` is to run: `requested`, or with "auto" the first usable of `candidates` (fastest first).

    `excluded` names candidates that the owner's options rule out, with the reason. Raises NotUsable if the wish cannot be met.
    """
    if requested != "auto" and requested not in candidates:
        raise NotUsable(f"{owner} has no implementation {requested!r}.{nearest(requested, ['auto', *candidates])}")
    reasons = {name: (excluded or {}).get(name) or usable(name, device) for name in candidates}
    fit = [name for name in candidates if reasons[name] is None]
    if requested == "auto":
        if not fit:
            raise NotUsable(f"{owner} has no usable implementation: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))
        passed_over = "".join(f"; {name} is not usable: {reasons[name]}" for name in candidates[: candidates.index(fit[0])])
        _announce(f"{owner} runs {fit[0]!r}{passed_over}")
        return fit[0]
    if reasons[requested] is not None:
        instead = f"use impl={fit[0]!r} or impl='auto'" if fit else "no other implementation is usable either"
        raise NotUsable(f"{owner}: impl={requested!r} is not usable: {reasons[requested]}; {instead}")
    return requested


@functools.cache
def _cuda() -> bool:
    """Whether torch sees a CUDA device. It is asked only where there is a driver: importing it takes seconds."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def _absence(module: str, extra: str) -> str | None:
    """Said of a package that is not there at all; nothing is imported."""
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # a module that somebody made by hand
        return None
    wanted = f"'attnlab[{extra}]'" if extra else module
    return f"not installed: pip install {wanted}" if found is None else None


@functools.cache
def _import_error(module: str) -> str | None:
    """Why a package that is there cannot be imported; asked once a process, since a broken import may take seconds to fail."""
    try:
        importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # another binary interface, a missing driver, even sys.exit: it must not take us with it
        return f"unavailable: {str(error) or type(error).__name__}"
    return None


@functools.cache
def _announce(message: str) -> None:
    """Log a line once a process."""
    logger.info(message)
