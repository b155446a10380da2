"""Answers that outgrow GPU memory, and sequences that outgrow what was left when they began."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.engine.rows import options
from tests.engine.small import UNIT, check_tables, greedy, prompt, slow_prompts, small, tokenizer

import coattn
from coattn.errors import BudgetError

LONG = 768
"""Tokens of the long answers."""


def answer(method: str, tokens: int = LONG, **more: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    given = {"max_batch": 1, "max_length": LONG + 64, "chunk": 32, "block": 8, **more}
    with coattn.LLM((small(1, 3, positions=4096), tokenizer()), method, **given) as llm:
        found = llm.generate(prompt(40, seed=1), greedy(tokens, ignore_eos=True))[0]
        assert found.error is None
        return found.token_ids, llm.report()


@cache
def exact() -> tuple[int, ...]:
    """Under full attention, all of it in GPU memory."""
    return answer("full")[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cpu", "hgca", "scout"])
def test_a_long_answer_goes_on_where_gpu_memory_ends(method: str) -> None:
    """Its KV is several times what the GPU may hold: it goes on in DRAM."""
    more: dict[str, Any] = {"scout": {"budget": 80}, "hgca": {"beta": 0.5}}.get(method, {})
    whole = (LONG + 40) // 8 * UNIT
    budget = whole // 4
    found, report = answer(method, gpu_kv=budget, host_kv=4 * whole, **more)
    assert len(found) == LONG
    assert report["gpu_kv_peak"] <= budget
    assert report["preemptions"] == 0
    if method == "cpu":
        assert found == exact()


def test_full_says_which_method_goes_on() -> None:
    budget = (LONG + 40) // 8 * UNIT // 4
    with pytest.raises(BudgetError) as caught:
        answer("full", gpu_kv=budget)
    assert "in the GPU tier" in caught.value.sentence
    assert "method auto or cpu, whose sequences go on in DRAM" in caught.value.hint
    # as much as fits is answered
    assert len(answer("full", 60, gpu_kv=budget)[0]) == 60
    with pytest.raises(BudgetError) as caught:
        answer("cpu", host_kv=budget)
    assert "in DRAM" in caught.value.sentence
    assert "method streaming" in caught.value.hint


@pytest.mark.parametrize("method", ["scout", "cpu"])
@pytest.mark.parametrize("disk", [True, False])
def test_two_that_outgrow_dram_are_both_answered(method: str, disk: bool, tmp_path: Path) -> None:
    """Both begin; then there is room for one. With a disk the other waits there, and hardly reads again."""
    asked, params = [prompt(40, seed=i) for i in range(2)], greedy(90, ignore_eos=True)
    given: dict[str, Any] = {"max_batch": 2, "max_length": 136, "chunk": 64, **options(method)}
    with coattn.LLM((small(1), tokenizer()), method, **given) as llm:
        want = [llm.generate(ids, params)[0].token_ids for ids in asked]
    budget = {"host_kv": 26 * UNIT, "disk": tmp_path if disk else None}
    with coattn.LLM((small(1), tokenizer()), method, **given, **budget) as llm:
        slow_prompts(llm)
        found = llm.generate(asked, params)
        assert [each.finish_reason for each in found] == ["length"] * 2
        report = llm.report()
        assert report["preemptions"] > 0
        if disk or llm.composed.exact:
            assert [each.token_ids for each in found] == want
        if disk:
            assert report["disk"]["parked" if method == "scout" else "read_tokens"] > 0
            # the last block, which was not full, is computed: maintenance hears it
            assert report["prefill_tokens"] - 2 * 40 <= 8 * report["preemptions"]
        else:
            assert report["prefill_tokens"] > 2 * 40 + 8 * report["preemptions"]
        check_tables(llm)
        assert not list(tmp_path.glob("waiting-*"))
