"""Loading: quiet, whole, from safetensors, and one sentence with a hint for everything that goes wrong."""

import json
import os
import pickle
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

import coattn
from coattn.errors import BudgetError, CoattnError, ConfigError, ModelError, UnsupportedError
from coattn.hf.load import choose_device, choose_dtype, load


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer that names no pad token."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_it_loads_exactly_the_saved_weights(folder: Path) -> None:
    loaded = load(str(folder), dtype="float32", device="cpu")
    assert (loaded.name, loaded.path) == (str(folder), folder)
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    saved, state = load_file(folder / "model.safetensors"), loaded.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in saved.items())


def test_the_tokenizer_pads_on_the_left_with_the_end(folder: Path) -> None:
    tokenizer = load(folder, device="cpu").tokenizer
    batch = tokenizer(["a b", "b"], padding=True)
    assert batch["input_ids"] == [[1, 2], [0, 2]]
    assert batch["attention_mask"] == [[1, 1], [0, 1]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.float32])
def test_the_dtype_is_the_one_asked_for(folder: Path, dtype: str | torch.dtype) -> None:
    expected = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    assert {p.dtype for p in load(folder, dtype=dtype, device="cpu").model.parameters()} == {expected}


@pytest.mark.parametrize(
    ("words", "hidden", "expected"),
    [
        ("avx512f amx_bf16", "", torch.bfloat16),
        ("avx512f avx512_bf16", "", torch.float32),
        *(("avx512f amx_bf16", hidden, torch.float32) for hidden in ("amx", "avx512", "avx2", "amx,avx512")),
    ],
)
def test_auto_is_bfloat16_only_where_it_is_fast_and_not_hidden(
    monkeypatch: pytest.MonkeyPatch, words: str, hidden: str, expected: torch.dtype
) -> None:
    monkeypatch.setenv("COATTN_HIDE_ISA", hidden)
    monkeypatch.setattr("coattn.hf.cpu_dtypes.cpu_words", lambda: frozenset(words.split()))
    assert choose_dtype("auto", torch.device("cpu")) is expected
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16


def test_unknown_dtypes_and_devices_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'int3' is not a dtype"):
        load(folder, dtype="int3")
    with pytest.raises(ConfigError, match="'abacus' is not a device"):
        load(folder, device="abacus")
    with pytest.raises(ConfigError, match="There is no device cuda:99"):
        choose_device("cuda:99")


def settings() -> tuple[Any, ...]:
    return hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(), sys.stderr, warnings.filters[:]


def test_loading_is_quiet_and_restores_the_settings(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = load_file(folder / "model.safetensors")
    save_file({**saved, "surplus": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    before = settings()
    loaded = load(folder, device="cpu")
    loaded.tokenizer.model_max_length = 4
    loaded.tokenizer("a b a b a b")
    assert settings() == before
    assert capfd.readouterr() == ("", "")


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def scramble(folder: Path) -> None:
    """A header that is whole and a name in it that no model has."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"model.mron.weight"))


BROKEN: dict[str, Callable[[Path], object]] = {
    "does not know the model type": edit_config(model_type="xyzzy"),
    "'t5' is an encoder with a decoder": edit_config(model_type="t5", is_encoder_decoder=True),
    "family 'qwen3_vl_moe' hold a language model": edit_config(model_type="qwen3_vl_moe"),
    "needs code of its own": edit_config(model_type="own", auto_map={"AutoConfig": "own.Config"}),
    "lack model.layers.2.input_layernorm.weight and 8 more": edit_config(num_hidden_layers=3),
    "The model of": edit_config(intermediate_size=48),
    "The config of": edit_config(num_attention_heads="nine"),
    "The tokenizer of": lambda f: (f / "tokenizer.json").write_text("{}"),
    "lack model.norm.weight": scramble,
    "is truncated": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-8]),
    "has no config.json": lambda f: (f / "config.json").unlink(),
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_folder_is_one_sentence_and_a_hint(folder: Path, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    BROKEN[said](folder)
    with pytest.raises(CoattnError) as caught:
        load(folder, device="cpu")
    assert said in caught.value.sentence
    assert "\n" not in caught.value.sentence
    assert caught.value.sentence.endswith(".")
    assert caught.value.hint
    assert capfd.readouterr() == ("", "")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os._exit, (99,))


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError, match="pickled weights only"):
        load(folder)


def refuse_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("coattn.hf.load._causal.from_pretrained", read)
    monkeypatch.setattr("coattn.hf.load.AutoModelForCausalLM.from_pretrained", read)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model_type": "mamba2", "state_size": 8}, UnsupportedError, "family 'mamba2'"),
        ({"quantization_config": {"quant_method": "nvfp4"}}, UnsupportedError, "quantised by 'nvfp4'"),
        ({"max_position_embeddings": 40}, ConfigError, "max_length is 64, but .* has 40 positions"),
        ({}, BudgetError, r"The weights of .* in float32 need .* KiB of memory, but only 1\.0 KiB is free"),
    ],
    ids=["family", "quantised", "positions", "memory"],
)
def test_what_cannot_run_is_refused_before_weights_are_read(
    changes: dict[str, Any], error: type[CoattnError], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(**changes)(folder)
    refuse_weights(monkeypatch)
    monkeypatch.setattr("coattn.hf.load.memory", lambda: (1 << 30, 1 << (30 if changes else 10)))
    with pytest.raises(error, match=said) as refused:
        coattn.LLM(str(folder), dtype="float32", device="cpu", max_length=64)
    assert refused.value.hint


def test_weights_that_fit_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusals above are what keeps them from being read."""
    refuse_weights(monkeypatch)
    with pytest.raises(ModelError, match="weights are read"):
        coattn.LLM(str(folder), dtype="float32", device="cpu", max_length=64)


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    edit_config(auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})(folder)
    (folder / "own.py").write_text("import os\nos._exit(99)\n")
    assert load(folder, device="cpu").model.config.model_type == "llama"


@pytest.fixture
def ask_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModelError]:
    """(Address of the hub, name) -> what is said of a model that is not there."""

    def ask(endpoint: str, name: str) -> ModelError:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(ModelError) as caught:
            load(name)
        return caught.value

    return ask


def test_an_unreachable_hub_is_said_soon(
    ask_hub: Callable[[str, str], ModelError], capfd: pytest.CaptureFixture[str]
) -> None:
    begun = time.perf_counter()
    said = ask_hub("http://127.0.0.1:9", "smolm2")
    assert "hub cannot be reached" in said.sentence
    assert "coattn models" in said.hint
    assert time.perf_counter() - begun < 15
    assert capfd.readouterr() == ("", "")


def test_a_name_the_hub_does_not_know_is_said(ask_hub: Callable[[str, str], ModelError]) -> None:
    class Unknown(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Unknown)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        said = ask_hub(f"http://127.0.0.1:{server.server_port}", "some/thing")
    finally:
        server.shutdown()
        server.server_close()
    assert "no public model some/thing on the hub" in said.sentence
    assert "Check the name" in said.hint
