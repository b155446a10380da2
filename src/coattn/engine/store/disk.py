"""Shared blocks on disk. They are written soon after they were read, so that they outlast the process, and read where
that is faster than computing them again: the speed of both is measured all along."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coattn._version import __version__
from coattn.cache import available
from coattn.cache.ledger import PLACE
from coattn.engine.store.blocks import PrefixNode, StoredBlocks
from coattn.engine.store.files import READER_THREADS, SUFFIX, FileCache, Loaded, Tensors
from coattn.engine.store.keys import FORMAT, digest
from coattn.engine.store.speed import DiskSpeed, PromptSpeed
from coattn.errors import BudgetError, ConfigError, one_line
from coattn.hf.fingerprint import config_fingerprint, read_by
from coattn.types import LayerShape
from coattn.units import as_folder, parse_bytes

LIMIT_BYTES = 16 << 30
"""Most bytes of the files, unless said."""
LOAD_BYTES = 64 << 20
"""That are read before it is decided again; they lie in DRAM outside the budgets until they are stored."""
SAVE_BYTES, IDLE_SAVE_BYTES = 4 << 20, 64 << 20
"""Of new blocks, copied for the writer between two steps, and at a time while nobody runs."""
LAST_SAVE_S = 3.0
"""Seconds that an engine which closes waits for the queue to take what is new."""

log = logging.getLogger("coattn")


@dataclass(frozen=True)
class DiskConfig:
    """A folder, or None, and the most bytes of its files."""

    folder: Path | None
    limit: int

    @staticmethod
    def of(disk: str | Path | None, memory: int | float | str | None) -> DiskConfig:
        """Raises ConfigError for what does not go together."""
        limit = parse_bytes(memory, "disk_memory")
        if disk is None and memory is not None:
            raise ConfigError("disk_memory is given, but no folder for it.", "Give disk as well, or leave it out.")
        return DiskConfig(as_folder("disk", disk), LIMIT_BYTES if limit is None else limit)

    def key(self, model: Any, layers: Sequence[LayerShape]) -> bytes:
        """The fingerprint of a model, by which what is stored of it is known."""
        # files outlast the process, and may meet a model of the same configuration with other weights
        known_by = config_fingerprint(model) if self.folder is None else read_by(model)
        return digest(FORMAT, __version__, known_by, repr([shape.mark for shape in layers]))

    def open(self, key: bytes) -> FileCache | None:
        """The caller closes it."""
        return None if self.folder is None else FileCache(self.folder, self.limit, {"model": key.hex()})


@dataclass
class DiskRead:
    """Blocks on their way from the disk: their keys, and the number of the first."""

    keys: list[bytes]
    first: int
    future: Future[Loaded]
    state: bool = False
    """Whether it is not a block, but the state after one."""


class DiskPrefixCache:
    """Between steps, on the engine's thread; files are read and written by other threads."""

    def __init__(self, blocks: StoredBlocks, files: FileCache, block: int) -> None:
        """block: its tokens."""
        self.files, self.block, self._blocks = files, block, blocks
        self.prompts, self.reads = PromptSpeed(), DiskSpeed()
        self.counts: Counter[str] = Counter()
        self._coming: set[bytes] = set()
        """First keys of what is on its way."""
        self._probe: Future[Loaded] | None = None
        self._unsaved: dict[bytes, PrefixNode] = {}
        """Nodes that are to be written, the first of them first."""
        self._unsaved_states: dict[bytes, tuple[Tensors, int]] = {}
        """The same of states, with the number of the block before each."""
        self._used: list[list[str]] = []
        """Files of texts that were used since all was saved; their order is told when all is saved again."""

    def __contains__(self, key: bytes) -> bool:
        return _name(key) in self.files

    def note_step(self, spans: Sequence[tuple[int, int]], start: float, waited: bool) -> None:
        """A step that began at `start` has read tokens of prompts. waited: whether anybody waited for the device."""
        on_gpu = torch.cuda.is_available()  # without a GPU a step is over when its call is
        if not waited and not self.prompts.known and on_gpu:
            torch.cuda.synchronize()
            waited = True
        self.prompts.note(spans, time.perf_counter() - start, waited or not on_gpu)

    def note(self, node: PrefixNode) -> None:
        """A node is new: it is to be written."""
        if node.key not in self:
            self._unsaved[node.key] = node

    def use(self, nodes: Sequence[PrefixNode]) -> None:
        """A text was used just now, as far as it is stored: what is not on the disk is to be written. Its files get
        their order when all is: the end leaves first."""
        for node in nodes:
            self.note(node)
        self._used.append([_name(node.key) for node in nodes])

    def note_state(self, key: bytes, state: Tensors, number: int) -> None:
        """The state after a block, in host memory, is to be written. It must not change."""
        if not self.has_state(key):
            self._unsaved_states[key] = state, number

    def forget_state(self, key: bytes) -> None:
        """A state leaves memory."""
        self._unsaved_states.pop(key, None)

    def has_state(self, key: bytes) -> bool:
        return _state_name(key) in self.files

    def save(self, most: int) -> bool:
        """Copies new blocks for the writer: so many bytes at most, as far as its queue has room. False: it has copied
        none. Whatever fails here costs no step anything: what was to be written is read again after a restart."""
        try:
            return self._save(most)
        except Exception as error:
            log.warning("What is stored cannot be put on disk: %s.", one_line(error))
            self.counts["failed"] += 1
            for waiting in (self._unsaved, self._unsaved_states, self._used):
                waiting.clear()
            return False

    def _save(self, most: int) -> bool:
        one = max(1, self._blocks.block_bytes)
        room = self.files.room // one
        nodes = list(islice(self._unsaved.values(), min(room, max(1, most // one))))
        self.spill(nodes)
        if self._used and not self._unsaved:
            self.files.touch_later(self._used)
            self._used = []
        states = 0
        for key, (state, number) in list(self._unsaved_states.items()):
            if sum(x.nbytes for x in state.values()) > self.files.room:
                break
            del self._unsaved_states[key]
            self.files.put(_state_name(key), state, number)
            states += 1
        return bool(nodes) or states > 0

    def save_all(self) -> None:
        """The same of all that is new, for `LAST_SAVE_S`."""
        end = time.monotonic() + LAST_SAVE_S
        while (self._unsaved or self._unsaved_states) and time.monotonic() < end:
            if not self.save(IDLE_SAVE_BYTES):
                time.sleep(0.01)

    def spill(self, nodes: Sequence[PrefixNode]) -> None:
        """Nodes leave memory or are saved: new ones that would be read sooner than computed are written if they can
        be."""
        size, block = self._blocks.block_bytes, self.block
        nodes = [node for node in nodes if self._unsaved.pop(node.key, None) is not None]
        try:
            nodes = [node for node in nodes if self.pays(size, node.number * block, (node.number + 1) * block)]
            new = [node for node in nodes if node.key not in self]
            if not new:
                return
            tensors = self._blocks.read(list(zip(*(node.blocks for node in new), strict=True)))
            for i, node in enumerate(new):
                # a copy of its own: the queue must not keep the others' memory
                own = {name: x[i : i + 1].clone() for name, x in tensors.items()}
                self.files.put(_name(node.key), own, node.number)
        except Exception as error:  # their room is needed, whatever fails here
            log.warning("Blocks cannot be put on disk: %s.", one_line(error))
            self.counts["failed"] += 1

    def look(self, keys: Sequence[bytes], first: int) -> DiskRead | bool | None:
        """Whether the blocks `keys`, of which `first` is the number of the first, are brought back.

        -> what is on its way; False: reading would take longer than computing; None: there is nothing, or it is on its
        way for another.
        """
        if not keys or keys[0] not in self or keys[0] in self._coming:
            return None
        self._finish_probe()
        stored = list(takewhile(self.__contains__, keys))
        if not self.reads.known:
            stored = stored[:READER_THREADS]
        names, block = list(map(_name, stored)), self.block
        size = sum(self.files.size(name) or self._blocks.block_bytes for name in names)
        if not self.pays(size, first * block, (first + len(stored)) * block):
            self.counts["refused_tokens"] += len(stored) * block
            if self._probe is None:  # or a disk that was slow once would be so for ever
                self._probe = self.files.load(names[:READER_THREADS])
            return False
        count = max(READER_THREADS, LOAD_BYTES // self._blocks.block_bytes)
        self.files.touch(names)  # what is brought back makes others leave, and these must not go for them
        self._coming.add(stored[0])
        return DiskRead(stored[:count], first, self.files.load(names[:count]))

    def look_state(self, key: bytes) -> DiskRead | None:
        """The state after a block is brought back; None: there is none, or it is on its way for another."""
        if not self.has_state(key) or key in self._coming:
            return None
        self._coming.add(key)
        self.files.touch_later([[_state_name(key)]])
        return DiskRead([key], 0, self.files.load([_state_name(key)]), state=True)

    def state(self, read: DiskRead) -> Tensors | None:
        """The state that has come; None: its file was damaged, or could not be read."""
        self._coming.discard(read.keys[0])
        failed = read.future.exception()
        if failed is not None:
            self.delete_state(read.keys[0], one_line(failed))
            return None
        loaded = read.future.result()
        self.counts["read_bytes"] += loaded.bytes
        return loaded.tensors[0] if loaded.tensors else None

    def delete_state(self, key: bytes, why: str) -> None:
        """A file that cannot be used."""
        self.files.delete_damaged(_state_name(key), why)

    def store(self, read: DiskRead, known: Container[bytes]) -> list[PrefixNode]:
        """What has come is stored in new blocks that are held, but for the `known` -> a node for each, without users.

        Where it raises BudgetError or whatever storing fails with, nothing has changed.
        """
        self._coming.discard(read.keys[0])
        failed = read.future.exception()
        if failed is not None:
            self.files.delete_damaged(_name(read.keys[0]), one_line(failed))  # or it would be asked for again at once
            return []
        loaded = read.future.result()
        self.reads.note(loaded.bytes, loaded.seconds)
        self.counts["read_bytes"] += loaded.bytes
        new: list[tuple[bytes, int, Tensors]] = []
        wanted = self._blocks.expected([1] * len(self._blocks.tables))
        for number, (key, tensors) in enumerate(zip(read.keys, loaded.tensors, strict=False), read.first):
            if {name: (list(x.shape), x.dtype) for name, x in tensors.items()} != wanted:
                self.files.delete_damaged(_name(key), "its tensors are not those of this model")
                break
            if key not in known:
                new.append((key, number, tensors))
        joined: dict[str, Tensor] = {name: torch.cat([x[name] for _, _, x in new]) for name in wanted if new}
        ids = self._blocks.write(joined, [len(new)] * len(self._blocks.tables))
        self.files.touch(list(map(_name, read.keys)))
        self.counts["read_tokens"] += len(new) * self.block
        return [PrefixNode(key, own, number) for (key, number, _), own in zip(new, zip(*ids, strict=True), strict=True)]

    def give_up(self, read: DiskRead) -> None:
        """The request that waited for it is gone."""
        self._coming.discard(read.keys[0])

    def clear(self) -> None:
        """No request waits for anything, and nothing is stored."""
        self._coming.clear()
        self._unsaved.clear()
        self._unsaved_states.clear()
        self._used = []

    def takes(self, size: int, tokens: int) -> bool:
        """Whether a sequence of so many bytes may be parked: it is not read again sooner, and there is room for its
        file, and in DRAM for the copy that is written."""
        try:
            available.require(size, "A parked sequence", PLACE["host"])
        except BudgetError:
            return False
        return self.pays(size, 0, tokens) and self.files.takes_private(size)

    def park(self, tensors: Tensors) -> str | None:
        """A sequence is written -> the name of its file; None: there is no room."""
        name = self.files.put_private(tensors)
        self.counts["parked"] += name is not None
        return name

    def describe(self) -> dict[str, Any]:
        """For reports."""
        own = ("written", "written_bytes", "skipped", "deleted", "damaged")
        return {
            "bytes": self.files.held,
            "limit": self.files.limit,
            **{name: self.files.counts[name] for name in own},
            **{name: self.counts[name] for name in ("read_tokens", "read_bytes", "refused_tokens", "parked", "failed")},
            "read_bytes_per_s": self.reads.bytes_per_s(),
            "prompt_tokens_per_s": self.prompts.tokens_per_s(),
        }

    def pays(self, size: int, start: int, end: int) -> bool:
        """Whether reading so many bytes takes less time than computing these tokens; yes, while either is unknown."""
        if not self.prompts.known or not self.reads.known:
            return True
        return self.reads.seconds(size) < self.prompts.seconds(start, end)

    def _finish_probe(self) -> None:
        if self._probe is not None and self._probe.done():
            probe, self._probe = self._probe, None
            if probe.exception() is None:
                self.reads.note(probe.result().bytes, probe.result().seconds)


def _name(key: bytes) -> str:
    return key.hex() + SUFFIX


def _state_name(key: bytes) -> str:
    return f"{key.hex()}-state{SUFFIX}"
