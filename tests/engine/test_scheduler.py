"""The scheduler alone, over a pretended memory: nobody is lost, no byte too many, the old come first."""

import random

import pytest
from tests.engine.memory import Blocks

from coattn.engine.admission import Admission
from coattn.engine.chunk_policy import ChunkPolicy
from coattn.engine.request import Forward, PromptChunk, Refuse, Request
from coattn.engine.sampling.params import SamplingParams
from coattn.engine.scheduler import Scheduler
from coattn.errors import BudgetError, InputError

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


class Play:
    """Drives a scheduler as the engine does and checks every move."""

    def __init__(self, gpu: int | None, host: int | None, slots: int, chunk: int) -> None:
        self.memory = Blocks(gpu, host)
        self.scheduler = Scheduler(Admission(self.memory, 200), slots, ChunkPolicy(chunk))
        self.slots, self.chunk = slots, chunk
        self.made: list[Request] = []
        self.ended: list[Request] = []
        self.admitted: list[int] = []
        self.read_since_decode = 0

    def submit(self, prompt: int, new: int) -> bool:
        limit = min(prompt + new, 200)
        request = Request(len(self.made), [0] * prompt, SamplingParams(max_new_tokens=new), limit)
        try:
            self.scheduler.admission.check(request)
        except (BudgetError, InputError):
            return False
        self.made.append(request)
        self.scheduler.add(request)
        return True

    def cancel(self, request: Request) -> None:
        if request not in self.ended:
            self.end(request)

    def end(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.ended.append(request)

    def step(self) -> bool:
        work = self.scheduler.next()
        self.check_places()
        if work is None:
            return False
        assert not isinstance(work, Refuse), "whoever passed the check fits alone"
        for chunk in work.chunks:
            self.extend(chunk)
        if work.requests:
            self.decode(work)
        return True

    def extend(self, chunk: PromptChunk) -> None:
        request, size = chunk.request, chunk.size
        assert 0 < size <= self.chunk
        if any(other.decodes for other in self.scheduler.running):
            self.read_since_decode += size
            assert self.read_since_decode <= self.chunk or self.read_since_decode == size, "decoding starves"
        else:  # nobody waits for a decode step
            self.read_since_decode = 0
        assert request.slot is not None
        self.memory.store(request.slot, request.stored, size)
        self.scheduler.done(Forward((chunk,)))
        if chunk.last:
            self.token(request)

    def decode(self, work: Forward) -> None:
        assert work.requests
        self.read_since_decode = 0
        assert set(work.requests) == {request for request in self.scheduler.running if request.decodes}
        for request in work.requests:
            assert request.slot is not None
            self.memory.store(request.slot, request.stored, 1)
        self.scheduler.done(work)
        for request in work.requests:
            self.token(request)

    def token(self, request: Request) -> None:
        request.output.append(0)
        if request.total >= request.limit:
            self.end(request)

    def check_places(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert sorted(r.id for r in [*running, *waiting, *self.ended]) == [r.id for r in self.made]
        slots = [request.slot for request in running]
        assert len(set(slots)) == len(slots) <= self.slots
        assert set(self.memory.held) <= set(slots)
        assert [r.id for r in running] == sorted(r.id for r in running), "running is ordered by arrival"
        assert all(r.id < w.id for r in running for w in waiting), "nobody overtakes"
        for request in running:
            if request.id not in self.admitted:
                self.admitted.append(request.id)


requests = st.tuples(st.integers(1, 120), st.integers(1, 60))
moves = st.lists(st.one_of(requests, st.just("step"), st.just("cancel")), max_size=60)


@settings(max_examples=200, deadline=None)
@given(
    moves,
    st.one_of(st.none(), st.integers(5, 30)),
    st.one_of(st.none(), st.integers(20, 120)),
    st.integers(1, 5),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
)
def test_everyone_gets_through(
    script: list[object], gpu: int | None, host: int | None, slots: int, chunk: int, dice: random.Random
) -> None:
    play = Play(gpu and 100 * gpu, host and 100 * host, slots, chunk)
    for move in script:
        if isinstance(move, tuple):
            play.submit(*move)
        elif move == "step":
            play.step()
        elif play.made:
            play.cancel(dice.choice(play.made))
    left = sum(request.limit for request in play.made)
    steps = 0
    while play.step():
        steps += 1
        assert steps < 50 * (left + 10), "it never ends"
    assert sorted(r.id for r in play.ended) == [r.id for r in play.made]
    assert play.memory.held == {}
    assert play.memory.free_bytes() == play.scheduler.admission.capacity
    assert play.admitted == sorted(play.admitted), "first come, first served"


@settings(max_examples=50, deadline=None)
@given(st.lists(requests, min_size=2, max_size=8), st.integers(30, 60))
def test_preempted_requests_lose_nothing(sizes: list[tuple[int, int]], host: int) -> None:
    play = Play(None, 100 * host, 4, 16)
    for size in sizes:
        play.submit(*size)
    while play.step():
        pass
    for request in play.ended:
        assert len(request.output) == min(request.params.max_new_tokens, 200 - len(request.prompt))


def test_a_tight_budget_preempts_the_youngest_and_the_oldest_goes_on() -> None:
    play = Play(None, 100 * 40, 4, 64)
    for _ in range(3):
        assert play.submit(16, 100)
    while play.step():
        if not play.ended:
            assert play.made[0].preemptions == 0
    assert [request.id for request in play.ended] == [0, 1, 2]
    assert play.scheduler.preemptions > 0


def test_a_long_prompt_does_not_starve_decoding() -> None:
    play = Play(None, None, 2, 10)
    play.submit(4, 50)
    play.step()
    play.submit(150, 5)
    before = len(play.made[0].output)
    for _ in range(20):
        play.step()
    assert len(play.made[0].output) - before == 10, "a chunk and a decode step take turns"


def test_short_prompts_share_a_chunk() -> None:
    play = Play(None, None, 5, 32)
    for _ in range(5):
        play.submit(8, 10)
    kinds = []
    for _ in range(7):
        work = play.scheduler.next()
        kinds.append("read" if work.chunks else "decode")
        play.step()
    assert kinds == ["read"] * 4 + ["decode", "read", "decode"]


def test_memory_that_vanishes_ends_the_request_instead_of_waiting_forever() -> None:
    play = Play(None, 100 * 20, 2, 16)
    play.submit(30, 10)
    play.memory.limits["host"] = 100
    work = play.scheduler.next()
    assert isinstance(work, Refuse)
    play.end(work.request)
    assert play.scheduler.next() is None
