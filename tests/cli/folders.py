"""Tiny models on disk, with a tokenizer that knows the words w0 to w156."""

from pathlib import Path

from tests.hf.families import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_tiny(family: str, path: Path, template: str | None = None) -> Path:
    """The family's tiny model. template: of chats."""
    tiny(family).save_pretrained(path)
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(157))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path
