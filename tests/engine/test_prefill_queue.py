"""How prompts share what is read between two decode steps."""

import pytest
from tests.engine.memory import Boundless

from coattn.engine.admission import Admission
from coattn.engine.chunk_policy import ChunkPolicy
from coattn.engine.prefill_queue import PrefillQueue
from coattn.engine.request import Forward, PromptChunk, Request
from coattn.engine.sampling.params import SamplingParams
from coattn.engine.scheduler import Scheduler


def request(name: int, tokens: int) -> Request:
    return Request(name, [0] * tokens, SamplingParams(max_new_tokens=1), tokens + 1000)


def test_a_short_prompt_takes_half_of_what_a_long_one_has() -> None:
    scheduler = Scheduler(Admission(Boundless(), 1 << 20), 8, ChunkPolicy(None, None, most=256), mixes=True)
    scheduler.add(request(0, 5000))
    scheduler.add(request(1, 40))
    scheduler.add(request(2, 600))
    work = scheduler.next()
    assert [(chunk.request.id, chunk.end) for chunk in work.chunks] == [(0, 128), (1, 40), (2, 88)]
    alone = Scheduler(Admission(Boundless(), 1 << 20), 8, ChunkPolicy(None, None, most=256), mixes=True)
    alone.add(request(0, 5000))
    assert alone.next() == Forward((PromptChunk(alone.running[0], 256),))


def test_a_fixed_chunk_is_cut_where_it_would_be_cut_alone() -> None:
    scheduler = Scheduler(Admission(Boundless(), 1 << 20), 8, ChunkPolicy(100), mixes=True)
    for name, tokens in ((0, 250), (1, 130), (2, 30)):
        scheduler.add(request(name, tokens))
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while any(r.stored < len(r.prompt) for r in (*scheduler.running, *scheduler.waiting)):
        work = scheduler.next()
        for chunk in work.chunks:
            seen[chunk.request.id].append(chunk.end)
        scheduler.done(work)
        for r in scheduler.running:
            if r.stored == r.total:
                r.output.append(0)
    assert seen == {0: [100, 200, 250], 1: [100, 130], 2: [30]}


def test_prompts_are_cut_at_tiles() -> None:
    policy = ChunkPolicy()
    policy.tile = 2048
    line = Scheduler(Admission(Boundless(), 1 << 20), 4, policy, mixes=True)
    for name, length in enumerate((9000, 3000, 20000)):
        line.add(Request(name, [0] * length, SamplingParams(max_new_tokens=1), length + 1))
    ends: dict[int, list[int]] = {}
    while line.waiting or line.running:
        work = line.next()
        line.done(work)
        for chunk in work.chunks:
            ends.setdefault(chunk.request.id, []).append(chunk.end)
            if chunk.request.stored == chunk.request.total:
                line.finish(chunk.request)
    assert {name: each[-1] for name, each in ends.items()} == {0: 9000, 1: 3000, 2: 20000}
    assert not any(end % 2048 for each in ends.values() for end in each[:-1])


@pytest.mark.parametrize(("most", "end"), [(100, 100), (249, 248), (250, 250)])
def test_where_a_prompt_is_cut(most: int, end: int) -> None:
    """Not before its last token, which would be a decode step."""
    assert PrefillQueue(ChunkPolicy()).chunk(request(0, 250), most).end == end


def test_the_oldest_and_the_shortest_take_turns() -> None:
    readers, line = PrefillQueue(ChunkPolicy(100)), [request(0, 900), request(1, 500), request(2, 300)]
    turns = []
    for _ in range(4):
        chunk = readers.chunk(readers.next(line), 100)
        readers.note(chunk, line)
        chunk.request.stored = chunk.end
        turns.append(chunk.request.id)
    assert turns == [0, 2, 0, 2]


def test_chunks_of_a_model_with_states_end_where_blocks_do() -> None:
    line, ends = PrefillQueue(ChunkPolicy(300), 32), []
    given = request(0, 1100)
    while given.stored < given.total:
        given.stored = line.chunk(given, 300).end
        ends.append(given.stored)
    assert ends == [288, 576, 864, 1088, 1100]
    assert line.chunk(request(0, 100), 300).last, "a short prompt is not cut once more"
