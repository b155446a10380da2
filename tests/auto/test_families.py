"""`auto` on models of which some layers attend to a window alone, and have no sketches."""

import pytest
from tests.engine.small import DEVICE, greedy, prompt
from tests.hf.families import tiny

import coattn


def answer(family: str, method: str, **more: object) -> tuple[tuple[int, ...], dict[str, object]]:
    given = {"max_batch": 2, "max_length": 256, "block": 8, **more}
    with coattn.LLM((tiny(family, DEVICE), None), method, **given) as engine:  # type: ignore[arg-type]
        found = engine.generate([x % 100 for x in prompt(200)], greedy(12, ignore_eos=True))[0].token_ids
        return tuple(found), engine.report()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral_sliding", "gpt_oss"])
def test_exactly_all_is_what_full_says(family: str) -> None:
    want, _ = answer(family, "full")
    got, _ = answer(family, "auto", quality=1.0)
    assert got == want


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_layers_beside_windows_are_attended_to_a_quality(family: str) -> None:
    _, said = answer(family, "auto", quality=0.9, window_blocks=1, pool_share=0.1)
    assert said["audit"]["audits"] > 0  # type: ignore[index]
