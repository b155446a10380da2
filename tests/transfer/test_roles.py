"""A prompt that another process has read is answered like one that was read here; what went wrong there never shows."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.engine.rows import options
from tests.engine.small import greedy, llm, prompt, small, tokenizer
from tests.transfer.local import local as local_server
from tests.transfer.local import watch_taken
from tests.transfer.processes import Process, reading

import coattn
from coattn.errors import DeadlineError, InputError, TransferError
from coattn.hf.prefilled import Prefilled
from coattn.transfer import decode
from coattn.transfer.channel import Channel
from coattn.transfer.decode import RemotePrefill
from coattn.transfer.prefill import PrefillServer

ROWS = ["full", "cpu", "hgca", "scout", "hcattention", "pqcache"]
ANSWER = greedy(12, ignore_eos=True)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with reading(request.param, tmp_path_factory.mktemp("reads")) as process:
        yield process


@pytest.mark.parametrize("row", ROWS)
def test_answers_are_those_of_one_process(other: Process, row: str) -> None:
    # reuse is off, so that nothing of the first answer helps the second; the first prompt makes a codebook, if any
    with (
        llm(row, chunk=300, reuse=False, **options(row)) as engine,
        RemotePrefill(engine, other.said, lease=20) as remote,
    ):
        engine.generate(prompt(90, seed=9), greedy(1))
        for length in (1, 200):
            here = engine.generate(prompt(length), ANSWER)[0]
            read = engine.report()["prefill_tokens"]
            there = engine.generate(remote.read(prompt(length)), ANSWER)[0]
            assert there.token_ids == here.token_ids
            assert engine.report()["prefill_tokens"] == read, "nothing is read again"
        assert remote.report() == {"elsewhere_prompts": 2, "elsewhere_tokens": 201, "elsewhere_failed": 0}
        assert other.mapped() == 0


def test_what_was_transferred_is_shared_and_let_go_of(other: Process) -> None:
    with llm("cpu") as engine, RemotePrefill(engine, other.said, lease=20) as remote:
        text = prompt(100)
        given = remote.read(text)
        assert isinstance(given, Prefilled)
        handle = engine.submit(given, ANSWER)
        first = handle.result()
        assert handle.request.given is None
        again = remote.read([*text, 1, 2, 3])  # most of it is stored here
        assert again == [*text, 1, 2, 3]
        assert engine.generate(again, ANSWER)[0].cached_tokens == 96
        assert engine.generate(remote.read(text), ANSWER)[0].token_ids == first.token_ids
        # a hit, and the rest of what was handed over
        longer = [*text, *prompt(120, seed=5)]
        there = engine.generate(remote.read(longer), ANSWER)[0]
        assert there.cached_tokens == 96
        with llm("cpu") as alone:
            assert there.token_ids == alone.generate(longer, ANSWER)[0].token_ids


@pytest.fixture(scope="module")
def local() -> Iterator[PrefillServer]:
    """In this process, so that a test can reach into it."""
    with local_server(key=b"secret") as server:
        yield server


def remote(engine: Any, server: PrefillServer, **more: Any) -> RemotePrefill:
    return RemotePrefill(engine, str(server.address), **{"key": b"secret", **more})


def test_another_model_key_or_dtype_is_refused(local: PrefillServer) -> None:
    with llm() as engine, remote(engine, local, key=b"other") as made:
        with pytest.raises(InputError, match="another key"):
            made.check()
        assert made.read(prompt(20)) == prompt(20), "then it is read here"
    for model, words in ((small(seed=1), "another weights"), (small().to(torch.bfloat16), "another weights")):
        with coattn.LLM((model, tokenizer()), max_length=256) as engine, remote(engine, local, fallback=False) as made:
            with pytest.raises(InputError, match=words):
                made.check()
            with pytest.raises(TransferError, match=words):
                made.read(prompt(20))
    with (
        coattn.LLM((small(), None), max_length=256) as engine,
        remote(engine, local) as made,
        pytest.raises(InputError, match="another tokenizer"),
    ):
        made.check()


def test_a_damaged_layer_is_not_believed(local: PrefillServer, monkeypatch: pytest.MonkeyPatch) -> None:
    landed: list[int] = []
    real = Channel.read_into

    def damage(self: Channel, view: memoryview, tick: Any) -> None:
        real(self, view, tick)
        if len(view) > 1000 and threading.current_thread() is threading.main_thread():  # a part of a layer
            landed.append(1)
            if len(landed) == 7:
                view[0] ^= 1

    taken = watch_taken(monkeypatch)
    monkeypatch.setattr(Channel, "read_into", damage)
    with llm() as engine, remote(engine, local) as made:
        gc.collect()
        gc.disable()
        try:
            assert made.read(prompt(200)) == prompt(200)
            assert [each() for each in taken] == [None], "the memory is free at once"
        finally:
            gc.enable()
        assert made.report()["elsewhere_failed"] == 1
        monkeypatch.setattr(decode, "PAUSE", 0.0)
        made._links[0].asleep = 0.0
        assert isinstance(made.read(prompt(200)), Prefilled), "the next one is right"


def test_nobody_there(local: PrefillServer) -> None:
    with llm() as engine:
        with RemotePrefill(engine, "tcp://127.0.0.1:1") as made:
            made.check()
            assert made.read(prompt(20)) == prompt(20)
        alone = RemotePrefill(engine, "tcp://127.0.0.1:1", fallback=False)
        with alone, pytest.raises(TransferError, match="cannot be reached"):
            alone.read(prompt(20))
        with RemotePrefill(engine, ["tcp://127.0.0.1:1", str(local.address)], key=b"secret") as made:
            assert isinstance(made.read(prompt(20)), Prefilled), "the other address is asked"


def test_deadlines_and_cancelling_end_a_wait(local: PrefillServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()

    def slow(*_: Any) -> None:
        hold.wait(20)
        raise RuntimeError("late")

    with llm() as engine, remote(engine, local, lease=0.4) as made:
        monkeypatch.setattr("coattn.transfer.prefill.read_prompt", slow)
        with pytest.raises(DeadlineError):
            made.read(prompt(20), timeout=0.8)  # two leases: heartbeats keep them
        with pytest.raises(TransferError, match="cancelled"):
            made.read(prompt(20), cancelled=lambda: True)
        hold.set()
        monkeypatch.undo()
        assert isinstance(made.read(prompt(20)), Prefilled)


def test_who_reads_for_others_reads_exactly() -> None:
    with (
        local_server(method="cpu", block=8) as server,
        llm() as engine,
        RemotePrefill(engine, str(server.address)) as made,
    ):
        here = engine.generate(prompt(120), ANSWER)[0]
        with llm(reuse=False) as fresh, RemotePrefill(fresh, str(server.address)) as other:
            assert fresh.generate(other.read(prompt(120)), ANSWER)[0].token_ids == here.token_ids
        assert made.report()["elsewhere_prompts"] == 0
