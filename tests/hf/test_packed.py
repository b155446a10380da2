"""Checkpoints in 4 and 8 bits: read without other packages, kept packed, right in every way to run a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small import by_transformers, greedy
from tests.hf.quantised_folders import SCHEMES, edit_config, write
from tests.hf.test_weights import logits, staged_weights

import coattn
from coattn.errors import CoattnError, UnsupportedError
from coattn.hf.architectures import describe_layers
from coattn.hf.experts import is_experts, weights_read
from coattn.hf.fingerprint import weights_fingerprint
from coattn.hf.forward import Session
from coattn.hf.fuse.fusion import Fusion
from coattn.hf.load import load
from coattn.hf.quantised.module import PackedExperts, PackedLinear
from coattn.hf.quantised.read import Checkpoint
from coattn.hf.stored import bytes_of

IDS = torch.randint(3, 160, (1, 30), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "mxfp4"])
def test_logits_are_those_of_the_numbers_that_the_files_mean(scheme: str, family: str, tmp_path: Path) -> None:
    numbers = write(tmp_path, scheme, family)
    model = load(tmp_path, dtype="float32", device="cpu").model
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 7 * model.config.num_hidden_layers
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, numbers(IDS).logits, rtol=2e-4, atol=2e-4)
    assert {shape.dtype for shape in describe_layers(model)} == {torch.float32}
    bits = 4 if packed[0].form in ("int4", "nf4") else 8
    assert sum(each.codes.nbytes for each in packed) == sum(x.in_features * x.out_features for x in packed) * bits // 8


MIXTURES = [
    ("mxfp4", "gpt_oss"),
    *(
        (scheme, "qwen3_moe")
        for scheme in ("awq", "gptq", "gptq v2", "int4 zeros", "int8 bytes", "fp8", "fp8 blocks", "fp8 rows")
    ),
    ("int8", "mixtral"),
    ("awq", "glm4_moe"),
]


@pytest.mark.parametrize(("scheme", "family"), MIXTURES)
def test_experts_stay_packed(scheme: str, family: str, tmp_path: Path) -> None:
    numbers = write(tmp_path, scheme, family)
    model = load(tmp_path, dtype="float32", device="cpu").model
    packed = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(packed) == sum(map(is_experts, numbers.modules())) > 0
    assert not any(map(is_experts, model.modules()))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, numbers(IDS).logits, rtol=5e-4, atol=5e-4)
    read, plain = weights_read(model), weights_read(numbers)
    assert read.share == plain.share
    bits = 4.5 if scheme == "mxfp4" else 5.5 if "4" in packed[0].first.form else 9.5
    assert read.of_experts <= plain.of_experts / 32 * bits + 8 * numbers.config.hidden_size * 300


@pytest.mark.parametrize(("scheme", "family"), [("mxfp4", "gpt_oss"), ("fp8 blocks", "qwen3_moe")])
def test_every_way_to_run_a_mixture_gives_the_same_tokens(scheme: str, family: str, tmp_path: Path) -> None:
    want = by_transformers(write(tmp_path, scheme, family), IDS[0].tolist(), 8)
    with coattn.LLM(str(tmp_path), "cpu", dtype="float32", device="cpu", max_length=64, block=8) as llm:
        (found,) = llm.generate(IDS[0].tolist(), greedy(8))
        assert found.token_ids == want
    model = load(tmp_path, dtype="float32", device="cpu").model
    with coattn.attach(model, "full", block=8), torch.no_grad():
        out = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert tuple(out[0, 30:].tolist()) == want


@pytest.mark.model
@pytest.mark.parametrize("scheme", ["awq", "gptq", "int4", "int8", "fp8 rows", "fp8 blocks", "nf4", "bnb int8"])
def test_a_trained_model_gives_the_logits_of_its_numbers(scheme: str, tmp_path: Path) -> None:
    """Its first layers."""
    trained: Any = load("smollm2", dtype="float32", device="cpu").model
    del trained.model.layers[3:]
    trained.config.num_hidden_layers = 3
    numbers = write(tmp_path, scheme, model=trained)
    model = load(tmp_path, dtype="float32", device="cpu").model
    ids = IDS[:, :8]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, numbers(ids).logits, rtol=1e-3, atol=2e-3)
    with coattn.attach(model, "full", block=8), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, numbers(ids).logits, rtol=1e-3, atol=2e-3)
    want = by_transformers(numbers, ids[0].tolist(), 3)
    with coattn.LLM((model, None), "cpu", max_length=64, block=8) as llm:
        assert llm.generate(ids[0].tolist(), greedy(3))[0].token_ids == want


EVERY_WAY = [
    "awq",
    "gptq",
    "gptq sorted",
    "int4 zeros",
    "int8",
    "int8 bytes",
    "fp8 rows",
    "fp8 blocks",
    "nf4",
    "bnb int8",
]


@pytest.mark.parametrize("scheme", EVERY_WAY)
def test_every_way_to_run_a_model_gives_the_same_tokens(scheme: str, tmp_path: Path) -> None:
    want = by_transformers(write(tmp_path, scheme), IDS[0].tolist(), 8)
    with coattn.LLM(str(tmp_path), "cpu", dtype="float32", device="cpu", max_length=64, block=8) as llm:
        (found,) = llm.generate(IDS[0].tolist(), greedy(8))
        assert found.token_ids == want
        assert llm.report()["exact"]
    model = load(tmp_path, dtype="float32", device="cpu").model
    for way in ("attach", "cache"):
        with coattn.attach(model, "full", block=8) if way == "attach" else coattn.Cache(model, "full") as running:
            options = {} if way == "attach" else {"past_key_values": running}
            with torch.no_grad():
                out = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0, **options)
        assert tuple(out[0, 30:].tolist()) == want


def test_the_kv_is_of_the_activations_dtype_and_weights_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, "fp8 blocks")
    model = load(tmp_path, dtype="bfloat16", device="cpu").model
    assert {shape.dtype for shape in describe_layers(model)} == {torch.bfloat16}
    assert {module.codes.dtype for module in model.modules() if isinstance(module, PackedLinear)} == {torch.uint8}
    assert model.model.norm.weight.dtype == torch.bfloat16


def test_fingerprints_tell_two_quantisations_apart(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    first, again = (load(tmp_path, dtype="float32", device="cpu").model for _ in range(2))
    change(tmp_path, lambda tensors: tensors["model.layers.1.mlp.up_proj.qweight"][3].bitwise_xor_(1))
    other = load(tmp_path, dtype="float32", device="cpu").model
    assert weights_fingerprint(first) == weights_fingerprint(again) != weights_fingerprint(other)


def test_packed_layers_lie_in_dram_and_come_in_turns(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    model = load(tmp_path, dtype="float32", device="cpu").model
    want = logits(model)
    with staged_weights(model) as staged:
        assert torch.equal(logits(model), want)
        assert 0 < staged.split.host_bytes < bytes_of(model)
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize(("scheme", "layers"), [("awq", 3), ("fp8 blocks", 3), ("gptq sorted", 0)])
def test_packed_projections_are_one_matrix_in_a_fused_step(scheme: str, layers: int, tmp_path: Path) -> None:
    """But where each sorts its columns in its own way."""
    pytest.importorskip("triton")
    write(tmp_path, scheme)
    model: Any = load(tmp_path, dtype="float32", device="cpu").model
    before = {name: x.clone() for name, x in model.named_parameters()}
    with Session(model) as session:
        fusion = Fusion(session)
        assert fusion.summary.get("layers", 0) == layers
        parts = [getattr(model.model.layers[0].self_attn, f"{name}_proj").codes for name in "qkv"]
        assert (len({part.untyped_storage().data_ptr() for part in parts}) == 1) == bool(layers)
        fusion.close()
    assert all(x.is_contiguous() and torch.equal(x, before[name]) for name, x in model.named_parameters())


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


Q = "model.layers.0.self_attn.q_proj."
BROKEN: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "lack model.layers.0.self_attn.q_proj.scales.": ("awq", lambda t: t.pop(Q + "scales")),
    "lack model.layers.0.self_attn.q_proj.qzeros.": ("gptq", lambda t: t.pop(Q + "qzeros")),
    "lack model.layers.0.self_attn.q_proj.weight_packed.": ("int4", lambda t: t.pop(Q + "weight_packed")),
    "lack model.layers.0.self_attn.q_proj.weight_scale_inv.": ("fp8", lambda t: t.pop(Q + "weight_scale_inv")),
    "lack model.norm.weight": ("fp8 rows", lambda t: t.pop("model.norm.weight")),
    "wrong shape for model.layers.0.self_attn.q_proj.qweight": ("awq", lambda t: cut(t, Q + "qweight")),
    "wrong shape for model.layers.0.self_attn.q_proj.qzeros": ("gptq", lambda t: cut(t, Q + "qzeros")),
    "wrong shape for model.layers.0.self_attn.q_proj.weight_packed": ("int8", lambda t: cut(t, Q + "weight_packed")),
    "wrong shape for model.layers.0.self_attn.q_proj.weight.": ("int8 bytes", lambda t: cut(t, Q + "weight")),
    "wrong shape for model.layers.0.self_attn.q_proj.weight_scale_inv": (
        "fp8 blocks",
        lambda t: cut(t, Q + "weight_scale_inv"),
    ),
    "lack model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4.": (
        "nf4",
        lambda t: t.pop(Q + "weight.quant_state.bitsandbytes__nf4"),
    ),
    "wrong shape for model.layers.0.self_attn.q_proj.weight.absmax": ("nf4", lambda t: cut(t, Q + "weight.absmax")),
    "wrong shape for model.layers.0.self_attn.q_proj.weight.nested_absmax": (
        "nf4",
        lambda t: t.pop(Q + "weight.nested_quant_map"),
    ),
    "wrong shape for model.layers.0.self_attn.q_proj.weight.quant_map": (
        "nf4 plain",
        lambda t: t[Q + "weight.quant_map"].zero_(),
    ),
    "wrong shape for model.layers.0.self_attn.q_proj.SCB": ("bnb int8", lambda t: cut(t, Q + "SCB")),
    "wrong shape for model.layers.0.self_attn.q_proj.g_idx": ("gptq sorted", lambda t: t[Q + "g_idx"].zero_()),
}


E = "model.layers.1.mlp.experts."
BROKEN_MIXTURES: dict[str, tuple[str, str, Callable[[dict[str, Any]], object]]] = {
    "lack model.layers.1.mlp.experts.down_proj_scales.": ("mxfp4", "gpt_oss", lambda t: t.pop(E + "down_proj_scales")),
    "lack model.layers.1.mlp.experts.gate_up_proj_bias": ("mxfp4", "gpt_oss", lambda t: t.pop(E + "gate_up_proj_bias")),
    "wrong shape for model.layers.1.mlp.experts.gate_up_proj_blocks": (
        "mxfp4",
        "gpt_oss",
        lambda t: [cut(t, E + f"gate_up_proj_{end}") for end in ("blocks", "scales")],
    ),
    "lack model.layers.1.mlp.experts.6.up_proj.scales": ("gptq", "qwen3_moe", lambda t: t.pop(E + "6.up_proj.scales")),
    "lack model.layers.1.mlp.experts.3.down_proj.weight": (
        "fp8 blocks",
        "qwen3_moe",
        lambda t: [t.pop(E + f"3.down_proj.{end}") for end in ("weight", "weight_scale_inv")],
    ),
    "wrong shape for model.layers.1.mlp.experts.5.gate_proj.weight_scale_inv": (
        "fp8 blocks",
        "qwen3_moe",
        lambda t: cut(t, E + "5.gate_proj.weight_scale_inv"),
    ),
}


@pytest.mark.parametrize("said", BROKEN_MIXTURES)
def test_a_broken_mixture_is_one_sentence(said: str, tmp_path: Path) -> None:
    scheme, family, edit = BROKEN_MIXTURES[said]
    write(tmp_path, scheme, family)
    change(tmp_path, edit)
    with pytest.raises(CoattnError) as caught:
        load(tmp_path, dtype="float32", device="cpu")
    assert said in caught.value.sentence


def test_experts_with_sorted_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "gptq sorted", "qwen3_moe")
    with pytest.raises(UnsupportedError, match="desc_act"):
        load(tmp_path, dtype="float32", device="cpu")


def cut(tensors: dict[str, Any], name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders whose weights were read."""
    found: list[Path] = []
    fill = Checkpoint.fill

    def spy(self: Checkpoint, device: torch.device) -> Any:
        found.append(self.folder)
        return fill(self, device)

    monkeypatch.setattr(Checkpoint, "fill", spy)
    return found


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_file_is_one_sentence(said: str, tmp_path: Path, filled: list[Path]) -> None:
    """Before a weight is read, where shapes tell."""
    scheme, edit = BROKEN[said]
    write(tmp_path, scheme)
    change(tmp_path, edit)
    with pytest.raises(CoattnError) as caught:
        load(tmp_path, dtype="float32", device="cpu")
    assert said in caught.value.sentence
    assert caught.value.hint
    assert bool(filled) == said.endswith(("quant_map", "g_idx"))


@pytest.mark.parametrize(("scheme", "family"), [*((scheme, "llama") for scheme in EVERY_WAY), ("mxfp4", "gpt_oss")])
@pytest.mark.parametrize("broken", ["cut off", "no header"])
def test_a_damaged_file_is_one_sentence(
    scheme: str, family: str, broken: str, tmp_path: Path, filled: list[Path]
) -> None:
    write(tmp_path, scheme, family)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-64] if broken == "cut off" else b"\xff" * 8 + raw[8:])
    with pytest.raises(CoattnError) as caught:
        load(tmp_path, dtype="float32", device="cpu")
    assert "\n" not in caught.value.sentence
    assert caught.value.hint
    assert not filled


UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "'awq' with 4 bits in version 'gemv'": ("awq", {"version": "gemv"}),
    "'gptq' with 3 bits": ("gptq", {"bits": 3}),
    "'gptq' with 4 bits in format 'marlin'": ("gptq", {"checkpoint_format": "marlin"}),
    "'bitsandbytes' with 4 bits of type 'fp4'": ("nf4", {"bnb_4bit_quant_type": "fp4"}),
    "with format 'nvfp4-pack-quantized'": ("int4", {"format": "nvfp4-pack-quantized"}),
    "with a transform_config": ("int4", {"transform_config": {"config_groups": {"R1": {}}}}),
    "with a sparsity_config": ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}),
    "quantised by 'exl3', which coattn does not load": ("awq", {"quant_method": "exl3"}),
}


@pytest.mark.parametrize("said", UNKNOWN)
def test_what_is_not_understood_is_refused_by_its_name(said: str, tmp_path: Path) -> None:
    scheme, changes = UNKNOWN[said]
    write(tmp_path, scheme)
    edit_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").unlink()  # it is refused before weights are looked at
    with pytest.raises(UnsupportedError, match="quantised by") as caught:
        load(tmp_path, dtype="float32", device="cpu")
    assert said in caught.value.sentence
