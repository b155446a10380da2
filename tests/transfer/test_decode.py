"""Several processes read prompts: whoever is free is asked, and one that fails costs nobody an answer."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine.small import greedy, llm, prompt
from tests.transfer.local import local, watch_taken
from tests.transfer.processes import reading

from coattn.errors import BudgetError, InputError, TransferError
from coattn.hf.prefilled import Prefilled
from coattn.transfer import prefill
from coattn.transfer.decode import RemotePrefill

CALLERS = 10


def read_all(remote: RemotePrefill, length: int = 40) -> list[Any]:
    """What each of ten callers who ask at once with the same prompt gets: a result or an error."""

    def ask(_: int) -> Any:
        try:
            return remote.read(prompt(length), timeout=30)
        except Exception as error:
            return error

    with ThreadPoolExecutor(CALLERS) as threads:
        return list(threads.map(ask, range(CALLERS)))


def test_whoever_is_free_reads_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    both, real = threading.Barrier(2), prefill.read_prompt

    def together(*given: Any) -> Any:
        both.wait(5)  # nobody reads alone: as many prompts for one as for the other
        return real(*given)

    with local() as one, local() as other, llm() as engine:
        addresses = [str(one.address), str(other.address)]
        with RemotePrefill(engine, addresses, fallback=False) as remote:
            monkeypatch.setattr(prefill, "read_prompt", together)
            found = read_all(remote)
            assert [each for each in found if not isinstance(each, Prefilled)] == []
            assert (one.counts["prompts"], other.counts["prompts"]) == (5, 5)


def test_a_model_that_fails_leaves_its_prompts_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    real = prefill.read_prompt
    with local() as one, local() as other, llm() as engine:

        def read(session: Any, *given: Any) -> Any:
            if session is one._session:
                raise RuntimeError("broken")
            return real(session, *given)

        monkeypatch.setattr(prefill, "read_prompt", read)
        with RemotePrefill(engine, [str(one.address), str(other.address)], fallback=False) as remote:
            found = read_all(remote)
            assert [each for each in found if not isinstance(each, Prefilled)] == []
            assert other.counts["prompts"] == CALLERS
            assert remote.report()["elsewhere_failed"] == one.counts["failed"] > 0


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("killed", [1, 2])
def test_processes_killed_in_the_middle(tmp_path: Path, killed: int, fallback: bool) -> None:
    lease = 5.0
    with reading("tcp", tmp_path, chunk=1) as one, reading("tcp", tmp_path, chunk=1) as other, llm() as engine:
        with RemotePrefill(engine, [one.said, other.said], lease=lease, fallback=fallback) as remote:
            remote.check()
            with ThreadPoolExecutor(1) as thread:
                asking = thread.submit(read_all, remote, 100)
                while len(remote._free):  # both read
                    time.sleep(0.001)
                time.sleep(0.05)
                for process in (one, other)[:killed]:
                    process.kill()
                ended = time.monotonic()
                found = asking.result()
        if killed == 1:
            assert [each for each in found if not isinstance(each, Prefilled)] == [], "the other one reads them all"
            return
        assert time.monotonic() - ended < lease
        for each in found:
            if fallback:
                assert isinstance(each, Prefilled) or each == prompt(100), "read here"
            else:
                assert isinstance(each, Prefilled | TransferError)
        assert sum(isinstance(each, Prefilled) for each in found) < CALLERS


def test_a_prompt_that_does_not_fit_there_is_no_fault_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = watch_taken(monkeypatch)
    with llm() as engine:
        tokens = sum(2 * each.kv_heads * each.head_dim * 4 for each in engine.runner.runtime.layers)
        with local(method="cpu", block=8, host_kv=64 * tokens) as server:
            address = str(server.address)
            with RemotePrefill(engine, address, fallback=False) as remote:
                free = engine.runner.runtime.free_bytes()
                with pytest.raises(BudgetError, match=f"{address} could not read the prompt: .*host_kv") as caught:
                    remote.read(prompt(200))
                assert caught.value.hint
                assert [each() for each in taken] == [None], "its memory is let go of, also while the error lives"
                assert engine.runner.runtime.free_bytes() == free
                short = remote.read(prompt(20))
                assert isinstance(short, Prefilled), "the next one is read there at once"
                engine.generate(short, greedy(4))
            with RemotePrefill(engine, address) as remote:
                assert remote.read(prompt(200)) == prompt(200), "this process may have room for it"
                assert len(engine.generate(prompt(200), greedy(4))[0].token_ids) == 4


def test_a_prompt_without_positions_is_refused_before_anybody_is_asked() -> None:
    with local() as server, llm() as engine, RemotePrefill(engine, str(server.address)) as remote:
        with pytest.raises(InputError, match="only 512 positions"):
            remote.read(prompt(600))
        assert isinstance(remote.read(prompt(20)), Prefilled)
        assert remote.report()["elsewhere_failed"] == 0
