"""Of checkpoints that also take images, the language model runs as it does inside them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small import tokenizer
from tests.hf.test_table import SIZES, engine, greedy
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

import coattn
from coattn.errors import InputError
from coattn.hf.families import PLAIN, WRAPPERS, language_part
from coattn.hf.load import load

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14, "depth": 1, "embed_dim": 32, "num_heads": 2, "out_hidden_size": 64}


def wrapped(family: str, inner: str | None = None, seed: int = 0) -> PreTrainedModel:
    known: Any = AutoConfig.for_model(family)
    kind = inner or known.text_config.model_type
    text: Any = AutoConfig.for_model(kind)
    sizes = {key: value for key, value in SIZES.items() if hasattr(text, key) or key == "head_dim"}
    vision = {key: value for key, value in VISION.items() if hasattr(known.vision_config, key)}
    vision |= {"model_type": known.vision_config.model_type}
    if kind in PLAIN:  # channels of a head that are turned by the time, the height and the width of a token's place
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    parts = {"text_config": {**sizes, "model_type": kind}, "vision_config": vision}
    # Gemma scales its embeddings: a head that is tied to them would repeat the last token
    config = AutoConfig.for_model(family, **parts, **({"tie_word_embeddings": False} if family == "gemma3" else {}))
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.14)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.parametrize(("family", "inner"), [*((family, None) for family in WRAPPERS), ("mistral3", "ministral3")])
def test_the_language_model_inside_runs_alone(family: str, inner: str | None, tmp_path: Path) -> None:
    models = (wrapped(family, inner, seed) for seed in range(9))
    model = next(each for each in models if len({token for row in greedy(each) for token in row}) > 5)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    want = greedy(model)
    text = load(tmp_path, device="cpu", dtype="float32").model
    assert not any("vision" in name for name, _ in text.named_parameters())
    assert engine(text, "cpu") == want


def test_names_of_older_checkpoints_are_known(tmp_path: Path) -> None:
    model = wrapped("llava")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    older = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    named = {}
    for name, weight in load_file(path).items():
        start = next((start for start in older if name.startswith(start)), "")
        named[older.get(start, "") + name.removeprefix(start)] = weight
    assert "language_model.lm_head.weight" in named
    save_file(named, path, {"format": "pt"})
    with coattn.LLM(str(tmp_path), "full", device="cpu", dtype="float32", max_batch=1, max_length=64) as llm:
        image = {"role": "user", "content": [{"type": "image", "url": "x"}]}
        with pytest.raises(InputError, match="a part of type 'image', but only text"):
            llm.chat([image])
        assert not llm.generate([[5, 6, 7]])[0].error


def test_positions_of_images_are_left_out_of_a_config() -> None:
    """As checkpoints of Qwen2-VL have it: nothing inside, rotation in sections."""
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    config = {"model_type": "qwen2_vl", "hidden_size": 64, "rope_scaling": rope, "vision_config": {"depth": 1}}
    assert language_part(config) == {"model_type": "qwen2", "hidden_size": 64, "rope_scaling": {"type": "default"}}
    longer = {"rope_type": "yarn", "factor": 2.0, "mrope_section": [16, 24, 24]}
    inner = {"model_type": "qwen3_vl_text", "rope_parameters": longer}
    assert language_part({"text_config": inner})["rope_parameters"] == {"rope_type": "yarn", "factor": 2.0}
    assert language_part({"text_config": {"model_type": "llama"}}) == {"model_type": "llama"}
