"""Prompts that are over and still in spare GPU memory: who goes on from their blocks finds them, nobody else does."""

from typing import Any

import pytest
import torch
from tests.cache.test_prompt_buffer import BLOCK, LAYERS, TOKENS, assert_dense, attend, numbers, read
from tests.cache.test_spare_room import PAGE, needed, open_runtime
from tests.engine.rows import options
from tests.engine.small import greedy, prompt, small, tokenizer

import coattn
from coattn.cache import prompt_buffer
from coattn.cache.ledger import Ledger
from coattn.cache.page_cache import MAX_CACHED_PROMPTS, PageCache
from coattn.cache.snapshot import Snapshot
from coattn.kernels.append import read_rows
from coattn.step.runtime import Runtime

CUT = 192
"""Where a turn goes on: a block begins here."""


def opened(method: str, pages: int = 16) -> tuple[Runtime, Any]:
    runtime = open_runtime(method, Ledger(needed(method) + pages * PAGE))
    return runtime, runtime.groups[0].cache


def turn(runtime: Runtime, slot: int, start: int, end: int, seed: int = 0) -> None:
    """Tokens of a text in a step of their own, attended as they should be."""
    assert_dense(attend(runtime, slot, start, end, seed=seed), start, seed)


@pytest.mark.parametrize("method", ["offload", "cpu", "scout", "hgca"])
def test_a_turn_attends_to_what_is_remembered(method: str) -> None:
    runtime, cache = opened(method)
    read(runtime, 64)
    spoil(cache)
    turn(runtime, 0, TOKENS, TOKENS + 5)
    turn(runtime, 0, TOKENS + 5, TOKENS + 8)
    runtime.release()
    assert runtime.ledger.held == {"gpu": 0, "host": 0}


def spoil(cache: Any) -> None:
    """Whatever is read out of DRAM of the text's first half is wrong from now on."""
    for layer in range(LAYERS):
        cache.host.memory[layer][cache.host.table.owned[0][: TOKENS // BLOCK // 2]] = 1e4


def test_a_sequence_that_begins_with_the_same_blocks_attends_to_it_too() -> None:
    runtime, cache = opened("cpu")
    read(runtime, 64)
    table = cache.host.table
    table.hold(table.owned[0][: CUT // BLOCK])
    table.share(1, table.owned[0][: CUT // BLOCK])
    spoil(cache)
    turn(runtime, 1, CUT, CUT + 7)
    assert len(cache.prompts.pages) == 2, "both texts go on from the same pages"
    turn(runtime, 0, TOKENS, TOKENS + 5)


def test_blocks_that_were_given_to_others_are_not_found() -> None:
    runtime, cache = opened("cpu")
    read(runtime, 64)
    runtime.truncate(0, TOKENS, 0)
    attend(runtime, 0, 0, CUT, seed=1)  # another text in one step, so that no page is made of it
    turn(runtime, 0, CUT, CUT + 7, seed=1)
    assert cache.host.table.generations(0, 1) == [(0, 2)]


def test_it_gives_way_to_prompts_that_are_read() -> None:
    runtime, cache = opened("cpu", pages=9)
    before = runtime.ledger.held["gpu"]
    read(runtime, 64)
    assert runtime.ledger.held["gpu"] == before + 4 * PAGE
    read(runtime, 64, slot=1)
    assert runtime.ledger.peak["gpu"] <= before + 9 * PAGE
    assert len(cache.prompts.pages) == 1
    turn(runtime, 0, TOKENS, TOKENS + 5)  # of whom nothing is remembered: out of DRAM
    runtime.release()
    assert runtime.ledger.held == {"gpu": 0, "host": 0}


def test_the_longest_beginning_is_found_and_the_oldest_forgotten() -> None:
    past = PageCache()
    for text in range(MAX_CACHED_PROMPTS):
        past.add([(text, 1), (100 + text, 1)], [])
    assert past.find([(3, 1), (103, 1), (5, 1)])[0] == 2
    assert past.find([(3, 1), (103, 2)])[0] == 1
    assert past.find([(3, 2)])[0] == 0
    gone = past.add([(99, 1)], [])
    assert [known.blocks[0] for known in gone] == [(0, 1)]
    gone = past.add([(3, 1), (103, 1), (5, 1)], [])
    assert [known.blocks for known in gone] == [[(3, 1), (103, 1)]], "what it goes on from is in it"


@pytest.mark.parametrize("method", ["offload", "cpu", "scout", "hgca"])
def test_an_engine_answers_the_same_with_and_without(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, found = prompt(150, seed=3), []
    recall = prompt_buffer.PromptKVBuffer._find_cached

    def noted(self: Any, *given: Any) -> Any:
        found.append(recall(self, *given))
        return found[-1]

    monkeypatch.setattr(prompt_buffer.PromptKVBuffer, "_find_cached", noted)
    answers = []
    for room in (None, "64MiB"):
        given = {"max_batch": 2, "max_length": 256, "chunk": 32, "gpu_kv": room, **options(method)}
        with coattn.LLM((small(), tokenizer()), method, **given) as llm:
            session = llm.session()
            made = [session.ask(text, greedy(6, ignore_eos=True))]
            made += [llm.generate(text + prompt(n, seed=n), greedy(6, ignore_eos=True))[0] for n in (3, 40)]
            made += [session.ask(prompt(9, seed=n), greedy(6, ignore_eos=True)) for n in (1, 2)]
            answers.append([each.token_ids for each in made])
    assert answers[0] == answers[1]
    assert sum(tokens >= 80 for tokens, _ in found) >= 4


@pytest.mark.parametrize("method", ["cpu", "scout"])
def test_a_window_is_filled_from_what_is_remembered_and_from_dram(method: str) -> None:
    """With blocks at the beginning that stay: the window is not one stretch."""
    for pages in (0, 16):
        runtime, cache = opened(method, pages)
        read(runtime, 64)
        table = cache.host.table
        kept = Snapshot(list(table.owned[0][: CUT // BLOCK]))
        table.hold(kept.ids)
        assert cache.gpu.put(1, CUT, kept, {}) > 0
        positions = torch.cat([torch.arange(cache.gpu.sinks * BLOCK), torch.arange(cache.gpu.first(CUT) * BLOCK, CUT)])
        for layer, (_, k, v) in enumerate(numbers(0)):
            found = read_rows(cache.gpu.memory[layer], *cache.gpu.places(1, positions))
            torch.testing.assert_close(found[0], k[positions])
            torch.testing.assert_close(found[1], v[positions])
