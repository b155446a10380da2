"""Prompts for the small random model, whose answers have no meaning but are always the same."""

from __future__ import annotations

from tests.engine.small import small, tokenizer

from coattn.hf.load import Loaded
from coattn_lab.evaluate.tasks.prompts import Prompt, PromptFile


def loaded() -> Loaded:
    """The small random model."""
    return Loaded(small(), tokenizer(), "small", None)


def made(count: int = 4, length: int = 200, task: str = "vt", seed: int = 0) -> list[Prompt]:
    return [
        Prompt(
            f"ruler/{length}/{task}/{seed}/{i}",
            "ruler",
            task,
            length,
            f"abc def {i + 10 * seed} " * (8 if length <= 200 else 20),
            f"\nWhat is it? {i}",
            "A:",
            (chr(97 + i), "e"),
            "all",
            12,
        )
        for i in range(count)
    ]


def file_of(*prompts: Prompt) -> PromptFile:
    return PromptFile(tuple(prompts), {"command": "made by hand"}, "0" * 64)
