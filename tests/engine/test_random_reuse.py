"""Random operations on an engine whose memory is short: every answer is the one that it has alone.

Freed blocks are filled with numbers that would spoil any answer that read them. `COATTN_OPERATIONS=10000` runs more.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from tests.engine.rows import options
from tests.engine.small import greedy, prompt, small, tokenizer

import coattn
from coattn.cache.blocks import BlockTable
from coattn.engine.handle import Handle
from coattn.engine.session import Session
from coattn.errors import BudgetError

OPERATIONS = int(os.environ.get("COATTN_OPERATIONS", "0")) or 150
CANARY = 1e4
"""Finite: rows of a block that is not full yet are multiplied by a weight of zero."""
UNIT = 8 * 1 * 2 * 2 * 8 * 4
BUDGETS: dict[str, dict[str, Any]] = {
    "full": {"gpu_kv": 34 * UNIT},
    "cpu": {"host_kv": 30 * UNIT, "gpu_kv": 12 * UNIT},
    "scout": {"host_kv": 30 * UNIT},
    "hgca": {"host_kv": 80 * UNIT},
}


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
    """Asks, cancels, evicts, saves and restores, and compares every answer with that of an engine that shares nothing.

    Sessions are for exact rows: what a lossy one has decoded is not what reading it again would give.
    """

    def __init__(self, method: str, folder: Path, seed: int) -> None:
        given = {"max_batch": 3, "max_length": 128, "chunk": 24, **options(method)}
        self.dice = random.Random(seed)
        self.alone = coattn.LLM((small(1), tokenizer()), method, reuse=False, **given)
        self.llm = coattn.LLM((small(1), tokenizer()), method, session_dir=folder, **given, **BUDGETS[method])
        for table in self.llm.reuse.tables:
            poison(table)
        self.texts = [prompt(90, seed=i) for i in range(3)]
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.live: list[tuple[Handle, list[int]]] = []
        self.sessions: list[Session] = []
        self.counts: dict[str, int] = {}

    def want(self, ids: list[int], count: int) -> tuple[int, ...]:
        key = tuple(ids)
        if len(self.known.get(key, ())) < count:
            self.known[key] = self.alone.generate(ids, greedy(count, ignore_eos=True))[0].token_ids
        return self.known[key][:count] if count else ()

    def prompt(self) -> list[int]:
        dice = self.dice
        return dice.choice(self.texts)[: dice.choice((7, 8, 9, 16, 31, 64, 65, 90))] + prompt(
            dice.randint(1, 3), seed=1
        )

    def ask(self) -> None:
        ids, count = self.prompt(), self.dice.choice((1, 2, 9))
        self.live.append((self.llm.submit(ids, greedy(count, ignore_eos=True)), ids))

    def turn(self) -> None:
        idle = [each for each in self.sessions if not each.answering and len(each.tokens) < 90]
        if len(self.sessions) < 3:
            idle = [self.llm.session(f"s{len(self.sessions)}")]
            self.sessions += idle
        if idle:
            session = self.dice.choice(idle)
            more = self.prompt()[:20]
            whole = session.tokens + more
            self.live.append((session.submit(more, greedy(self.dice.choice((1, 5)), ignore_eos=True)), whole))

    def cancel(self) -> None:
        if self.live:
            self.dice.choice(self.live)[0].cancel()

    def step(self) -> None:
        for _ in range(self.dice.randint(1, 8)):
            self.llm.step()

    def evict(self) -> None:
        with self.llm.engine.paused():
            for _ in range(self.dice.randint(1, 12)):
                self.llm.reuse.prefixes.evict()

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

    def settle(self) -> None:
        for handle, ids in [pair for pair in self.live if pair[0].done]:
            found = handle.output()
            assert found.error is None, found.error
            assert found.token_ids == self.want(ids, len(found.token_ids)), (ids, found)
            self.live.remove((handle, ids))
            self.counts["hits" if found.cached_tokens else "misses"] = 1 + self.counts.get(
                "hits" if found.cached_tokens else "misses", 0
            )
        for table in self.llm.reuse.tables:
            table.check_integrity()


@pytest.mark.parametrize("method", BUDGETS)
def test_random_operations(method: str, tmp_path: Path) -> None:
    player = Player(method, tmp_path, seed=5)
    with player.alone, player.llm:
        exact = player.llm.composed.exact
        moves = [player.ask] * 6 + [player.step] * 10 + [player.cancel, player.evict]
        if exact:
            moves += [player.turn] * 4 + [player.save, player.restore]
        for _ in range(OPERATIONS):
            player.dice.choice(moves)()
            player.settle()
        while player.llm.step():
            pass
        player.settle()
        assert not player.live
        for session in player.sessions:
            session.close()
        while player.llm.reuse.prefixes.evict():
            pass
        for table in player.llm.reuse.tables:
            table.check_integrity()
            assert not table.idle
            assert table.used() == 0
        assert player.counts["hits"] > (2 if method == "hgca" else 5)
        assert player.counts["misses"] > 2
        if exact:
            assert player.llm.report()["prefix_evicted"] > 5
