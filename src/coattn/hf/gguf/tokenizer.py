"""The tokenizer that a GGUF file holds: its vocabulary, its merges, its markers, its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

untyped: Any = transformers  # parts of it carry no annotations

CONTROL, USER_DEFINED = 3, 4
"""GGUF's types of tokens that are found in a text before it is split: markers, and words of their own."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen 2 cut a text into words; they differ in how many digits a word may have."""
SPLITS = {"llama-bpe": WORDS.format(digits="{1,3}"), "qwen2": WORDS.format(digits="")}
"""By `tokenizer.ggml.pre`."""
BEGINS = {"llama-bpe"}
"""Where a text begins with the begin token unless the file says otherwise, as llama.cpp takes it."""
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Transformers' names of markers, and GGUF's."""


def read_tokenizer(header: dict[str, Any], path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a file. Transformers' own reader makes those whose rule of splitting is not known here."""
    pre = header.get("tokenizer.ggml.pre")
    if header.get("tokenizer.ggml.model") == "gpt2" and (pre in SPLITS or pre == "smollm"):
        made = _build(header, str(pre))
    else:
        made = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    template = header.get("tokenizer.chat_template")
    if template:
        made.chat_template = template
    return made


def _build(header: dict[str, Any], pre: str) -> PreTrainedTokenizerFast:
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in header["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    first: Any
    if pre in SPLITS:
        first = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        first = pre_tokenizers.Digits(individual_digits=True)
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_])
    backend.decoder = decoders.ByteLevel()
    types = header.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for kind in (CONTROL, USER_DEFINED):
        added = [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, own in zip(tokens, types, strict=True)
            if own == kind
        ]
        if added:
            (backend.add_special_tokens if kind == CONTROL else backend.add_tokens)(added)
    named = {}
    for role, key in ROLES.items():
        number = header.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            named[role] = tokens[number]
    begin = named.get("bos_token")
    if begin is not None and header.get("tokenizer.ggml.add_bos_token", pre in BEGINS):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, tokens.index(begin))]
        )
    made: PreTrainedTokenizerFast = untyped.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **named,
    )
    return made
