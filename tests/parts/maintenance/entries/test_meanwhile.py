"""After a prompt entries are chosen off the steps: the right ones, and nobody else waits."""

import threading
import time
from typing import Any, cast

import pytest
import torch
from tests.engine.small import greedy, llm, prompt

from coattn.cache.host_memory import Growing
from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.maintenance.entries import background
from coattn.parts.maintenance.entries import choosing as module
from coattn.parts.maintenance.entries import lists as lists_module
from coattn.parts.maintenance.entries.entries import QUERIES, Entries
from coattn.parts.maintenance.entries.lists import EntryLists
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

BLOCK, KV, GROUP, D, TOKENS = 8, 2, 3, 16, 150


def opened(layers: int = 1, room: int | None = None, fixed: bool = True, **params: Any) -> tuple[Runtime, Entries]:
    """room: in GPU memory. params: with beta 0 everything is kept."""
    shape = LayerShape(KV * GROUP, KV, D, torch.float32, torch.device("cpu"))
    row = compose(METHODS["hgca"], **{"block": BLOCK, "window_blocks": 2, "beta": 0.0, **params})
    runtime = Runtime([shape] * layers, row, Ledger(gpu=room), 2, 256, fixed=fixed)
    return runtime, cast("Entries", runtime.groups[0].maintenance)


def begin(maintenance: Entries) -> None:
    """As the next step of another sequence does."""
    maintenance.choosing.begin(maintenance._begin_choice, ())


def choose(maintenance: Entries, slot: int) -> None:
    """To its end."""
    begin(maintenance)
    assert maintenance.busy[slot].exception(60) is None


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("room", [None, 1 << 20])
@pytest.mark.parametrize("form", ["model", "int8"])
@pytest.mark.parametrize("peak", [True, False])
def test_what_is_kept_is_what_the_last_queries_weigh(peak: bool, form: str, room: int | None, beside: bool) -> None:
    """room: in GPU memory, where pages of the prompt stay. beside: the steps of others, or in the sequence's own."""
    beta, counts = 5.5 if peak else 1.0, []
    runtime, maintenance = opened(2, room, peak=peak, beta=beta, host_dtype=form)
    draws = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, TOKENS, heads, D, generator=draws) for heads in (KV * GROUP, KV, KV))
    k = (k > 0).float() * (255 / 256) if form == "int8" else k  # numbers that 8 bits hold exactly
    for start, end in ((0, 60), (60, TOKENS)):
        step = Step.of((1,), (start,), (end - start,))
        running = runtime.begin(
            Step(step.phase, (1,), (start,), (end - start,), frozenset({1} if end < TOKENS else ()))
        )
        for layer in range(2):
            runtime.attend(running, layer, q[layer, start:end], k[layer, start:end], v[layer, start:end], 0.4)
        runtime.commit(running)
        assert (1 in maintenance.busy) == (end == TOKENS), "due when the prompt is over, not before"
        assert not maintenance.choosing.choices, "and not begun: somebody waits for the first token"
    if beside:
        begin(maintenance)
        assert (maintenance.choosing.choices[1].held is not None) == (room is not None and form == "model")
        assert maintenance.busy[1].exception() is None
    running = runtime.begin(Step.of((1,), (TOKENS,), (1,)))
    assert not maintenance.busy
    first = maintenance.gpu.first(TOKENS + 1) * BLOCK
    for layer in range(2):
        for head in range(KV):
            own = q[layer, -QUERIES:, head * GROUP : (head + 1) * GROUP].double()
            weights = torch.einsum("qgd,nd->gqn", own * 0.4, k[layer, :first, head].double()).softmax(-1)
            worth = weights.amax((0, 1)) if peak else weights.mean(1).amax(0)
            assert (worth - beta / first).abs().min() > 1e-7, "no entry is on the edge"
            kept = (worth > beta / first).nonzero()[:, 0]
            assert maintenance.lists.positions(layer, 1, head).tolist() == kept.tolist()
            counts.append(len(kept))
    assert 0 < sum(counts) < 4 * first
    runtime.abort(running)
    runtime.release()
    assert runtime.ledger.held == {"gpu": 0, "host": 0}, "pages too"


@pytest.mark.parametrize("form", ["model", "int8"])
def test_pieces_hold_what_one_call_puts(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block in a thread, or at once in the step, by the pool."""
    draws, found = torch.Generator().manual_seed(4), []
    q, k, v = (torch.randn(2, TOKENS, heads, D, generator=draws) for heads in (KV * GROUP, KV, KV))
    for pieces in (True, False):
        with monkeypatch.context() as patch:
            if pieces:
                patch.setattr(lists_module, "CHUNK_BYTES", 1)
            runtime, maintenance = opened(2, fixed=pieces, beta=4.0, host_dtype=form)
            running = runtime.begin(Step.of((0,), (0,), (TOKENS,)))
            for layer in range(2):
                runtime.attend(running, layer, q[layer], k[layer], v[layer], 0.4)
            runtime.commit(running)
            assert (0 in maintenance.busy) == pieces
            if pieces:
                choose(maintenance, 0)
            running = runtime.begin(Step.of((0,), (TOKENS,), (1,)))
        found.append(everything(maintenance))
        runtime.abort(running)
        runtime.release()
    assert len(found[0]) == 3 * 2 * KV
    for own, whole in zip(*found, strict=True):
        assert torch.equal(own, whole)


def everything(maintenance: Entries) -> list[torch.Tensor]:
    """Positions, weights and bytes of the entries of slot 0, list by list."""
    lists, found = maintenance.lists, []
    memory = lists._memory.memory.view(-1)
    for layer in range(2):
        for head in range(KV):
            positions = lists.positions(layer, 0, head)
            assert 0 < len(positions) == int(lists.shown[layer, 0, head])
            ids = lists.table[layer, 0, head, : -(-len(positions) // BLOCK)].tolist()
            size = lists.block_bytes
            found += [positions.clone(), lists._entries(lists._weight, layer, 0, head)]
            found.append(torch.cat([memory[i * size : (i + 1) * size] for i in ids[:-1]]).clone())
    return found


def test_one_that_is_given_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of its lists: their blocks are free again, and the next choice is whole."""
    begun, go, plain = threading.Event(), threading.Event(), EntryLists.fill

    def slowly(self: EntryLists, *given: Any) -> int:
        added = plain(self, *given)
        begun.set()
        assert go.wait(60)
        return added

    (runtime, maintenance), numbers = opened(), torch.randn(TOKENS, KV * GROUP, D)
    with monkeypatch.context() as patch:
        patch.setattr(lists_module, "CHUNK_BYTES", 1)
        patch.setattr(EntryLists, "fill", slowly)
        read(runtime, numbers)
        begin(maintenance)
        assert begun.wait(60)
        choice = maintenance.choosing.choices[0]
        threading.Timer(0.05, go.set).start()
        runtime.truncate(0, TOKENS, 0)
    assert not maintenance.busy
    assert int(maintenance.lists.stored.sum()) == maintenance.lists.used_bytes() == 0
    assert choice.given_up
    read(runtime, numbers)
    choose(maintenance, 0)
    running = runtime.begin(Step.of((0,), (TOKENS,), (1,)))
    first = maintenance.gpu.first(TOKENS + 1) * BLOCK
    assert maintenance.lists.shown[0, 0].tolist() == [first] * KV
    runtime.abort(running)
    runtime.release()


def test_blocks_that_are_replaced_meanwhile_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may overwrite them at once."""
    monkeypatch.setattr(lists_module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "REST", 20.0)
    (runtime, maintenance), numbers = opened(), torch.randn(TOKENS, KV * GROUP, D)
    read(runtime, numbers, slot=1)
    choose(maintenance, 1)
    read(runtime, numbers)
    begin(maintenance)
    while not int(maintenance.lists.stored[0, 0].sum()):
        time.sleep(1e-4)
    table, own = maintenance.table, list(maintenance.table.owned[0])
    for b, block in enumerate(table.owned[1]):
        table.swap(0, b, block)
        maintenance.host[0][own[b]] = torch.nan
    half = int(maintenance.lists.stored[0, 0].sum())
    time.sleep(0.01)
    assert int(maintenance.lists.stored[0, 0].sum()) == half, "its own step does the rest"
    running = runtime.begin(Step.of((0,), (TOKENS,), (1,)))
    first = maintenance.gpu.first(TOKENS + 1) * BLOCK
    assert 0 < half < KV * first
    blocks = maintenance.lists.blocks
    for head in range(KV):
        ids = maintenance.lists.table[0, 0, head, : first // BLOCK].long()
        keys = blocks[ids, head, 0].flatten(0, 1)
        torch.testing.assert_close(keys, numbers[:first, head])
    runtime.abort(running)
    runtime.release()


def read(runtime: Runtime, numbers: torch.Tensor, slot: int = 0) -> None:
    running = runtime.begin(Step.of((slot,), (0,), (TOKENS,)))
    runtime.attend(running, 0, numbers, numbers[:, :KV].contiguous(), numbers[:, KV : 2 * KV].contiguous(), 0.4)
    runtime.commit(running)


def answers(**options: Any) -> list[tuple[int, ...]]:
    with llm("hgca", window_blocks=1, max_batch=3, **options) as engine:
        handles = [engine.submit(prompt(n, seed=2), greedy(20, ignore_eos=True)) for n in (40, 70, 90)]
        return [handle.result().token_ids for handle in handles]


def test_others_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    want = answers()
    go, blocked = threading.Event(), threading.Event()
    plain = module.weigh_host

    def slowly(choice: module.Choice, layer: int) -> torch.Tensor:
        if choice.slot == 1:
            blocked.set()
            assert go.wait(60)
        return plain(choice, layer)

    monkeypatch.setattr(module, "weigh_host", slowly)
    with llm("hgca", window_blocks=1, max_batch=3) as engine:
        first = engine.submit(prompt(40, seed=2), greedy(20, ignore_eos=True))
        while len(first.request.output) < 2:  # with the second token its own choice is over
            engine.step()
        second = engine.submit(prompt(70, seed=2), greedy(20, ignore_eos=True))
        while not second.request.output:  # the token after the prompt
            engine.step()
        assert not blocked.is_set(), "nothing is done before the first token is out"
        before = len(first.request.output)
        engine.step()
        assert blocked.wait(60), "the next step of another begins it"
        for _ in range(4):
            engine.step()
        assert len(first.request.output) == before + 5
        assert len(second.request.output) == 1, "it waits for its entries"
        go.set()
        assert second.result().token_ids == want[1]
        assert first.result().token_ids == want[0]


def test_one_alone_waits_and_one_that_leaves_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    want = answers()
    with llm("hgca", window_blocks=1, max_batch=3) as engine:
        assert engine.generate(prompt(70, seed=2), greedy(20, ignore_eos=True))[0].token_ids == want[1]
        gone = engine.submit(prompt(90, seed=2), greedy(20, ignore_eos=True))
        while not gone.request.output:
            engine.step()
        gone.cancel()
        assert not engine.runner.runtime.busy()
        assert engine.generate(prompt(90, seed=2), greedy(20, ignore_eos=True))[0].token_ids == want[2]


class Rests:
    """Every call that copies entries: the slot, how long it rests, and by whom it is done."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fills: list[tuple[int, float, bool, str]] = []
        fill = EntryLists.fill

        def noted(lists: EntryLists, layer: int, slot: int, *given: Any) -> int:
            rest, _, alone = given[-3:]
            self.fills.append((slot, rest, alone, threading.current_thread().name))
            return fill(lists, layer, slot, *given)

        patch.setattr(EntryLists, "fill", noted)

    def of(self, slot: int) -> list[tuple[float, bool, str]]:
        return [found[1:] for found in self.fills if found[0] == slot]


def test_a_choice_that_alone_is_waited_for_never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else decodes: the step makes it, with the pool, and the thread that stands back has no part in it."""
    monkeypatch.setattr(lists_module, "CHUNK_BYTES", 1)
    rests, own = Rests(monkeypatch), threading.current_thread().name
    with llm("hgca", window_blocks=1, max_batch=3) as engine:
        engine.generate(prompt(90, seed=2), greedy(3, ignore_eos=True))
    assert rests.fills
    assert {found[1:] for found in rests.fills} == {(0.0, False, own)}


def test_a_choice_beside_others_rests_after_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread as long as anybody decodes. When the last of the others is gone, the step takes over midway."""
    monkeypatch.setattr(lists_module, "CHUNK_BYTES", 1)
    own, gone, want = threading.current_thread().name, threading.Event(), answers()[2]
    rests, plain = Rests(monkeypatch), module.weigh_host

    def slowly(choice: module.Choice, layer: int) -> torch.Tensor:
        if layer == 1 and choice.slot == 1 and not choice.waited_for:
            gone.set()
            while not choice.waited_for:
                time.sleep(1e-3)
        return plain(choice, layer)

    monkeypatch.setattr(module, "weigh_host", slowly)
    with llm("hgca", window_blocks=1, max_batch=3) as engine:
        other = engine.submit(prompt(40, seed=2), greedy(200, ignore_eos=True))
        while len(other.request.output) < 2:
            engine.step()
        second = engine.submit(prompt(90, seed=2), greedy(20, ignore_eos=True))
        while not gone.is_set():
            engine.step()
        assert len(second.request.output) == 1
        beside = rests.of(1)
        assert {(rest, alone) for rest, alone, _ in beside} == {(module.REST, True)}
        assert not any(who == own for *_, who in beside)
        other.cancel()
        assert second.result().token_ids == want
    assert set(rests.of(1)[len(beside) :]) == {(0.0, False, own)}


def test_beside_others_a_head_is_one_call_and_memory_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces: each call would take the interpreter from the thread that runs the steps."""
    monkeypatch.setattr(lists_module, "CHUNK_BYTES", 1)
    plain, grown, rests = Growing.grow, list[tuple[Any, ...]](), Rests(monkeypatch)

    def grow(memory: Growing, *given: Any) -> None:
        if not grown or not maintenance.busy[0].done():
            grown.append(given)
        plain(memory, *given)

    monkeypatch.setattr(Growing, "grow", grow)
    runtime, maintenance = opened()
    read(runtime, torch.randn(TOKENS, KV * GROUP, D))
    choose(maintenance, 0)
    assert len(rests.fills) == KV
    assert 0 < len(grown) <= KV
    assert all(given[1:] == (True, False) for given in grown), "no page is touched before it is written"
    runtime.release()


@pytest.mark.parametrize("workers", [[-1, 2, 3], [-1, 1, 2, 3], [-1, -1]])
def test_the_thread_keeps_off_the_workers(workers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a CPU beside theirs and worker 0's."""
    asked: list[set[int]] = []
    monkeypatch.setattr(background.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(background.os, "sched_setaffinity", lambda _, cpus: asked.append(cpus))
    monkeypatch.setattr("coattn.native.worker_cpus", lambda: workers)
    thread = threading.Thread(target=background.stand_back)
    thread.start()
    thread.join()
    assert asked == {3: [{0, 1}], 4: [], 2: [{0, 1, 2, 3}]}[len(workers)]
