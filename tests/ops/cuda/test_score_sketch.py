"""Scores of sketches on tensor cores against PyTorch."""

from __future__ import annotations

import pytest
import torch

from coattn.ops.cuda import choose_scored, nvrtc
from coattn.ops.cuda import score_sketch as cuda
from coattn.ops.cuda.nvrtc import FOLDER
from coattn.ops.sketch import score_sketch
from coattn.quantise.sketch import WORD, Sketcher, fit, spread_of

KV_HEADS = 2


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("words", cuda.WORDS)
def test_compiles(words: int) -> None:
    form = {"WARPS": cuda.WARPS, "WORDS": words, "GROUP": 5, "BLOCK": 32, "CHUNK": cuda.CHUNK, "D": 16 * words}
    scores, choosing = ((FOLDER / name).read_text() for name in ("score_sketch.cu", "choose_scored.cu"))
    assert nvrtc.compile_cubin(scores, {**form, "F16": 0, "CAP": words % 8}, "sm_90")
    assert nvrtc.compile_cubin(choosing, {"THREADS": choose_scored.THREADS, "GROUP": 5}, "sm_90")


def test_refused_without_a_gpu() -> None:
    assert cuda.refuses(torch.zeros(1, 4, 64), torch.zeros(3, 2, 32, 4)) is not None
    assert choose_scored.refuses(torch.zeros(1, 2, 2, 64)) is not None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "group", "block", "cap", "dtype"),
    [(64, 7, 32, None, torch.bfloat16), (128, 5, 32, None, torch.float16), (128, 8, 16, 30.0, torch.bfloat16)],
)
def test_scores_are_those_of_the_reference(
    d: int, group: int, block: int, cap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    planes, rows, blocks, width, scale = 2 * d, 3, 40, 70, d**-0.5
    # channels of very different spread, as keys have, and far from zero: scores have a thousand in common
    keys = torch.randn(600, KV_HEADS, d) * torch.logspace(0.5, -1, d) + 60 * torch.randn(KV_HEADS, d)
    made = [fit(*spread_of(keys[i * 100 : i * 100 + 300], None), planes) for i in range(4)]
    of, start, half, bit, worth, base = (torch.stack(x) for x in zip(*(m.tensors() for m in made), strict=True))
    sketcher = Sketcher(of.to(dtype), start, half, bit, worth.to(dtype), base)
    kept = torch.stack([made[2].encode(keys[i : i + block]) for i in range(blocks)]).transpose(1, 2)
    kept = kept.contiguous()
    table = torch.randint(0, blocks, (rows, width), dtype=torch.int32)
    tokens = torch.tensor([width * block, 0, 9 * block], dtype=torch.int32)
    seq = torch.tensor([2, 3, 0], dtype=torch.int32)
    q = (torch.randn(rows, KV_HEADS * group, d) * 2).to(dtype)
    place_of = torch.full((4, KV_HEADS, width * block + 7), -1, dtype=torch.int16)
    place_of[2, 1, 5:400:3] = 4
    want, want_lse, _ = score_sketch(q, kept, table, tokens, sketcher, seq, scale, cap, place_of)
    here = [x.cuda() for x in (q, kept, table, tokens)]
    there = Sketcher(*(x.cuda() for x in sketcher.tensors()))
    assert cuda.refuses(here[0], here[1]) is None
    got, lse, offset = cuda.score_sketch(*here, there, seq.cuda(), scale, cap, place_of.cuda())
    real = (torch.arange(width * block) < tokens[:, None])[:, None, None].expand_as(want)
    assert (offset is None) is (cap is not None)
    whole = got.float() if offset is None else got.float() + offset[:, :, :group, None]
    difference = (whole.cpu() - want)[real]
    assert planes == kept.shape[3] * WORD
    # 8 bits for what a plane is worth, 16 for a score
    alone = (want - want.masked_fill(~real, 0.0).sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1))[real]
    assert difference.std() < 0.05 * alone.std()
    torch.testing.assert_close(lse.logsumexp(1).cpu(), want_lse.logsumexp(1), atol=0.15, rtol=0.01)
