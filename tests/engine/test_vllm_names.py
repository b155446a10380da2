"""What someone who knows vLLM types first: its names, `n`, `chat`, its prompts and its outputs."""

import inspect
import traceback
from typing import Any

import pytest
from tests.engine.small import greedy, llm, prompt, small, tokenizer

from coattn import LLM, SamplingParams
from coattn.aliases import ALIASES
from coattn.errors import ConfigError, InputError, UnknownNameError

HELLO = [{"role": "user", "content": "hello"}]


def opened(**options: Any) -> LLM:
    return LLM((small(), tokenizer()), "full", gpu_kv="1MiB", **options)


def test_every_alias_stands_for_an_argument() -> None:
    takers = {"LLM": LLM, "SamplingParams": SamplingParams, "LLM.generate": LLM.generate, "LLM.chat": LLM.chat}
    assert ALIASES.keys() == takers.keys()
    for name, aliases in ALIASES.items():
        assert set(aliases.values()) <= inspect.signature(takers[name]).parameters.keys(), name


def test_vllm_s_names_mean_ours() -> None:
    with opened(max_model_len=100, max_num_seqs=3, enable_prefix_caching=False) as engine:
        assert (engine.max_length, engine.runner.slots) == (100, 3)
        assert engine.report()["not_shared"] == "it was switched off"
        (output,) = engine.generate("hello", sampling_params=SamplingParams(max_tokens=5, min_tokens=5), use_tqdm=False)
        assert output.new_tokens == 5
        assert output.outputs[0].text == output.text


def test_a_traceback_ends_with_the_hint() -> None:
    with pytest.raises(UnknownNameError) as refused:
        SamplingParams(temprature=1)
    assert traceback.format_exception(refused.value)[-1] == "hint: Did you mean temperature?\n"


@pytest.mark.parametrize("given", [{"max_tokens": 5, "max_new_tokens": 5}, {"min_tokens": 0, "min_new_tokens": 0}])
def test_both_spellings_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="which mean the same"):
        SamplingParams(**given)
    with pytest.raises(ConfigError, match="max_tokens and max_new_tokens"):
        SamplingParams(8, max_tokens=5)
    with pytest.raises(ConfigError, match="max_num_seqs and max_batch"):
        opened(max_num_seqs=16, max_batch=16)


@pytest.mark.parametrize(
    ("method", "wrong", "said", "hint"),
    [
        ("cpu", "max_modle_len", "LLM with method 'cpu'", "Did you mean max_model_len?"),
        ("cpu", "blok", "LLM with method 'cpu'", "Did you mean block?"),
        (None, "max_lenght", "LLM with methods 'full' and 'auto'", "Did you mean max_length?"),
        ("cpu", "gpu_memory_utilization", "LLM with method 'cpu'", "gpu_kv='20GiB'"),
    ],
)
def test_an_unknown_name_blames_the_engine_and_says_the_nearest(
    method: str | None, wrong: str, said: str, hint: str
) -> None:
    with pytest.raises(UnknownNameError, match=f"{said} has no parameter {wrong!r}") as caught:
        LLM("/nowhere", method, **{wrong: 1})
    assert hint in caught.value.hint
    with opened() as engine, pytest.raises(UnknownNameError, match=r"LLM\.generate has no parameter 'param'") as caught:
        engine.generate("hello", param=greedy(1))  # type: ignore[call-arg]
    assert caught.value.hint == "Did you mean params?"


@pytest.mark.parametrize(("method", "reuse"), [("full", True), ("cpu", True), ("cpu", False)])
def test_n_answers_share_what_is_stored_of_the_prompt(method: str, reuse: bool) -> None:
    sampling = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=7, ignore_eos=True)
    with llm(method, reuse=reuse) as engine:
        first, second = engine.generate([prompt(80), prompt(9)], [sampling, greedy(2)])
        assert [each.index for each in first.outputs] == [0, 1, 2]
        assert len({each.token_ids for each in first.outputs}) == 3
        assert (len(second.outputs), second.new_tokens) == (1, 2)
        read = engine.report()["prefill_tokens"]
        for each, one in zip(first.outputs, sampling.choices(), strict=True):
            assert engine.generate(prompt(80), one)[0].token_ids == each.token_ids
        assert [each.cached_tokens >= 72 for each in first.outputs] == [False, reuse, reuse]
        assert (read < 2 * 80) is reuse
        with pytest.raises(ConfigError, match="n is 3, but submit gives one answer"):
            engine.submit(prompt(80), sampling)


def test_chat_and_prompts_as_vllm_takes_them() -> None:
    ids = prompt(12)
    with llm() as engine:
        talk = engine.generate(HELLO, greedy(6))[0]
        assert [each.text for each in engine.chat([HELLO, HELLO], greedy(6))] == [talk.text] * 2
        assert engine.chat(HELLO, greedy(6))[0].text == talk.text
        for wrong in ("hello", [1, 2], ["a"], ""):
            with pytest.raises(InputError, match=r"LLM\.chat takes messages"):
                engine.chat(wrong)  # type: ignore[arg-type]
        want, text = engine.generate([ids, "hello"], greedy(6))
        for given in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
            assert engine.generate(given, greedy(6))[0].token_ids == want.token_ids
        for one in ("hello", ["hello"], {"prompt": "hello"}):
            assert engine.generate(one, greedy(6))[0].text == text.text
