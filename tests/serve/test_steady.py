"""Agents whose prompts change in one line, or whose tools come in another order: what was read is found."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.engine.small import small, tokenizer
from tests.serve.running import serving

import coattn
from coattn.cli.serve import patterns
from coattn.errors import ConfigError
from coattn.serve.settings import Settings
from coattn.serve.steady import Steady

BILLING = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch={:05x};"
RULES = "You are an agent. " * 12
DATE = re.compile("Date: ")


def chat(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([("system", BILLING + "\nrules"), ("user", "a")], [("system", "rules"), ("user", "a")]),
        ([("system", BILLING), ("developer", "rules\n"), ("user", "a")], [("developer", "rules\n"), ("user", "a")]),
        ([("system", "say x-anthropic-billing-header: 1"), ("user", "a")], None),
        ([("system", "rules\r\n\r\nmore\u2028"), ("user", BILLING)], None),
        ([("system", ""), ("user", "a")], None),
    ],
)
def test_the_billing_line_alone_is_dropped(given: list[tuple[str, str]], left: list[tuple[str, str]] | None) -> None:
    messages = chat(*given)
    assert Steady().messages(messages) == chat(*(left or given))
    assert Steady(billing=False).messages(messages) == messages == chat(*given), "what was given is as it was"


def test_lines_that_change_go_behind_the_last_message() -> None:
    steady = Steady(moved=(DATE,))
    given = chat(("system", "Date: 1\nrules\nDate: 2\n"), ("user", "Date: mine"), ("tool", "out"))
    assert steady.messages(given) == chat(
        ("system", "rules\n"), ("user", "Date: mine"), ("tool", "out\n\nDate: 1\nDate: 2")
    )
    unfinished = chat(("system", "Date: 1\nrules"), ("assistant", "and so"))
    assert steady.messages(unfinished) == unfinished, "an answer that is continued is not added to"
    assert steady.messages(chat(("system", "Date: 1"), ("user", ""))) == chat(("user", "Date: 1"))
    assert steady.messages([]) == []


def test_tools_in_another_order_are_the_same() -> None:
    def tool(name: str, *keys: str) -> dict[str, Any]:
        properties = {key: {"type": "string", "enum": ["b", "a"]} for key in keys}
        schema = {"type": "object", "properties": properties, "required": list(keys)}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    steady = Steady(sort_tools=True)
    one = steady.tools([tool("b", "x", "y"), tool("a", "z")])
    other = steady.tools([tool("a", "z"), tool("b", "y", "x")])
    assert repr(one) == repr(other), "keys are in one order too"
    assert [each["function"]["name"] for each in one] == ["a", "b"]
    assert one[1]["function"]["parameters"]["properties"]["x"]["enum"] == ["b", "a"], "a list that is no set stays"
    assert Steady().tools([tool("b"), tool("a")]) == [tool("b"), tool("a")]


def test_a_pattern_that_is_none_is_refused() -> None:
    assert patterns(("Date: ",)) == (DATE,)
    with pytest.raises(ConfigError, match="not a regular expression"):
        patterns(("(",))


def read_in(turns: int, header: str, steady: Steady, line: str = "") -> int:
    """Tokens that an agent's calls read, each with all messages so far; header and line have a number in them."""
    model = small(positions=16384)

    def engine() -> coattn.LLM:
        return coattn.LLM((model, tokenizer()), "full", max_batch=1, max_length=12000, block=16, max_waiting=4)

    with serving(Settings(port=0, names=("small",), steady=steady), engine) as server:
        told: list[dict[str, Any]] = []
        cached = 0
        for turn in range(turns):
            system = f"{header.format(turn)}\n{RULES}\n{line.format(turn)}"
            told += chat(("user", f"turn {turn}: go on"))
            body = {"messages": [*chat(("system", system)), *told], "max_tokens": 1, "temperature": 0}
            got = server.post("/v1/chat/completions", body)
            assert got.status_code == 200, got.text
            cached += got.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            told += chat(("assistant", "yes"))
        report = server.llm.report()
        assert cached == report["cached_tokens"] == report["asked_tokens"] - report["prefill_tokens"]
        return int(report["prefill_tokens"])


@pytest.mark.slow
def test_200_turns_with_a_changing_header_read_what_a_fixed_one_reads() -> None:
    fixed = read_in(200, BILLING.format(7), Steady())
    changing = read_in(200, BILLING, Steady())
    print(f"200 turns read {fixed:,} tokens with a fixed header, {changing:,} with one that changes")
    assert changing <= 1.05 * fixed
    assert fixed < 200 * 100


def test_a_header_that_stays_in_its_place_reads_all_again() -> None:
    assert read_in(12, BILLING, Steady(billing=False)) > 4 * read_in(12, BILLING, Steady())


def test_a_date_that_was_moved_costs_a_message_a_turn() -> None:
    moved = read_in(12, "", Steady(moved=(DATE,)), "Date: {}")
    assert moved < 0.5 * read_in(12, "", Steady(), "Date: {}")
