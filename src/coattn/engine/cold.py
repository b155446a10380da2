"""Beginnings of texts that memory has given up, on disk: written when they leave, read where that is the shorter way.

Both ways are measured while they are gone: bytes per second of the disk, and seconds of a prompt's tokens.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from coattn.cache import available, keep
from coattn.cache.ledger import PLACE
from coattn.engine.disk import READERS, Block, Disk, Found
from coattn.engine.parked import Parked, memories, pack
from coattn.engine.prefix import Node, Prefixes
from coattn.engine.sealed import explain
from coattn.engine.speed import DiskSpeed, PromptSpeed
from coattn.errors import BudgetError
from coattn.step.runtime import Runtime

PIECE = 64 << 20
"""Bytes that are read before it is decided again; they lie in DRAM beside the budgets until they are stored."""

log = logging.getLogger("coattn")


@dataclass
class Load:
    """Blocks on their way from the disk: their keys, and the number of the first."""

    keys: list[bytes]
    first: int
    future: Future[Found]


class Cold:
    """Between steps, on the engine's thread. What it brings back are nodes like any others, used by nobody yet."""

    def __init__(self, runtime: Runtime, prefixes: Prefixes, disk: Disk) -> None:
        self.runtime, self.prefixes, self.disk = runtime, prefixes, disk
        self.prompts, self.reads = PromptSpeed(), DiskSpeed()
        self.counts: Counter[str] = Counter()
        self._block_bytes = sum(table.memory.block_bytes for table in prefixes.tables)
        self._coming: set[bytes] = set()
        """First keys of what is on its way."""
        self._probe: Future[Found] | None = None
        prefixes.leaving = self.spill

    def watch(self, spans: Sequence[tuple[int, int]]) -> Callable[[bool], None]:
        """A step begins that reads tokens `start .. end` of prompts: how long does it take? Call it when it is over.

        It is told whether anybody has waited for the device.
        """
        start = time.perf_counter()

        def over(waited: bool) -> None:
            speed = self.prompts
            for span in spans:
                speed.add(*span)
            if not waited and not speed.known and torch.cuda.is_available():
                torch.cuda.synchronize()
            # without a GPU a step is over when its call is
            speed.tick(time.perf_counter() - start, waited or not speed.known or not torch.cuda.is_available())

        return over

    def spill(self, nodes: Sequence[Node]) -> None:
        """Nodes are about to leave memory: those that would be read sooner than computed go to the disk if they can."""
        try:
            self._spill(nodes)
        except Exception as error:  # whoever needs their room gets it
            log.warning("Blocks cannot be put on disk: %s.", explain(error))
            self.counts["failed"] += 1

    def _spill(self, nodes: Sequence[Node]) -> None:
        block = self.prefixes.block
        nodes = [n for n in nodes if self._pays(self._block_bytes, n.number * block, (n.number + 1) * block)]
        new = [node for node in nodes if node.key not in self.disk]
        if new:
            parts: dict[str, Tensor] = {}
            for g, group in enumerate(self.runtime.groups):
                ids = [node.blocks[g] for node in new]
                for name, memory in memories(group).items():
                    parts |= {f"{g}.{name}.{layer}": x for layer, x in keep.contents(memory, ids).items()}
            for i, node in enumerate(new):
                # a copy of its own: a queue must not hold on to what was taken beside it
                own = {name: x[i : i + 1].clone() for name, x in parts.items()}
                self.disk.put(node.key, Block(node.tokens, own), node.number)
        self.disk.touch([node.key for node in reversed(nodes)])

    def look(self, keys: Sequence[bytes], first: int) -> Load | bool | None:
        """Whether the blocks `keys`, of which `first` is the number of the first, are brought back.

        -> what is on its way; False: reading would take longer than computing; None: it is too early to say, or there
        is nothing.
        """
        if not keys or keys[0] not in self.disk or keys[0] in self._coming or not self.prompts.known:
            return None
        self._hear_probe()
        found = list(takewhile(self.disk.__contains__, keys))
        if not self.reads.known:
            found = found[:READERS]
        block = self.prefixes.block
        if not self._pays(self._bytes(found), first * block, (first + len(found)) * block):
            self.counts["refused_tokens"] += len(found) * block
            if self._probe is None:  # or a disk that was slow once would be so for ever
                self._probe = self.disk.load(found[:READERS])
            return False
        piece = found[: max(READERS, PIECE // self._block_bytes)]
        self.disk.touch(found)  # what is brought back makes others leave, and these must not go for them
        self._coming.add(piece[0])
        return Load(piece, first, self.disk.load(piece))

    def store(self, load: Load, tokens: Sequence[int]) -> list[Node]:
        """What has come becomes nodes, as far as it is what `tokens` would be. Where it raises BudgetError or whatever
        storing fails with, nothing has changed."""
        self._coming.discard(load.keys[0])
        failed, block = load.future.exception(), self.prefixes.block
        if failed is not None:
            self.disk.refuse(load.keys[0], explain(failed))  # or it would be asked for again at once
            return []
        found = load.future.result()
        self.reads.note(found.bytes, found.seconds)
        self.counts["read_bytes"] += found.bytes
        good: list[tuple[bytes, Block]] = []
        for i, (key, each) in enumerate(zip(load.keys, found.blocks, strict=False)):
            start = (load.first + i) * block
            wrong = self._wrong(each, tokens[start : start + block])
            if wrong is not None:
                self.disk.refuse(key, wrong)
                break
            good.append((key, each))
        new = [(i, key, each) for i, (key, each) in enumerate(good) if key not in self.prefixes.nodes]
        made = self._fill([each for _, _, each in new])
        for (i, key, each), ids in zip(new, made, strict=True):
            self.prefixes.adopt(key, each.tokens, ids, load.first + i)
        self.disk.touch([key for key, _ in good])
        self.counts["read_tokens"] += len(new) * block
        return [self.prefixes.nodes[key] for key, _ in takewhile(lambda each: each[0] in self.prefixes.nodes, good)]

    def give_up(self, load: Load) -> None:
        """Nobody waits for it any more."""
        self._coming.discard(load.keys[0])

    def clear(self) -> None:
        """Nobody waits for anything any more."""
        self._coming.clear()

    def park(self, parked: Parked) -> bool:
        """A sequence that waits leaves memory. False: it is read again sooner, or there is no room for its file, or in
        DRAM for the copy that is written."""
        size = self._block_bytes * len(parked.groups[-1].ids)
        if not self._pays(size, 0, len(parked.tokens)) or not self.disk.takes(size):
            return False
        try:
            available.require(size, "A sequence that waits", PLACE["host"])
        except BudgetError:
            return False
        name = self.disk.put_apart(pack(self.runtime, parked))
        if name is None:
            return False
        parked.away = name
        self.counts["parked"] += 1
        return True

    def fetch(self, parked: Parked) -> Future[dict[str, Tensor] | None]:
        """What a sequence was that waits on the disk; None: its file is gone or damaged."""
        return self.disk.load_apart(parked.away)

    def drop(self, parked: Parked) -> None:
        """Its file goes, if it has one."""
        if parked.away:
            self.disk.delete(parked.away)
            parked.away = ""

    def describe(self) -> dict[str, Any]:
        """For reports."""
        own = ("written", "written_bytes", "skipped", "deleted", "damaged")
        return {
            "bytes": self.disk.held,
            "limit": self.disk.limit,
            **{name: self.disk.counts[name] for name in own},
            **{name: self.counts[name] for name in ("read_tokens", "read_bytes", "refused_tokens", "parked", "failed")},
            "read_bytes_per_s": self.reads.bytes_per_s(),
            "prompt_tokens_per_s": self.prompts.tokens_per_s(),
        }

    def _pays(self, size: int, start: int, end: int) -> bool:
        """Whether reading so many bytes takes less time than computing these tokens; yes, while either is unknown."""
        if not self.prompts.known or not self.reads.known:
            return True
        return self.reads.seconds(size) < self.prompts.seconds(start, end)

    def _bytes(self, keys: Sequence[bytes]) -> int:
        return sum(self.disk.size(key) or self._block_bytes for key in keys)

    def _hear_probe(self) -> None:
        if self._probe is not None and self._probe.done():
            probe, self._probe = self._probe, None
            if probe.exception() is None:
                self.reads.note(probe.result().bytes, probe.result().seconds)

    def _wrong(self, found: Block, tokens: Sequence[int]) -> str | None:
        """Why a block is not what is stored here of these tokens."""
        if found.tokens != tuple(tokens):
            return "it holds other tokens"
        wanted = {
            f"{g}.{name}.{layer}": (memory.size(1, shape), memory.dtype(shape))
            for g, group in enumerate(self.runtime.groups)
            for name, memory in memories(group).items()
            for layer, shape in memory.layers.items()
        }
        if {name: (tuple(x.shape), x.dtype) for name, x in found.tensors.items()} != wanted:
            return "its tensors are not those of this model"
        return None

    def _fill(self, found: Sequence[Block]) -> list[tuple[int, ...]]:
        """New blocks that are held and have these contents: for each, its number in every table."""
        taken: list[list[int]] = []
        try:
            for table in self.prefixes.tables:
                taken.append(table.fresh(len(found)))
            for g, (group, ids) in enumerate(zip(self.runtime.groups, taken, strict=True)):
                for name, memory in memories(group).items() if ids else ():
                    parts: Mapping[int, Tensor] = {
                        layer: torch.cat([each.tensors[f"{g}.{name}.{layer}"] for each in found])
                        for layer in memory.layers
                    }
                    keep.fill(memory, ids, parts)
        except BaseException:
            for table, ids in zip(self.prefixes.tables, taken, strict=False):
                table.drop(ids)
            raise
        return list(zip(*taken, strict=True))
