"""Quantised weights in every form: keys and values stay in the numbers that the model computes with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small import by_transformers, greedy, small, tokenizer
from tests.hf.families import tiny
from tests.hf.quantised import FORMS, Closed, quantise, subclass_linear
from tests.hf.test_weights import logits, staged_weights

import coattn
from coattn.errors import ConfigError, UnsupportedError
from coattn.hf.architectures import describe_layers
from coattn.hf.fingerprint import weights_fingerprint
from coattn.hf.forward import Session
from coattn.hf.fuse.fusion import Fusion
from coattn.hf.weights import StagedWeights

IDS = torch.randint(3, 160, (1, 30), generator=torch.Generator().manual_seed(2))
CPU = torch.device("cpu")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_engine_and_attachment_say_what_transformers_says(family: str, form: str) -> None:
    model = quantise(tiny(family), FORMS[form])
    want = by_transformers(model, IDS[0].tolist(), 8)
    assert {shape.dtype for shape in describe_layers(model)} == {torch.float32}
    for method in ("full", "offload"):
        with coattn.LLM((model, None), method, max_batch=2, max_length=64, block=8) as llm:
            (found,) = llm.generate(IDS[0].tolist(), greedy(8))
            assert found.token_ids == want
            assert llm.report()["exact"]
    with coattn.attach(model, "full", block=8) as attachment, torch.no_grad():
        out = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert tuple(out[0, 30:].tolist()) == want
        assert attachment.report()["exact"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_kv_is_of_the_activations_dtype(form: str, dtype: torch.dtype) -> None:
    model = quantise(tiny("llama", dtype=dtype), FORMS[form])
    assert {shape.dtype for shape in describe_layers(model)} == {dtype}


def test_quantised_embeddings_leave_it_to_the_config() -> None:
    model = tiny("llama")
    embeddings = model.get_input_embeddings()
    embeddings.weight = torch.nn.Parameter(embeddings.weight.to(torch.float8_e4m3fn), requires_grad=False)
    model.config.dtype = torch.bfloat16
    assert {shape.dtype for shape in describe_layers(model)} == {torch.bfloat16}
    model.config.dtype = None
    with pytest.raises(UnsupportedError, match="embeddings are quantised"):
        describe_layers(model)


def test_wider_keys_than_the_cache_holds_are_refused() -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    with coattn.attach(model, "full"):
        model.float()  # a cache of the dtype that was there would round
        with pytest.raises(UnsupportedError, match=r"keys in float32.*bfloat16"), torch.no_grad():
            model(IDS)


@pytest.mark.parametrize("form", FORMS)
def test_fingerprints_tell_quantised_weights_apart(form: str) -> None:
    model, same, other = (quantise(small(layers=2), FORMS[form]) for _ in range(3))
    with torch.no_grad():
        weights = other.model.layers[1].mlp.down_proj
        packed = weights.qweight if form == "buffers" else weights.weight
        packed = packed.packed if form == "subclass" else packed
        packed.view(torch.uint8)[3, 5] ^= 1
    assert weights_fingerprint(model) == weights_fingerprint(same) != weights_fingerprint(other)


def test_weights_that_cannot_be_read_are_refused_in_one_sentence(tmp_path: Path) -> None:
    model = quantise(small(layers=2), lambda linear: subclass_linear(Closed, linear))
    with coattn.LLM((model, tokenizer()), "full", max_batch=1, max_length=64, session_dir=tmp_path) as llm:
        session = llm.session("talk")
        session.ask([1, 2, 3], greedy(2))
        with pytest.raises(UnsupportedError, match="type Closed cannot be read bit by bit"):
            session.save()


@pytest.mark.parametrize("form", ["buffers", "subclass"])
def test_weights_on_gpu_is_refused_where_weights_are_not_plain_parameters(form: str) -> None:
    model = quantise(small(layers=6), FORMS[form])
    before = {name: x.data_ptr() for name, x in model.state_dict().items() if type(x) is torch.Tensor}
    with pytest.raises(ConfigError, match=r"weights_on_gpu.*quantised"):
        StagedWeights(model, 0.0, CPU)
    assert before == {name: x.data_ptr() for name, x in model.state_dict().items() if type(x) is torch.Tensor}


def test_fp8_parameters_can_be_staged() -> None:
    model = quantise(small(layers=6).to(CPU), FORMS["fp8"])
    want = logits(model)
    with staged_weights(model):
        assert torch.equal(logits(model), want)


@pytest.mark.parametrize("form", FORMS)
def test_quantised_projections_are_not_fused(form: str) -> None:
    pytest.importorskip("triton")
    model: Any = quantise(tiny("llama"), FORMS[form])
    with Session(model) as session:
        fusion = Fusion(session)
        assert "layers" not in fusion.summary
        assert fusion.summary["linears"] == 1, "the head, which is not quantised"
        fusion.close()
