"""A GGUF file where a model is asked for: its weights in its own bits, its tokenizer, its template, its hash."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from tests.cli.run import coattn  # noqa: E402
from tests.engine.small import by_transformers, greedy  # noqa: E402
from tests.hf.gguf_files import write  # noqa: E402
from tests.hf.test_gguf import source  # noqa: E402
from tests.hf.test_weights import logits, staged_weights  # noqa: E402

from coattn import LLM, SamplingParams, attach  # noqa: E402
from coattn.errors import CoattnError, ModelError  # noqa: E402
from coattn.hf.architectures import describe_layers  # noqa: E402
from coattn.hf.fingerprint import weights_fingerprint  # noqa: E402
from coattn.hf.forward import Session  # noqa: E402
from coattn.hf.fuse.fusion import Fusion  # noqa: E402
from coattn.hf.gguf.blocks import READERS  # noqa: E402
from coattn.hf.gguf.header import read_header, read_tensors  # noqa: E402
from coattn.hf.gguf.tokenizer import read_tokenizer  # noqa: E402
from coattn.hf.load import load  # noqa: E402
from coattn.hf.quantised.module import PackedModule  # noqa: E402
from coattn.hf.stored import bytes_of, weight_bytes  # noqa: E402
from coattn.tools.plan.known import find_config  # noqa: E402
from coattn.tools.plan.shape import read_shape  # noqa: E402

__all__ = ["source"]  # the fixture: a tiny Llama as a file, and its weights


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay packed on a CPU, too."""
    monkeypatch.setattr("coattn.hf.load.keeps_packed", lambda place, on_host: True)


IDS = torch.randint(3, 256, (1, 30), generator=torch.Generator().manual_seed(2))
KINDS = [name for name, _ in READERS.values()]


def packed_modules(model: Any) -> list[PackedModule]:
    return [module for module in model.modules() if isinstance(module, PackedModule)]


@pytest.mark.parametrize(("kind", "architecture"), [*((kind, "llama") for kind in KINDS), ("Q4_K", "qwen3")])
def test_logits_are_those_of_the_numbers_that_the_file_means(kind: str, architecture: str, tmp_path: Path) -> None:
    numbers = write(tmp_path / "m.gguf", kind, architecture)
    model = load(tmp_path / "m.gguf", dtype="float32", device="cpu").model
    assert len(packed_modules(model)) == 2 + 7 * 2, "the embedding and the head, too"
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, numbers(IDS).logits, rtol=2e-4, atol=2e-4)
    assert {shape.dtype for shape in describe_layers(model)} == {torch.float32}
    stored = sum(each.size for each in read_tensors(tmp_path / "m.gguf").values())
    assert 0.99 * stored <= bytes_of(model) <= 1.04 * stored


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "phi3", "gemma3"])
def test_other_architectures(architecture: str, tied: bool, tmp_path: Path) -> None:
    numbers = write(tmp_path / "m.gguf", "Q4_K", architecture, tied)
    model = load(tmp_path / "m.gguf", dtype="float32", device="cpu").model
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, numbers(IDS).logits, rtol=5e-4, atol=5e-4)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (table.codes is head.codes) == tied
    assert bytes_of(model) - weight_bytes(model) == (0 if tied else bytes_of(table))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "Q4_0", "Q5_0", "MXFP4"])
def test_every_way_to_run_a_file_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    want = by_transformers(write(tmp_path / "m.gguf", kind, tied=True), IDS[0].tolist(), 8)
    with LLM(str(tmp_path / "m.gguf"), "cpu", dtype="float32", device="cpu", max_length=64, block=8) as llm:
        (found,) = llm.generate(IDS[0].tolist(), greedy(8))
        assert found.token_ids == want
        assert llm.report()["exact"]
    model = load(tmp_path / "m.gguf", dtype="float32", device="cpu").model
    with attach(model, "full", block=8), torch.no_grad():
        out = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert tuple(out[0, 30:].tolist()) == want


def test_the_kv_is_of_the_wanted_dtype(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q5_K")
    model = load(tmp_path / "m.gguf", dtype="bfloat16", device="cpu").model
    assert {shape.dtype for shape in describe_layers(model)} == {torch.bfloat16}
    assert model.get_input_embeddings()(IDS).dtype == torch.bfloat16


def test_projections_of_one_type_are_one_matrix_in_a_fused_step(tmp_path: Path) -> None:
    """Those of another type, as of values in Q4_K_M, stay their own."""
    pytest.importorskip("triton")
    for kind, layers in (("Q5_K", 2), ("Q4_K", 0)):
        write(tmp_path / "m.gguf", kind)
        model: Any = load(tmp_path / "m.gguf", dtype="float32", device="cpu").model
        before = {name: x.clone() for name, x in model.named_parameters()}
        with Session(model) as session:
            fusion = Fusion(session)
            assert fusion.summary.get("layers", 0) == layers
            parts = [getattr(model.model.layers[0].mlp, f"{name}_proj").codes for name in ("gate", "up")]
            assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
            fusion.close()
        assert all(x.is_contiguous() and torch.equal(x, before[name]) for name, x in model.named_parameters())


def test_fingerprints_tell_two_files_apart_and_layers_lie_in_dram(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q5_K")
    write(tmp_path / "n.gguf", "Q4_0")
    one, again, other = (load(tmp_path / f"{x}.gguf", dtype="float32", device="cpu").model for x in "mmn")
    assert weights_fingerprint(one) == weights_fingerprint(again) != weights_fingerprint(other)
    want = logits(one)
    with staged_weights(one) as staged:
        assert torch.equal(logits(one), want)
        assert staged.split.gpu_bytes >= 0
    assert torch.equal(logits(one), want)


def test_a_cpu_unpacks_them_where_memory_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path))
    numbers = write(tmp_path / "m.gguf", "Q4_K", "llama", tied=True)
    model = load(tmp_path / "m.gguf", dtype="float32", device="cpu").model
    assert not packed_modules(model)
    own = model.state_dict()
    assert all(torch.equal(own[name], x) for name, x in numbers.state_dict().items())
    assert packed_modules(load(tmp_path / "m.gguf", dtype="float32", device="cpu", on_host=True).model)
    need = bytes_of(model)
    monkeypatch.setattr("coattn.hf.load.memory", lambda: (need, need - 1))
    assert packed_modules(load(tmp_path / "m.gguf", dtype="float32", device="cpu").model)


def test_weights_of_a_type_that_is_not_packed_are_unpacked(tmp_path: Path) -> None:
    numbers = write(tmp_path / "m.gguf", "Q3_K")
    model = load(tmp_path / "m.gguf", dtype="float32", device="cpu").model
    assert not packed_modules(model)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, numbers(IDS).logits, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skip": "blk.1.attn_k.weight"}, "lack model.layers.1.self_attn.k_proj.weight"),
        ({"skip": "blk.0.ffn_norm.weight"}, "lack model.layers.0.post_attention_layernorm.weight"),
        ({"cut": "blk.1.ffn_up.weight"}, "wrong shape for model.layers.1.mlp.up_proj.weight"),
        ({"cut": "output_norm.weight"}, "wrong shape for model.norm.weight"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence(options: dict[str, str], said: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q6_K", **options)
    with pytest.raises(CoattnError) as caught:
        load(tmp_path / "m.gguf", dtype="float32", device="cpu")
    assert said in caught.value.sentence
    assert caught.value.hint


def test_a_type_that_nobody_knows_is_refused_by_its_tensor(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q8_0")
    raw = (tmp_path / "m.gguf").read_bytes()
    name = b"blk.0.attn_q.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8
    (tmp_path / "m.gguf").write_bytes(raw[:at] + (99).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight in GGUF's type 99"):
        load(tmp_path / "m.gguf", device="cpu")


def test_a_model_is_named_by_the_files_hash(source: tuple[Path, dict[str, np.ndarray]]) -> None:
    sha256 = hashlib.sha256(source[0].read_bytes()).hexdigest()
    loaded = load(str(source[0]), device="cpu", dtype="float32")
    assert (loaded.name, loaded.sha256, loaded.path) == (f"weights@{sha256[:12]}", sha256, source[0])
    assert loaded.tokenizer.model_max_length == loaded.positions


def test_words_are_split_as_the_file_says(source: tuple[Path, dict[str, np.ndarray]]) -> None:
    header = read_header(source[0])
    for pre, pieces in (("qwen2", ["1", "2"]), ("llama-bpe", ["<|im_start|>", "12"])):
        header["tokenizer.ggml.pre"] = pre
        header.pop("tokenizer.ggml.add_bos_token", None)
        made = read_tokenizer(header, source[0])
        assert made.convert_ids_to_tokens(made("12")["input_ids"]) == pieces


@pytest.mark.parametrize("tied", [False, True])
def test_plans_know_its_dimensions_and_bytes(tied: bool, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "Q4_K", "qwen3", tied)
    model = load(tmp_path / "m.gguf", device="cpu", dtype="bfloat16").model
    own, want = (read_shape("m", each) for each in (find_config(str(tmp_path / "m.gguf"))[1], model.config.to_dict()))
    changing = {"config": {}, "weight_bytes": 0, "active_weight_bytes": 0, "packed": True}
    assert own._replace(**changing) == want._replace(**changing)
    assert own.packed
    assert abs(own.weight_bytes / bytes_of(model) - 1) < 0.03
    assert abs(own.active_weight_bytes / weight_bytes(model) - 1) < 0.03
    said = coattn("doctor", "--model", str(tmp_path / "m.gguf"), "--json").stdout
    assert json.loads(said)["model"]["runs"] == "yes"
    assert "Q4_K, Q6_K, unpacked" in said or "Q4_K, Q6_K, kept packed" in said


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
        ("weights.gguf", whole[: len(whole) - 4096], "truncated"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelError, match=said):
            load(tmp_path / name, device="cpu")
    with pytest.raises(ModelError, match="There is no file"):
        load(str(tmp_path / "absent.gguf"))
