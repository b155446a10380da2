"""What cannot be done is refused with one sentence and a hint, before anything has run."""

from typing import Any

import pytest
import torch
from tests.engine.small import greedy, llm, prompt, small, tokenizer

import coattn
from coattn import SamplingParams
from coattn.errors import BudgetError, CoattnError, ConfigError, InputError, MethodError, UnsupportedError

OUT_OF_RANGE: dict[str, list[Any]] = {
    "max_new_tokens": [0, 2.5, True, 10**30],
    "min_new_tokens": [-1],
    "temperature": [-0.1, float("nan"), float("inf"), "hot"],
    "top_p": [0, 1.1],
    "top_k": [-1, 1.0],
    "min_p": [-0.1, 1.5, float("nan")],
    "repetition_penalty": [0, float("inf")],
    "presence_penalty": [2.1],
    "frequency_penalty": [float("nan")],
    "stop": [("",), 5, ("a", None)],
    "stop_token_ids": [(-1,), "a", 1.5],
    "seed": [-1, "x"],
    "logprobs": [-1, True, 1 << 40],
    "ignore_eos": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, some in OUT_OF_RANGE.items() for value in some])
def test_parameters_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.hint


def test_parameters_may_be_written_simply() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert SamplingParams(stop_token_ids=3).stop_token_ids == (3,)
    with pytest.raises(ConfigError, match="SamplingParams has no parameter 'tempreature'") as caught:
        SamplingParams(tempreature=1.0)  # type: ignore[call-arg]
    assert caught.value.hint == "Did you mean temperature?"


@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        ("", InputError, "empty"),
        ([], InputError, "no prompts"),
        ([[]], InputError, "empty"),
        (["fine", ""], InputError, "empty"),
        (None, InputError, "NoneType"),
        (5, InputError, "int"),
        (b"bytes", InputError, "bytes"),
        ({"role": "user", "content": "x"}, InputError, "dict"),
        ([1, "a"], InputError, "int"),
        ([[1, "a"]], InputError, "mixes"),
        ([1.5, 2.5], InputError, "float"),
        ([1, -1], InputError, "Token id -1"),
        ([1, 260], InputError, "Token id 260 is not in the model's vocabulary of 260"),
        ([True, False], InputError, "bool"),
        ([{"content": "x"}], InputError, "role"),
        ([{"role": "user"}], InputError, "content"),
        (torch.zeros(2, 2, dtype=torch.long), InputError, "tensor"),
        (torch.zeros(3), InputError, "float32"),
        ([0] * 256, InputError, "256 tokens"),
        ([0] * 1000, InputError, "1,000 tokens, but a sequence has at most 256"),
    ],
)
def test_prompts(bad: Any, error: type[CoattnError], said: str) -> None:
    with llm() as engine:
        with pytest.raises(error, match=said) as caught:
            engine.generate(bad)
        assert caught.value.hint
        assert engine.report()["prefill_steps"] == 0
        assert len(engine.generate("fine", greedy(2, ignore_eos=True))[0].token_ids) == 2


def test_every_form_of_prompt() -> None:
    ids = list(b"user: hi\n")
    with llm() as engine:
        forms: list[Any] = ["user: hi\n", ids, torch.tensor(ids), [{"role": "user", "content": "hi"}]]
        want = engine.generate(ids, greedy(5))[0].token_ids
        for form in forms:
            assert [each.token_ids for each in engine.generate(form, greedy(5))] == [want], form
            assert engine.submit(form, greedy(5)).result().token_ids == want
        assert [each.token_ids for each in engine.generate(forms, greedy(5))] == [want] * 4
        with pytest.raises(InputError, match="2 prompts, but submit takes one"):
            engine.submit(["a", "b"])


def test_sets_of_parameters() -> None:
    with llm() as engine:
        with pytest.raises(ConfigError, match="2 prompts, but 3 sets"):
            engine.generate(["a", "b"], [SamplingParams()] * 3)
        with pytest.raises(ConfigError, match="a dict"):
            engine.generate("a", {"temperature": 1.0})  # type: ignore[arg-type]
        got = engine.generate(["a", "b"], [greedy(2, ignore_eos=True), greedy(4, ignore_eos=True)])
        assert [each.new_tokens for each in got] == [2, 4]


def test_without_a_tokenizer_text_is_refused() -> None:
    with coattn.LLM((small(), None), max_batch=2, max_length=64) as engine:
        for bad in ("text", [{"role": "user", "content": "x"}]):
            with pytest.raises(InputError, match="no tokenizer"):
                engine.generate(bad)
        with pytest.raises(ConfigError, match="no tokenizer"):
            engine.generate([1, 2], SamplingParams(stop="x"))
        assert engine.generate([1, 2], greedy(3))[0].text == ""


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"method": "nonsense"}, MethodError, "nonsense"),
        ({"blocks": 8}, ConfigError, "no parameter 'blocks'"),
        ({"max_batch": 0}, ConfigError, "max_batch"),
        ({"chunk": 0}, ConfigError, "chunk"),
        ({"max_length": 1}, ConfigError, "max_length"),
        ({"max_length": 513}, ConfigError, "513, but .* has 512 positions"),
        ({"gpu_kv": "a lot"}, ConfigError, "gpu_kv"),
        ({"gpu_kv": -1}, ConfigError, "gpu_kv"),
        ({"gpu_kv": 100}, BudgetError, "gpu_kv is 100 B"),
        ({"method": "cpu", "gpu_kv": 100}, BudgetError, "gpu_kv is 100 B"),
        ({"method": "hcattention", "gpu_kv": 1000}, BudgetError, "gpu_kv is 1000 B"),
        ({"device": "cpu"}, ConfigError, "device was given with a model that is loaded already"),
        ({"dtype": "float32"}, ConfigError, "dtype was given with a model that is loaded already"),
    ],
)
def test_engines_that_cannot_be(options: dict[str, Any], error: type[CoattnError], said: str) -> None:
    model = small()
    before = model.config._attn_implementation
    with pytest.raises(error, match=said) as caught:
        coattn.LLM((model, tokenizer()), **{"max_batch": 2, **options})
    assert caught.value.hint
    assert model.config._attn_implementation == before
    coattn.LLM((model, tokenizer()), max_batch=1, max_length=32).close()


@pytest.mark.parametrize("model", [5, None, ("a", "b"), (1, 2, 3), small()], ids=str)
def test_models_that_are_none(model: Any) -> None:
    with pytest.raises(ConfigError, match="The model is a"):
        coattn.LLM(model)


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="training mode"):
        coattn.LLM((small().train(), None))


def test_a_budget_too_small_for_one_request_names_the_need() -> None:
    with llm("full", max_batch=1) as probe:
        need = probe.engine.runner.runtime.bytes_for(64)["gpu"]
    with llm("full", gpu_kv=3 * need) as engine:
        assert engine.generate(prompt(30), greedy(30))[0].error is None
        with pytest.raises(BudgetError, match="200 tokens with up to 56 new ones needs") as caught:
            engine.generate([prompt(10), prompt(200)], greedy(80))
        assert "gpu_kv" in caught.value.hint
        assert engine.report()["waiting"] == 0


@pytest.mark.parametrize("name", ["disk", "session_dir"])
def test_a_folder_is_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 5, but must be the path of a folder") as caught:
        llm("full", **{name: 5})
    assert name in caught.value.hint
