"""A folder of sealed files with a size limit. Knows names and tensors, no cache.

One thread writes the files and others read them, so that the engine waits for neither. A file that cannot be read is
deleted and counts as missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from coattn.engine.store import sealed
from coattn.errors import ConfigError, one_line

FORMAT = "coattn-block-1"
SUFFIX = ".block"
PRIVATE = "waiting-"
"""Before the names of files that belong to this process alone."""
LOCK = ".lock"
QUEUE_BYTES = 512 << 20
"""That may wait to be written, of shared files, and of private ones; what comes while they do is lost. One private file
may be larger."""
READER_THREADS = 4
WRITING = -2
"""In place of a block's number, in the queue: below all of them, and below that of a private file, -1."""

Tensors = Mapping[str, Tensor]

log = logging.getLogger("coattn")


@dataclass(frozen=True)
class Loaded:
    """Contents of files, up to the first that could not be read."""

    tensors: Sequence[Tensors]
    bytes: int
    """That were read from files for it: what is still in the queue takes no reading."""
    seconds: float
    """How long all of it took."""


class FileCache:
    """At most `limit` bytes of files in a folder of its own; the least recently used file is deleted first."""

    def __init__(self, folder: Path, limit: int, made_for: Mapping[str, str]) -> None:
        """made_for: fingerprints; a file that was written for others is not used, whatever its name."""
        self.folder, self.limit, self.made_for = folder, limit, dict(made_for)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        """Guards all of what follows."""
        self._files: OrderedDict[str, int] = OrderedDict()
        """Bytes by name, the least recently used first."""
        self._fresh: set[str] = set()
        """Shared files that were written since some were touched. They lie in the order of writing, beginnings of texts
        first, so none of them is deleted for another."""
        self.held = 0
        """Bytes of all files."""
        self._queued: dict[str, tuple[int, Tensors]] = {}
        """By name: the number of a block, or `WRITING`, and what is to be written. The beginnings of texts come first,
        since nothing is read without them."""
        self._queued_bytes = {False: 0, True: 0}
        """Of shared and of private files."""
        self._warned = False
        """Whether it was said that a file could not be written."""
        self._claim = _claim(folder)
        self._scan()
        self._writer = ThreadPoolExecutor(1, "coattn-disk-write")
        self._loader = ThreadPoolExecutor(1, "coattn-disk-load")
        self._readers = ThreadPoolExecutor(READER_THREADS, "coattn-disk-read")

    def __contains__(self, name: str) -> bool:
        return name in self._queued or name in self._files

    def size(self, name: str) -> int:
        """Bytes of a file; 0 where there is none yet."""
        return self._files.get(name, 0)

    @property
    def room(self) -> int:
        """Bytes of shared files that the queue would take now."""
        return QUEUE_BYTES - self._queued_bytes[False]

    def put(self, name: str, tensors: Tensors, number: int = 0) -> bool:
        """Tensors are written when their turn comes; from now on they can be read, and must not change.

        False: there was no room in the queue. number: of the block in its text; where the queue is full, the blocks
        furthest from the beginning are lost.
        """
        size = _bytes(tensors)
        with self._lock:
            if name in self:
                if name in self._files:
                    self._files.move_to_end(name)
                return True
            while self._queued_bytes[False] + size > QUEUE_BYTES:
                last = max(self._queued, key=self._number, default=None)
                if last is None or self._number(last) <= number:
                    break
                self._dequeue(last)
                self.counts["skipped"] += 1
            if self._queued_bytes[False] + size > QUEUE_BYTES or _file_bytes(tensors) > self.limit:
                self.counts["skipped"] += 1
                return False
            self._enqueue(number, name, tensors)
        return True

    def put_private(self, tensors: Tensors) -> str | None:
        """The same, before shared files, under a new name that this process alone knows. None: there is no room."""
        name = f"{PRIVATE}{uuid.uuid4().hex}{SUFFIX}"
        with self._lock:
            if _file_bytes(tensors) > self.limit or not self.takes_private(_bytes(tensors)):
                self.counts["skipped"] += 1
                return None
            self._enqueue(-1, name, tensors)
        return name

    def takes_private(self, size: int) -> bool:
        """Whether there is room for so many bytes of tensors."""
        queued = self._queued_bytes[True]
        return size <= self.limit and (not queued or queued + size <= QUEUE_BYTES)

    def load(self, names: Sequence[str]) -> Future[Loaded]:
        """Reads files, in order, up to the first that is missing or damaged."""
        return self._loader.submit(self._load, list(names))

    def touch(self, names: Sequence[str]) -> None:
        """These were used now, the last of them least recently: the ends of texts go first."""
        with self._lock:
            for name in reversed(names):
                if name in self._files:
                    self._files.move_to_end(name)
                    with contextlib.suppress(OSError):
                        os.utime(self.folder / name)

    def touch_later(self, texts: Sequence[Sequence[str]]) -> None:
        """The same of the files of several texts, once all that was put is written."""

        def touch() -> None:
            with self._lock:  # those that begin another text are written before the ends of these
                queued = any(name in self._queued for names in texts for name in names)
            if queued:
                with contextlib.suppress(RuntimeError):  # it is closing
                    self._writer.submit(touch)
                return
            for names in texts:
                self.touch(names)
            with self._lock:
                self._fresh.clear()

        self._writer.submit(touch)

    def delete(self, name: str) -> None:
        with self._lock:
            self._forget(name)

    def delete_damaged(self, name: str, why: str) -> None:
        log.warning("A file on disk is damaged and was deleted (%s): %s.", name, why)
        with self._lock:
            self.counts["damaged"] += 1
            self._forget(name)

    def flush(self) -> None:
        """Waits until all that was put is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Writes what is in the queue, and lets the folder go."""
        with self._lock:
            for name in [name for name in (*self._queued, *self._files) if name.startswith(PRIVATE)]:
                self._forget(name)
        for pool in (self._loader, self._readers, self._writer):
            pool.shutdown()
        self._claim.close()

    def _load(self, names: list[str]) -> Loaded:
        start = time.perf_counter()
        tensors: list[Tensors] = []
        read = 0
        for loaded in self._readers.map(self._get, names):
            if loaded is None:
                break
            tensors.append(loaded[0])
            read += loaded[1]
        return Loaded(tensors, read, time.perf_counter() - start)

    def _get(self, name: str) -> tuple[Tensors, int] | None:
        """What a file holds, or will hold, and the bytes that were read for it."""
        with self._lock:
            queued, size = self._queued.get(name), self._files.get(name, 0)
        if queued is not None:
            return queued[1], 0
        try:
            tensors, facts = sealed.read(self.folder / name, FORMAT)
            if facts.get("made for") != self.made_for or facts.get("name") != name:
                raise ValueError("it was written for another model, or under another name")
            return tensors, size
        except FileNotFoundError:
            self.delete(name)
        except Exception as error:  # whatever it is, the next attempt would meet it again
            self.delete_damaged(name, one_line(error))
        return None

    def _enqueue(self, number: int, name: str, tensors: Tensors) -> None:
        """With the lock."""
        self._queued[name] = number, tensors
        self._queued_bytes[name.startswith(PRIVATE)] += _bytes(tensors)
        self._writer.submit(self._write_next)

    def _number(self, name: str) -> int:
        return self._queued[name][0]

    def _dequeue(self, name: str) -> None:
        """A name is not in the queue any more; with the lock."""
        queued = self._queued.pop(name, None)
        if queued is not None:
            self._queued_bytes[name.startswith(PRIVATE)] -= _bytes(queued[1])

    def _write_next(self) -> None:
        with self._lock:
            if not self._queued:  # it was lost, or deleted
                return
            name = min(self._queued, key=self._number)
            tensors = self._queued[name][1]
            writing = self._queued[name] = WRITING, tensors
        try:
            self._write(name, tensors)
        finally:
            with self._lock:
                if self._queued.get(name) is writing:
                    self._dequeue(name)
                else:  # it was deleted while it was written
                    self._forget(name)

    def _write(self, name: str, tensors: Tensors) -> None:
        if not self._make_room(_file_bytes(tensors), keeps=not name.startswith(PRIVATE)):
            self.counts["skipped"] += 1
            return
        path, facts = self.folder / name, {"made for": self.made_for, "name": name}
        try:
            # a file that is half written when the machine fails is a miss: nothing waits for the disk itself
            sealed.write(path, tensors, facts, FORMAT, sync=False)
            size = path.stat().st_size
        except Exception as error:
            self.counts["skipped"] += 1
            if not self._warned:  # of a full disk this would else be said for every block
                log.warning("Files cannot be written to %s, and are left out: %s.", self.folder, one_line(error))
            self._warned = True
            return
        with self._lock:
            self._files[name] = size
            if not name.startswith(PRIVATE):
                self._fresh.add(name)
            self.held += size
            self.counts["written"] += 1
            self.counts["written_bytes"] += size
        self._make_room(0)

    def _make_room(self, size: int, keeps: bool = False) -> bool:
        """Deletes what was used least recently until there is room for a file of at most `limit` bytes.

        keeps: deletes no fresh file for it. False: there is no room, for that reason.
        """
        with self._lock:
            while self._files and self.held + size > self.limit:
                oldest = next(iter(self._files))
                if keeps and oldest in self._fresh:
                    return False
                self.counts["deleted"] += 1
                self._forget(oldest)
        return True

    def _forget(self, name: str) -> None:
        """Deletes a file, or what would become one; with the lock."""
        self._dequeue(name)
        self.held -= self._files.pop(name, 0)
        self._fresh.discard(name)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def _scan(self) -> None:
        """An earlier process has left its shared files: they stay."""
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith((".", PRIVATE)) and path.name != LOCK:
                    path.unlink()
                elif path.name.endswith(SUFFIX):
                    files.append((path.stat().st_mtime_ns, path.name, path.stat().st_size))
        self._files.update((name, size) for _, name, size in sorted(files))
        self.held = sum(self._files.values())
        self._make_room(0)


def _bytes(tensors: Tensors) -> int:
    return sum(x.nbytes for x in tensors.values())


def _file_bytes(tensors: Tensors) -> int:
    """Of a file, rather more than it will have: names, shapes and digests are counted by the tensor."""
    return _bytes(tensors) + 1024 + 256 * len(tensors)


def _claim(folder: Path) -> Any:
    """An open file that says whose the folder is. Raises ConfigError where it is another's, or cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise ConfigError(
            f"The folder {folder} cannot be used for blocks: {error.strerror}.", "Give another one."
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"The folder {folder} belongs to another engine that is running.", "Give each engine a folder of its own."
        ) from None
    return file
