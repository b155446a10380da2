"""What a request leaves out is the same in Python, on the command line, over HTTP and on the page."""

import re
from importlib.resources import files

import pytest
from tests.cli.run import coattn as command
from tests.engine.small import greedy, prompt, small, tokenizer

import coattn
from coattn.cli.options import sampling_options
from coattn.engine.sampling.params import DEFAULT_NEW_TOKENS, SamplingParams
from coattn.hf.forward import sampling_defaults

pytest.importorskip("pydantic")
from coattn.serve.ask import params
from coattn.serve.schema.chat import ChatRequest


def engine(max_length: int = 512, **generation: object) -> coattn.LLM:
    model = small()
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    return coattn.LLM((model, tokenizer()), max_batch=2, max_length=max_length, block=8)


def test_every_way_in_leaves_the_same_out() -> None:
    @sampling_options
    def nothing() -> None: ...

    options = {each.name: each.default for each in nothing.__click_params__}  # type: ignore[attr-defined]
    assert SamplingParams(**options) == SamplingParams()
    for name in ("generate", "chat"):
        assert f"default: {DEFAULT_NEW_TOKENS}" in command(name, "--help").stdout
    with engine() as llm:
        asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]})
        assert params(asked, llm, 1, None, None) == SamplingParams()
    page = (files("coattn.serve") / "page/index.html").read_text(encoding="utf-8")
    for name in ("temperature", "most"):
        assert "value=" not in re.findall(f'<input id="{name}"[^>]*>', page)[0]


def test_answers_are_as_long_as_the_default_or_what_fits() -> None:
    with engine() as llm:
        one, two = llm.generate([prompt(500), prompt(20)], SamplingParams(ignore_eos=True))
        assert (len(one.token_ids), len(two.token_ids)) == (12, 492)
    with engine(max_length=512) as llm:
        assert llm.engine.prepare(prompt(20), SamplingParams()).limit == 512
        llm.engine.longest = 1 << 20
        llm.engine.scheduler.admission.longest = 1 << 20
        llm.engine.scheduler.admission.most = lambda: 1 << 20  # type: ignore[method-assign]
        llm.engine.scheduler.admission.check = lambda _: None  # type: ignore[method-assign]
        assert llm.engine.prepare(prompt(20), SamplingParams()).limit == 20 + DEFAULT_NEW_TOKENS
    with coattn.LLM((small(), tokenizer()), max_batch=1, max_length=512, block=8, gpu_kv="40KiB") as llm:
        few = llm.generate(prompt(20), SamplingParams(ignore_eos=True))[0]
        assert (few.finish_reason, few.error) == ("length", None), "no more than fits is promised"
        assert len(few.token_ids) < 492


def test_a_model_that_says_so_samples() -> None:
    with engine() as llm:
        assert llm.engine.prepare(prompt(9), SamplingParams()).params.greedy
        plain = llm.generate(prompt(9), greedy(24, temperature=0))[0].token_ids
    with engine(do_sample=True, temperature=1.3, top_p=0.9, top_k=40) as llm:
        found = llm.engine.prepare(prompt(9), SamplingParams()).params
        assert (found.temperature, found.top_p, found.top_k) == (1.3, 0.9, 40)
        found = llm.engine.prepare(prompt(9), SamplingParams(temperature=0.5, top_p=1.0)).params
        assert (found.temperature, found.top_p, found.top_k) == (0.5, 1.0, 40)
        assert llm.generate(prompt(9), greedy(24, temperature=0))[0].token_ids == plain
        assert llm.generate(prompt(9), SamplingParams(max_new_tokens=24, seed=1))[0].token_ids != plain
    with engine(do_sample=False, temperature=1.3) as llm:
        assert llm.engine.sampling == {}


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_sampling_without_a_temperature_is_at_one(temperature: float | None) -> None:
    model = small()
    model.generation_config.do_sample, model.generation_config.temperature = True, temperature
    assert sampling_defaults(model)["temperature"] == (1.0 if temperature is None else temperature)
