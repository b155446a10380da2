"""The commands, as a user sees them: on the embedded model."""

import json
from pathlib import Path
from unittest import mock

import pytest
from tests.cli.run import coattn
from tests.loaded_once import loaded_once

from coattn.hf.models import resolve
from coattn.method.table import METHODS
from coattn.parts.method import AXES

__all__ = ["loaded_once"]
pytestmark = [pytest.mark.model, pytest.mark.usefixtures("loaded_once")]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return Path(resolve("smollm2"))


def run_json(*arguments: str) -> dict:  # type: ignore[type-arg]
    done = coattn(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # one object and nothing else, or this fails


def test_doctor() -> None:
    found = run_json("doctor")
    assert found["machine"]["cores"] >= 1
    assert {row["part"] for row in found["uses"]} >= {"GPU tier", "numbers", "CPU attention"}
    assert all(row["reason"] for row in found["uses"])
    assert "CPU attention" in coattn("doctor").stdout


def test_doctor_of_a_model(tmp_path: Path) -> None:
    found = run_json("doctor", "--model", "google/gemma-2-9b-it")
    dtype = next(use["choice"] for use in found["uses"] if use["part"] == "numbers")
    assert found["model"] == {
        "name": "google/gemma-2-9b-it",
        "family": "gemma2",
        "runs": "yes",
        "layers": 42,
        "q_heads": 16,
        "kv_heads": 8,
        "head_dim": 256,
        "positions": 8192,
        "kv_bytes_per_token": 2 * 8 * 256 * 42 * (4 if dtype == "float32" else 2),
    }
    rows = {use["part"]: use["choice"] for use in found["uses"][-3:]}
    assert rows.keys() == {"21 layers over the last 4,096 tokens", "21 layers over all tokens", "queries a layer ahead"}
    assert set(rows.values()) in ({"Triton, captured", "predicted"}, {"C++ kernels, layer by layer", "predicted"})
    sinks = {"model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(sinks))
    found = run_json("doctor", "--model", str(tmp_path))
    assert "64 query heads on 8, each of 64 numbers and a sink" in [use["reason"] for use in found["uses"]]
    (tmp_path / "config.json").write_text(json.dumps({**sinks, "quantization_config": {"quant_method": "nvfp4"}}))
    found = run_json("doctor", "--model", str(tmp_path))
    assert (found["model"]["family"], found["model"]["runs"]) == ("gpt_oss", "no")
    assert "quantised by 'nvfp4'" in found["model"]["reason"]
    first = coattn("doctor", "--model", str(tmp_path)).stdout.splitlines()[0]
    assert first.startswith(f"{tmp_path.name} does not run: The weights are quantised by 'nvfp4'")
    odd = {"model_type": "llama", "hidden_size": 36, "num_attention_heads": 3, "num_hidden_layers": 1, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    step = run_json("doctor", "--model", str(tmp_path))["uses"][-2]
    assert step["choice"][:6] == "Triton" or step["reason"] == "head size 12 is not a multiple of 8"
    packed = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**odd, "quantization_config": packed}))
    row = run_json("doctor", "--model", str(tmp_path))["uses"][-2]
    assert row["choice"] == "fp8, kept packed"
    assert row["reason"].startswith("fp8, a scale for blocks 128 x 128; ")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "Layer 0 of family 'bert' attends" in run_json("doctor", "--model", str(tmp_path))["model"]["reason"]


def test_what_a_config_does_not_say_is_its_familys_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    found = run_json("doctor", "--model", str(tmp_path))
    assert [found["model"][key] for key in ("runs", "layers", "q_heads", "positions")] == ["yes", 3, 12, 1024]
    assert "does not say hidden_size, num_attention_heads, vocab_size: Transformers' defaults" in caplog.text
    assert found["uses"][-1]["choice"] == "not predicted"


def test_methods_lists_every_row_with_its_parts() -> None:
    rows = run_json("methods")["methods"]
    assert [row["name"] for row in rows] == list(METHODS)
    for row in rows:
        assert [part["axis"] for part in row["parts"]] == list(AXES)
        assert all(part["does"] for part in row["parts"])
        assert all(param["help"] for param in row["params"].values()), row["name"]
    assert run_json("methods", "streaming")["paper"].startswith("Xiao")
    assert "recent" in coattn("methods", "streaming").stdout


def test_methods_at_80_columns_shows_every_name_whole() -> None:
    with mock.patch("coattn.cli.output.out._width", 80):
        shown = coattn("methods").stdout
    first = [line.split("│")[1].strip() for line in shown.splitlines() if line[:1] == "│"]
    assert [name for name in first if name] == list(METHODS)
    assert max(map(len, shown.splitlines())) <= 80


def test_models(smollm2: Path) -> None:
    assert run_json("models")["models"][0]["state"] == "ready"
    again = run_json("models", "get", "smollm2")
    assert again["path"] == str(smollm2)
    assert again["seconds"] < 2


def test_generate(smollm2: Path) -> None:
    prompt = "The capital of France is"
    options = ["--raw", "--max-new-tokens", "8", "--dtype", "float32"]
    full = run_json("generate", prompt, *options)
    for method in ("offload", "cpu"):
        own = run_json("generate", prompt, *options, "--fidelity", "--method", method)
        assert own["text"] == full["text"]
        assert "Paris" in own["text"]
        assert own["fidelity"]["top1"] == 1.0
        assert own["fidelity"]["kl"] < 1e-6
        assert own["host_kv_peak"] == 0, "twelve tokens do not fill a block"
        assert own["new_tokens"] == 8


def test_generate_on_two_devices() -> None:
    options = ("--raw", "--dtype", "float32", "--max-new-tokens", "4")
    one = run_json("generate", "Once upon a time", *options)
    two = run_json("generate", "Once upon a time", *options, "--devices", "cpu:0,cpu:1", "--gpu-kv", "64MiB,64MiB")
    assert one["text"] == two["text"]
    assert [row["device"] for row in two["devices"]] == ["cpu:0", "cpu:1"]


def test_generate_streams_to_stdout_and_reports_on_stderr(smollm2: Path) -> None:
    done = coattn("generate", "--max-new-tokens", "2", stdin="Say hello.")
    assert done.returncode == 0, done.stderr
    assert "The answer was cut off: it reached --max-new-tokens 2." in done.stderr
    done = coattn("generate", "--max-new-tokens", "40", stdin="Say hello.")
    assert done.returncode == 0, done.stderr
    assert "cut off" not in done.stderr
    assert len(done.stdout.strip()) > 3
    assert "tokens/s" in done.stderr
    assert "KV at most" in done.stderr


def test_demo(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a rough codebook is made soon: what hcattention answers by it is not looked at
    monkeypatch.setattr("coattn.kernels.quantise.kmeans.SETTLED", 0.5)
    result = run_json("demo", "--tokens", "1500", "--max-new-tokens", "16", "--out", str(tmp_path / "demo"))
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["full", "offload", "cpu", "hgca", "scout", "hcattention", "streaming"]
    for name in ("full", "offload", "cpu"):
        assert rows[name]["found"], rows[name]["answer"]
        assert rows[name]["answer"] == rows["full"]["answer"]
    assert not rows["streaming"]["found"]
    assert rows["streaming"]["fact_kept"] == 0
    for name in ("offload", "cpu", "hgca", "scout", "hcattention", "streaming"):
        assert rows[name]["gpu_kv"] <= result["gpu_cap"] < rows["full"]["gpu_kv"]
    assert json.loads((tmp_path / "demo" / "demo.json").read_text()) == result
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000
