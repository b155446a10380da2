"""A greedy answer that is the same bits alone and in random company."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small import END, VOCAB, greedy, in_order, prompt, tokenizer
from tests.hf.families import tiny
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import coattn
from coattn.engine.request import RequestOutput
from coattn.errors import CoattnError, ConfigError, UnsupportedError
from coattn.step.runtime import Runtime

METHODS = ("full", "cpu", "offload")
DTYPES = (torch.float32, torch.bfloat16)
SHARED = prompt(150, seed=77)
"""What every third prompt begins with."""


def model(dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Wide enough that products of matrices take other kernels for other numbers of rows."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=400,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=END,
    )
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
    return made.to(device, dtype).eval()


def engine(method: str, dtype: torch.dtype, device: str = "cpu", **more: Any) -> coattn.LLM:
    given: dict[str, Any] = {"max_batch": 6, "max_length": 512, "chunk": 64, "block": 16, **more}
    return coattn.LLM((model(dtype, device), tokenizer()), method, **{"deterministic": True, **given})


def prompts(count: int) -> list[list[int]]:
    """Of many lengths; some begin alike, and some end where a chunk does, or a token before or after."""
    found = [prompt(12 + (37 * i) % 190, seed=i) for i in range(count)]
    found[::3] = [SHARED + each[: 1 + 9 * i % 60] for i, each in enumerate(found[::3])]
    for i, length in enumerate((63, 64, 65, 66, 128, 129, 130)):
        found[3 * i + 1] = SHARED[:length] if length < 100 else prompt(length, seed=i)
    return found


def asked(count: int = 10) -> coattn.SamplingParams:
    return greedy(count, ignore_eos=True, logprobs=2)


def bits(output: RequestOutput) -> Any:
    """Tokens and log-probabilities, which differ where a single bit of the logits does."""
    assert output.error is None
    assert output.logprobs is not None
    return output.token_ids, [repr(each) for each in output.logprobs]


def alone(method: str, dtype: torch.dtype, texts: list[list[int]], **more: Any) -> list[Any]:
    with engine(method, dtype, reuse=False, **more) as llm:
        return [bits(llm.generate(text, asked())[0]) for text in texts]


def in_company(llm: coattn.LLM, texts: list[list[int]]) -> list[Any]:
    """The bits of each answer, where requests come in any order and others come and go."""
    company = random.Random(5)
    line = list(enumerate(texts))
    company.shuffle(line)
    handles = {}
    while line or any(not each.done for each in handles.values()):
        if line and company.random() < 0.3:
            number, text = line.pop()
            handles[number] = llm.submit(text, asked(), streams=False)
            if company.random() < 0.3:  # somebody who leaves again
                gone = llm.submit(prompt(100, seed=company.randrange(99)), asked(30), streams=False)
                for _ in range(company.randrange(6)):
                    llm.step()
                gone.cancel()
        llm.step()
    report = llm.report()
    assert report["cached_tokens"] > 500, "what others have read was used"
    assert report["preemptions"] == 0
    assert report["deterministic"]
    in_order(llm)
    return [bits(handles[i].result()) for i in range(len(texts))]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_fifty_requests_in_random_company_are_as_alone(method: str, dtype: torch.dtype) -> None:
    texts = prompts(50)
    want = alone(method, dtype, texts)
    with engine(method, dtype) as llm:
        found = in_company(llm, texts)
    assert [i for i, each in enumerate(found) if each != want[i]] == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "dtype", "batch", "captured", "count"),
    [
        ("full", torch.bfloat16, 12, True, 200),
        ("cpu", torch.bfloat16, 12, True, 60),
        ("offload", torch.bfloat16, 12, True, 60),
        ("full", torch.bfloat16, 40, True, 60),
        ("full", torch.float32, 12, True, 60),
        ("cpu", torch.bfloat16, 6, False, 60),
    ],
)
def test_requests_in_random_company_on_a_gpu(
    method: str, dtype: torch.dtype, batch: int, captured: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches that two kernels of products take, in a window of few blocks before DRAM, and layer by layer."""
    if not captured:
        monkeypatch.setattr(Runtime, "uncaptured", lambda _: "this test says so")
    given: dict[str, Any] = {"device": "cuda", "max_batch": batch, **({} if method == "full" else {"window_blocks": 2})}
    texts = prompts(count)
    with engine(method, dtype, reuse=False, **given) as llm:
        assert (llm.not_captured is None) == captured
        want = [bits(llm.generate(text, asked())[0]) for text in texts]
    with engine(method, dtype, **given) as llm:
        found = in_company(llm, texts)
    assert [i for i, each in enumerate(found) if each != want[i]] == []


@pytest.mark.gpu
def test_without_it_company_changes_bits_on_a_gpu() -> None:
    """Else the test above could not fail."""
    texts = prompts(60)
    given: dict[str, Any] = {"device": "cuda", "max_batch": 40, "deterministic": False, "chunk": None}
    with engine("full", torch.bfloat16, reuse=False, **given) as llm:
        want = [bits(llm.generate(text, asked())[0]) for text in texts]
        found = [bits(each) for each in llm.generate(texts, asked())]
    assert found != want


@pytest.mark.gpu
def test_a_gpu_refuses_what_it_cannot_promise() -> None:
    """Before the first request, and the model is as it was."""
    own = tiny("qwen3_moe", "cuda", torch.bfloat16)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="not for experts on a GPU"):
            coattn.LLM((own, tokenizer()), "full", deterministic=True, max_batch=2, max_length=64, block=16)
    assert all("forward" not in vars(module) for module in own.modules())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_it_company_changes_bits(dtype: torch.dtype) -> None:
    """Else the test above could not fail."""
    texts = prompts(24)
    want = alone("full", dtype, texts)
    with engine("full", dtype, deterministic=False, chunk=None) as llm:
        found = [bits(each) for each in llm.generate(texts, asked())]
    assert any(one != other for one, other in zip(found, want, strict=True))


@pytest.mark.slow
def test_short_memory_and_a_disk_change_nothing(tmp_path: Path) -> None:
    """Stored chunks come and go, and requests wait for room rather than give way."""
    texts = prompts(30)
    want = alone("cpu", torch.float32, texts)
    budget: dict[str, Any] = {"host_kv": "700KiB", "disk": tmp_path}
    for _ in range(2):  # the second one finds files of the first
        with engine("cpu", torch.float32, **budget) as llm:
            found = [bits(each) for each in llm.generate(texts, asked())]
            assert found == want
            assert llm.report()["preemptions"] == 0
            in_order(llm)


def test_a_step_that_fails_leaves_the_others_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [prompt(20 + i, seed=i) for i in range(4)]
    want = alone("full", torch.float32, texts)
    with engine("full", torch.float32) as llm:
        handles = [llm.submit(text, asked(), streams=False) for text in texts]
        while not all(each.request.decodes for each in handles):
            llm.step()
        forward, calls = llm.runner.session.forward, []

        def third_fails(*given: Any) -> Any:
            calls.append(None)
            if len(calls) == 3:
                raise RuntimeError("once")
            return forward(*given)

        monkeypatch.setattr(llm.runner.session, "forward", third_fails)
        assert [bits(each.result()) for each in handles] == want
        assert llm.report()["failed_steps"] == 1
        in_order(llm)


def test_sessions_read_their_text_again_and_saved_ones_are_refused(tmp_path: Path) -> None:
    with engine("full", torch.float32, deterministic=False, session_dir=tmp_path) as llm, llm.session("talk") as talk:
        talk.ask(SHARED, asked())
        talk.save()
    with engine("full", torch.float32, session_dir=tmp_path) as llm:
        with llm.session() as other:
            first = other.ask(SHARED, asked())
            second = other.ask(prompt(20), asked())
            assert second.cached_tokens == 128, "whole chunks of the prompt"
            text = SHARED + list(first.token_ids) + prompt(20)
            with engine("full", torch.float32, reuse=False) as fresh:
                assert bits(fresh.generate(text, asked())[0]) == bits(second)
        with pytest.raises(CoattnError, match="deterministic"):
            llm.session("talk")


@pytest.mark.parametrize(
    ("method", "more", "error", "said"),
    [
        ("auto", {}, UnsupportedError, "for full, cpu and offload"),
        ("streaming", {}, UnsupportedError, "for full, cpu and offload"),
        ("full", {"chunk": 70}, ConfigError, "Give chunk 64"),
        ("full", {"chunk": None, "target_ms": 50.0}, ConfigError, "Leave one out"),
    ],
)
def test_what_cannot_be_promised_is_refused(
    method: str, more: dict[str, Any], error: type[CoattnError], said: str
) -> None:
    with pytest.raises(error) as refused:
        engine(method, torch.float32, **more).close()
    assert said in f"{refused.value.sentence} {refused.value.hint}"
