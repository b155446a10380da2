"""Perplexity and KL of a method whose prompts an engine reads in chunks, beside `full`: `chunk_quality.py [options]`.

Prompts are read by `coattn.LLM`'s runner in the engine's own chunks; the tokens that follow are fed one decode step
each. A needle in chunks: `coattn eval needle --chunk N`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import coattn
from coattn.evaluate.fidelity import kl_divergence
from coattn.evaluate.results import write_json
from coattn.hf.load import Loaded, load
from coattn.provenance import provenance
from coattn.text import default_text


@torch.no_grad()
def predictions(loaded: Loaded, method: str, windows: list[list[int]], steps: int) -> tuple[list[Tensor], int]:
    """Of each window the logits `[steps, vocabulary]` of its last tokens, and the chunk they were read in."""
    found = []
    with coattn.LLM(loaded, method, max_batch=1, max_length=len(windows[0]) + 1, reuse=False) as llm:
        chunk = llm.engine.pace.budget(False)
        for ids in windows:
            end, rows = len(ids) - steps, []
            for start in range(0, end, chunk):
                stop = min(start + chunk, end)
                logits = llm.runner.extend(0, ids[start:stop], start, stop == end)
            for at in range(end, len(ids)):
                assert logits is not None
                rows.append(logits[0].float().clone())
                logits = llm.runner.decode([0], [ids[at]], [at])
            llm.runner.forget(0, len(ids))
            found.append(torch.stack(rows))
    return found, chunk


def main() -> None:
    """Writes one JSON file and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="hcattention")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=3072, help="tokens that are read in chunks")
    parser.add_argument("--steps", type=int, default=96, help="tokens that are fed after them")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load(given.model, dtype="float32")
    length = given.prompt + given.steps
    ids = loaded.tokenizer(default_text().body)["input_ids"][: given.windows * length]
    windows = [ids[i * length : (i + 1) * length] for i in range(given.windows)]
    exact, _ = predictions(loaded, "full", windows, given.steps)
    own, chunk = predictions(loaded, given.method, windows, given.steps)
    labels = torch.tensor([window[-given.steps :] for window in windows])
    losses = [torch.nn.functional.cross_entropy(torch.cat(x), labels.flatten()).item() for x in (exact, own)]
    result: dict[str, Any] = {
        "model": given.model, "method": given.method, "chunk": chunk, "windows": given.windows,
        "prompt_tokens": given.prompt, "steps": given.steps, "perplexity": math.exp(losses[1]),
        "perplexity_full": math.exp(losses[0]), "ratio": math.exp(losses[1] - losses[0]),
        "kl": float(kl_divergence(torch.cat(exact), torch.cat(own)).mean()),
        "top1": float((torch.cat(exact).argmax(-1) == torch.cat(own).argmax(-1)).double().mean()),
        **provenance(),
    }  # fmt: skip
    result["command"] = (
        f"scripts/chunk_quality.py --method {given.method} --prompt {given.prompt} --steps {given.steps}"
    )
    write_json(given.out, result)
    print({name: value for name, value in result.items() if isinstance(value, int | float | str)})


if __name__ == "__main__":
    main()
