"""A rehearsal leaves nothing behind, and a first request after it compiles nothing."""

from typing import Any

import pytest
import torch
from tests.engine.small import DEVICE, greedy, in_order, llm, prompt
from tests.hf.families import tiny
from transformers import LlamaConfig, LlamaForCausalLM

import coattn
from coattn.engine.runner import rehearse as rehearsing
from coattn.engine.runner.rehearse import rehearse
from coattn.errors import BudgetError, EngineError
from coattn.kernels.cuda import nvrtc

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("auto", {"audit": False, "window_blocks": 2}),
    ("scout", {}),
    ("streaming", {}),
    ("snapkv", {"block": 1}),
]


@pytest.mark.parametrize(("method", "params"), METHODS)
def test_answers_and_memory_are_as_if_there_had_been_none(
    method: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(150), prompt(90, seed=1)]
    with llm(method, **params) as engine:
        want = engine.generate(prompts, greedy(12, ignore_eos=True))
    with llm(method, **params) as engine:
        steps: list[Any] = []
        extend, decode = engine.runner.extend, engine.runner.decode
        with monkeypatch.context() as noted:
            noted.setattr(engine.runner, "extend", lambda *a: (steps.append(("extend", len(a[1]))), extend(*a))[1])
            noted.setattr(engine.runner, "decode", lambda *a: (steps.append(("decode", 1)), decode(*a))[1])
            noted.setattr(rehearsing, "TURNS", (70, 80))
            rehearse(engine.runner, engine.max_length, 150)
        assert steps == [("extend", 70), ("decode", 1), ("extend", 150), ("decode", 1)]
        in_order(engine)
        assert not engine.engine.counts
        got = engine.generate(prompts, greedy(12, ignore_eos=True))
        assert [x.token_ids for x in got] == [x.token_ids for x in want]


@pytest.mark.parametrize("method", ["full", "auto"])
@pytest.mark.parametrize("family", ["gemma3", "mistral_sliding", "gpt_oss"])
def test_windows_are_as_if_there_had_been_none(family: str, method: str) -> None:
    given = {"max_batch": 2, "max_length": 160, "chunk": 24, "block": 8}
    given |= {"quality": 1.0} if method == "auto" else {}
    found = []
    for rehearsed in (False, True):
        with coattn.LLM((tiny(family, DEVICE), None), method, **given) as engine:
            if rehearsed:
                rehearse(engine.runner, engine.max_length, 2048)
                in_order(engine)
            found.append(engine.generate([x % 100 for x in prompt(90)], greedy(9, ignore_eos=True))[0].token_ids)
    assert found[0] == found[1]


def test_what_would_learn_from_it_is_left_alone() -> None:
    with llm("hcattention", groups=4, centroids=16) as engine:
        [group] = engine.runner.runtime.groups
        assert group.index.learns()
        rehearse(engine.runner, engine.max_length, 2048)
        assert group.index.learns()
        engine.generate(prompt(200), greedy(3, ignore_eos=True))
        assert not group.index.learns()


@pytest.mark.parametrize("error", [BudgetError("full", "wait"), torch.OutOfMemoryError("full")], ids=["cache", "GPU"])
def test_without_memory_for_it_there_is_none(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with llm("full") as engine:
        monkeypatch.setattr(engine.runner, "decode", lambda *_: (_ for _ in ()).throw(error))
        rehearse(engine.runner, engine.max_length, 2048)
        in_order(engine)


def test_what_fails_in_it_is_said_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm("full") as engine:
        monkeypatch.setattr(engine.runner, "decode", lambda *_: (_ for _ in ()).throw(EngineError("broken", "mend")))
        with pytest.raises(EngineError, match="broken"):
            rehearse(engine.runner, engine.max_length, 2048)
        in_order(engine)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("method", ["full", "auto", "scout"])
def test_a_first_request_compiles_nothing(method: str) -> None:
    import triton
    from tests.engine.small import tokenizer

    config = LlamaConfig(
        vocab_size=260, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, eos_token_id=256, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    made: list[str] = []
    with coattn.LLM((model, tokenizer()), method, max_batch=2, max_length=8192) as engine:
        engine.warm_up()
        before = dict(nvrtc.counts)
        knobs = triton.knobs.runtime
        knobs.jit_post_compile_hook = lambda **given: made.append(given["repr"]) and None
        try:
            for seed in (0, 1):  # the second as a hit
                engine.generate([prompt(6000, seed=0) + prompt(9, seed)], greedy(24, ignore_eos=True))
        finally:
            knobs.jit_post_compile_hook = None
        assert made == []
        assert dict(nvrtc.counts) == before
