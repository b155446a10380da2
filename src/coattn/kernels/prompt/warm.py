"""Kernels for prompts, chosen and compiled before the first prompt comes."""

from collections.abc import Iterable, Sequence

import torch

from coattn.kernels.merge import merge_rows
from coattn.kernels.prompt.attend import attend_prompt
from coattn.kernels.prompt.choice import FEW_TOKENS
from coattn.kernels.prompt.kernels import PIECES, TILES
from coattn.kernels.prompt.mask import Mask
from coattn.state import AttnState
from coattn.types import LayerShape

CHUNKS = (FEW_TOKENS, *TILES)


def warm(layers: Iterable[LayerShape], longest: int, chunks: Sequence[int] = CHUNKS) -> None:
    """Attends once in every way that chunks of these sizes over sequences of at most `longest` tokens will need.

    On a GPU: cuDNN compiles a program for every number of queries and keys, 0.1 to 0.6 s each. Once in a process.
    """
    kinds = {(s.q_heads, s.kv_heads, s.head_dim, s.dtype, s.device, s.sliding_window, s.softcap) for s in layers}
    for q_heads, kv_heads, d, dtype, device, window, softcap in kinds:
        if device.type != "cuda":
            continue
        k = torch.randn(min(longest, PIECES[0]), kv_heads, d, device=device).to(dtype)
        for size in {min(chunk, longest) for chunk in chunks}:
            q = torch.randn(size, q_heads, d, device=device).to(dtype)
            attend_prompt(q, k[:size], k[:size], d**-0.5, Mask(True, window, 0, softcap))
            for piece in PIECES if window is None else ():
                if piece <= len(k):
                    attend_prompt(q, k[:piece], k[:piece], d**-0.5, Mask(False, softcap=softcap))
        from coattn.kernels.triton.merge_rows import COUNTS

        part = AttnState(q[:1], torch.zeros(1, q_heads, device=device))
        for count in COUNTS:  # what chunks are merged of: their own tokens, and pieces of their history
            merge_rows([part] * count, dtype)
        torch.cuda.synchronize(device)
