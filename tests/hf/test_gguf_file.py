"""A GGUF file where a model is asked for: its weights in the wanted dtype, its tokenizer, its template, its hash."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from tests.cli.run import coattn  # noqa: E402
from tests.hf.test_gguf import source  # noqa: E402

from coattn import LLM, SamplingParams  # noqa: E402
from coattn.errors import ModelError  # noqa: E402
from coattn.hf.gguf.header import read_header  # noqa: E402
from coattn.hf.gguf.tokenizer import read_tokenizer  # noqa: E402
from coattn.hf.load import load  # noqa: E402
from coattn.tools.plan.known import find_config  # noqa: E402
from coattn.tools.plan.shape import read_shape  # noqa: E402

__all__ = ["source"]  # the fixture: a tiny Llama as a file, and its weights


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_files_own_in_the_wanted_dtype(
    source: tuple[Path, dict[str, np.ndarray]], dtype: torch.dtype
) -> None:
    loaded = load(source[0], dtype=dtype, device="cpu")
    own = loaded.model.state_dict()
    for name, value in source[1].items():
        assert torch.equal(own[name], torch.from_numpy(value).to(dtype)), name


def test_a_model_is_named_by_the_files_hash_and_kept(source: tuple[Path, dict[str, np.ndarray]]) -> None:
    sha256 = hashlib.sha256(source[0].read_bytes()).hexdigest()
    loaded = load(str(source[0]), device="cpu", dtype="float32")
    assert loaded.name == f"weights@{sha256[:12]}"
    assert loaded.sha256 == sha256
    before = (loaded.path / "model.safetensors").stat().st_mtime_ns
    assert (load(source[0], device="cpu", dtype="float32").path / "model.safetensors").stat().st_mtime_ns == before


def test_words_are_split_as_the_file_says(source: tuple[Path, dict[str, np.ndarray]]) -> None:
    header = read_header(source[0])
    for pre, pieces in (("qwen2", ["1", "2"]), ("llama-bpe", ["<|im_start|>", "12"])):
        header["tokenizer.ggml.pre"] = pre
        header.pop("tokenizer.ggml.add_bos_token", None)
        made = read_tokenizer(header, source[0])
        assert made.convert_ids_to_tokens(made("12")["input_ids"]) == pieces


def test_plans_know_its_dimensions(source: tuple[Path, dict[str, np.ndarray]]) -> None:
    made = json.loads((load(source[0], device="cpu", dtype="float32").path / "config.json").read_text())
    name, config = find_config(str(source[0]))
    own, want = (read_shape(name, each)._replace(config={}) for each in (config, made))
    assert own == want
    assert own.weight_bytes == 2 * sum(x.size for key, x in source[1].items() if "norm" not in key)
    assert json.loads(coattn("doctor", "--model", str(source[0]), "--json").stdout)["model"]["runs"] == "yes"


def test_the_header_is_what_the_packages_own_reader_finds(source: tuple[Path, dict[str, np.ndarray]]) -> None:
    fields = gguf.GGUFReader(source[0]).fields
    theirs = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    ours = read_header(source[0])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == value, name


def test_the_engine_and_the_command_take_a_file(source: tuple[Path, dict[str, np.ndarray]]) -> None:
    with LLM(source[0], max_batch=1, max_length=32, device="cpu", dtype="float32") as llm:
        assert llm.generate("hello", SamplingParams(max_new_tokens=3, ignore_eos=True))[0].new_tokens == 3
    done = coattn("generate", "hello", "--model", str(source[0]), "--max-new-tokens", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"].startswith("weights@")


def test_an_unknown_architecture_is_refused_in_one_sentence(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba', which coattn does not run") as caught:
        load(tmp_path / "m.gguf")
    assert "qwen2" in caught.value.hint


def test_what_is_no_whole_gguf_file_is_refused(source: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    whole = source[0].read_bytes()
    for name, data, said in (
        ("text.gguf", b"hello world", "is not a GGUF file"),
        ("empty.gguf", b"", "truncated"),
        ("part.gguf", whole[:3000], "truncated"),
        ("weights.gguf", whole[: len(whole) - 4096], "could not be converted"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelError, match=said):
            load(tmp_path / name, device="cpu")
    with pytest.raises(ModelError, match="There is no file"):
        load(str(tmp_path / "absent.gguf"))
