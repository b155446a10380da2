"""A folder of blocks that memory has no room for. Knows files and keys, no cache.

One sealed file for each block, named by its key. Files are written by a thread and read by others; nobody waits for a
write. Whatever is not as it was written is deleted, and was never there.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
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

from safetensors import SafetensorError
from torch import Tensor

from coattn.engine import sealed
from coattn.errors import ConfigError

FORMAT = "coattn-block-1"
SUFFIX = ".block"
APART = "waiting-"
"""Before the names of files that belong to this process alone."""
QUEUE = 512 << 20
"""Bytes of blocks that may wait to be written; what comes while they do is lost."""
READERS = 4
"""Files that are read at a time."""

log = logging.getLogger("coattn")


@dataclass(frozen=True)
class Block:
    """A block of tokens, and what is stored of it: tensors by name."""

    tokens: tuple[int, ...]
    tensors: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())


@dataclass(frozen=True)
class Found:
    """Blocks as far as they were good, the bytes of their files, and how long all of it took."""

    blocks: Sequence[Block]
    bytes: int
    seconds: float


class Disk:
    """At most `limit` bytes of files in a folder that one process has to itself; the least recently used go first."""

    def __init__(self, folder: Path, limit: int, made_for: Mapping[str, str]) -> None:
        """made_for: fingerprints; a file that others wrote is not used, whatever its name."""
        self.folder, self.limit, self.made_for = folder, limit, dict(made_for)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        """Guards all of what follows."""
        self._files: OrderedDict[str, int] = OrderedDict()
        """Bytes by name, the least recently used first."""
        self._held = 0
        self._queue: list[tuple[int, bytes]] = []
        """A heap: the beginnings of texts are written first, since nothing is read without them."""
        self._waiting: dict[bytes, Block] = {}
        """Of keys in the queue, and the one that is being written."""
        self._waiting_bytes = 0
        self._claim = _claim(folder)
        self._scan()
        self._writer = ThreadPoolExecutor(1, "coattn-disk-write")
        self._loader = ThreadPoolExecutor(1, "coattn-disk-load")
        self._readers = ThreadPoolExecutor(READERS, "coattn-disk-read")

    @property
    def held(self) -> int:
        """Bytes of all files."""
        return self._held

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting or _name(key) in self._files

    def size(self, key: bytes) -> int:
        """Bytes of a block's file; 0 where there is none yet."""
        return self._files.get(_name(key), 0)

    def put(self, key: bytes, block: Block, number: int = 0) -> bool:
        """A block is written when its turn comes; from now on it can be read. False: there was no room in the queue.

        number: of the block in its text. Where the queue is full, the blocks furthest from the beginning are lost.
        """
        with self._lock:
            name = _name(key)
            if name in self._files:
                self._files.move_to_end(name)
                return True
            if key in self._waiting:
                return True
            while self._waiting_bytes + block.bytes > QUEUE and self._queue and max(self._queue)[0] > number:
                self._lose(max(self._queue))
            if self._waiting_bytes + block.bytes > QUEUE or block.bytes > self.limit:
                self.counts["skipped"] += 1
                return False
            self._waiting[key] = block
            self._waiting_bytes += block.bytes
            heapq.heappush(self._queue, (number, key))
        self._writer.submit(self._write_next)
        return True

    def _lose(self, queued: tuple[int, bytes]) -> None:
        """A block leaves the queue unwritten; with the lock."""
        self._queue.remove(queued)
        heapq.heapify(self._queue)
        self._waiting_bytes -= self._waiting.pop(queued[1]).bytes
        self.counts["skipped"] += 1

    def load(self, keys: Sequence[bytes]) -> Future[Found]:
        """Reads blocks, in order, up to the first that is not there or not good."""
        return self._loader.submit(self._load, list(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were used now, the last of them least recently: the ends of texts go first."""
        with self._lock:
            for key in reversed(keys):
                if _name(key) in self._files:
                    self._files.move_to_end(_name(key))
                    with contextlib.suppress(OSError):
                        os.utime(self.folder / _name(key))

    def put_apart(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Writes tensors now -> the name by which this process gets them back; None: there is no room."""
        name = f"{APART}{uuid.uuid4().hex}{SUFFIX}"
        if self._write(name, tensors, {}):
            return name
        self.delete(name)
        return None

    def get_apart(self, name: str) -> dict[str, Tensor] | None:
        """What was written under that name; None, and one line in the log, where it is damaged."""
        found = self._read(name)
        return None if found is None else found[0]

    def delete(self, name: str) -> None:
        with self._lock:
            self._forget(name)

    def refuse(self, key: bytes, why: str) -> None:
        """A block is not what its key says: it is deleted."""
        self._damaged(_name(key), ValueError(why))

    def settle(self) -> None:
        """Waits until all that was put is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Writes what is in the queue, and lets the folder go."""
        for pool in (self._loader, self._readers, self._writer):
            pool.shutdown()
        for name in [name for name in self._files if name.startswith(APART)]:
            self._forget(name)
        self._claim.close()

    def _load(self, keys: list[bytes]) -> Found:
        start = time.perf_counter()
        blocks: list[Block] = []
        read = 0
        for key, block in zip(keys, self._readers.map(self._block, keys), strict=True):
            if block is None:
                break
            blocks.append(block)
            read += self.size(key) or block.bytes
        return Found(blocks, read, time.perf_counter() - start)

    def _block(self, key: bytes) -> Block | None:
        with self._lock:
            waiting = self._waiting.get(key)
        if waiting is not None:
            return waiting
        found = self._read(_name(key))
        if found is None:
            return None
        tensors, facts = found
        try:
            return Block(tuple(int(token) for token in facts["tokens"]), tensors)
        except (KeyError, TypeError, ValueError) as error:
            self._damaged(_name(key), error)
            return None

    def _read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        try:
            tensors, facts = sealed.read(self.folder / name, FORMAT)
            if facts.get("made for") != self.made_for or facts.get("name") != name:
                raise ValueError("it was written for another model, or under another name")
            return tensors, facts
        except FileNotFoundError:
            with self._lock:
                self._forget(name)
        except sealed.DAMAGED as error:
            self._damaged(name, error)
        return None

    def _damaged(self, name: str, error: Exception) -> None:
        log.warning("A block on disk is damaged and was deleted (%s): %s.", name, sealed.explain(error))
        with self._lock:
            self.counts["damaged"] += 1
            self._forget(name)

    def _write_next(self) -> None:
        with self._lock:
            if not self._queue:  # it was lost
                return
            _, key = heapq.heappop(self._queue)
            block = self._waiting[key]
        try:
            self._write(_name(key), block.tensors, {"tokens": list(block.tokens)})
        finally:
            with self._lock:
                del self._waiting[key]
                self._waiting_bytes -= block.bytes

    def _write(self, name: str, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> bool:
        size = sum(x.nbytes for x in tensors.values())
        if not self._make_room(size):
            self.counts["skipped"] += 1
            return False
        path = self.folder / name
        try:
            # what a failing machine leaves half written is a miss: nothing waits for the disk itself
            sealed.write(path, tensors, {**facts, "made for": self.made_for, "name": name}, FORMAT, sync=False)
            size = path.stat().st_size
        except (OSError, SafetensorError) as error:
            self.counts["skipped"] += 1
            log.warning("A block cannot be written to %s: %s.", self.folder, sealed.explain(error))
            return False
        with self._lock:
            self._files[name] = size
            self._held += size
            self.counts["written"] += 1
            self.counts["written_bytes"] += size
        return self._make_room(0)

    def _make_room(self, size: int) -> bool:
        """Deletes what was used least recently until there is room. False: there cannot be."""
        with self._lock:
            for name in list(self._files) if self._held + size > self.limit else ():
                if name.startswith(APART):
                    continue  # somebody waits for it
                self.counts["deleted"] += 1
                self._forget(name)
                if self._held + size <= self.limit:
                    break
            return self._held + size <= self.limit

    def _forget(self, name: str) -> None:
        """Deletes a file; with the lock."""
        self._held -= self._files.pop(name, 0)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def _scan(self) -> None:
        """What an earlier process has left: its blocks stay, the least recently used first."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith((".", APART)) and path.name != LOCK:
                    path.unlink()
                elif path.name.endswith(SUFFIX):
                    found.append((path.stat().st_mtime_ns, path.name, path.stat().st_size))
        self._files.update((name, size) for _, name, size in sorted(found))
        self._held = sum(self._files.values())
        self._make_room(0)


LOCK = ".lock"


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


def _name(key: bytes) -> str:
    return key.hex() + SUFFIX
