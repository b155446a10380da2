"""Whatever fails while sequences wait, leave memory or come back: nobody else notices, and nothing leaks."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.engine.small import UNIT, flush, greedy, in_order, prompt, small, tokenizer
from tests.engine.test_disk import engine as small_engine

import coattn
from coattn.cache.blocks import BlockMemory
from coattn.cache.layout.all_blocks import AllBlocks
from coattn.cache.layout.newest import NewestBlocks
from coattn.engine.request import RequestOutput
from coattn.engine.store import files, parked
from coattn.engine.store.files import PRIVATE, FileCache
from coattn.errors import BudgetError

PARAMS, TURN = greedy(4, ignore_eos=True), greedy(12, ignore_eos=True)
BUDGETS = {"full": {"gpu_kv": 16 * UNIT}, "scout": {"host_kv": 16 * UNIT}}


def engine(method: str, folder: Path | None = None, **more: Any) -> coattn.LLM:
    return small_engine(method, folder, **{**BUDGETS[method], **more})


def give_all_back(llm: coattn.LLM) -> None:
    """No block is held by anybody once all that waits is closed and all prefixes are given up."""
    for key in llm.store.parked:
        llm.store.parked.close(key)
    while llm.store.prefixes.evict():
        pass
    in_order(llm)
    for table in llm.store.tables:
        assert not table._held


class Fault:
    """Raises at each call, as long as it is asked to."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.raised = error, 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.raised += 1
        raise self.error


@contextmanager
def failing(where: Any, name: str, error: BaseException | None = None) -> Iterator[Fault]:
    fault = Fault(error or RuntimeError("no memory for this"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, fault)
        yield fault


@contextmanager
def in_time(seconds: float = 30) -> Iterator[None]:
    """What goes on for ever is interrupted."""
    import _thread

    alarm = threading.Timer(seconds, _thread.interrupt_main)
    alarm.start()
    try:
        yield
    except KeyboardInterrupt:
        pytest.fail("it goes on for ever")
    finally:
        alarm.cancel()


@pytest.mark.parametrize("method", BUDGETS)
def test_a_restore_that_fails_holds_no_blocks(method: str, tmp_path: Path) -> None:
    with engine(method, session_dir=tmp_path) as llm:
        with llm.session("talk") as session:
            session.ask(prompt(40, seed=1), PARAMS)
            session.save()
        give_all_back(llm)
        with failing(BlockMemory, "replace") as fault:
            for _ in range(3):
                with pytest.raises(RuntimeError, match="no memory"):
                    llm.session("talk")
        assert fault.raised == 3
        give_all_back(llm)
        with llm.session("talk") as session:
            assert session.ask(prompt(20, seed=2), PARAMS).cached_tokens >= 40


@pytest.mark.parametrize("method", BUDGETS)
def test_blocks_that_nobody_gives_up_end_in_an_error(method: str) -> None:
    """The bytes are counted as free and cannot be had: one is served, the other refused, and nobody tries for ever."""
    with engine(method, reuse=False) as llm, in_time():
        lost = [(table, table.fresh(8)) for table in llm.store.tables]
        asked = [prompt(30, seed=1), prompt(60, seed=2)]
        found = llm.generate(asked, greedy(20, ignore_eos=True))
        assert [each.finish_reason for each in found] == ["length", "error"]
        assert isinstance(found[1].error, BudgetError)
        assert llm.report()["preemptions"] < 5
        for table, ids in lost:
            table.drop(ids)
        in_order(llm)
        assert [each.finish_reason for each in llm.generate(asked, PARAMS)] == ["length"] * 2


TEXT, MORE = prompt(40, seed=1), prompt(9, seed=2)
OTHERS = [prompt(96, seed=i) for i in range(5, 7)]


@cache
def undisturbed(method: str) -> tuple[list[Any], list[Any]]:
    """Answers of a session's two turns, and of other requests."""
    with engine(method) as llm, llm.session() as session:
        turns = [session.ask(each, TURN).token_ids for each in (TEXT, MORE)]
        return turns, [llm.generate(each, PARAMS)[0].token_ids for each in OTHERS]


LEAVING = [
    (AllBlocks, "take", {"full"}),
    (NewestBlocks, "take", {"scout"}),
    (parked, "pack", {"full", "scout"}),
    (BlockMemory, "contents", {"full", "scout"}),
    (files.sealed, "write", {"full", "scout"}),
    (FileCache, "put_private", {"scout"}),
]
"""What is called while sequences leave memory, and under which methods."""


@pytest.mark.parametrize(("where", "name", "methods"), LEAVING, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("method", BUDGETS)
def test_a_sequence_that_cannot_leave_is_read_again(
    method: str, where: Any, name: str, methods: set[str], tmp_path: Path
) -> None:
    """A session's blocks are needed, and what takes them elsewhere fails."""
    turns, answers = undisturbed(method)
    with engine(method, tmp_path) as llm, llm.session() as session:
        with failing(where, name) as fault:
            assert session.ask(TEXT, TURN).token_ids == turns[0]
            found = [llm.generate(each, PARAMS)[0] for each in OTHERS]
            llm.store.disk.files.flush()
            in_order(llm)
        assert bool(fault.raised) == (method in methods)
        assert [each.error for each in found] == [None, None]
        assert [each.token_ids for each in found] == answers
        back = session.ask(MORE, TURN)
        assert back.error is None
        if method == "full":
            assert back.token_ids == turns[1]
        give_all_back(llm)
        assert not list(tmp_path.glob(PRIVATE + "*"))


def test_a_request_that_loses_its_slot_and_cannot_wait_reads_again() -> None:
    """Two outgrow what they share: the last loses its slot, and what it has cannot be kept."""
    asked, params = [prompt(16, seed=i) for i in range(2)], greedy(90, ignore_eos=True)
    given: dict[str, Any] = {"max_batch": 2, "max_length": 112, "chunk": 24, "block": 8}
    with coattn.LLM((small(1), tokenizer()), "full", **given) as llm:
        want = [each.token_ids for each in llm.generate(asked, params)]
    with engine("full", gpu_kv=22 * UNIT) as llm:
        with failing(AllBlocks, "take") as fault:
            found = llm.generate(asked, params)
        assert fault.raised
        assert [each.token_ids for each in found] == want
        give_all_back(llm)


READING = [OSError(5, "Input/output error"), MemoryError(), RuntimeError("no memory for this"), AssertionError("never")]


def put_on_disk(llm: coattn.LLM) -> tuple[RequestOutput, FileCache]:
    """A prompt is answered, and others need the memory of its blocks."""
    (found,) = llm.generate(OTHERS[0], PARAMS)
    for i in range(3):
        llm.generate(prompt(90, seed=50 + i), PARAMS)
    flush(llm)
    return found, llm.store.disk.files


@pytest.mark.parametrize("error", READING, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    ("where", "name"), [(files.sealed, "read"), (FileCache, "_get"), (FileCache, "_load")], ids=["file", "get", "load"]
)
def test_reading_that_fails_costs_nobody_anything(where: Any, name: str, error: Exception, tmp_path: Path) -> None:
    """A prompt's blocks are on the disk, and the thread that reads them fails, however it does."""
    with engine("full", tmp_path) as llm:
        want, _ = put_on_disk(llm)
        with failing(where, name, error) as fault, in_time():
            bystander = llm.submit(prompt(9, seed=3), PARAMS)
            found = llm.submit(OTHERS[0], PARAMS)
            assert bystander.result().error is None
            assert found.result().token_ids == want.token_ids
        assert fault.raised
        assert llm.report()["disk"]["damaged"] > 0
        give_all_back(llm)


def test_blocks_that_cannot_be_stored_are_computed(tmp_path: Path) -> None:
    with engine("full", tmp_path) as llm:
        (want,) = llm.generate(OTHERS[0], PARAMS)
        for i in range(3):
            llm.generate(prompt(90, seed=50 + i), PARAMS)
        with failing(BlockMemory, "replace") as fault, in_time():
            found = llm.generate(OTHERS[0], PARAMS)[0]
        assert (found.token_ids, found.cached_tokens) == (want.token_ids, 0)
        assert fault.raised
        assert llm.report()["disk"]["failed"] > 0
        give_all_back(llm)


@pytest.mark.parametrize("how", ["gone", "short", "flipped", "unreadable", "raising", "unfilled"])
def test_a_session_whose_file_is_lost_reads_its_text_again(how: str, tmp_path: Path) -> None:
    with engine("scout", tmp_path) as llm, llm.session() as session:
        first = session.ask(TEXT, TURN)
        assert first.token_ids == undisturbed("scout")[0][0]
        for each in OTHERS:
            llm.generate(each, PARAMS)
        flush(llm)
        (path,) = tmp_path.glob(PRIVATE + "*")
        data = bytearray(path.read_bytes())
        if how == "gone":
            path.unlink()
        elif how == "short":
            path.write_bytes(data[:-9])
        elif how == "flipped":
            data[-1] ^= 1
            path.write_bytes(data)
        fault = {
            "unreadable": (files.sealed, "read"),
            "raising": (FileCache, "_get"),
            "unfilled": (BlockMemory, "replace"),
        }.get(how)
        with nullcontext() if fault is None else failing(*fault):
            back = session.ask(MORE, TURN)
        assert back.error is None
        # what a method that is not exact has decoded is read again exactly, as a new prompt is
        with engine("scout") as other:
            whole = [*TEXT, *first.token_ids, *MORE]
            assert back.token_ids == other.generate(whole, TURN)[0].token_ids
        give_all_back(llm)
        assert not list(tmp_path.glob(PRIVATE + "*"))


def test_a_session_that_the_disk_has_no_room_for_any_more_reads_its_text_again(tmp_path: Path) -> None:
    """Its file is the least recently used: blocks of others push it out."""
    with engine("scout", tmp_path, disk_memory=40_000) as llm, llm.session() as session:
        first = session.ask(TEXT, TURN)
        for i in range(8):
            llm.generate(prompt(96, seed=100 + i), PARAMS)
        flush(llm)
        assert llm.report()["disk"]["parked"] == 1
        assert not list(tmp_path.glob(PRIVATE + "*"))
        back = session.ask(MORE, TURN)
        with engine("scout") as other:
            assert back.token_ids == other.generate([*TEXT, *first.token_ids, *MORE], TURN)[0].token_ids
        give_all_back(llm)


def test_a_session_that_comes_from_the_disk_leaves_steps_to_others(tmp_path: Path) -> None:
    want = undisturbed("scout")[0]
    with engine("scout", tmp_path, host_kv=24 * UNIT) as llm, llm.session() as session:
        assert session.ask(TEXT, TURN).token_ids == want[0]
        for i in range(3):
            llm.generate([prompt(96, seed=5 + 2 * i + j) for j in range(2)], PARAMS)
        flush(llm)
        assert list(tmp_path.glob(PRIVATE + "*"))
        stop = threading.Event()
        for _ in range(files.READER_THREADS):
            llm.store.disk.files._readers.submit(stop.wait, 60)
        try:
            other = llm.submit(prompt(9, seed=3), TURN)
            while other.request.first is None:
                llm.step()
            back = session.submit(MORE, TURN)
            with in_time():
                while not other.done:
                    llm.step()
            assert back.request.slot is None, "it waits in line while its file is read"
        finally:
            stop.set()
        found = back.result()
        assert (found.token_ids, found.cached_tokens) == (want[1], len(TEXT) + 11)
        give_all_back(llm)
        assert not list(tmp_path.glob(PRIVATE + "*"))


def test_what_was_coming_when_all_was_dropped_is_read_the_next_time(tmp_path: Path) -> None:
    with engine("full", tmp_path) as llm:
        want, tier = put_on_disk(llm)
        interrupted = failing(futures, "wait", KeyboardInterrupt())
        with interrupted, held_back(tier), pytest.raises(KeyboardInterrupt):
            llm.generate(OTHERS[0], PARAMS)
        found = llm.generate(OTHERS[0], PARAMS)[0]
        assert (found.token_ids, found.cached_tokens) == (want.token_ids, 88)


@contextmanager
def held_back(disk: FileCache) -> Iterator[None]:
    """Nothing is read meanwhile."""
    stop = threading.Event()
    disk._loader.submit(stop.wait)
    try:
        yield
    finally:
        stop.set()
