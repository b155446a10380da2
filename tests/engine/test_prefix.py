"""Prompts that begin alike: the same answers, only the shared full blocks counted, and memory that stays in order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.rows import options, shares
from tests.engine.small import UNIT, greedy, in_order, prompt, small, tokenizer

import coattn
from coattn.cache.host import HostTier
from coattn.engine.store.keys import common_blocks, digest, extend_keys
from coattn.hf.architectures import describe_layers
from coattn.kernels.quantise.layer_file import TextOrigin
from coattn.kernels.quantise.skew import SKEWS
from coattn.method.table import METHODS
from coattn.tools.calibrate.skews import read_skews

NEW = 5


def engine(method: str, **more: Any) -> coattn.LLM:
    given = {"max_batch": 4, "max_length": 256, "chunk": 32, **options(method), **more}
    return coattn.LLM((small(), tokenizer()), method, **given)


def questions() -> list[list[int]]:
    """About one text of 90 tokens: they leave it around block borders, early and late."""
    text = prompt(90, seed=1)
    ends = ((90, 0), (90, 3), (72, 2), (71, 70), (73, 1), (64, 66),
            (8, 70), (7, 70), (90, 6), (80, 0), (63, 9), (65, 2))  # fmt: skip
    return [text[:end] + prompt(more, seed=7 + more) for end, more in ends]


def expected(llm: coattn.LLM, known: list[list[int]], ids: list[int]) -> int:
    """Full blocks in common with anything stored, but for the tokens that are always computed."""
    if llm.report()["not_shared"] is not None:
        return 0
    block, most = llm.store.sharing.block, len(ids) - llm.store.sharing.tail
    common = [
        next((i for i, (a, b) in enumerate(zip(ids, seen, strict=False)) if a != b), min(len(ids), len(seen)))
        for seen in known
    ]
    return max(0, max((min(each, most) for each in common), default=0)) // block * block


@pytest.mark.parametrize("method", METHODS)
def test_hits_and_misses_have_the_same_answers(method: str) -> None:
    same_answers(method, shares(method))


def test_with_a_skew_of_its_own_infinigen_shares(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "skew"
    found = read_skews(model, torch.arange(60) % 250)
    marks = tuple(shape.mark for shape in describe_layers(model))
    SKEWS.save(path, dict(enumerate(each for each, _ in found)), TextOrigin("small", "t", "0", 60, marks))
    same_answers("infinigen", True, skew=str(path))


@pytest.mark.parametrize("method", ["offload", "cpu", "scout", "hgca", "auto"])
def test_so_they_do_with_spare_gpu_memory(method: str) -> None:
    same_answers(method, True, gpu_kv="64MiB")


def same_answers(method: str, shared: bool, **more: Any) -> None:
    """Asks questions twice, where nothing is shared and where what is stored is."""
    asked, params = questions(), greedy(NEW, ignore_eos=True)
    with engine(method, reuse=False, **more) as llm:
        want = [llm.generate(ids, params)[0].token_ids for ids in asked]
        assert llm.report()["not_shared"] == "it was switched off"
    with engine(method, **more) as llm:
        known: list[list[int]] = []
        for ids, answer in zip(asked, want, strict=True):
            found = llm.generate(ids, params)[0]
            assert found.cached_tokens == expected(llm, known, ids)
            assert found.token_ids == answer
            # what an exact method has decoded can be gone on from, but for the last token, which is not stored
            known.append(ids + list(answer[:-1]) if llm.composed.exact else ids)
        assert (llm.report()["cached_tokens"] > 0) == shared
        assert (llm.report()["not_shared"] is None) == shared
        in_order(llm)


def test_under_auto_a_hit_reads_what_gpu_memory_has(monkeypatch: pytest.MonkeyPatch) -> None:
    text, params, read, whole = prompt(200, seed=1), greedy(NEW, ignore_eos=True), [], HostTier.read
    with engine("auto", gpu_kv="64MiB") as llm:
        llm.generate(text + prompt(40, seed=2), params)
        monkeypatch.setattr(HostTier, "read", lambda *given: read.append(given) or whole(*given))
        assert llm.generate(text + prompt(40, seed=3), params)[0].cached_tokens == 200
    assert not read


@pytest.mark.parametrize("chunk", [32, 512])
@pytest.mark.parametrize("method", ["full", "cpu", "scout", "hgca"])
def test_requests_at_the_same_time_share(method: str, chunk: int) -> None:
    """Also where the first of them is read to its end in one step."""
    ids, params = prompt(120, seed=2), greedy(NEW, ignore_eos=True)
    with engine(method) as llm:
        (want,) = llm.generate(ids, params)
    with engine(method, chunk=chunk) as llm:
        found = llm.generate([ids] * 3 + [ids[:50] + prompt(90, seed=3)], params)
        assert all(each.token_ids == want.token_ids for each in found[:3])
        first, *others = (each.cached_tokens for each in found)
        whole = (120 - llm.store.sharing.tail) // 8 * 8
        assert first == 0
        assert others == [whole, whole, 48]
        assert llm.report()["prefill_tokens"] <= 120 + 2 * (120 - whole) + 140 - 48
        in_order(llm)


def test_a_beginning_that_is_used_stays_and_others_go() -> None:
    hot, params = prompt(64, seed=1), greedy(2, ignore_eos=True)
    with engine("full", gpu_kv=24 * 2 * UNIT, max_length=128) as llm:
        llm.generate(hot, params)
        for i in range(8):
            assert llm.generate(hot + prompt(5, seed=i), params)[0].cached_tokens == 64
            llm.generate(prompt(70, seed=100 + i), params)
        assert llm.report()["prefix_evicted"] > 20
        in_order(llm)


@pytest.mark.parametrize("method", ["full", "quest", "cpu"])
def test_preempted_requests_come_back_through_it(method: str) -> None:
    budget = {"host_kv": 54 * UNIT, "gpu_kv": 16 * UNIT} if method == "cpu" else {"gpu_kv": 60 * UNIT}
    asked = [prompt(40, seed=i) for i in range(4)]
    with engine(method, reuse=False) as llm:
        want = [each.token_ids for each in llm.generate(asked, greedy(90, ignore_eos=True))]
    with engine(method, max_length=160, **budget) as llm:
        found = llm.generate(asked, greedy(90, ignore_eos=True))
        assert [each.token_ids for each in found] == want
        again = sum(each.preemptions for each in found)
        assert again
        read = llm.report()["prefill_tokens"]
        if method == "cpu":  # there is no tier below
            assert read < 4 * 40 + again * 100
        else:
            assert read == 4 * 40, "moved to DRAM and back, nothing is read again"
            assert llm.report()["sequences_moved"]
        in_order(llm)
        assert llm.ledger.held["host"] == (0 if method != "cpu" else llm.store.tables[0].memory.bytes)


def test_salts_keep_tenants_apart() -> None:
    ids, params = prompt(40, seed=1), greedy(2)
    with engine("full") as llm:
        for salt, cached in ((b"a", 0), (b"b", 0), (b"a", 32), (b"", 0), (b"b", 32)):
            assert llm.submit(ids, params, salt=salt).result().cached_tokens == cached


def test_no_two_lists_of_fields_have_one_digest() -> None:
    found: list[tuple[Any, ...]] = [("a", "b"), ("ab",), ("ab", ""), (b"ab",), ("a", b"b"), ("",), (), (b"",), ([],)]
    found += [([97, 98],), ([97], [98])]
    assert len({digest(*fields) for fields in found}) == len(found)


def test_chains_have_in_common_what_their_texts_do() -> None:
    one, other = list(range(40)), [*range(21), *range(19)]
    keys: list[list[bytes]] = [[], []]
    for made, tokens in zip(keys, (one, other), strict=True):
        extend_keys(made, b"root", tokens, 4)
    assert common_blocks(*keys) == 5
    assert common_blocks(keys[0], keys[0][:3]) == 3
    assert common_blocks(keys[0], []) == 0


def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, params = prompt(40, seed=1), greedy(4)
    with engine("cpu") as llm:
        want = llm.generate(ids, params)[0].token_ids
        session = llm.session()
        session.ask(ids, params)
        extend = llm.runner.extend
        monkeypatch.setattr(llm.runner, "extend", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt(30, seed=2), params)
        monkeypatch.setattr(llm.runner, "extend", extend)
        assert llm.report()["prefix_blocks"] == llm.report()["sessions_stored"] == 0
        found = llm.generate(ids, params)[0]
        assert (found.token_ids, found.cached_tokens) == (want, 0)
        assert session.ask(prompt(5), params).finish_reason == "length"
        in_order(llm)


def test_rows_that_cannot_share_say_why() -> None:
    for method, more, word in (
        ("streaming", {}, "gone"),
        ("hcattention", {}, "codes"),
        ("pqcache", {}, "in its own way"),
        ("h2o", {}, "not in its blocks"),
        ("tova", {}, "not in its blocks"),
        ("infinigen", {}, "not in its blocks"),
        ("cpu", {"host_dtype": "int8"}, "rounded"),
        ("full", {"gpu_dtype": "int4"}, "rounded"),
    ):
        with engine(method, **more) as llm:
            assert word in llm.report()["not_shared"]


@pytest.mark.parametrize("session_first", [True, False])
def test_sessions_and_prefixes_are_given_up_in_one_order(session_first: bool) -> None:
    """Whichever of the two was used longer ago makes room for a third text."""
    given: dict[str, Any] = {"max_batch": 2, "max_length": 112, "chunk": 24, **options("full"), "gpu_kv": 16 * UNIT}
    text, params = prompt(40, seed=2), greedy(4, ignore_eos=True)
    with coattn.LLM((small(1), tokenizer()), "full", **given) as llm, llm.session() as session:
        asks = [lambda: session.ask(prompt(40, seed=1), params), lambda: llm.generate(text, params)]
        for ask in asks if session_first else reversed(asks):
            ask()
        llm.generate(prompt(50, seed=3), params)
        assert llm.report()["sequences_moved"] == session_first
