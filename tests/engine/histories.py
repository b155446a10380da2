"""Random histories of conversations: turns that go on, are taken back or forked, lose their slot, move and come back.

Beside them others ask about texts that begin alike, and some leave. Freed blocks are filled with numbers that would
spoil any answer that read them; memory is short under exact rows, whose files on disk are damaged, too.

Under parameters that leave nothing out every answer is that of full attention to the text alone. Under others a row
makes the same choices as if nothing had happened, or as if it had read the text alone. As a command:

    python -m tests.engine.histories --count 2000 --seed 0
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.cache.integrity import check_blocks
from tests.engine.faults import PARAMS, compare, ids, model
from tests.engine.rows import ROWS, measured, options
from tests.engine.small import check_tables, slow_prompts

import coattn
from coattn.cache.block_table import BlockTable
from coattn.engine.handle import Handle
from coattn.engine.request import RequestOutput
from coattn.engine.session import Session
from coattn.engine.store.files import SUFFIX
from coattn.errors import BudgetError
from coattn.method.row import compose
from coattn.step.check import whole_parameters

FAMILIES = ("llama", "gemma3", "mistral_sliding", "gpt_oss")
LONGEST = 160
EXACT = [name for name, row in ROWS.items() if compose(row).exact]
TURNS = 5
TEXTS = [ids(70, seed) for seed in (21, 22, 23)]
"""What others ask about."""
CANARY = 1e4
"""Finite: rows of a block that is not full yet are multiplied by a weight of zero."""


def settings(row: str, whole: bool) -> dict[str, Any]:
    """Parameters that leave nothing out, or much."""
    given = options(row)
    return {**given, **(whole_parameters(compose(ROWS[row], **given), LONGEST) or {})} if whole else given


@cache
def alone(row: str, family: str, tokens: tuple[int, ...]) -> RequestOutput:
    """The answer to a text that nobody has read before."""
    given = {"max_batch": 1, "max_length": LONGEST, "chunk": 16, **settings(row, whole=False)}
    given |= measured(row, model(family))
    with coattn.LLM((model(family), None), ROWS[row], reuse=False, **given) as llm:
        return llm.generate(list(tokens), PARAMS)[0]


@cache
def short_memory(row: str, family: str) -> dict[str, int]:
    """A budget of the tier that sequences share: two of the longest fit, three do not."""
    given = {"max_batch": 1, "max_length": LONGEST, "chunk": 16, **settings(row, whole=True)}
    with coattn.LLM((model(family), None), ROWS[row], **given) as llm:
        shared, held = llm.engine.runner.runtime.bytes_for(LONGEST), llm.ledger.held
        return {f"{tier}_kv": 2 * (held[tier] - need) + 5 * need // 2 for tier, need in shared.items()}


def poison(table: BlockTable) -> None:
    """Whatever is freed from now on is overwritten, with what an index keeps of it."""
    give = table._give

    def gives(i: int) -> None:
        for memory in (table.memory, table.memory.side):
            for layer in () if memory is None else memory.layers:
                memory[layer][i] = CANARY
        give(i)

    table._give = gives  # type: ignore[method-assign]


class History:
    """One engine, a few sessions, and what happens to them."""

    def __init__(self, row: str, family: str, seed: int, folder: Path, whole: bool, disturbed: bool = True) -> None:
        """whole: with parameters that leave nothing out. disturbed: else turns follow one another, and no more."""
        self.row, self.family, self.seed, self.dice = row, family, seed, random.Random(seed)
        self.whole, self.disturbed = whole, disturbed
        self.counts: Counter[str] = Counter()
        self.asked: list[tuple[Handle, str]] = []
        given = {"max_batch": 2, "max_length": LONGEST, "chunk": 16, "session_dir": folder / "sessions"}
        given |= measured(row, model(family))
        given |= short_memory(row, family) if row in EXACT else {}
        self.disk = folder / "disk"
        self.llm = coattn.LLM((model(family), None), ROWS[row], disk=self.disk, **given, **settings(row, whole))
        if row in EXACT:
            slow_prompts(self.llm)
            for table in self.llm.store.tables:
                poison(table)
        self.sessions = [self.llm.session("0")]

    def play(self) -> list[str]:
        """A few turns -> what is wrong."""
        kinds = (self.append, self.append, self.take_back, self.take_back, self.fork) if self.whole else (self.append,)
        try:
            for _ in range(TURNS):
                self.turn(self.dice.choice(kinds))
                more = (self.damage,) if self.row in EXACT else ()
                between = self.dice.choice((self.stay, self.park, self.restore, *more))
                if self.disturbed:
                    between()
            check_tables(self.llm)
            self.end()
        finally:
            self.llm.close()
        if not self.disturbed:
            return []
        if self.whole:
            return self._compare_with_full()
        return [] if self.row == "random" else self._compare_with_undisturbed()  # whose draws go on

    def _compare_with_full(self) -> list[str]:
        wrong = []
        for handle, how in self.asked:
            want = alone("full", self.family, tuple(handle.request.prompt))
            wrong += [f"{how}: {x}" for x in compare(handle.output(), want, may_fail=False)]
        return wrong

    def _compare_with_undisturbed(self) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            other = History(self.row, self.family, self.seed, Path(folder), whole=False, disturbed=False)
            other.play()
        for (handle, how), (before, _) in zip(self.asked, other.asked, strict=True):
            if handle.request.prompt != before.request.prompt:
                return []  # it has read a turn again, and said something else
            found = handle.output()
            wrong = compare(found, before.output(), may_fail=False)
            if wrong:
                wrong = compare(found, alone(self.row, self.family, tuple(handle.request.prompt)), may_fail=False)
            if wrong:
                return [f"{how}: {x}" for x in wrong]
        return []

    # turns

    def append(self) -> tuple[Session, list[int]]:
        session = self.dice.choice(self.sessions)
        return session, session.tokens

    def take_back(self) -> tuple[Session, list[int]]:
        session = self.dice.choice(self.sessions)
        return session, session.tokens[: self.dice.randint(0, len(session.tokens))]

    def fork(self) -> tuple[Session, list[int]]:
        tokens = self.dice.choice(self.sessions).tokens
        if len(self.sessions) < 3:
            self.sessions.append(self.llm.session(str(len(self.sessions))))
        return self.sessions[-1], tokens[: self.dice.randint(0, len(tokens))]

    def turn(self, kind: Any) -> None:
        session, tokens = kind()
        tokens = [*tokens[:110], *ids(self.dice.randint(2, 30), self.dice.randint(0, 1000))]
        how = kind.__name__
        text = self.dice.choice(TEXTS)[: self.dice.choice((7, 9, 16, 31, 64, 65))]
        other, leaves = self.llm.submit([*text, *ids(2, self.dice.randint(0, 2))], PARAMS), self.dice.random() < 0.2
        for _ in range(self.dice.randint(0, 3)):
            self.llm.step()
        handle = session.submit_whole(tokens, PARAMS)
        when = self.dice.choice((None, 1, 2, 3, 4, 6, 9, 12))
        for number in range(1, 1000):
            if not self.llm.step():
                break
            if leaves and self.disturbed and number == 2:
                other.cancel()
                self.counts["left"] += 1
            running = self.llm.engine.scheduler.running
            reads = self.whole or not handle.request.output  # what a lossy row has decoded it would read again
            last = bool(running) and running[-1] is handle.request
            if self.disturbed and number == when and len(running) > 1 and last and reads:
                with self.llm.engine.paused():
                    self.llm.engine.scheduler.preempt()
                how += f", preempted in step {number}"
                self.counts["preempted"] += 1
        self.asked += [(handle, how)] if leaves else [(handle, how), (other, "other")]
        self.counts[kind.__name__] += 1
        self.counts["hits"] += other.output().cached_tokens > 0
        assert session.tokens == [*tokens, *handle.output().token_ids]

    # between turns

    def stay(self) -> None:
        """Nothing happens."""

    def park(self) -> None:
        """What is stored moves, to DRAM, to the disk, or away."""
        with self.llm.engine.paused():
            for table in self.llm.store.tables:
                while self.llm.store.prefixes.evict(100):
                    pass
                self.counts["parked"] += self.llm.store.parked.evict(1, table)

    def restore(self) -> None:
        """A session is saved, closed, and goes on from its file."""
        number = self.dice.randrange(len(self.sessions))
        session = self.sessions[number]
        if not session.tokens:
            return
        session.save()
        session.close()
        try:
            self.sessions[number] = self.llm.session(session.name)
        except BudgetError:  # there is no room now
            self.llm.sessions.delete(str(session.name))
            self.sessions[number] = self.llm.session(session.name)
        self.counts["restored"] += 1

    def damage(self) -> None:
        """A file of the disk tier is lost, cut or changed."""
        if self.llm.store.disk is None:
            return
        self.llm.store.disk.files.flush()
        paths = sorted(self.disk.glob("*" + SUFFIX))
        if not paths:
            return
        path = self.dice.choice(paths)
        data = bytearray(path.read_bytes())
        path.unlink()  # whoever has it open keeps what it was
        how = self.dice.choice(("lost", "cut", "changed"))
        data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
        if how != "lost":
            path.write_bytes(bytes(data if how == "changed" else data[: self.dice.randrange(len(data))]))
        self.counts["damaged"] += 1

    def end(self) -> None:
        """All conversations are over, and nobody holds a block any more."""
        for session in self.sessions:
            session.close()
        while self.llm.store.prefixes.evict():
            pass
        for table in self.llm.store.tables:
            check_blocks(table)
            assert not table.idle
            assert table.used() == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Random histories of conversations.")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--part", default="0/1", help="such as 1/2: of every two, the second")
    given = parser.parse_args()
    logging.getLogger("coattn").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    number, of = map(int, given.part.split("/"))
    start, counts, bad = time.perf_counter(), Counter[str](), 0
    kinds = [(row, family) for row in given.rows for family in FAMILIES]
    for seed in range(given.seed + number, given.seed + given.count, of):
        row, family = kinds[seed % len(kinds)]
        with tempfile.TemporaryDirectory() as folder:
            whole = bool(seed // len(kinds) % 2) or row in EXACT
            history = History(row, family, seed, Path(folder), whole)
            try:
                wrong = history.play()
            except Exception as error:
                wrong = [f"raised {type(error).__name__}: {error}"]
        counts += history.counts
        bad += bool(wrong)
        for x in wrong[:3]:
            print(f"{row} {family} seed {seed}: {x}"[:300], flush=True)
    print(
        f"{len(range(given.seed + number, given.seed + given.count, of))} histories from seed {given.seed}, part "
        f"{given.part}: {bad} wrong; {dict(counts)}; {time.perf_counter() - start:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
