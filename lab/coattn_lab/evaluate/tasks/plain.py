"""The same prompts through plain Transformers: what an exact row must answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from coattn.hf.load import Loaded
from coattn_lab.evaluate.tasks.reading import Ask, kv_bytes
from coattn_lab.evaluate.tasks.running import Running, judge
from coattn_lab.evaluate.tasks.turns import NoTurns, Turns

NAME = "transformers"


@torch.inference_mode()
def run_plain(
    loaded: Loaded,
    asks: Sequence[Ask],
    *,
    most: int,
    note: Callable[[Running], None] = lambda _: None,
    turns: Turns | None = None,
) -> Iterator[dict[str, Any]]:
    """Answers of `model.generate`, greedy, prompt by prompt, read whole: mode `read`."""
    model: Any = loaded.model
    found = Running(asks[0].prompt.length, 1, most, whole=kv_bytes(model, most))
    found.gpu_kv = found.whole
    started = time.perf_counter()
    turns = NoTurns() if turns is None else turns

    def before_next(ids: torch.Tensor, *_: Any) -> torch.Tensor:
        turns.work()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    for ask in asks:
        turns.work()
        ids = torch.tensor([ask.ids], device=model.get_input_embeddings().weight.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ask.prompt.new_tokens,
            do_sample=False,
            pad_token_id=loaded.tokenizer.pad_token_id,
            stopping_criteria=[before_next],
        )
        new = out[0, ids.shape[1] :].tolist()
        text = loaded.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        yield judge(ask.prompt, "read", text, new, loaded.tokenizer)
    found.seconds = time.perf_counter() - started
    note(found)
