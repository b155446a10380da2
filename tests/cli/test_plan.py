"""`coattn plan`: a table, a recommendation, and what is refused, from config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.run import coattn
from tests.hf.families import tiny

from coattn.tools.plan.estimate import METHODS
from tests.cli.test_bad_input import assert_refused

CARD = ("--gpu", "rtx4090", "--dram", "64GiB")


GEMMA_3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96},
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "hidden_size": 48},
}
"""A model of texts and images around one of texts: its config says nothing of attention, what it wraps does."""


def planned(*arguments: str) -> dict[str, Any]:
    done = coattn("plan", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_table_of_all_methods_and_one_recommendation() -> None:
    done = coattn("plan", "Llama-3.1-8B-Instruct", *CARD, "--context", "100k")
    assert done.returncode == 0, done.stderr
    for word in (*METHODS, "no (GPU)", "near exact", "100,000 tokens", "first token"):
        assert word in done.stdout
    assert "Take auto: the KV cache does not fit in GPU memory" in done.stdout
    assert "coattn serve --model Llama-3.1-8B-Instruct --method auto --gpu-kv" in done.stdout


def test_what_fits_is_kept_on_the_gpu() -> None:
    found = planned("Llama-3.1-8B-Instruct", *CARD, "--context", "8k")
    assert found["recommended"] == "full"
    assert [row["method"] for row in found["methods"]] == list(METHODS)


def test_weights_that_do_not_fit_come_from_dram() -> None:
    found = planned("Qwen3-32B", *CARD)
    assert not any(row["fits"] for row in found["methods"])
    assert "--weights-on-gpu 0." in found["command"]
    assert "--weights int4 plans" in found["recommendation"]


def test_a_method_with_a_part_of_the_weights_in_dram_beats_a_slower_one_without() -> None:
    found = planned("Llama-3.1-8B-Instruct", "--gpu", "18", "--dram", "64GiB", "--context", "100k")
    assert {row["method"]: row["fits"] for row in found["methods"]}["cpu"]
    assert found["recommended"] == "auto"
    assert "--weights-on-gpu 0." in found["command"]


def test_a_known_model_in_4_bits() -> None:
    whole, packed = planned("Qwen3-32B", *CARD), planned("Qwen3-32B", *CARD, "--weights", "int4")
    assert packed["weight_bytes"] < 0.32 * whole["weight_bytes"]
    assert packed["command"].startswith("coattn serve --model FOLDER --method auto")
    assert "--weights-on-gpu" not in packed["command"]
    done = coattn("plan", "Qwen2.5-32B-Instruct-AWQ", *CARD, "--weights", "int4")
    assert_refused(done, "quantised already", "Leave --weights out")


def test_several_cards_hold_more() -> None:
    one, two = (planned("Qwen3-14B", "--gpu", gpu, "--dram", "64", "--context", "30k") for gpu in ("24", "2x24"))
    assert one["recommended"] != "full"
    assert two["recommended"] == "full"


def test_without_a_gpu_it_is_said_which_card_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn.cli.plan._own_gpu", lambda: None)
    assert planned("Qwen3-8B")["gpu"]["name"] == "NVIDIA GeForce RTX 4090, since there is no GPU here"
    monkeypatch.setattr("coattn.cli.plan._own_gpu", lambda: "NVIDIA A10")
    assert planned("Qwen3-8B")["gpu"]["name"] == "NVIDIA A10"


def test_a_machine_that_is_too_small_is_told_what_is_needed() -> None:
    found = planned("Llama-3.3-70B-Instruct", "--gpu", "8", "--dram", "16")
    assert found["recommended"] is None
    assert found["recommendation"] == "Nothing fits. Any one of these would: --gpu b200 (180 GiB)."
    found = planned("Qwen3-32B", *CARD, "--batch", "32")
    would = found["recommendation"].partition("would: ")[2].rstrip(".").split("; ")
    assert len(would) == 2
    for way in would:
        assert planned("Qwen3-32B", *CARD, "--batch", "32", *way.split())["recommended"]


def test_of_one_method_it_is_said_whether_it_fits_and_what_does() -> None:
    found = planned("Llama-3.1-8B-Instruct", *CARD, "--context", "100k", "--method", "scout", "--set", "budget=1024")
    assert found["recommendation"] == "scout fits."
    assert found["command"].endswith("--max-batch 1 --set budget=1024")
    found = planned("Llama-3.1-8B-Instruct", *CARD, "--context", "100k", "--method", "full")
    assert found["recommendation"].startswith("full does not fit. Take auto: ")


@pytest.mark.parametrize("method", METHODS[3:])
def test_one_method_has_the_bytes_of_the_table(method: str) -> None:
    wanted = ("Llama-3.1-8B-Instruct", *CARD, "--context", "100k")
    table = {row["method"]: row["kv"] for row in planned(*wanted)["methods"]}
    assert planned(*wanted, "--method", method)["methods"][0]["kv"] == pytest.approx(table[method], rel=0.01)


def test_positions_are_said_in_the_first_line() -> None:
    done = coattn("plan", "Qwen3-8B", *CARD, "--context", "200k")
    assert done.stdout.startswith("Too long: Qwen/Qwen3-8B has 40,960 positions, and 200,000 tokens are more.")
    assert "At 40,960 tokens: Take full: " in done.stdout
    assert "--max-length 40960" in done.stdout


def test_what_yarn_needs_is_said_word_for_word(tmp_path: Path) -> None:
    config = json.loads(json.dumps(AWQ)) | {"max_position_embeddings": 40960, "num_key_value_heads": 2}
    done = coattn("plan", with_config(tmp_path, config), *CARD, "--context", "128k")
    assert '"max_position_embeddings": 163840 and "rope_scaling": {"rope_type": "yarn", "factor": 4.0,' in done.stdout
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    done = coattn("plan", with_config(tmp_path, config), *CARD, "--context", "128k")
    assert 'set "max_position_embeddings": 131072 in its config.json' in done.stdout.replace("\n", " ")
    config["max_position_embeddings"] = 131072
    assert "Too long" not in coattn("plan", with_config(tmp_path, config), *CARD, "--context", "128k").stdout


def test_one_row_with_settings_is_counted_by_the_cache() -> None:
    shares = {}
    for groups in ("32", "64"):
        own = ("--context", "100000", "--method", "hcattention", "--set", f"groups={groups}")
        (row,) = planned("Llama-3.1-8B-Instruct", *CARD, *own)["methods"]
        shares[groups] = row["kv"] / (100_000 * 131072)
        assert row["step_s"] is None
    staging = 2 / 32  # of one layer of 32, twice
    assert shares["32"] == pytest.approx(0.125 + staging, rel=0.02)
    assert shares["64"] == pytest.approx(0.25 + staging, rel=0.02)
    assert_refused(coattn("plan", "smollm2", "--set", "groups=1"), "--set is given without --method")


def test_a_folder_needs_its_config_alone(tmp_path: Path) -> None:
    tiny("llama").config.save_pretrained(tmp_path)
    found = planned(str(tmp_path), *CARD, "--context", "256", "--dtype", "float32")
    config = tiny("llama").config
    heads = config.num_hidden_layers * config.num_key_value_heads
    assert found["methods"][0]["kv"] == 256 * 2 * heads * config.head_dim * 4
    assert_refused(coattn("plan", str(tmp_path / "nowhere")), "There is no folder")
    assert_refused(coattn("plan"), "There is no model to plan for")


@pytest.mark.parametrize("command", [["plan"], ["doctor", "--model"]], ids=["plan", "doctor"])
def test_a_type_that_nobody_knows_is_refused_with_the_same_words(command: list[str], tmp_path: Path) -> None:
    config = json.loads(json.dumps(AWQ)) | {"model_type": "nobodys"}
    done = coattn(*command, with_config(tmp_path, config))
    said = (done.stderr + done.stdout).splitlines()[0]
    assert "This version of Transformers does not know the model type of" in said


def with_config(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


AWQ = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 160,
    "num_attention_heads": 4, "quantization_config": {"quant_method": "awq", "bits": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**GEMMA_3, "model_type": "qwen3_vl_moe"}, ("family 'qwen3_vl_moe' hold a language model ('gemma3_text')",)),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "nvfp4"}}, ("quantised by 'nvfp4'",)),
        ({**AWQ, "kv_lora_rank": 8}, ("family 'qwen2' compress keys", "docs/families.md lists")),
        ({**AWQ, "quantization_config": {"quant_method": "exl3"}}, ("quantised by 'exl3'", "bfloat16")),
        ({"model_type": "qwen2", "num_attention_heads": 0}, ("lacks a model's dimensions", "config.json")),
        ({"model_type": "nobodys"}, ("does not know the model type of", "Upgrade transformers")),
    ],
    ids=["qwen3_vl_moe", "gpt_oss", "mla", "exl3", "broken", "unknown"],
)
def test_what_does_not_run_is_refused_by_its_config(
    config: dict[str, object], said: tuple[str, ...], tmp_path: Path
) -> None:
    assert_refused(coattn("plan", with_config(tmp_path, config), *CARD), *said)


def test_a_known_model_that_does_not_run() -> None:
    assert_refused(coattn("plan", "deepseek-ai/DeepSeek-V3", *CARD), "compress keys and values (MLA)")


def test_experts_in_4_bits_are_planned_with_their_bytes() -> None:
    """gpt-oss-20b as released: 13.8 GB of files, of which all but the experts are in bfloat16."""
    assert planned("openai/gpt-oss-20b", *CARD)["weight_bytes"] == pytest.approx(13.8e9, rel=0.02)


def test_weights_in_4_bits_are_planned_with_their_bytes(tmp_path: Path) -> None:
    found = planned("Qwen2.5-32B-Instruct-AWQ", *CARD)
    table = 2 * 152064 * 5120 * 2
    assert found["weight_bytes"] - table == pytest.approx(31e9 * (4 + 24 / 128) / 8, rel=0.02)


def test_names_are_listed() -> None:
    done = coattn("plan", "--list")
    assert "Qwen/Qwen3-8B" in done.stdout
    assert "rtx4090" in done.stdout
