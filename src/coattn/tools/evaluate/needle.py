"""A needle in a haystack: depth x length, found or not (Kamradt, 2023)."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import InputError
from coattn.hf.architectures import describe_layers
from coattn.hf.load import Loaded
from coattn.method.row import Composed
from coattn.tools.evaluate.haystack import Haystack, frame

NEW_TOKENS = 24
BEFORE = "There is a pass key of the house hidden in this text. Find it and remember it.\n\n"
NEEDLE = "The pass key of the house is {key}. Remember it. {key} is the pass key of the house."
QUESTION = "\n\nWhat is the pass key of the house? Answer with the number."
"""The pass key task of Mohtashami and Jaggi, Landmark Attention, 2023. It is a house's: in texts about programs, small
models take a mere pass key for something of the language."""


class Cell(NamedTuple):
    """One place of the grid. depth: 0 is the beginning of the haystack, 1 its end."""

    length: int
    depth: float
    key: str


class Answer(NamedTuple):
    """What the model wrote, and what its engine reports so far."""

    cell: Cell
    text: str
    report: Mapping[str, Any]


def draw_key(length: int, depth: float, seed: int) -> str:
    """A number of five digits; the first is not zero."""
    return str(random.Random(f"{seed} {length} {depth:.4f}").randrange(10_000, 100_000))


def grid(lengths: Sequence[int], depths: int, seed: int = 0) -> list[Cell]:
    """Every cell, its key drawn from the seed, the length and the depth alone."""
    steps = [i / (depths - 1) for i in range(depths)] if depths > 1 else [0.5]
    return [Cell(length, depth, draw_key(length, depth, seed)) for length in dict.fromkeys(lengths) for depth in steps]


def prompt(cell: Cell, haystack: Haystack) -> list[int]:
    """Ids `[cell.length]`, chat template and question included."""
    first, last = frame(haystack.tokenizer, BEFORE, QUESTION)
    room = cell.length - len(first) - len(last)
    if room <= 0:
        raise InputError(
            f"{cell.length:,} tokens are too few for the question alone.",
            f"Give --lengths of {2 * len(first + last)} or more.",
        )
    return first + haystack.fill(room, cell.depth, f"\n\n{NEEDLE.format(key=cell.key)}\n\n") + last


def ask(
    loaded: Loaded,
    composed: Composed,
    prompts: Mapping[Cell, list[int]],
    *,
    gpu_kv: str | None,
    gpu_share: float | None,
    host_kv: str | None,
    batch: int,
    chunk: int | None,
) -> Iterator[Answer]:
    """Answers, `batch` prompts at a time. Raises the error of a prompt that fails: a grid with holes would look like a
    worse method.

    Prompts of one length share an engine: what depends on the longest sequence depends on the prompt's own length.
    gpu_share: instead of gpu_kv, GPU memory as a share of the KV of each prompt. chunk: tokens read per step; None:
    whole prompts, so that prefill is dense and exact under every method.
    """
    token_bytes = sum(layer.token_bytes for layer in describe_layers(loaded.model))
    for length in sorted({cell.length for cell in prompts}):
        cells = [cell for cell in prompts if cell.length == length]
        most, seqs = length + NEW_TOKENS, min(batch, len(cells))
        with LLM(
            loaded,
            composed.method,
            gpu_kv=gpu_kv if gpu_share is None else int(gpu_share * most * seqs * token_bytes),
            host_kv=host_kv,
            max_batch=seqs,
            max_length=most,
            chunk=chunk or most,
            **composed.params,
        ) as llm:
            for start in range(0, len(cells), seqs):
                asked = cells[start : start + seqs]
                outputs = llm.generate([prompts[cell] for cell in asked], SamplingParams(max_new_tokens=NEW_TOKENS))
                for cell, output in zip(asked, outputs, strict=True):
                    if output.error is not None:
                        raise output.error
                    yield Answer(cell, output.text, llm.report())


def judge(cell: Cell, answer: str) -> dict[str, Any]:
    """A finished cell as JSON has it: found when the key appears in the answer."""
    return {**cell._asdict(), "answer": answer.strip(), "found": cell.key in answer}


def summarise(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many were found, in all and for each length."""
    by_length = []
    for length in sorted({cell["length"] for cell in cells}):
        own = [cell["found"] for cell in cells if cell["length"] == length]
        by_length.append({"length": length, "found": sum(own), "total": len(own)})
    return {"found": sum(cell["found"] for cell in cells), "total": len(cells), "by_length": by_length}
