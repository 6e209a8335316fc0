"""Who works on a run: a claim that one process holds at a time, and that a dead process cannot keep.

Claims are numbered files, `claims/1.json`, `claims/2.json`, ...; the highest is the one that counts. Each is created exclusively, which the
file system grants to exactly one of several contenders. A stale claim is never removed, only followed: whoever saw number n stale
contends for number n + 1, so that one who looked too early cannot undo another's success. The heartbeat is the file's modification time; a
released claim has the heartbeat 0, which needs no space on a full disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.runs.files import read_json, writing
from registry import UserError

FOLDER = "claims"
BEAT_SECONDS = 5.0
#: A dozen missed beats: generous, because a loaded machine, or a network file system that caches attributes, is late by many seconds.
STALE_SECONDS = 60.0
RELEASED = 0.0


class AlreadyClaimed(UserError):
    """Another live process works on this run."""


class ClaimLost(UserError):
    """This process stood still so long that another one took the run over."""


@dataclass(frozen=True)
class Holder:
    """What a claim says of its process. `heartbeat` is in seconds since the epoch."""

    host: str
    pid: int
    #: Where the number `pid` has its meaning: this boot of this machine, this process namespace.
    realm: str
    #: When the process began, so that a reused number is not taken for it.
    began: str
    heartbeat: float

    @property
    def lost(self) -> str:
        """Why this claim no longer counts; empty while it does."""
        if self.heartbeat == RELEASED:
            return "released"
        if self.realm == _realm() and _began(self.pid) != self.began:
            return f"process {self.pid} on {self.host} is gone"
        silence = time.time() - self.heartbeat
        return f"process {self.pid} on {self.host} has been silent for {silence:.0f} s" if silence > STALE_SECONDS else ""


class Claim:
    """A claim this process holds; a thread keeps it alive until `release`."""

    def __init__(self, path: Path):
        self.path = path
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="attnlab heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, directory: Path) -> Claim:
        """Claim a run's directory. Raises AlreadyClaimed, naming the holder, or CannotWrite."""
        folder = directory / FOLDER
        with writing(folder):
            folder.mkdir(exist_ok=True)
            number = _latest(folder)
            holder = _read(folder, number)
            if holder is not None and not holder.lost:
                raise AlreadyClaimed(f"{directory} is being worked on by process {holder.pid} on {holder.host}")
            path = _path(folder, number + 1)
            if not _create(path):
                raise AlreadyClaimed(f"{directory} was claimed by another process at the same moment")
        return cls(path)

    def check(self) -> None:
        """Raise ClaimLost if another process has taken over."""
        folder = self.path.parent
        if self._lost or _latest(folder) != int(self.path.stem):
            raise ClaimLost(f"{folder.parent} was taken over by another process; this one stops")

    @property
    def lost(self) -> bool:
        """What the heartbeat saw last; costs nothing."""
        return self._lost

    def release(self) -> None:
        """Let the next one in."""
        self._stop.set()
        self._thread.join()
        _release(self.path)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                os.utime(self.path)
                self._lost = _latest(self.path.parent) != int(self.path.stem)
            except OSError:  # a file system that is away for a moment; silence for long enough is noticed by the others
                continue


def holder(directory: Path) -> Holder | None:
    """Who claimed the run last, dead or alive."""
    folder = directory / FOLDER
    return _read(folder, _latest(folder))


def _create(path: Path) -> bool:
    """Create a claim of this process; False if another one was faster. Until its content is there, a claim lives by its heartbeat alone."""
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "realm": _realm(), "began": _began(os.getpid())})
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(content)
    except OSError:
        _release(path)
        raise
    return True


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number}.json"


def _latest(folder: Path) -> int:
    """The number of the claim that counts; 0 if there is none."""
    try:
        return max((int(path.stem) for path in folder.iterdir() if path.stem.isdigit()), default=0)
    except FileNotFoundError:
        return 0


def _read(folder: Path, number: int) -> Holder | None:
    path = _path(folder, number)
    try:
        heartbeat = path.stat().st_mtime
    except FileNotFoundError:
        return None
    found = read_json(path) or {}
    return Holder(found.get("host", "unknown"), found.get("pid", 0), found.get("realm", ""), found.get("began", ""), heartbeat)


def _release(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # somebody removed the run while it ran
        os.utime(path, (RELEASED, RELEASED))


def _realm() -> str:
    """This boot and process namespace: two containers may share a host's name, and a process number means nothing after a reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + ":" + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()


def _began(pid: int) -> str:
    """When process `pid` began, in the system's own words; empty if it is gone, or only waits to be buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _began_without_proc(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _began_without_proc(pid: int) -> str:
    if Path("/proc/self/stat").exists() or pid <= 0:
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "unknown"
