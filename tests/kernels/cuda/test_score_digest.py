"""Scores of digests on tensor cores against the reference."""

from pathlib import Path

import pytest
import torch
from tests.kernels.cards import CARDS, fits

from coattn.kernels.cuda import nvrtc, score_digest
from coattn.kernels.digest import CHUNK, score_parts


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    "form", [{"D": 128, "GROUP": 5, "F16": 0, "CAP": 0}, {"D": 64, "GROUP": 8, "F16": 1, "CAP": 1}]
)
def test_compiles(form: dict[str, int], card: int) -> None:
    source = (Path(nvrtc.__file__).parent / "score_digest.cu").read_text()
    assert fits(source, {**form, "WARPS": score_digest.WARPS, "CHUNK": CHUNK}, card, 32 * score_digest.WARPS)


def test_refused_without_a_gpu() -> None:
    assert score_digest.refuses(torch.zeros(1, 4, 64), torch.zeros(3, 2, 2, 64)) is not None


def check_scores(
    n: int, d: int, group: int, softcap: float | None, slack: float, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(n)
    q = torch.randn(3, 4 * group, d, device=device).to(dtype)
    digests = torch.randn(3 * n + 5, 4, 2, d, device=device).sort(2).values.to(dtype)
    table = torch.randperm(3 * n, device=device).int().view(3, n)
    tokens = torch.tensor([n * 32 + 7, min(n, 17) * 32, 0], device=device).int().clamp(max=n * 32)
    got = score_digest.score_parts(q, digests, table, tokens, 32, 0.09, softcap, slack)
    want = score_parts.reference(q, digests, table, tokens, 32, 0.09, softcap, slack)
    there = torch.isfinite(want.blocks)
    torch.testing.assert_close(got.blocks[there], want.blocks[there], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.sums, want.sums, atol=1e-4, rtol=1e-4)
    again = score_digest.score_parts(q, digests, table, tokens, 32, 0.09, softcap, slack)
    assert torch.equal(again.sums, got.sums)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "d", "group", "softcap", "slack"),
    [(131, 128, 5, None, 0.5), (64, 64, 8, 30.0, 1.0), (700, 96, 1, None, 0.0), (1, 32, 3, None, 0.7)],
)
def test_score_parts(n: int, d: int, group: int, softcap: float | None, slack: float, dtype: torch.dtype) -> None:
    check_scores(n, d, group, softcap, slack, dtype, torch.device("cuda"))


@pytest.mark.gpu
def test_what_does_not_fit_is_refused() -> None:
    q, digests = torch.zeros(1, 18, 128, device="cuda").bfloat16(), torch.zeros(3, 2, 2, 128, device="cuda").bfloat16()
    assert score_digest.refuses(q, digests) is not None  # nine query heads a KV head
    assert score_digest.refuses(q[:, :16].float(), digests.float()) is not None
    assert score_digest.refuses(q[:, :16, :80].contiguous(), digests[..., :80].contiguous()) is not None
    assert score_digest.refuses(q[:, :16], digests) is None
    for d, group in ((128, 5), (64, 8), (96, 1), (32, 3)):
        fits_here = torch.zeros(3, 4 * group, d, device="cuda").half(), torch.zeros(3, 4, 2, d, device="cuda").half()
        assert score_digest.refuses(*fits_here) is None
