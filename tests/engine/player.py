"""Random operations on an engine whose memory is short: every answer must be the one that it has alone.

Freed blocks are filled with numbers that would spoil any answer that read them. As a command, at any length:

    python -m tests.engine.player --method cpu --operations 2500 --seed 7
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.cache.integrity import check_blocks
from tests.engine.rows import options
from tests.engine.small import UNIT, check_tables, greedy, prompt, small, tokenizer

import coattn
from coattn.cache.block_table import BlockTable
from coattn.engine import scheduler
from coattn.engine.handle import Handle
from coattn.engine.session import Session
from coattn.engine.store.files import SUFFIX
from coattn.errors import BudgetError

CANARY = 1e4
"""Finite: rows of a block that is not full yet are multiplied by a weight of zero."""
BUDGETS: dict[str, dict[str, Any]] = {
    "full": {"gpu_kv": 34 * UNIT},
    "cpu": {"host_kv": 30 * UNIT, "gpu_kv": 48 * UNIT},
    "scout": {"host_kv": 30 * UNIT, "gpu_kv": 160 * UNIT},
    "hgca": {"host_kv": 80 * UNIT, "gpu_kv": 64 * UNIT},
}
LONGEST = 30
"""Tokens of an answer at most."""
MARGIN = 1e-4
"""In log-probability: a text where the two likeliest tokens are ever nearer is not asked, since rounding may swap them.
So no difference is ever excused."""


def poison(table: BlockTable) -> None:
    """Whatever is freed from now on is overwritten, with what an index keeps of it."""
    give = table._give

    def gives(i: int) -> None:
        for memory in (table.memory, table.memory.side):
            for layer in () if memory is None else memory.layers:
                memory[layer][i] = CANARY
        give(i)

    table._give = gives  # type: ignore[method-assign]


class Player:
    """Asks, cancels, evicts, saves, restores and damages, and compares every answer with that of an engine that shares
    nothing.

    Sessions are for exact rows: what a lossy one has decoded is not what reading it again would give.
    """

    def __init__(self, method: str, folder: Path, seed: int) -> None:
        given = {"max_batch": 3, "max_length": 144, "chunk": 24, **options(method)}
        self.method, self.seed, self.folder = method, seed, folder
        self.dice = random.Random(seed)
        self.alone = coattn.LLM((small(1), tokenizer()), method, reuse=False, **given)
        self.llm = coattn.LLM(
            (small(1), tokenizer()),
            method,
            session_dir=folder / "sessions",
            disk=folder / "disk",
            disk_memory=80 * 2 * UNIT,
            **given,
            **BUDGETS[method],
        )
        for table in self.llm.store.tables:
            poison(table)
        assert self.llm.store.disk is not None
        self.disk = self.llm.store.disk
        # what is on the disk is read whenever it can be, and comes at once or when it comes
        self.disk.prompts.seconds = lambda start, end: float(end - start)  # type: ignore[method-assign]
        load = self.disk.files.load

        def sometimes_at_once(keys: Any) -> Any:
            future = load(keys)
            if self.dice.random() < 0.5:
                future.result()
            return future

        self.disk.files.load = sometimes_at_once  # type: ignore[method-assign]
        self.texts = [prompt(110, seed=i) for i in range(3)]
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.live: list[tuple[Handle, list[int]]] = []
        self.sessions: list[Session] = []
        self.counts: Counter[str] = Counter()
        self.done = 0
        self.exact = self.llm.composed.exact
        self.moves = [self.ask] * 6 + [self.step] * 10 + [self.cancel, self.evict, self.damage]
        if self.exact:
            self.moves += [self.turn] * 4 + [self.save, self.restore]

    def clear(self, ids: list[int], count: int) -> bool:
        """Whether the answer is the same however it is rounded; from then on it is known."""
        key = tuple(ids)
        if count > len(self.known.get(key, ())):
            wanted = 9 if count <= 9 else LONGEST
            found = self.alone.generate(ids, greedy(wanted, ignore_eos=True, logprobs=2))[0]
            gaps = [each.top[0][1] - each.top[1][1] for each in found.logprobs]
            unclear = next((i for i, gap in enumerate(gaps) if gap < MARGIN), len(gaps))
            self.known[key] = found.token_ids[:unclear]
        if count > len(self.known[key]):
            self.counts["unclear"] += 1
            return False
        return True

    def prompt(self) -> list[int]:
        dice = self.dice
        return dice.choice(self.texts)[: dice.choice((7, 9, 16, 31, 64, 65, 90, 110))] + prompt(
            dice.randint(1, 3), seed=1
        )

    def ask(self) -> None:
        ids, count = self.prompt(), self.dice.choice((1, 2, 9, LONGEST))
        if not self.clear(ids, count):
            return
        self.live.append((self.llm.submit(ids, greedy(count, ignore_eos=True)), ids))

    def turn(self) -> None:
        idle = [each for each in self.sessions if not each.answering and len(each.tokens) < 90]
        if len(self.sessions) < 3:
            idle = [self.llm.session(f"s{len(self.sessions)}")]
            self.sessions += idle
        if idle:
            session = self.dice.choice(idle)
            more = self.prompt()[:20]
            whole, count = session.tokens + more, self.dice.choice((1, 5))
            if self.clear(whole, count):
                self.live.append((session.submit(more, greedy(count, ignore_eos=True)), whole))

    def cancel(self) -> None:
        if self.live:
            self.dice.choice(self.live)[0].cancel()

    def step(self) -> None:
        for _ in range(self.dice.randint(1, 8)):
            self.llm.step()

    def evict(self) -> None:
        with self.llm.engine.paused():
            self.llm.store.prefixes.evict(self.dice.randint(1, 12))

    def save(self) -> None:
        idle = [each for each in self.sessions if not each.answering and each.tokens]
        if idle:
            self.dice.choice(idle).save()

    def restore(self) -> None:
        """Closed without saving, a session goes on from its file, or from nothing."""
        idle = [each for each in self.sessions if not each.answering]
        if idle:
            session = self.dice.choice(idle)
            session.close()
            try:
                opened = self.llm.session(session.name)
            except BudgetError:  # there is no room now
                self.llm.sessions.delete(str(session.name))
                opened = self.llm.session(session.name)
            self.sessions[self.sessions.index(session)] = opened

    def damage(self) -> None:
        """A file of the disk tier is lost, cut or changed."""
        self.disk.files.flush()
        files = sorted((self.folder / "disk").glob("*" + SUFFIX))
        if not files:
            return
        path = self.dice.choice(files)
        data = bytearray(path.read_bytes())
        path.unlink()  # whoever has it open keeps what it was
        how = self.dice.choice(("lost", "cut", "changed"))
        if how == "changed":
            data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
        if how != "lost":
            path.write_bytes(bytes(data if how == "changed" else data[: self.dice.randrange(len(data))]))
        self.counts["damaged"] += 1

    def settle(self) -> None:
        for handle, ids in [pair for pair in self.live if pair[0].done]:
            found = handle.output()
            assert found.error is None, (self._where(), found.error)
            want = self.known[tuple(ids)][: len(found.token_ids)]
            if handle.request.preemptions and not self.exact:
                self.live.remove((handle, ids))  # it has read again what a lossy row had decoded
                self.counts["preempted"] += 1
                continue
            assert found.token_ids == want, (self._where(), len(ids), found.token_ids, want)
            self.counts["tokens"] += len(want)
            self.live.remove((handle, ids))
            self.counts["hits" if found.cached_tokens else "misses"] += 1
        check_tables(self.llm)

    def play(self, operations: int) -> None:
        """So many operations, then everything ends, and nothing may be left."""
        with pytest.MonkeyPatch.context() as patch:
            if self.exact:  # what a lossy row has decoded is another's once it is read again: few are preempted
                patch.setattr(scheduler, "HEADROOM_TOKENS", 0)
            self._play(operations)

    def _play(self, operations: int) -> None:
        for _ in range(operations):
            self.dice.choice(self.moves)()
            self.settle()
            self.done += 1
        while self.llm.step():
            pass
        self.settle()
        assert not self.live
        for session in self.sessions:
            session.close()
        while self.llm.store.prefixes.evict():
            pass
        for table in self.llm.store.tables:
            check_blocks(table)
            assert not table.idle
            assert table.used() == 0

    def close(self) -> None:
        self.llm.close()
        self.alone.close()

    def _where(self) -> str:
        return f"{self.method}, seed {self.seed}, operation {self.done}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Random operations with canaries in freed blocks.")
    parser.add_argument("--method", choices=BUDGETS, required=True)
    parser.add_argument("--operations", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("coattn").setLevel(logging.ERROR)  # damaged blocks say so, by the dozen
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        player = Player(given.method, Path(folder), given.seed)
        try:
            player.play(given.operations)
        finally:
            report = player.llm.report()
            player.close()
    counted = {name: report["disk"][name] for name in ("written", "read_tokens", "damaged", "parked")}
    played = player.counts
    print(
        f"{given.method}, seed {given.seed}: {given.operations:,} operations, 0 differences in {played['tokens']:,} "
        f"tokens, {played['unclear']} texts not asked, {played['hits']} hits, {played['misses']} misses, "
        f"{report['preemptions']} preemptions ({played['preempted']} not compared), "
        f"{report['prefix_evicted']} evicted, disk {counted}, "
        f"{time.perf_counter() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
