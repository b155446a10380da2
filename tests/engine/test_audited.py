"""A request says how far its attention was off, as audited."""

import pytest
from tests.engine.small import greedy, llm, prompt

from coattn import SamplingParams
from coattn.auto.audit.tally import Tally
from coattn.engine.request import Request, RequestOutput

pytest.importorskip("pydantic")
from coattn.serve.answer.head import about


def test_every_request_says_what_was_audited() -> None:
    ids = [prompt(n, seed=3) for n in (90, 60, 3)]
    with llm("auto", block=8, window_blocks=2, quality=0.8) as engine:
        outputs = engine.generate(ids, greedy(24, ignore_eos=True))
        report = engine.report()["audit"]
        told = about(engine, list(enumerate(outputs)))["choices"]
    counts = [output.audit["audits"] for output in outputs if output.audit is not None]
    assert len(counts) == 3
    assert sum(counts) == report["audits"] > 5
    assert report["error_target"] == 0.2
    for output, choice in zip(outputs, told, strict=True):
        assert choice["audit"] == output.audit
    first = outputs[0].audit
    over = first["error"] > 0.2
    assert (first["over_target"] is not None) == over


def test_what_is_audited_of_a_request_does_not_depend_on_who_else_runs() -> None:
    """So its answer does not either: what its steps wait for follows from it."""
    params = greedy(20, ignore_eos=True, logprobs=1)
    alone: list[RequestOutput] = []
    beside: list[RequestOutput] = []
    for others in (0, 2):
        with llm("auto", block=8, window_blocks=2, quality=0.9, pool_share=0.05) as engine:
            engine.generate(prompt(70, seed=8), params)  # whose keys decide how others are coded
            ids = [prompt(90, seed=3), *(prompt(60 + n, seed=n) for n in range(others))]
            (alone, beside)[others > 0].append(engine.generate(ids, params)[0])
    assert alone[0].audit == beside[0].audit
    assert alone[0].audit["audits"] > 8
    assert alone[0].token_ids == beside[0].token_ids
    found = [[token.logprob for token in one.logprobs or ()] for one in (*alone, *beside)]
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_what_is_not_audited_says_nothing() -> None:
    with llm("full") as engine:
        (output,) = engine.generate([prompt(20, seed=1)], greedy(4))
        assert engine.report()["audit"] is None
    assert output.audit is None


def test_a_request_that_ran_twice_has_both() -> None:
    request = Request(0, [1], SamplingParams(), 9)
    assert request.audit() is None
    for error in (0.1, 0.3):
        tally = Tally(0.1)
        tally.add(error, 0.2, 0.2)
        request.tallies.append(tally)
    found = request.audit()
    assert (found["audits"], found["error"], found["over_target"]) == (2, 0.2, 2.0)
