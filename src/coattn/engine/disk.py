"""A folder of blocks that memory has no room for. Knows files and keys, no cache.

One sealed file for each block, named by its key, and one for each sequence that waits here. Files are written by one
thread, and blocks are read by others; nobody waits for a write. A file that cannot be read is deleted, and was never
there.
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

from torch import Tensor

from coattn.engine import sealed
from coattn.errors import ConfigError

FORMAT = "coattn-block-1"
SUFFIX = ".block"
APART = "waiting-"
"""Before the names of files that belong to this process alone."""
QUEUE = 512 << 20
"""Bytes of blocks that may wait to be written, and of sequences; what comes while they do is lost. One sequence may be
larger."""
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

    @property
    def file_bytes(self) -> int:
        """Of its file, rather more than it will have: names, shapes and digests are counted by the tensor."""
        return self.bytes + 1024 + 256 * len(self.tensors) + 8 * len(self.tokens)


@dataclass(frozen=True)
class Found:
    """Blocks as far as they were good, the bytes that were read from files for them, and how long all of it took."""

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
        self._queue: list[tuple[int, str]] = []
        """A heap of names: the beginnings of texts are written first, since nothing is read without them. A name that
        is not in `_waiting` any more is passed over."""
        self._waiting: dict[str, Block] = {}
        """By name: what is in the queue, and the one that is being written."""
        self._waiting_bytes = {False: 0, True: 0}
        """Of blocks, and of sequences."""
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
        return _name(key) in self._waiting or _name(key) in self._files

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
            if name in self._waiting:
                return True
            while self._waiting_bytes[False] + block.bytes > QUEUE and self._queue and max(self._queue)[0] > number:
                self._lose(max(self._queue))
            if self._waiting_bytes[False] + block.bytes > QUEUE or block.file_bytes > self.limit:
                self.counts["skipped"] += 1
                return False
            self._enqueue(number, name, block)
        return True

    def _lose(self, queued: tuple[int, str]) -> None:
        """A block leaves the queue unwritten; with the lock."""
        self._queue.remove(queued)
        heapq.heapify(self._queue)
        if self._dequeue(queued[1]):
            self.counts["skipped"] += 1

    def _enqueue(self, number: int, name: str, block: Block) -> None:
        """With the lock."""
        self._waiting[name] = block
        self._waiting_bytes[name.startswith(APART)] += block.bytes
        heapq.heappush(self._queue, (number, name))
        self._writer.submit(self._write_next)

    def _dequeue(self, name: str) -> bool:
        """A name waits no more; with the lock. False: it did not."""
        block = self._waiting.pop(name, None)
        if block is not None:
            self._waiting_bytes[name.startswith(APART)] -= block.bytes
        return block is not None

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

    def takes(self, size: int) -> bool:
        """Whether a sequence of so many bytes may be put apart while those before it wait to be written."""
        waiting = self._waiting_bytes[True]
        return size <= self.limit and (not waiting or waiting + size <= QUEUE)

    def put_apart(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Tensors are written when their turn comes, before blocks; nobody may write to them from now on.

        -> the name by which this process gets them back, unless others have needed their room meanwhile; None: there is
        no room.
        """
        name, block = f"{APART}{uuid.uuid4().hex}{SUFFIX}", Block((), tensors)
        with self._lock:
            if block.file_bytes > self.limit or not self.takes(block.bytes):
                self.counts["skipped"] += 1
                return None
            self._enqueue(-1, name, block)
        return name

    def get_apart(self, name: str) -> dict[str, Tensor] | None:
        """What was put there under that name; None where its file is gone, or cannot be read."""
        with self._lock:
            waiting = self._waiting.get(name)
        if waiting is not None:
            return dict(waiting.tensors)
        found = self._read(name)
        return None if found is None else found[0]

    def load_apart(self, name: str) -> Future[dict[str, Tensor] | None]:
        """The same, read by a thread."""
        return self._readers.submit(self.get_apart, name)

    def delete(self, name: str) -> None:
        with self._lock:
            self._forget(name)

    def refuse(self, key: bytes, why: str) -> None:
        """A block is not what its key says, or cannot be read: it is deleted."""
        self._damaged(_name(key), ValueError(why))

    def settle(self) -> None:
        """Waits until all that was put is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Writes what is in the queue, and lets the folder go."""
        with self._lock:
            for name in [name for name in (*self._waiting, *self._files) if name.startswith(APART)]:
                self._forget(name)
        for pool in (self._loader, self._readers, self._writer):
            pool.shutdown()
        self._claim.close()

    def _load(self, keys: list[bytes]) -> Found:
        start = time.perf_counter()
        blocks: list[Block] = []
        read = 0
        for found in self._readers.map(self._block, keys):
            if found is None:
                break
            blocks.append(found[0])
            read += found[1]
        return Found(blocks, read, time.perf_counter() - start)

    def _block(self, key: bytes) -> tuple[Block, int] | None:
        """A block, and the bytes of its file where that was read."""
        name = _name(key)
        with self._lock:
            waiting, size = self._waiting.get(name), self._files.get(name, 0)
        if waiting is not None:
            return waiting, 0
        found = self._read(name)
        if found is None:
            return None
        tensors, facts = found
        try:
            return Block(tuple(int(token) for token in facts["tokens"]), tensors), size
        except (KeyError, TypeError, ValueError) as error:
            self._damaged(name, error)
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
        except Exception as error:  # whatever it is, the next attempt would meet it again
            self._damaged(name, error)
        return None

    def _damaged(self, name: str, error: Exception) -> None:
        log.warning("A file on disk is damaged and was deleted (%s): %s.", name, sealed.explain(error))
        with self._lock:
            self.counts["damaged"] += 1
            self._forget(name)

    def _write_next(self) -> None:
        with self._lock:
            if not self._queue:  # it was lost
                return
            _, name = heapq.heappop(self._queue)
            block = self._waiting.get(name)
        if block is None:
            return
        try:
            self._write(name, block)
        finally:
            with self._lock:
                if self._waiting.get(name) is block:
                    self._dequeue(name)
                else:  # it was deleted meanwhile
                    self._forget(name)

    def _write(self, name: str, block: Block) -> None:
        self._make_room(block.file_bytes)
        path, facts = self.folder / name, {"tokens": list(block.tokens), "made for": self.made_for, "name": name}
        try:
            # what a failing machine leaves half written is a miss: nothing waits for the disk itself
            sealed.write(path, block.tensors, facts, FORMAT, sync=False)
            size = path.stat().st_size
        except Exception as error:
            self.counts["skipped"] += 1
            log.warning("A file cannot be written to %s: %s.", self.folder, sealed.explain(error))
            return
        with self._lock:
            self._files[name] = size
            self._held += size
            self.counts["written"] += 1
            self.counts["written_bytes"] += size
        self._make_room(0)

    def _make_room(self, size: int) -> None:
        """Deletes what was used least recently until there is room for a file of at most `limit` bytes."""
        with self._lock:
            for name in list(self._files) if self._held + size > self.limit else ():
                self.counts["deleted"] += 1
                self._forget(name)
                if self._held + size <= self.limit:
                    break

    def _forget(self, name: str) -> None:
        """Deletes a file, or what would become one; with the lock."""
        self._dequeue(name)
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
