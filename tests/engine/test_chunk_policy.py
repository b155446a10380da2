"""The token budget of prompts over a pretended clock: the promised time between tokens holds, short prompts pass."""

import pytest
import torch
from tests.engine.memory import Boundless
from tests.engine.small import llm

from coattn.engine import chunk_policy as timing
from coattn.engine.admission import Admission
from coattn.engine.chunk_policy import FIRST_CHUNK_TOKENS, MIN_CHUNK_TOKENS, ChunkConfig, ChunkPolicy
from coattn.engine.request import Request
from coattn.engine.sampling.params import SamplingParams
from coattn.engine.scheduler import Scheduler
from coattn.errors import ConfigError


class World:
    """A machine on which a decode step takes `decode` seconds and a prompt's token `token`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: ChunkPolicy, decode: float, token: float) -> None:
        self.now, self.decode, self.token = 0.0, decode, token
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        self.scheduler = Scheduler(Admission(Boundless(), 1 << 20), 16, policy)
        self.chunk_policy = policy
        self.gaps: list[float] = []
        self.firsts: dict[int, float] = {}
        self._last: float | None = None

    def add(self, name: int, prompt: int, new: int = 100000) -> Request:
        request = Request(name, [0] * prompt, SamplingParams(max_new_tokens=1), prompt + new, arrived=self.now)
        self.scheduler.add(request)
        return request

    def pass_a_decode_step(self) -> None:
        self.now += self.decode
        if self._last is not None:
            self.gaps.append(self.now - self._last)
        self._last = self.now

    def step(self) -> bool:
        work = self.scheduler.next()
        if work is None:
            return False
        if work.chunks:
            (chunk,) = work.chunks
            self.now += self.token * chunk.size
            finished = [chunk.request] if chunk.last else []
        else:
            self.pass_a_decode_step()
            finished = list(work.requests)
        self.scheduler.done(work)
        for request in finished:
            self.firsts.setdefault(request.id, self.now)
            request.output.append(0)
            if request.total >= request.limit:
                self.scheduler.finish(request)
        return True


@pytest.mark.parametrize(("target", "wanted"), [(None, 0.030), (0.060, 0.060), (0.018, 0.018)])
def test_the_promised_time_between_tokens_holds(
    monkeypatch: pytest.MonkeyPatch, target: float | None, wanted: float
) -> None:
    world = World(monkeypatch, ChunkPolicy(None, target), decode=0.010, token=0.00002)
    for i in range(8):
        world.add(i, 16)
    for _ in range(40):
        world.step()
    world.gaps.clear()
    long = world.add(99, 64000)
    begin = world.now
    while 99 not in world.firsts:
        world.step()
    settled = world.gaps[3:]
    assert max(settled) <= wanted * 1.001
    alone, most_read = 0.00002 * 64000, wanted - world.decode
    used = most_read * 2 / 3
    assert max(settled) >= world.decode + used * 0.99, "what is promised is used"
    assert world.firsts[99] - begin <= alone * (1 + world.decode / used) * 1.1
    assert long.decodes


def test_a_target_that_cannot_be_met_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ChunkPolicy(None, 0.001), decode=0.010, token=0.001)
    world.add(0, 8)
    for _ in range(10):
        world.step()
    world.add(1, 2000)
    for _ in range(200):
        world.step()
    assert 1 in world.firsts
    assert world.chunk_policy.budget(True) in (0, MIN_CHUNK_TOKENS)


def test_nobody_waits_so_as_much_as_possible_is_read() -> None:
    policy = ChunkPolicy(None, 0.001, most=4096)
    assert policy.budget(False) == 4096
    assert policy.budget(True) == FIRST_CHUNK_TOKENS
    policy.note(512, 0.1)
    assert policy.budget(True) == 0, "a decode step by itself, to know its time"
    policy.note(0, 0.05)
    assert ChunkPolicy(300).budget(True) == ChunkPolicy(300).budget(False) == 300


def test_one_slow_step_changes_nothing() -> None:
    policy = ChunkPolicy(None, 0.05)
    for seconds in (0.01, 0.01, 2.0, 0.01, 0.01):
        policy.note(0, seconds)
    for seconds in (0.03, 0.03, 5.0, 0.03, 0.03):
        policy.note(1000, seconds)
    assert policy.budget(True) == 1984  # 40 ms at 20 us a token are 2,000


def test_a_short_prompt_is_not_held_up_by_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ChunkPolicy(1000), decode=0.010, token=0.001)
    world.add(0, 50000)
    world.step()
    world.add(1, 500)
    begin = world.now
    while 1 not in world.firsts:
        world.step()
    assert world.firsts[1] - begin <= 0.5 + 1.0 + 0.01, "at most one chunk of the long one before it"


def test_short_prompts_do_not_starve_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ChunkPolicy(1000), decode=0.0, token=0.001)
    world.add(0, 20000, 1)
    for i in range(1, 200):
        world.add(i, 1000, 1)
    while 0 not in world.firsts:
        world.step()
    assert world.now <= 2 * 20.0 + 1.0


def test_what_is_refused_and_what_is_said() -> None:
    with pytest.raises(ConfigError, match="Both chunk and target_ms"):
        llm(target_ms=50)
    for wrong in (0, -1, float("nan"), "x"):
        with pytest.raises(ConfigError, match="target_ms"):
            llm(chunk=None, target_ms=wrong)
    chosen = 8192 if torch.cuda.is_available() else 2048
    with llm(chunk=None, target_ms=20) as engine:
        assert engine.report()["chunk"] == chosen
    with llm("streaming", chunk=None) as engine:
        assert engine.report()["chunk"] == engine.engine.chunk_policy.fixed == chosen


def test_no_fewer_than_the_least() -> None:
    """Where a step that reads costs much before its first token, small chunks would starve prompts."""
    policy = ChunkPolicy()
    policy.least = 512
    policy.note(0, 0.01)
    for _ in range(8):
        budget = policy.budget(True)
        assert budget >= 512
        policy.note(budget, 0.04 + 1e-5 * budget)


@pytest.mark.parametrize("layers", [None, 36])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_chunk_that_was_given_is_kept(on_gpu: bool, layers: int | None) -> None:
    for exact in (False, True):
        assert ChunkConfig(100).policy(exact, on_gpu, layers).fixed == 100


@pytest.mark.parametrize(
    ("on_gpu", "layers", "fixed", "most", "least"),
    [
        (False, None, 2048, 2048, MIN_CHUNK_TOKENS),
        (True, None, 2048, 8192, FIRST_CHUNK_TOKENS),
        (True, 36, 8192, 8192, MIN_CHUNK_TOKENS),
    ],
)
def test_what_the_device_makes_of_nothing(on_gpu: bool, layers: int | None, fixed: int, most: int, least: int) -> None:
    """An exact method follows the clock; what another forgets must not depend on it."""
    exact, lossy = ChunkConfig().policy(True, on_gpu, layers), ChunkConfig().policy(False, on_gpu, layers)
    assert (exact.fixed, lossy.fixed) == (None, fixed)
    for policy in (exact, lossy):
        assert (policy.most, policy.least, policy.layers) == (most, least, layers or 1)
        assert (policy.tile > 1) is on_gpu


def test_a_promise_may_need_small_chunks() -> None:
    policy = ChunkConfig(target_ms=20).policy(False, True, None)
    assert (policy.fixed, policy.target_s, policy.least) == (None, 0.02, MIN_CHUNK_TOKENS)
