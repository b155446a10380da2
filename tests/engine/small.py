"""A very small random model and a tokenizer of single bytes, for tests that run many steps."""

from functools import cache
from typing import Any

import torch
from tests.cache.integrity import check_blocks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import coattn
from coattn import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the engine's tests run: recorded steps where there is a GPU, layer by layer elsewhere."""
END = 256
VOCAB = 260
UNIT = 8 * 1 * 2 * 2 * 8 * 4
"""Bytes of a block of 8 tokens: one layer, keys and values, two KV heads of 8 float32 numbers."""


def small(layers: int = 2, seed: int = 0, positions: int = 512) -> PreTrainedModel:
    """Always the same weights, large enough that texts do not repeat themselves."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=END,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model.to(DEVICE).eval()


@cache
def tokenizer(*pairs: str, generation_prompt: str = "") -> PreTrainedTokenizerFast:
    """Token i is byte i; 256 ends a text.

    pairs: two letters each, which are one token, from 257 on. generation_prompt: what the chat template begins an
    answer with.
    """
    vocabulary = {letter: i for i, letter in enumerate(_byte_letters())} | {"<end>": END}
    vocabulary |= {pair: END + 1 + i for i, pair in enumerate(pairs)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[(pair[0], pair[1]) for pair in pairs]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}" + generation_prompt + "{% endif %}"
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=template)


def llm(method: str = "full", **options: Any) -> coattn.LLM:
    """An engine over a fresh small model, with blocks of eight tokens."""
    given = {"max_batch": 4, "max_length": 256, "chunk": 32, "block": 8, **options}
    return coattn.LLM((small(), tokenizer()), method, **given)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, **more)


@torch.no_grad()
def by_transformers(model: PreTrainedModel, ids: list[int], count: int) -> tuple[int, ...]:
    """What Transformers alone makes of a prompt, greedily, end token included."""
    batch = torch.tensor([ids], device=model.device)
    mask = torch.ones_like(batch)
    out = model.generate(batch, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(ids) :].tolist())


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def slow_prompts(engine: coattn.LLM) -> None:
    """From now on prompts count as slow, a second a token: what is on disk is read whenever it can be."""
    if engine.store.disk is not None:
        engine.store.disk.prompts.seconds = lambda start, end: float(end - start)  # type: ignore[method-assign]


def flush(engine: coattn.LLM) -> None:
    """What goes to the disk is there."""
    engine.store.disk.files.flush()


def check_tables(engine: coattn.LLM) -> None:
    """Counts of blocks are right."""
    for table in engine.store.tables:
        check_blocks(table)


def in_order(engine: coattn.LLM) -> None:
    """Counts of blocks are right, and with nobody running all of them are free."""
    check_tables(engine)
    assert dict(engine.runner.runtime.free_bytes()) == engine.engine.scheduler.admission.capacity


class Only:
    """A guide that lets one text through, then the end token."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.at = ids, 0

    def mask(self) -> torch.Tensor:
        token = self.ids[self.at] if self.at < len(self.ids) else END
        flags = torch.zeros(-(-VOCAB // 32) * 32, dtype=torch.int64)
        flags[token] = 1
        words = (flags.view(-1, 32) << torch.arange(32)).sum(-1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def accept(self, token: int) -> None:
        self.at += 1
