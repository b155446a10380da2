"""Models and cards by name."""

import json
from pathlib import Path

import pytest

from coattn.errors import ConfigError, ModelError, UnsupportedError
from coattn.tools.plan.known import find_card, find_config

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("rtx4090", "NVIDIA GeForce RTX 4090", 24), ("RTX 4090", "NVIDIA GeForce RTX 4090", 24),
        ("NVIDIA H200", "NVIDIA H200", 141), ("4090", "NVIDIA GeForce RTX 4090", 24),
        ("2xrtx3090", "2 x NVIDIA GeForce RTX 3090", 48), ("24GiB", "a GPU with 24 GiB", 24),
        ("24", "a GPU with 24 GiB", 24), ("24GB", "a GPU with 24 GiB", 24), ("2x24 gb", "2 x a GPU with 24 GiB", 48),
    ],
)  # fmt: skip
def test_cards_as_people_write_them(text: str, name: str, gib: int) -> None:
    found = find_card(text)
    assert (found.name, found.memory) == (name, gib * GIB)


def test_an_unknown_card_is_refused_with_a_near_one() -> None:
    with pytest.raises(ConfigError, match="no card 'rtx4091'") as refused:
        find_card("rtx4091")
    assert "Did you mean rtx4090?" in refused.value.hint


def test_a_card_without_bfloat16_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.0 or newer, and the NVIDIA Tesla T4 has 7\.5"):
        find_card("Tesla T4")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "qwen3-32b", "Qwen3-32B"])
def test_models_by_a_part_of_their_name(name: str) -> None:
    assert find_config(name)[0] == "Qwen/Qwen3-32B"


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for given in (tmp_path, tmp_path / "config.json"):
        assert find_config(str(given)) == (tmp_path.name, {"model_type": "llama"})


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "a" * 300, "a\0b", ""])
def test_a_folder_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="There is no folder" if name else "has no config"):
        find_config(name)


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ModelError, match=r"is neither a GGUF file nor a config\.json"):
        find_config(str(tmp_path / "model.safetensors"))


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(ModelError, match="no model of that name is known") as refused:
        find_config("Qwen3-9B")
    assert "Did you mean Qwen/Qwen3-8B?" in refused.value.hint
