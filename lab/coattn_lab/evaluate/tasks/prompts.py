"""Prompts in a file: made on one machine, run on another. JSONL, one prompt a line after a line about all of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn.tools.evaluate.haystack import PLACE
from coattn_lab.evaluate.tasks.rules import RAW, RULES

FORMAT = 1
HOW = "Make it with `coattn-lab eval tasks make`."


@dataclass(frozen=True)
class Prompt:
    """name: unique in a file. length: tokens that were aimed at, answer included; prompts of one length run together.

    context: what is read. question: follows it; read with it, or fed under the method. prefix: how the answer begins.
    """

    name: str
    benchmark: str
    task: str
    length: int
    context: str
    question: str
    prefix: str
    outputs: tuple[str, ...]
    rule: str
    new_tokens: int


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, what it says about them, and the SHA-256 of its contents, unpacked."""

    prompts: tuple[Prompt, ...]
    about: dict[str, Any]
    sha256: str


def write_prompts(path: Path, prompts: Iterable[Prompt], about: dict[str, Any]) -> str:
    """Writes a file, packed if its name ends with `.gz` -> the SHA-256 of its contents. The file appears when whole."""
    lines = [{"coattn_prompts": FORMAT, **about}, *(asdict(prompt) for prompt in prompts)]
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    os.replace(fresh, path)
    return hashlib.sha256(data).hexdigest()


def read_prompts(path: Path) -> PromptFile:
    """Reads such a file. Raises InputError for anything else, with the line."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        lines = data.decode().split("\n")  # a text may hold other line ends
        about = json.loads(lines[0])
        if not isinstance(about, dict) or about.get("coattn_prompts") != FORMAT:
            raise ValueError("its first line is not that of such a file")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.", HOW) from None
    except (ValueError, IndexError, EOFError) as error:
        raise InputError(f"{path} is no file of prompts: {error}.", HOW) from None
    prompts = [_prompt(f"{path}, line {i}", line) for i, line in enumerate(lines[1:], 2) if line.strip()]
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise InputError(f"{path} has two prompts of one name.", HOW)
    if not prompts:
        raise InputError(f"{path} has no prompts.", HOW)
    return PromptFile(tuple(prompts), about, hashlib.sha256(data).hexdigest())


def _prompt(where: str, line: str) -> Prompt:
    try:
        data = json.loads(line)
    except json.JSONDecodeError:
        raise InputError(f"{where} is not JSON.", HOW) from None
    wanted = {field.name for field in fields(Prompt)}
    if not isinstance(data, dict) or set(data) != wanted:
        raise InputError(f"{where} does not have exactly the keys of a prompt.", HOW)
    texts = ("name", "benchmark", "task", "context", "question", "prefix", "rule")
    outputs = data["outputs"]
    if not all(isinstance(data[key], str) for key in texts) or not all(
        isinstance(data[key], int) and data[key] > 0 for key in ("length", "new_tokens")
    ):
        raise InputError(f"{where} has a value of the wrong kind.", HOW)
    if not isinstance(outputs, list) or not outputs or not all(isinstance(each, str) and each for each in outputs):
        raise InputError(f"{where} expects nothing.", HOW)
    if data["rule"] not in RULES:
        raise InputError(f"{where} has the rule {data['rule']!r}.", f"There are {', '.join(RULES)}.")
    if not data["context"] or not data["question"]:
        raise InputError(f"{where} has no context or no question.", HOW)
    return Prompt(**{**data, "outputs": tuple(outputs)})


def encode(prompt: Prompt, tokenizer: Any, chat: bool = True) -> tuple[list[int], int]:
    """Ids of the whole prompt, chat template and the answer's beginning included, and how many of them are context.

    The text is cut into tokens as one, so both modes have the same tokens; one across the border is the question's.
    """
    before, behind, special = "", "", True
    if chat and prompt.rule not in RAW and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": PLACE}]
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, found, behind = shown.partition(PLACE)
        if not found:
            raise InputError("The model's chat template does not show the user's message.", "Use another model.")
        special = False
    text = before + prompt.context + prompt.question + behind + prompt.prefix
    border = len(before) + len(prompt.context)
    try:
        made = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    except NotImplementedError:
        raise InputError("The model's tokenizer does not tell where its tokens lie.", "Use another model.") from None
    ids, offsets = [int(i) for i in made["input_ids"]], made["offset_mapping"]
    split = next((i for i, (_, end) in enumerate(offsets) if end > border), len(ids))
    if not 0 < split < len(ids):
        raise InputError(f"The prompt {prompt.name} has no tokens before or in its question.", HOW)
    return ids, split
