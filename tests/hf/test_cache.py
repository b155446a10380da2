"""`coattn.Cache` as the `past_key_values` of Transformers: equal to its own cache, and as sparing with surprises."""

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.hf.families import tiny
from tests.hf.test_attach import IDS, SHORT, assert_same, fail, footprint
from tests.loaded_once import loaded_once
from transformers import DynamicCache, pipeline

import coattn
from coattn.errors import BudgetError, InputError, UnsupportedError
from coattn.method.table import METHODS

__all__ = ["loaded_once"]
SMALL: dict[str, Any] = {"block": 8, "window_blocks": 1}
PREDICTING = {"scout", "scout-paper", "infinigen"}


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"duo"}))  # which needs labels of the model's heads
def test_every_row_does_what_it_does_under_attach(method: str) -> None:
    model = tiny("llama")
    if method in PREDICTING:
        with pytest.raises(UnsupportedError, match=f"Method '{method}' predicts queries by hooks") as refused:
            coattn.Cache(model, method)
        assert f"coattn.attach(model, '{method}')" in refused.value.hint
        return
    with coattn.attach(model, method) as attachment:
        expected = model.generate(IDS, **SHORT)
        described = attachment.report()
    with coattn.Cache(model, method, max_length=47) as cache:  # as much as `generate` tells an attachment
        assert torch.equal(model.generate(IDS, past_key_values=cache, **SHORT), expected)
    told = cache.report()
    assert "coattn.Cache runs" in told.pop("not_captured")
    assert told == {name: described[name] for name in told}


@pytest.mark.model
@pytest.mark.usefixtures("loaded_once")
def test_a_pipeline_takes_it() -> None:
    from coattn.hf.load import load

    loaded = load("smollm2", dtype="float32", device="cpu")
    generate = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer, device="cpu")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    first = generate("The capital of France is", **options)[0]["generated_text"]
    second = generate(first + " The capital of Italy is", **options)[0]["generated_text"]
    with coattn.Cache(loaded.model, "offload", gpu_kv="4MiB") as cache:
        assert generate("The capital of France is", past_key_values=cache, **options)[0]["generated_text"] == first
        known = cache.get_seq_length()
        again = generate(first + " The capital of Italy is", past_key_values=cache, **options)
        assert again[0]["generated_text"] == second
        assert cache.get_seq_length() > known > 8


@pytest.mark.parametrize("method", ["full", "offload", "cpu"])
def test_assisted_decoding_takes_tokens_back(method: str) -> None:
    model, assistant, options = tiny("llama"), tiny("llama"), {**SHORT, "max_new_tokens": 24}
    assistant.lm_head.weight.data[:80] *= -1  # right about some tokens, and wrong about others
    ids = torch.cat([IDS, IDS[:, :20]], 1)
    plain = model.generate(ids, **options)
    for helped in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 4}):
        cache = coattn.Cache(model, method, block=8)
        assert torch.equal(model.generate(ids, past_key_values=cache, **options, **helped), plain)


@torch.no_grad()
def test_crop_forgets_the_last_columns() -> None:
    """Two questions about one text, which is read once; then a window that cannot go back so far."""
    model, ends = tiny("llama"), (IDS[:, :9], IDS[:, 20:27])
    plain = [model(torch.cat([IDS, end], 1)).logits[:, 40:] for end in ends]
    cache = coattn.Cache(model, "cpu", **SMALL)
    model(IDS, past_key_values=cache)
    for end, expected in zip(ends, plain, strict=True):
        torch.testing.assert_close(model(end, past_key_values=cache).logits, expected, atol=2e-5, rtol=1e-5)
        cache.crop(-end.shape[1])
        assert cache.get_seq_length() == 40
    with pytest.raises(InputError, match=r"crop\(12\) is not supported"):
        cache.crop(12)
    sliding = tiny("mistral_sliding")
    cache = coattn.Cache(sliding)
    sliding(IDS, past_key_values=cache)
    with pytest.raises(UnsupportedError, match="cannot be taken back from a window"):
        cache.crop(-1)
    assert cache.get_seq_length() == 40


def test_what_is_not_supported_is_refused_by_name() -> None:
    model, other = tiny("llama"), tiny("qwen3")
    cache, known = coattn.Cache(model), coattn.Cache(model)
    model(IDS, past_key_values=known)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("Beam search is not supported", lambda: model.generate(IDS, past_key_values=cache, num_beams=3, **SHORT)),
        ("open for this model, and this call does not use", lambda: model.generate(IDS, **SHORT)),
        ("this call does not use", lambda: model.generate(IDS, past_key_values=DynamicCache(), **SHORT)),
        ("this call does not use", lambda: model.generate(IDS, past_key_values=cache, assistant_early_exit=2, **SHORT)),
        ("output_attentions is not supported", lambda: model(IDS, past_key_values=cache, output_attentions=True)),
        ("custom masks", lambda: model(IDS, past_key_values=cache, attention_mask=torch.ones(1, 1, 40, 40))),
        ("Copying a cache", lambda: copy.deepcopy(cache)),
        ("not made for", lambda: other.generate(IDS, past_key_values=cache, **SHORT)),
        ("cannot be trained", lambda: model(IDS, past_key_values=known).logits.sum().backward()),
        ("does not run the model", lambda: copy.deepcopy(model)(IDS)),
        ("in use already", lambda: coattn.LLM((model, None))),
        ("in use already", lambda: coattn.attach(model).__enter__()),
        ("not 'smollm2'", lambda: coattn.Cache("smollm2")),  # type: ignore[arg-type]
        ("training mode", lambda: model.train()(IDS, past_key_values=cache)),
    ]
    for said, call in calls:
        with pytest.raises(UnsupportedError, match=said):
            call()
        model.config.num_hidden_layers = 3  # which Transformers leaves changed when leaving early fails
    model.eval()
    with coattn.Cache(other), pytest.raises(UnsupportedError, match="not made for"):
        other(IDS, past_key_values=cache)
    with coattn.attach(other):
        with pytest.raises(UnsupportedError, match="this attachment did not make"):
            other(IDS, past_key_values=cache)
        with pytest.raises(UnsupportedError, match=r"by `coattn.attach` or by an engine"):
            coattn.Cache(other)
    with pytest.raises(InputError, match="adds no tokens to a cache that holds 80 columns"):
        model.generate(IDS, past_key_values=known, **SHORT)
    with pytest.raises(BudgetError, match="needs at least"):
        model(IDS, past_key_values=coattn.Cache(model, gpu_kv="1KiB", max_length=64))
    model.model.layers = model.model.layers[1:]
    with pytest.raises(UnsupportedError, match="Layer 1 attends when it is the turn of layer 0"):
        model(IDS[:, :1], past_key_values=known)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedError, match="was set to 'sdpa' while a"):
        model(IDS[:, :1], past_key_values=known)


@pytest.mark.parametrize("method", ["full", "offload", "cpu"])
@pytest.mark.parametrize("attached", [False, True])
@torch.no_grad()
def test_a_forward_that_fails_is_taken_back(method: str, attached: bool) -> None:
    """A prompt and two decode steps, each failing after every layer first. A chunk over a window is refused instead."""
    model, params = tiny("llama"), {} if method == "full" else SMALL
    text, plain = IDS, model.generate(IDS, **SHORT)

    def broken(layer: int, ids: torch.Tensor) -> None:
        hook = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="half way"):
            model(ids, past_key_values=cache)
        hook.remove()

    with coattn.attach(model, method, **params) if attached else nullcontext() as attachment:
        cache = coattn.Cache(model, method, **params) if attachment is None else attachment.new_cache()
        for _ in range(3):
            known = cache.get_seq_length()
            for layer in range(2):
                broken(layer, text[:, known:])
                assert cache.get_seq_length() == known
            text = torch.cat([text, model(text[:, known:], past_key_values=cache).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(text, plain[:, :43])
        broken(1, IDS[:, :20])
        for _ in range(2):
            with nullcontext() if method == "full" else pytest.raises(InputError, match="overwrote older tokens"):
                model(IDS[:, :20], past_key_values=cache)
        cache.reset()
        assert torch.equal(model.generate(IDS, past_key_values=cache, **SHORT), plain)


@torch.no_grad()
def test_the_model_is_as_before_and_memory_goes_back() -> None:
    gc.collect()  # caches that another test has left
    model = tiny("llama")
    before = footprint(model)
    kept = coattn.Cache(model, "cpu", block=8)
    ledger = kept.ledger
    with coattn.Cache(model, "offload", block=8) as cache:
        for a, b in ((0, 20), (20, 39), (39, 40)):  # two caches in turn, and memory from inference mode outside it
            with torch.inference_mode(a == 0):
                for past in (kept, cache):
                    own = model(IDS[:, a:b], past_key_values=past).logits
                    torch.testing.assert_close(own, before["forward"][:, a:b], atol=2e-5, rtol=1e-5)
        assert min(*cache.ledger.held.values(), *ledger.held.values()) > 0
        assert model.config._attn_implementation == "coattn"
    assert min(ledger.held.values()) > 0
    del kept, past
    gc.collect()
    assert set(cache.ledger.held.values()) == set(ledger.held.values()) == {0}
    with pytest.raises(InputError, match="This cache is closed"):
        model(IDS, past_key_values=cache)
    assert_same(before, footprint(model))
