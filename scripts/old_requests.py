"""The burst of `scripts/prompt_checks.sh` by `full` of an older tree: `old_requests.py SRC OUT`.

SRC: the folder that the older `coattn` lies in. It needs no more of it than `LLM` and the random models; lengths and
tokens are drawn as `coattn bench requests` of this tree draws them, and given as JSON on stdin: prompt_tokens and
new_tokens of each.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Runs it and writes one row."""
    source, target = sys.argv[1:]
    # an installed tree may come before any path, by a finder of its own
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
    sys.path.insert(0, source)
    import torch

    import coattn
    from coattn.hf.random_model import random_model

    assert Path(coattn.__file__).is_relative_to(Path(source).resolve()), coattn.__file__
    asked: dict[str, Any] = json.load(sys.stdin)
    model = random_model(asked["shapes"], torch.device(asked["device"]), getattr(torch, asked["dtype"]))
    draws = torch.Generator().manual_seed(asked["seed"])
    items, vocabulary = asked["items"], int(model.config.vocab_size)
    prompts = [torch.randint(0, vocabulary, (tokens,), generator=draws).tolist() for tokens, _ in items]
    most = max(tokens + new for tokens, new in items)
    options = {"gpu_kv": asked["gpu_kv"], "max_batch": asked["max_batch"], "max_length": most}
    with coattn.LLM((model, None), "full", **options) as llm:
        llm.warm_up()
        llm.generate([prompts[0]], coattn.SamplingParams(max_new_tokens=2, ignore_eos=True))
        begin = time.perf_counter()
        handles = [
            llm.submit(ids, coattn.SamplingParams(max_new_tokens=new, ignore_eos=True))
            for ids, (_, new) in zip(prompts, items, strict=True)
        ]
        while not all(handle.done for handle in handles):
            llm.step()
        total = time.perf_counter() - begin
        made = sum(len(handle.output().token_ids) for handle in handles)
    row = {"method": "full", "total_s": total, "tokens": made, "tokens_per_s": made / total}
    Path(target).write_text(json.dumps({"rows": [row]}), encoding="utf-8")


if __name__ == "__main__":
    main()
