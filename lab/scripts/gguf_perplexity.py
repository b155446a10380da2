"""Perplexity of GGUF files kept packed, beside that of the same files unpacked by Transformers.

    python lab/scripts/gguf_perplexity.py FILE... [--text FILE] [--tokens 4096] [--window 2048] [--piece 2048]
                                          [--dtype float32] [--device auto] [--out OUT.json]

A line for each file: its bytes, the bytes of weights that are held, the perplexity of the text's first tokens in
windows that know nothing of each other, and the largest relative difference of a matrix. --piece is how many tokens
the model reads at a time: up to 32 of them the GPU multiplies with packed weights, more with unpacked ones. The exit
status is 1 where the perplexities are 0.1% apart, or the weights take 1.1 times the file.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache

from coattn.hf.gguf.header import open_gguf
from coattn.hf.gguf.read import GgufCheckpoint, config_of
from coattn.hf.gguf.tokenizer import read_tokenizer
from coattn.hf.load import DTYPES, choose_device
from coattn.hf.quantised.module import PackedModule
from coattn.hf.refusals import quiet
from coattn.hf.stored import bytes_of
from coattn.kernels.quantise.weights import unpack
from coattn.text import read_text

WITHIN, MOST_BYTES = 0.001, 1.1
"""Of perplexity, and of the file."""
MOST_CHARACTERS = 16
"""Of a token, in the mean."""


def by_transformers(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model whose weights Transformers makes numbers of."""
    made = getattr(transformers, "GgufConfig", None)  # newer releases keep blocks packed unless they are told
    options = {} if made is None else {"quantization_config": made(dequantize=True)}
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype, **options)
    return model.to(device).eval()


@torch.no_grad()
def losses(model: Any, windows: Tensor, piece: int) -> Tensor:
    """Negative log-likelihood `[windows, tokens - 1]` of every token but the first, in float64."""
    found = []
    for window in windows:
        cache, parts = DynamicCache(config=model.config), []
        for ids, following in zip(window.split(piece), window[1:].split(piece), strict=False):
            logits = model(ids[None], past_key_values=cache, use_cache=True).logits[0].float()
            parts.append(functional.cross_entropy(logits[: len(following)], following, reduction="none").double())
        found.append(torch.cat(parts).cpu())
    return torch.stack(found)


@torch.no_grad()
def farthest(packed: Any, plain: Any) -> tuple[float, str]:
    """The largest difference of a matrix from what Transformers makes of it, over its norm, and where."""
    worst = 0.0, "none"
    for path, module in packed.named_modules():
        if isinstance(module, PackedModule):
            own, other = unpack(module.packed, torch.float32), plain.get_submodule(path).weight.float()
            worst = max(worst, (float((own - other).norm() / other.norm()), path))
    return worst


def compare(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A file's figures."""
    device, dtype = choose_device(given.device), DTYPES[given.dtype]
    on_gpu, file = device.type == "cuda", open_gguf(path)
    tokenizer = read_tokenizer(file.header, path)
    text = read_text(given.text).body[: MOST_CHARACTERS * given.tokens]
    ids = tokenizer(text)["input_ids"][: given.tokens // given.window * given.window]
    windows = torch.tensor(ids, device=device).view(-1, given.window)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    packed: Any = GgufCheckpoint(file, config_of(path), dtype).fill(device).eval()
    gc.collect()
    found: dict[str, Any] = {
        "file": file.name,
        "file_bytes": path.stat().st_size,
        "weight_bytes": bytes_of(packed),
        "gpu_bytes": torch.cuda.memory_allocated() - before if on_gpu else None,
    }
    start = time.perf_counter()
    own = losses(packed, windows, given.piece)
    found["packed_s"] = time.perf_counter() - start
    plain = by_transformers(path, dtype, device)
    usual = losses(plain, windows, given.piece)
    found["unpacked_bytes"] = bytes_of(plain)
    found["packed"], found["unpacked"] = (math.exp(x.mean()) for x in (own, usual))
    found["difference"] = found["packed"] / found["unpacked"] - 1
    found["largest_of_a_token"] = float((own - usual).abs().max())
    found["largest_of_a_matrix"], found["matrix"] = farthest(packed, plain)
    return found


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    held = row["gpu_bytes"] or row["weight_bytes"]
    where = "GPU memory" if row["gpu_bytes"] else "weights"
    return (
        f"{row['file']}: {row['file_bytes']:,} bytes, {held:,} of {where} (x{held / row['file_bytes']:.3f}; unpacked "
        f"{row['unpacked_bytes']:,}); perplexity {row['packed']:.6f} packed, {row['unpacked']:.6f} unpacked "
        f"({row['difference']:+.2e}; a token at most {row['largest_of_a_token']:.1e}); matrices within "
        f"{row['largest_of_a_matrix']:.1e} ({row['matrix']}); {row['packed_s']:.0f} s packed"
    )


def is_off(row: dict[str, Any]) -> bool:
    """Whether a file's figures are not what they are to be."""
    held = row["gpu_bytes"] or row["weight_bytes"]
    return bool(abs(row["difference"]) > WITHIN or held > MOST_BYTES * row["file_bytes"])


def main() -> int:
    """Compares the files one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--text")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--piece", type=int, default=2048)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for path in given.files:
        rows.append(compare(path, given))
        print(line(rows[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return int(any(map(is_off, rows)))


if __name__ == "__main__":
    sys.exit(main())
