import copy
import gc
from typing import Any

import pytest
import torch
from tests.hf.families import FAMILIES, tiny
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    TextStreamer,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import coattn
from coattn.errors import BudgetError, CoattnError, ConfigError, InputError, MethodError, UnsupportedError

IDS = torch.arange(3, 43)[None]
SHORT: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def footprint(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that attach could leave changed."""
    modules = model.named_modules()
    return {
        "weights": {name: x.clone() for name, x in model.state_dict().items()},
        "config": copy.deepcopy(model.config.__dict__),
        "generation": model.generation_config.to_dict(),
        "modules": {
            name: (sorted(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in modules
        },
        "functions": sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()) + sorted(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
        "forward": model(IDS).logits,
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, x in before.pop("weights").items():
        assert torch.equal(x, after["weights"][name]), name
    assert torch.equal(before.pop("forward"), after["forward"])
    for key, value in before.items():
        assert value == after[key], key


def fail(*_: Any) -> None:
    raise RuntimeError("half way")


def test_two_models_can_be_attached_at_once_but_one_not_twice() -> None:
    first, second = tiny("llama"), tiny("qwen3")
    known = sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())
    plain = [m.generate(IDS, **SHORT) for m in (first, second)]
    with coattn.attach(first, "cpu"), coattn.attach(second, "full"):
        assert torch.equal(first.generate(IDS, **SHORT), plain[0])
        assert torch.equal(second.generate(IDS, **SHORT), plain[1])
        with pytest.raises(UnsupportedError, match="in use already"), coattn.attach(first, "full"):
            pass
        assert torch.equal(first.generate(IDS, **SHORT), plain[0])
    assert sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()) == known


@pytest.mark.parametrize("method", ["full", "offload", "cpu"])
def test_sampling_is_the_same_with_the_same_seed(method: str) -> None:
    model = tiny("llama")
    options = {**SHORT, "do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 3}
    torch.manual_seed(5)
    plain = model.generate(IDS, **options)
    with coattn.attach(model, method):
        torch.manual_seed(5)
        assert torch.equal(model.generate(IDS, **options), plain)


def test_streamers_get_every_token() -> None:
    model = tiny("llama")

    class Tokens(TextStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            pass

    streamer = Tokens()
    with coattn.attach(model, "cpu"):
        out = model.generate(IDS, streamer=streamer, **SHORT)
    assert streamer.seen == out[0].tolist()


TURNS = torch.stack([IDS[0], IDS[0].flip(0)])
ROOMY: dict[str, dict[str, Any]] = {"streaming": {"sinks": 4, "recent": 300}}


def talk(model: PreTrainedModel, end: int, past: Any = None) -> tuple[list[torch.Tensor], Any]:
    """Three turns of `generate`, each with the cache of the one before, in a batch where one sequence ends early: the
    texts and the cache."""
    generator = torch.Generator().manual_seed(3)
    options = {**SHORT, "eos_token_id": end, "return_dict_in_generate": True}
    text, mask, texts = TURNS, torch.ones_like(TURNS), []
    for _ in range(3):
        out = model.generate(text, attention_mask=mask, past_key_values=past, **options)
        past, texts = out.past_key_values, [*texts, out.sequences]
        new = torch.randint(3, 160, (2, 7), generator=generator)
        text = torch.cat([out.sequences, new], 1)
        mask = torch.cat([mask, (out.sequences[:, mask.shape[1] :] != 0).long(), torch.ones_like(new)], 1)
    return texts, past


@pytest.mark.parametrize("method", ["full", "offload", "cpu", "streaming"])
def test_turns_continue_the_same_cache(method: str) -> None:
    """Under `attach`, and beside another cache with a `coattn.Cache`."""
    model = tiny("llama")
    end = int(model.generate(TURNS, **SHORT)[0, 42])  # the third new token of the first sequence
    plain, _ = talk(model, end)
    assert (plain[0] == 0).any(), "one sequence should have ended early"
    params = ROOMY.get(method, {"block": 8})
    with coattn.attach(model, method, **params):
        texts, past = talk(model, end)
    assert type(past).__name__ == "CoattnCache"
    with coattn.Cache(model, "full"), coattn.Cache(model, method, **params) as cache:
        native, kept = talk(model, end, cache)
    assert kept is cache
    for expected, *own in zip(plain, texts, native, strict=True):
        assert all(torch.equal(text, expected) for text in own)


def test_prefill_in_chunks() -> None:
    model = tiny("llama")
    plain = model.generate(IDS, **SHORT)
    with coattn.attach(model, "cpu", block=8):
        assert torch.equal(model.generate(IDS, prefill_chunk_size=16, **SHORT), plain)


@torch.no_grad()
def test_a_forward_without_cache() -> None:
    model = tiny("gemma2")
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :11] = 0
    ids = torch.cat([IDS, IDS.flip(1)])
    plain = model(ids, attention_mask=mask, use_cache=False).logits
    with coattn.attach(model, "cpu"):
        out = model(ids, attention_mask=mask, use_cache=False)
    assert out.past_key_values is None
    torch.testing.assert_close(out.logits[mask.bool()], plain[mask.bool()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 3}, "Beam search is not supported: it copies whole sequences"),
        ({"assistant_model": "self"}, "Assisted decoding is not supported: it takes tokens back"),
        ({"prompt_lookup_num_tokens": 3}, "Assisted decoding is not supported"),
        ({"cache_implementation": "static"}, "cache_implementation='static' conflicts"),
        ({"past_key_values": "dynamic"}, "a DynamicCache that this attachment did not make"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    model = tiny("llama")
    if options.get("assistant_model") == "self":
        options = {"assistant_model": tiny("llama")}
    if options.get("past_key_values") == "dynamic":
        options = {"past_key_values": DynamicCache()}
    with coattn.attach(model, "full"), pytest.raises(UnsupportedError, match=reason):
        model.generate(IDS, **{**SHORT, **options})


def test_masks_of_other_shapes_are_refused() -> None:
    model = tiny("llama")
    with coattn.attach(model, "full"):
        with pytest.raises(UnsupportedError, match="custom masks"):
            model(IDS, attention_mask=torch.ones(1, 1, 40, 40))
        with pytest.raises(InputError, match="attention_mask has shape"):
            model(IDS, attention_mask=torch.ones(1, 30))


@torch.no_grad()
def test_masks_that_change_their_mind_are_refused() -> None:
    model = tiny("llama")
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, :3] = 0
    with coattn.attach(model, "full"):
        past = model(IDS, attention_mask=mask).past_key_values
        with pytest.raises(UnsupportedError, match="was hidden when it was computed"):
            model(IDS[:, :1], attention_mask=torch.ones(1, 41), past_key_values=past)
        hole = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
        hole[0, 20] = 0
        with pytest.raises(UnsupportedError, match="in the middle of sequence 0"):
            model(IDS[:, :1], attention_mask=hole, past_key_values=past)
        with pytest.raises(InputError, match="holds 1 sequence"):
            model(IDS[:, :1].expand(2, 1), past_key_values=past)
        model(IDS[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], 1), past_key_values=past)  # and is still fine


def test_other_families_and_what_is_no_language_model_are_refused() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2)).eval()
    others: tuple[tuple[Any, str], ...] = (
        (bloom, "family 'bloom'"),
        (tiny("llama").model, "not a causal language model"),
        ("smollm2", "not 'smollm2'"),
    )
    for model, said in others:
        with pytest.raises(UnsupportedError, match=said), coattn.attach(model, "full"):
            pass


def test_language_models_inside_others_are_refused_alike_by_all() -> None:
    text = {**FAMILIES["gemma3"][1], "sliding_window": 19}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    wrapped = Gemma3ForConditionalGeneration(config).eval()
    said = "Gemma3ForConditionalGeneration also takes images"
    with pytest.raises(UnsupportedError, match=said), coattn.attach(wrapped, "full"):
        pass
    for options in ({}, {"weights_on_gpu": 0.5}):
        with pytest.raises(UnsupportedError, match=said):
            coattn.LLM((wrapped, None), "full", **options)


def test_training_is_refused() -> None:
    model = tiny("llama")
    with pytest.raises(UnsupportedError, match="training mode"), coattn.attach(model.train(), "full"):
        pass
    model.eval()
    with coattn.attach(model, "full"), pytest.raises(UnsupportedError, match="cannot be trained"):
        model(IDS).logits.sum().backward()


def test_layers_that_are_unknown_or_differ_from_their_config_are_refused() -> None:
    model = tiny("gemma3")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedError, match="'chunked_attention'"), coattn.attach(model, "full"):
        pass
    model = tiny("gemma2")
    model.model.layers[0].self_attn.sliding_window = 7
    with coattn.attach(model, "full"), pytest.raises(UnsupportedError, match="sliding_window=7"):
        model(IDS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "fulll"}, MethodError, "no method 'fulll'"),
        ({"method": "cpu", "sinks": 3}, ConfigError, "no parameter 'sinks'"),
        ({"method": "full", "gpu_kv": "plenty"}, ConfigError, "gpu_kv is 'plenty'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[CoattnError], message: str) -> None:
    model = tiny("llama")
    with pytest.raises(error, match=message), coattn.attach(model, **arguments):
        pass


def test_a_budget_that_is_too_small_names_the_minimum_before_anything_runs() -> None:
    model = tiny("llama")
    with coattn.attach(model, "full", gpu_kv="1KiB") as attachment:
        with pytest.raises(BudgetError, match=r"needs at least 48\.0 KiB"):
            model.generate(IDS, **SHORT)
        assert attachment.ledger.held == {"gpu": 0, "host": 0}
    with coattn.attach(model, "full", gpu_kv="48KiB"):
        model.generate(IDS, **SHORT)
    with coattn.attach(model, "cpu", host_kv="1KiB"), pytest.raises(BudgetError, match=r"host_kv is 1\.0 KiB"):
        model.generate(IDS, **SHORT)


@torch.no_grad()
def test_memory_goes_back_when_nobody_holds_a_cache() -> None:
    model = tiny("llama")
    with coattn.attach(model, "cpu", gpu_kv="24KiB") as attachment:
        for _ in range(3):
            model.generate(IDS, **SHORT)  # each needs nearly all of the budget
        assert attachment.ledger.held == {"gpu": 0, "host": 0}
        past = model(IDS).past_key_values
        held = dict(attachment.ledger.held)
        assert held["gpu"] > 0
        with pytest.raises(BudgetError):
            model.generate(IDS, **SHORT)
        model(IDS[:, :1], past_key_values=past)  # the refusal has cost nothing
        del past
        gc.collect()
        model.generate(IDS, **SHORT)
    assert attachment.ledger.held == {"gpu": 0, "host": 0}


@torch.no_grad()
def test_a_cache_is_useless_after_its_attachment() -> None:
    model = tiny("llama")
    with coattn.attach(model, "full"):
        past = model(IDS).past_key_values
    with pytest.raises(UnsupportedError, match="outside the attachment"):
        model(IDS[:, :1], past_key_values=past)
    with coattn.attach(model, "full"), pytest.raises(UnsupportedError, match="did not make"):
        model(IDS[:, :1], past_key_values=past)


def test_the_report_says_what_is_held() -> None:
    model = tiny("llama")
    with coattn.attach(model, "offload", block=8) as attachment:
        model.generate(IDS, **SHORT)
        report = attachment.report()
    token_bytes = 3 * 2 * 2 * 16 * 4
    assert report["method"] == "offload"
    assert report["exact"] is True
    assert report["host_kv_peak"] == 40 * token_bytes  # 47 tokens: five full blocks
    assert report["gpu_kv_peak"] == 8 * token_bytes + 2 * 40 * token_bytes // 3


@pytest.mark.gpu
def test_layers_whose_weights_are_offloaded_attend_where_they_run() -> None:
    from accelerate import dispatch_model

    plain = tiny("llama").generate(IDS, **SHORT)
    places = {"model.embed_tokens": 0, "model.layers.0": "cpu", "model.layers.1": 0, "model.layers.2": 0}
    places |= {"model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
    model = dispatch_model(tiny("llama"), places, main_device=0)
    for method in ("full", "offload", "cpu"):
        with coattn.attach(model, method, block=8) as attachment:
            assert [layer.device.type for layer in attachment.layers] == ["cuda", "cuda", "cuda"]
            assert torch.equal(model.generate(IDS.cuda(), **SHORT).cpu(), plain)
