"""The line in front of the engine: priorities, deadlines, a limit, and cancelling from an event loop."""

import time

import pytest
import torch
from tests.engine.small import greedy, llm, prompt

from coattn.errors import BusyError, ConfigError, DeadlineError, EngineError

LONG = greedy(60, ignore_eos=True)


def test_a_lower_number_is_served_first() -> None:
    with llm(max_batch=1) as engine:
        running = engine.submit(prompt(5), LONG)
        engine.step()
        given = {name: engine.submit(prompt(5), greedy(2), priority=p) for name, p in (("b", 0), ("c", 5), ("a", -1))}
        order: list[str] = []
        while len(order) < 3:
            engine.step()
            order += [name for name, handle in given.items() if handle.done and name not in order]
        assert running.done
        assert order == ["a", "b", "c"]
        with pytest.raises(ConfigError, match="priority"):
            engine.submit(prompt(5), priority=1.5)  # type: ignore[arg-type]


def test_whoever_comes_last_in_rank_gives_its_memory_up() -> None:
    longer = greedy(120, ignore_eos=True)  # grows beyond the headroom that both had
    with llm(max_batch=2, gpu_kv=28 * 8 * 256) as engine:  # 28 blocks of eight tokens
        want = [engine.generate(prompt(40, seed), longer)[0].token_ids for seed in (1, 2)]
        late = engine.submit(prompt(40, 1), longer, priority=1)
        engine.step()
        first = engine.submit(prompt(40, 2), longer)
        assert first.result().token_ids == want[1]
        assert late.result().token_ids == want[0]
        assert (first.result().preemptions, late.result().preemptions) == (0, 1)


def test_a_request_past_its_deadline_fails_with_what_it_has() -> None:
    with llm(max_batch=1) as engine:
        late = engine.submit(prompt(5), greedy(200, ignore_eos=True), timeout=0.2)
        waits = engine.submit(prompt(5), greedy(2), timeout=0.1)
        fine = engine.submit(prompt(5), greedy(2), timeout=60)
        while not late.output().token_ids:
            engine.step()
        time.sleep(0.25)
        engine.step()
        for handle in (late, waits):
            assert isinstance(handle.result().error, DeadlineError)
        assert late.result().token_ids
        assert not waits.result().token_ids
        assert fine.result().finish_reason == "length"
        with pytest.raises(ConfigError, match="timeout"):
            engine.submit(prompt(5), timeout=0)


def test_a_full_line_refuses_until_somebody_leaves() -> None:
    with llm(max_batch=2, max_waiting=1) as engine:
        handles = [engine.submit(prompt(5), LONG) for _ in range(3)]
        assert engine.engine.inbox.room == 0
        for _ in range(2):
            with pytest.raises(BusyError, match="1 requests wait"):
                engine.submit(prompt(5), LONG)
            engine.step()
        handles[0].cancel()
        assert engine.submit(prompt(5), greedy(2)).result().finish_reason == "length"
        assert all(handle.result().new_tokens == 60 for handle in handles[1:])


def test_cancelling_later_is_left_to_the_next_step() -> None:
    with llm() as engine:
        handle = engine.submit(prompt(5), LONG)
        engine.step()
        handle.cancel(later=True)
        assert not handle.done
        engine.step()
        assert handle.result().finish_reason == "cancelled"


def test_a_failure_of_the_loop_itself_is_told_to_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm() as engine:
        handles = [engine.submit(prompt(5), LONG) for _ in range(2)]
        engine.step()

        def fail() -> None:
            raise RuntimeError("a wire came loose")

        with monkeypatch.context() as patch:
            patch.setattr(engine.engine.scheduler, "next", fail)
            with pytest.raises(RuntimeError):
                engine.step()
        for handle in handles:
            assert isinstance(handle.result().error, EngineError)
            assert "came loose" in str(handle.result().error)
        assert engine.generate(prompt(5), greedy(3))[0].new_tokens == 3


def test_failed_steps_are_counted_until_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm() as engine:

        def fail(*_: object) -> None:
            raise RuntimeError("no")

        with monkeypatch.context() as patch:
            patch.setattr(engine.engine.runner, "extend", fail)
            patch.setattr(engine.engine.runner, "mix", fail)
            assert [each.finish_reason for each in engine.generate([prompt(5)] * 2)] == ["error"] * 2
        # both together, both once more, then each by itself
        assert (engine.engine.failed_in_a_row, engine.report()["failed_steps"]) == (4, 4)
        engine.generate(prompt(5), greedy(2))
        assert (engine.engine.failed_in_a_row, engine.report()["failed_steps"]) == (0, 4)


def test_the_longest_that_fits_is_what_the_budget_says() -> None:
    padding = int(torch.cuda.is_available())  # a block for the padding rows of captured steps
    with llm(gpu_kv=(16 + padding) * 8 * 256, max_batch=1) as engine:
        most = engine.engine.scheduler.admission.most()
        assert most == 16 * 8 + 1, "sixteen blocks, and a last token that is never stored"
        assert engine.generate(prompt(5), greedy(most - 5, ignore_eos=True))[0].new_tokens == most - 5
    with llm() as engine:
        assert engine.engine.scheduler.admission.most() == engine.max_length


def test_tokens_that_cannot_be_drawn_for_one_are_drawn_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm() as engine:
        want = engine.generate([prompt(5, seed=i) for i in range(3)], greedy(4, ignore_eos=True))
        handles = [engine.submit(prompt(5, seed=i), greedy(4, ignore_eos=True)) for i in range(3)]
        draw = engine.engine.sampler.draw

        def fails(logits: torch.Tensor, draws: list[object], best: list[int] | None) -> object:
            if handles[1].draws in draws:
                raise RuntimeError("no")
            return draw(logits, draws, best)  # type: ignore[arg-type]

        monkeypatch.setattr(engine.engine.sampler, "draw", fails)
        found = [handle.result() for handle in handles]
    assert [each.finish_reason for each in found] == ["length", "error", "length"]
    assert [found[i].token_ids for i in (0, 2)] == [want[i].token_ids for i in (0, 2)]
