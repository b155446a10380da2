"""The real default model, fetched if it is not here yet: its tokenizer, its numbers, its use."""

import pydoc_data.topics
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from coattn.hf.load import Loaded, load
from coattn.hf.models import get_model, list_models

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Loaded:
    return load("smollm2", device="cpu")


def chat(loaded: Loaded, message: str, tokens: int) -> tuple[int, str]:
    """Prompt length in tokens and the greedy answer to one message."""
    turns, options = [{"role": "user", "content": message}], {"return_tensors": "pt", "return_dict": True}
    ids = loaded.tokenizer.apply_chat_template(turns, add_generation_prompt=True, **options)
    out = loaded.model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    prompt = ids["input_ids"].shape[1]
    return prompt, loaded.tokenizer.decode(out[0, prompt:], skip_special_tokens=False)


def test_getting_it_again_is_fast(smollm2: Path) -> None:
    start = time.perf_counter()
    assert get_model("smollm2") == smollm2
    assert time.perf_counter() - start < 0.5
    info = {model["name"]: model for model in list_models()}["smollm2"]
    assert info["state"] == "ready"
    assert info["path"] == smollm2
    assert info["bytes"] == sum(f.stat().st_size for f in smollm2.iterdir() if f.name != "coattn-model.json")


def test_its_weights_are_stored_in_half_precision_once(smollm2: Path) -> None:
    with safe_open(smollm2 / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"F16"}
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("text", ["1234567890", "pi is 3.14159", "In 2024, 42 of 100"])
def test_digits_are_tokens_of_their_own(loaded: Loaded, text: str) -> None:
    pieces = loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer(text)["input_ids"])
    assert [piece for piece in pieces if any(map(str.isdigit, piece))] == list(filter(str.isdigit, text))


TEXTS = ["Hello, world!", " leading  and  double ", "naïve café — ▁ 日本 🙂", "a\n\n\tb 12 .", "it 's , fine"]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(loaded: Loaded, text: str) -> None:
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"]) == text


def test_known_words_have_their_published_ids(loaded: Loaded) -> None:
    ids = loaded.tokenizer("<|im_start|>user\nHello world<|im_end|>")["input_ids"]
    assert ids == [1, 4093, 198, 19556, 905, 2]


def test_it_ends_and_pads_with_the_end_of_a_turn(loaded: Loaded) -> None:
    tokenizer, generation = loaded.tokenizer, loaded.model.generation_config
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.eos_token_id == 2
    assert (generation.eos_token_id, generation.pad_token_id) == (2, 2)
    assert tokenizer.padding_side == "left"
    assert tokenizer.model_max_length == 8_192


def test_the_chat_template_marks_the_turns(loaded: Loaded) -> None:
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = loaded.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_it_answers_and_stops(loaded: Loaded) -> None:
    _, answer = chat(loaded, "What is the capital of France?", 40)
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_it_predicts_english_well_and_shuffled_english_badly(loaded: Loaded) -> None:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in ("class", "with", "lambda", "naming"))
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"][:, :1024]
    shuffled = ids[:, torch.randperm(1024, generator=torch.Generator().manual_seed(0))]
    with torch.inference_mode():
        good, bad = (loaded.model(x, labels=x).loss.exp().item() for x in (ids, shuffled))
    assert 5 < good < 25
    assert bad > 20 * good


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_it_finds_a_passkey_in_a_thousand_tokens(loaded: Loaded, depth: float) -> None:
    key = str(71_432 + int(depth * 4_444))
    words = " ".join(pydoc_data.topics.topics["objects"].split()).split(" ")[:730]
    at = int(len(words) * depth)
    words.insert(at, f"The pass key is {key}. Remember it. {key} is the pass key.")
    question = "What is the pass key? Answer with the number only."
    prompt, answer = chat(loaded, " ".join(words) + "\n\n" + question, 16)
    assert 950 <= prompt <= 1_400
    assert key in answer
