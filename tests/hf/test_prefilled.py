"""A prompt that was read elsewhere is answered like one that was read here."""

from pathlib import Path

import pytest
import torch
from tests.hf.families import tiny

import coattn
from coattn.errors import InputError
from coattn.hf.prefilled import QUERIES, Prefilled, prefill

METHODS = {
    "full": {"block": 8},
    "offload": {"block": 8, "window_blocks": 2},
    "cpu": {"block": 8, "window_blocks": 3},
    "streaming": {"sinks": 4, "recent": 20},
    "quest": {"block": 8, "budget": 48},
    "scout": {"block": 8, "budget": 48, "window_blocks": 2},
    "hgca": {"block": 8, "window_blocks": 3, "beta": 0.5},
    "pqcache": {"block": 8, "window_blocks": 1, "sinks": 4, "compress": 0.3, "subbits": 4},
}


def answer(model: object, method: str, prompt: object, tokens: int = 12) -> tuple[int, ...]:
    params = coattn.SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
    with coattn.LLM((model, None), method, max_batch=2, max_length=256, chunk=50, **METHODS[method]) as llm:
        (found,) = llm.generate(prompt, params)
        assert found.finish_reason == "length", found.error
        if isinstance(prompt, Prefilled):
            assert llm.report()["prefill_tokens"] == 0, "nothing is read again"
    return found.token_ids


@pytest.mark.parametrize(
    ("method", "length"),
    [*((method, 33) for method in METHODS), *((m, n) for m in ("cpu", "scout", "hgca") for n in (1, 120))],
)
def test_answers_are_those_of_a_prompt_read_here(method: str, length: int, tmp_path: Path) -> None:
    model = tiny("qwen3")
    ids = torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    made = prefill(model, ids, chunk=37)
    assert len(made.queries[0]) == min(length, QUERIES)
    made.save(tmp_path / "prompt.safetensors")
    given = Prefilled.load(tmp_path / "prompt.safetensors")
    assert given.tokens == tuple(ids)
    found = answer(model, method, given)
    # streaming reads a prompt through its window, so what it reads is not what was handed over
    assert len(found) == 12 if method == "streaming" else found == answer(model, method, ids)


def test_sliding_layers_too() -> None:
    model = tiny("gemma3")
    ids = torch.randint(3, 160, (90,), generator=torch.Generator().manual_seed(2)).tolist()
    assert answer(model, "cpu", prefill(model, ids)) == answer(model, "cpu", ids)


def test_another_models_prompt_is_refused() -> None:
    made = prefill(tiny("qwen3"), list(range(3, 40)))
    with pytest.raises(InputError, match="prefilled prompt is of 3 layers"):
        answer(tiny("llama_multi_query"), "full", made)


def test_a_sibling_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    model = tiny("qwen3")
    prefill(model, list(range(3, 40))).save(tmp_path / "prompt")
    given = Prefilled.load(tmp_path / "prompt")
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        before = weight[0, 0].item()
        weight[0, 0] += 1
        with pytest.raises(InputError, match="another model of the same shape"):
            answer(model, "full", given)
        weight[0, 0] = before
    assert len(answer(model, "full", given)) == 12
