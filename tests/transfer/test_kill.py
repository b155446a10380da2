"""Either process is killed or stopped at random moments: an answer or an error in time, never a wrong answer.

COATTN_KILLS=30 does at full length what is done briefly otherwise.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.engine.small import greedy, llm, prompt
from tests.transfer.processes import Process, Server, prefill, read_prompts

for each in ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx2"):
    pytest.importorskip(each, reason=f"needs {each}: the extras serve and dev")

KILLS = int(os.environ.get("COATTN_KILLS", "2"))
"""Of each transport."""
DEADLINE = 30.0
LEASE = 1.0
TOKENS = 16
THREADS = ThreadPoolExecutor(1)


@pytest.fixture(scope="module")
def right() -> dict[int, tuple[int, ...]]:
    """Answers of one process, by the prompt's seed."""
    with llm("cpu", max_length=512) as engine:
        found = engine.generate([prompt(400, seed) for seed in range(8)], greedy(TOKENS, ignore_eos=True))
    return {seed: each.token_ids for seed, each in enumerate(found)}


class Pair:
    """Both processes, each replaced when it was killed."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.prefill = prefill(kind, folder)
        self.decode = self.serve()

    def serve(self) -> Server:
        options = {"method": "cpu", "max_length": 512, "reuse": False}
        return Server(self.prefill.said, {"lease": LEASE}, options)

    def replace(self, victim: str) -> None:
        if victim == "prefill":
            self.prefill = Process(read_prompts, self.prefill.said, {"chunk": 16})
        else:
            self.decode = self.serve()

    def close(self) -> None:
        for process in (self.decode, self.prefill):
            process.kill()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(request.param, tmp_path)
    yield made
    made.close()


def test_a_kill_is_an_answer_or_an_error(pair: Pair, right: dict[int, tuple[int, ...]]) -> None:
    rng = random.Random(f"{pair.kind} {KILLS}")
    before = sorted(os.listdir("/dev/shm"))
    usual = seconds(pair, right)
    tally = {"right": 0, "error": 0}
    for number in range(KILLS):
        victim = ("prefill", "decode")[number % 2]
        seed, moment = rng.randrange(8), rng.uniform(0, 1.2 * usual)
        asking = THREADS.submit(pair.decode.ask, prompt(400, seed), TOKENS, DEADLINE)
        time.sleep(moment)
        getattr(pair, victim).kill()
        got = asking.result(DEADLINE + 5)
        if isinstance(got, str):
            assert victim == "decode", f"the server lives, but says {got}"
            tally["error"] += 1
        else:
            assert got == right[seed], f"a wrong answer after {victim} was killed at {moment:.3f} s"
            tally["right"] += 1
        pair.replace(victim)
        assert pair.decode.ask(prompt(400, 7 - seed), TOKENS, DEADLINE) == right[7 - seed], "the next one is right"
        until_nothing_is_mapped(pair)
    assert sorted(os.listdir("/dev/shm")) == before
    print(f"{pair.kind}: {KILLS} kills, {tally}, a request takes {usual:.2f} s")


def test_a_process_that_sleeps_past_its_lease_changes_nothing(pair: Pair, right: dict[int, tuple[int, ...]]) -> None:
    usual = seconds(pair, right)
    asking = THREADS.submit(pair.decode.ask, prompt(400, 3), TOKENS, DEADLINE)
    time.sleep(usual / 4)
    pair.prefill.kill(signal.SIGSTOP)
    assert asking.result(DEADLINE + 5) == right[3], "read by the server itself"
    pair.prefill.kill(signal.SIGCONT)  # it goes on writing, if it can
    assert pair.decode.ask(prompt(400, 2), TOKENS, DEADLINE) == right[2]
    until_nothing_is_mapped(pair)


def seconds(pair: Pair, right: dict[int, tuple[int, ...]]) -> float:
    """What a request takes, after a first one."""
    for seed in (0, 1):
        begun = time.monotonic()
        assert pair.decode.ask(prompt(400, seed), TOKENS, DEADLINE) == right[seed]
    return time.monotonic() - begun


def until_nothing_is_mapped(pair: Pair) -> None:
    """The prefill side lets go of memory that nobody reads any more; the other side of what it has stored."""
    end = time.monotonic() + 10 * LEASE
    while pair.prefill.mapped() or pair.decode.mapped():
        assert time.monotonic() < end, "memory of a prompt is left"
        time.sleep(0.05)
