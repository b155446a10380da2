"""Requests that come and go, fail and are cancelled: each gets what it would get alone, and the memory comes back."""

import gc
import threading
from typing import Any

import pytest
import torch
from tests.engine.small import DEVICE, END, by_transformers, greedy, llm, prompt, small, tokenizer
from tests.hf.families import FAMILIES, tiny

import coattn
from coattn import SamplingParams
from coattn.errors import EngineError, WorkerError

EXACT = ["full", "offload", "cpu"]
WHOLE: list[tuple[str, dict[str, Any]]] = [
    *((method, {}) for method in EXACT),
    ("hgca", {"beta": 0, "window_blocks": 2}),
    ("hcattention", {"groups": 0, "tau": 1}),
    ("hcattention", {"groups": 0, "tau": 1, "window_blocks": 1, "sink_blocks": 1}),
]
"""Rows with parameters that leave nothing out."""
LENGTHS = [3, 40, 17, 70, 1, 33, 8, 100, 64, 32, 5, 90]


def assert_empty(engine: coattn.LLM) -> None:
    """Everything that sequences can have is there again."""
    scheduler = engine.engine.scheduler
    assert (scheduler.running, list(scheduler.waiting), engine.engine.inbox.live) == ([], [], {})
    assert dict(engine.engine.runner.runtime.free_bytes()) == scheduler.admission.capacity


@pytest.mark.parametrize(("method", "params"), WHOLE)
def test_a_mixed_batch_equals_transformers(method: str, params: dict[str, Any]) -> None:
    """More requests than slots, prompts longer than a chunk, some of one token, some that end by themselves."""
    ids = [prompt(n, seed=1) for n in LENGTHS]
    want = [by_transformers(small(), each, 30) for each in ids]
    assert any(END in each for each in want), "an end token should be among them"
    with llm(method, **params) as engine:
        got = engine.generate(ids, greedy(30))
        assert_empty(engine)
        assert engine.report()["exact"]
        assert engine.report()["requests"]["error"] == 0
    assert [each.token_ids for each in got] == want
    for each, tokens in zip(got, want, strict=True):
        assert each.finish_reason == ("stop" if tokens[-1] == END else "length")
        assert each.text == tokenizer().decode(tokens, skip_special_tokens=True)
        assert (each.new_tokens, each.prompt_tokens) == (len(tokens), LENGTHS[got.index(each)])
        assert 0 <= each.waited_s <= each.first_token_s <= each.total_s


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_a_batch(family: str) -> None:
    model = tiny(family)
    ids = [[3 + i % 150 for i in prompt(n, seed=2)] for n in (40, 9, 1, 60, 25)]
    want = [by_transformers(model, each, 12) for each in ids]
    with coattn.LLM((model, None), "cpu", max_batch=3, max_length=128, chunk=16, block=8) as engine:
        assert [each.token_ids for each in engine.generate(ids, greedy(12))] == want


@pytest.mark.parametrize(("method", "family"), [*((method, None) for method in EXACT), ("full", "qwen3_moe")])
def test_preemption_changes_no_text(method: str, family: str | None) -> None:
    """A budget for about two of the five: some are thrown out and read again."""
    ids = [[3 + i % 150 for i in prompt(n, seed=3)] for n in (20, 30, 25, 10, 35)]
    params = [greedy(90, ignore_eos=True)] * len(ids)
    model = small() if family is None else tiny(family)
    with coattn.LLM((model, None), "full", max_batch=1, max_length=256, chunk=32, block=8) as probe:
        bytes_per_token = probe.engine.runner.runtime.bytes_for(256)["gpu"] // 256
    with coattn.LLM((model, None), method, max_batch=5, max_length=256, chunk=32, block=8) as roomy:
        want = [each.token_ids for each in roomy.generate(ids, params)]
        assert roomy.report()["preemptions"] == 0
        fixed = roomy.ledger.held["gpu"]
    tight = {"gpu_kv" if method == "full" else "host_kv": 300 * bytes_per_token}
    with coattn.LLM((model, None), method, max_batch=5, max_length=256, chunk=32, block=8, **tight) as engine:
        held = dict(engine.ledger.held)
        got = engine.generate(ids, params)
        assert engine.report()["preemptions"] > 0
        assert engine.ledger.held == held
        if method == "full":  # who has to wait waits in DRAM
            held["host"] = engine.ledger.peak["host"]
        assert engine.ledger.peak == held
        assert held["gpu"] <= fixed
        assert_empty(engine)
    assert [each.token_ids for each in got] == want
    assert sum(each.preemptions for each in got) == engine.report()["preemptions"]


def test_streams_add_up_and_requests_join_on_the_way() -> None:
    ids = [prompt(n, seed=4) for n in (5, 50, 12)]
    params = SamplingParams(max_new_tokens=20, logprobs=2, ignore_eos=True)
    with llm() as engine:
        want = [engine.generate(each, params)[0] for each in ids]
        handles = []
        for each in ids:
            handles.append(engine.submit(each, params))
            for _ in range(3):
                engine.step()
        parts = [list(handle) for handle in handles]
        assert_empty(engine)
    for handle, pieces, whole in zip(handles, parts, want, strict=True):
        assert "".join(part.text for part in pieces) == whole.text
        assert sum((part.token_ids for part in pieces), ()) == whole.token_ids
        assert [part.finish_reason for part in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert [part.new_tokens for part in pieces] == list(range(1, 21))
        chosen = [entry.logprob for part in pieces for entry in part.logprobs]
        assert chosen == pytest.approx([entry.logprob for entry in whole.logprobs], abs=1e-4)
        assert handle.done
        assert handle.result().token_ids == whole.token_ids
        assert list(handle) == []


def test_leaving_a_stream_early_cancels_it() -> None:
    with llm() as engine:
        for i, _ in enumerate(engine.stream(prompt(10), greedy(100, ignore_eos=True))):
            if i == 3:
                break
        assert_empty(engine)
        assert engine.report()["requests"]["cancelled"] == 1
        untouched = engine.stream(prompt(10), greedy(5, ignore_eos=True))
        assert len(list(untouched)) == 5


def test_cancelling_waiting_running_and_finished_requests() -> None:
    with llm(max_batch=2) as engine:
        want = engine.generate(prompt(9), greedy(40, ignore_eos=True))[0].token_ids
        handles = [engine.submit(prompt(9), greedy(40, ignore_eos=True)) for _ in range(4)]
        for _ in range(8):
            engine.step()
        handles[1].cancel()
        handles[3].cancel()
        assert handles[1].done
        assert handles[3].done
        results = [handle.result() for handle in handles]
        assert [each.finish_reason for each in results] == ["length", "cancelled", "length", "cancelled"]
        assert results[0].token_ids == results[2].token_ids == want
        assert results[1].token_ids == want[: len(results[1].token_ids)] != ()
        assert results[3].token_ids == ()
        handles[0].cancel()
        assert handles[0].result().finish_reason == "length"
        assert_empty(engine)


def test_threads_submit_wait_and_cancel() -> None:
    ids = [prompt(n, seed=5) for n in range(1, 25)]
    with llm() as engine:
        want = [each.token_ids for each in engine.generate(ids, greedy(15))]
        got: dict[int, Any] = {}

        def ask(i: int) -> None:
            handle = engine.submit(ids[i], greedy(15))
            if i % 4 == 3:
                handle.cancel()
            got[i] = handle.result()

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(ids))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert_empty(engine)
        for i, result in got.items():
            if i % 4 == 3 and result.finish_reason == "cancelled":
                assert result.token_ids == want[i][: len(result.token_ids)]
            else:
                assert result.token_ids == want[i]
        assert not engine.wait(0)
        threading.Timer(0.05, lambda: engine.submit([1], greedy(1))).start()
        assert engine.wait(10)


def test_seeds_are_kept_in_any_company() -> None:
    mine = SamplingParams(max_new_tokens=25, temperature=1.2, top_p=0.95, seed=11, ignore_eos=True)
    others = [SamplingParams(max_new_tokens=12, temperature=1.0, top_k=k, ignore_eos=True) for k in (0, 3, 9)]
    with llm() as engine:
        alone = engine.generate(prompt(20), mine)[0].token_ids
        again = engine.generate(prompt(20), mine)[0].token_ids
        company = engine.generate([prompt(7), prompt(20), prompt(33), prompt(50)], [others[0], mine, *others[1:]])
        other = engine.generate(prompt(20), SamplingParams(**{**mine.__dict__, "seed": 12}))[0].token_ids
    assert alone == again == company[1].token_ids != other


def test_stop_strings_and_stop_tokens() -> None:
    with llm() as engine:
        whole = engine.generate(prompt(10, seed=6), greedy(60, ignore_eos=True))[0]
        stop = whole.text[8:11]
        cut = engine.generate(prompt(10, seed=6), greedy(60, ignore_eos=True, stop=stop))[0]
        assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] != whole.token_ids
        parts = list(engine.stream(prompt(10, seed=6), greedy(60, ignore_eos=True, stop=stop)))
        assert "".join(part.text for part in parts) == cut.text
        token = whole.token_ids[6]
        ended = engine.generate(prompt(10, seed=6), greedy(60, ignore_eos=True, stop_token_ids=(token,)))[0]
        at = whole.token_ids.index(token)
        assert (ended.token_ids, ended.finish_reason) == (whole.token_ids[: at + 1], "stop")
        assert ended.text == tokenizer().decode(whole.token_ids[:at])
        assert_empty(engine)


def test_a_sequence_ends_at_the_longest_length() -> None:
    with llm(max_length=64) as engine:
        got = engine.generate([prompt(60), prompt(63)], greedy(50, ignore_eos=True))
    assert [(each.new_tokens, each.finish_reason) for each in got] == [(4, "length"), (1, "length")]


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("error", [WorkerError("The workers are gone.", "Nothing to do."), RuntimeError("on purpose")])
def test_a_failing_step_fails_its_own_requests_only(
    method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llm(method, max_batch=2) as engine:
        want = engine.generate(prompt(9), greedy(20, ignore_eos=True))[0].token_ids
        handles = [engine.submit(prompt(9), greedy(20, ignore_eos=True)) for _ in range(3)]
        for _ in range(6):
            engine.step()
        runtime = engine.engine.runner.runtime
        attend = runtime.attend

        def fail(running: Any, layer: int = 1, *args: Any) -> torch.Tensor:
            if layer == 1:
                raise error
            return attend(running, layer, *args)

        with monkeypatch.context() as patch:
            # a recorded step does not pass through Python's attention any more
            patch.setattr(runtime, "attend" if DEVICE.type == "cpu" else "commit", fail)
            engine.step()
        assert [handle.done for handle in handles] == [True, True, False]
        for handle in handles[:2]:
            result = handle.result()
            assert result.finish_reason == "error"
            assert result.token_ids == want[: len(result.token_ids)] != ()
            assert isinstance(result.error, WorkerError if isinstance(error, WorkerError) else EngineError)
            assert str(error).rstrip(".") in str(result.error)
        assert handles[2].result().token_ids == want
        assert_empty(engine)
        assert engine.generate(prompt(9), greedy(20, ignore_eos=True))[0].token_ids == want


def test_a_failing_chunk_of_a_prompt_leaves_the_others_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm() as engine:
        want = engine.generate(prompt(9), greedy(20, ignore_eos=True))[0].token_ids
        running = engine.submit(prompt(9), greedy(20, ignore_eos=True))
        engine.step()
        reading = engine.submit(prompt(100), greedy(5))
        mix, calls = engine.engine.runner.mix, []

        def fail(chunks: Any, slots: Any, *rest: Any) -> Any:
            """Together with those that decode, and after the first chunk."""
            calls.extend([] if slots else [chunks[0].history])
            if slots or chunks[0].history:
                raise WorkerError("The workers are gone.")
            return mix(chunks, slots, *rest)

        monkeypatch.setattr(engine.engine.runner, "mix", fail)
        assert reading.result().finish_reason == "error"
        assert calls == [0, 32]
        assert running.result().token_ids == want
        assert_empty(engine)


def test_predictions_that_are_not_numbers_fail_only_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm() as engine:
        want = engine.generate(prompt(9), greedy(20, ignore_eos=True))[0].token_ids
        handles = [engine.submit(prompt(9), greedy(20, ignore_eos=True)) for _ in range(2)]
        for _ in range(4):
            engine.step()
        decode = engine.engine.runner.decode

        def broken(*args: Any) -> torch.Tensor:
            logits = decode(*args)
            logits[0, 5] = float("nan")
            if engine.engine.runner.best:
                engine.engine.runner.best[0] = -1
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(engine.engine.runner, "decode", broken)
            engine.step()
        assert "not finite" in str(handles[0].result().error)
        assert handles[1].result().token_ids == want
        assert_empty(engine)


def test_a_failure_in_the_text_of_one_request_fails_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm() as engine:
        want = engine.generate(prompt(9), greedy(20, ignore_eos=True))[0].token_ids
        handles = [engine.submit(prompt(9), greedy(20, ignore_eos=True)) for _ in range(3)]

        def fail(token: int) -> str:
            raise ValueError("no such token")

        monkeypatch.setattr(handles[1].text, "push", fail)
        results = [handle.result() for handle in handles]
        assert [each.finish_reason for each in results] == ["length", "error", "length"]
        assert "no such token" in str(results[1].error)
        assert results[0].token_ids == results[2].token_ids == want
        assert_empty(engine)


@pytest.mark.parametrize("where", ["attend", "commit", "draw"])
def test_an_interrupt_leaves_everything_freed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with llm("offload") as engine:
        ids = [prompt(n) for n in (9, 40, 20, 30, 11)]
        want = [each.token_ids for each in engine.generate(ids, greedy(20))]
        free = dict(engine.engine.runner.runtime.free_bytes())
        target = engine.engine.sampler if where == "draw" else engine.engine.runner.runtime
        real, calls = getattr(target, where), []

        def interrupt(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 9:
                raise KeyboardInterrupt
            return real(*args)

        bystander = engine.submit(prompt(5), greedy(50, ignore_eos=True))
        with monkeypatch.context() as patch:
            patch.setattr(target, where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(ids, greedy(20))
        assert_empty(engine)
        assert dict(engine.engine.runner.runtime.free_bytes()) == free
        assert bystander.result().finish_reason == "cancelled"
        assert [each.token_ids for each in engine.generate(ids, greedy(20))] == want


def test_closing_cancels_gives_everything_back_and_frees_the_model() -> None:
    model = small()
    want = by_transformers(model, prompt(9), 10)
    engine = coattn.LLM((model, tokenizer()), "cpu", max_batch=2, max_length=64)
    handle = engine.submit(prompt(9), greedy(40))
    for _ in range(3):
        engine.step()
    assert engine.ledger.held["gpu"] > 0
    engine.close()
    engine.close()
    assert engine.ledger.held == {"gpu": 0, "host": 0}
    assert handle.result().finish_reason == "cancelled"
    with pytest.raises(EngineError, match="closed"):
        engine.submit(prompt(3))
    assert not engine.step()
    assert by_transformers(model, prompt(9), 10) == want
    with coattn.LLM((model, None), max_batch=2, max_length=64) as again:
        assert again.generate(prompt(9), greedy(10))[0].token_ids == want


def test_an_engine_that_is_forgotten_closes_itself() -> None:
    model = small()
    want = by_transformers(model, prompt(9), 10)
    handle = coattn.LLM((model, None), max_batch=2, max_length=64).submit(prompt(9), greedy(10))
    gc.collect()
    assert handle.result().token_ids == want, "a handle keeps its engine open"
    del handle
    gc.collect()
    assert by_transformers(model, prompt(9), 10) == want


def test_a_server_polls_and_is_notified() -> None:
    """One thread steps; this one sleeps until there is news."""
    news, over = threading.Event(), threading.Event()
    with llm() as engine:
        want = engine.generate(prompt(9), greedy(12, ignore_eos=True))[0].token_ids

        def serve() -> None:
            while not over.is_set():
                if not engine.step():
                    engine.wait(0.1)

        thread = threading.Thread(target=serve)
        thread.start()
        handle, got = engine.submit(prompt(9), greedy(12, ignore_eos=True), notify=news.set), []
        while not (got and got[-1].finish_reason):
            assert news.wait(10)
            news.clear()
            got += handle.poll()
        over.set()
        thread.join(10)
        assert sum((part.token_ids for part in got), ()) == want


def test_the_report_counts() -> None:
    with llm() as engine:
        engine.generate([prompt(40), prompt(5)], greedy(6, ignore_eos=True))
        report = engine.report()
    assert report["method"] == "full"
    assert report["exact"]
    assert (report["prefill_steps"], report["prefill_tokens"]) == (2, 45), "the short one beside the end of the other"
    assert report["new_tokens"] == 12
    assert report["requests"] == {"stop": 0, "length": 2, "error": 0, "cancelled": 0}
    assert report["gpu_kv_bytes"] == report["gpu_kv_peak"] > 0
