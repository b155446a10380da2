"""One thread at a time touches the tables; in a callback of a step nobody waits for itself."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.small import greedy, llm, prompt

import coattn
from coattn.errors import EngineError


@pytest.mark.parametrize("touch", [coattn.LLM.trace, coattn.LLM.warm_up])
def test_it_waits_for_the_step_that_runs(touch: Callable[[coattn.LLM], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on, done = threading.Event(), threading.Event(), threading.Event()
    with llm() as engine:
        decode = engine.runner.decode

        def slow(*given: Any) -> Any:
            inside.set()
            assert go_on.wait(30)
            return decode(*given)

        monkeypatch.setattr(engine.runner, "decode", slow)
        threads = [threading.Thread(target=engine.generate, args=(prompt(9), greedy(2, ignore_eos=True)))]
        threads[0].start()
        assert inside.wait(30)
        threads.append(threading.Thread(target=lambda: (touch(engine), done.set())))
        threads[1].start()
        waits = not done.wait(0.3)
        go_on.set()
        assert waits
        assert done.wait(30)
        for thread in threads:
            thread.join()


def test_a_callback_may_look_at_the_last_step_and_is_told_what_it_may_not_do() -> None:
    seen: list[Any] = []
    with llm() as engine:

        def notify() -> None:
            seen.append(engine.trace())
            for wrong in (engine.warm_up, engine.step, engine.close):
                with pytest.raises(EngineError, match="step is running on this thread"):
                    wrong()

        handle = engine.submit(prompt(9), greedy(3, ignore_eos=True), notify=notify)
        assert handle.result().finish_reason == "length"
        assert len(seen) == 3
        assert seen[-1] is not None
        assert engine.generate(prompt(9), greedy(3))[0].error is None
