"""CUDA C++ kernels of HCAttention: they compile, and on a GPU they say what the references say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.kernels.cards import CARDS, SHARED, fits
from torch import Tensor

from coattn.kernels.cuda import nvrtc
from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.quantise.pack import pack
from coattn.kernels.score_pq import reference

SOURCES = Path(nvrtc.__file__).parent
FORMS = [
    {"BITS": 16, "GROUPS": 64, "WIDTH": 2, "F16": 0, "CAP": 0},
    {"BITS": 13, "GROUPS": 64, "WIDTH": 2, "F16": 1, "CAP": 1},
    {"BITS": 13, "GROUPS": 32, "WIDTH": 4, "F16": 0, "CAP": 0},
    {"BITS": 12, "GROUPS": 32, "WIDTH": 4, "F16": 1, "CAP": 0},
]


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("form", FORMS)
def test_score_pq_compiles(form: dict[str, Any], card: int) -> None:
    source = (SOURCES / "score_pq.cu").read_text()
    assert fits(source, {**form, "THREADS": 384, "GROUP": 4, "BLOCK": 32, "COUNT": 4096}, card, 384)


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("group", [1, 8])
def test_top_p_compiles(group: int, card: int) -> None:
    assert fits((SOURCES / "top_p.cu").read_text(), {"GROUP": group}, card, 1024)


@pytest.mark.parametrize("card", CARDS)
def test_a_codebook_that_a_card_cannot_hold_is_refused(card: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from coattn.kernels.cuda import score_pq as kernel

    monkeypatch.setattr(kernel, "available", lambda device: True)
    monkeypatch.setattr(kernel, "shared_memory", lambda device: SHARED[card])
    half = torch.bfloat16

    def refused(count: int) -> str | None:
        book = SimpleNamespace(centroids=torch.empty(1, count, 4, dtype=half), groups=32, shared=True)
        kept = torch.empty(1, 2, 32, 52, dtype=torch.uint8)
        return kernel.refuses(torch.empty(1, 8, 128, dtype=half), kept, cast("Codebook", book), 13)

    assert refused(8192) is None
    assert refused(12800 + 8) is not None  # more than 100 KiB
    assert (refused(12800) is None) == (SHARED[card] >= 100 << 10)


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
def test_an_error_has_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        nvrtc.compile_cubin("nonsense", {}, "sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [12, 13, 16])
@pytest.mark.parametrize(
    ("groups", "width", "group", "softcap", "dtype"),
    [
        (64, 2, 4, None, torch.bfloat16),
        (32, 4, 4, None, torch.bfloat16),
        (32, 4, 3, 5.0, torch.float16),
        (32, 2, 8, None, torch.float16),
        (16, 4, 1, None, torch.bfloat16),
    ],
)
def test_scores(groups: int, width: int, group: int, softcap: float | None, dtype: torch.dtype, bits: int) -> None:
    from coattn.kernels.cuda import score_pq as kernel

    count = 4096 if bits == 12 else 8192
    book = Codebook(torch.randn(1, count, width, device="cuda").to(dtype), groups)
    codes = torch.randint(0, count, (40, 2, 32, groups), device="cuda").short()
    kept = codes if bits == 16 else pack(codes, bits)
    q = torch.randn(3, 2 * group, groups * width, device="cuda").to(dtype)
    table = torch.randperm(40, device="cuda")[:39].int().view(3, 13)
    tokens = torch.tensor([397, 0, 416], dtype=torch.int32, device="cuda")
    top = torch.zeros(3, 2 * group, dtype=torch.int32, device="cuda")
    if kernel.refuses(q, kept, book, bits) is not None:
        assert groups == 16
        assert bits == 13
        return
    got = kernel.score_pq(q, kept, table, tokens, book, bits, 0.3, softcap, top)
    want = reference(q, kept, table, tokens, book, bits, 0.3, softcap)
    for seq, n in enumerate(tokens.tolist()):
        torch.testing.assert_close(got[seq, ..., :n], want[seq, ..., :n], atol=2e-3, rtol=1e-2)
        if n:
            assert torch.equal(_floats(top[seq]), got[seq, ..., :n].amax(-1).flatten())
    assert not top[1].any()


def _floats(ordered: Tensor) -> Tensor:
    bits = torch.where(ordered < 0, ordered & 0x7FFFFFFF, ~ordered)
    return bits.view(torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("tau", "cap"), [(0.9, None), (0.5, 40), (1.0, None), (1.0, 300), (0.95, 3000)])
@pytest.mark.parametrize("spread", [0.0, 0.7, 6.0])
def test_top_p(spread: float, tau: float, cap: int | None, renormalise: bool) -> None:
    from coattn.kernels.cuda.top_p import Work, largest, top_p

    seqs, kv_heads, group, n = 3, 2, 3, 20_000
    scores = torch.randn(seqs, kv_heads, group, n, device="cuda") * spread + 3
    tokens = torch.tensor([n, 0, 17_001], dtype=torch.int32, device="cuda")
    near = torch.randn(seqs, 2, kv_heads * group, device="cuda") + 5
    work, most = Work(scores.device), n
    made = []
    for _ in range(2):
        largest(scores, tokens, work.of(seqs * kv_heads * group)[2])
        made.append(top_p(scores, tokens, near, tau, cap, int(renormalise), most, work))
    first, again = made
    assert all(not x.any() for x in work.of(seqs * kv_heads * group))
    for seq, many in enumerate(tokens.tolist()):
        for head in range(kv_heads):
            count = int(first.count[seq, head])
            at = first.index[seq, head, :count].long()
            assert torch.equal(at, again.index[seq, head, :count].long())
            assert torch.equal(at, at.unique()), "in order, each once"
            used = torch.zeros(count, dtype=torch.bool, device="cuda")
            for g in range(group):
                q_head = head * group + g
                weights = first.weights[seq, q_head, :count]
                assert torch.equal(weights, again.weights[seq, q_head, :count])
                own = scores[seq, head, g, :many].double()
                check(
                    own,
                    at,
                    weights.double(),
                    near[seq, :, q_head].double(),
                    first.lse[seq, q_head],
                    tau,
                    cap,
                    renormalise,
                )
                used |= weights > 0
            assert bool(used.all()) or spread == 6.0, "only weights too small for float32 are zero"


def check(
    own: Tensor, at: Tensor, weights: Tensor, near: Tensor, lse: Tensor, tau: float, cap: int | None, renormalise: bool
) -> None:
    """One head: its mass, that it keeps the heaviest, and no bin too many."""
    if not len(own):
        assert not len(at)
        assert lse == -torch.inf
        return
    total = torch.logaddexp(own.logsumexp(0), near.logsumexp(0))
    share, beside = (own - total).exp(), (near.logsumexp(0) - total).exp()
    mine = at[weights > 0]
    held = share[mine].sum() + beside
    if cap is None or len(mine) < cap:
        assert held >= tau - 1e-4 or len(mine) == len(own) or share[mine].sum() > 0.9999 * share.sum()
    else:
        assert len(mine) == cap
    if len(mine):
        lightest = own[mine].min()
        left = torch.ones_like(own, dtype=torch.bool)
        left[mine] = False
        assert not left.any() or own[left].max() <= lightest + 1 / 64 + 1e-4
        if tau < 1:
            assert held - share[mine][own[mine] < lightest + 1 / 64 + 1e-4].sum() < tau + 1e-4
        norm = own[mine].logsumexp(0) if renormalise else own.logsumexp(0)
        torch.testing.assert_close(lse.double(), norm, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(weights[weights > 0], (own[mine] - norm).exp(), atol=1e-6, rtol=6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("tail", [0, 1, 2])
@pytest.mark.parametrize(("tau", "cap", "near_lse"), [(0.9, None, 0.0), (1.0, 300, 5.0), (0.6, None, 12.0)])
def test_heads_of_a_group_share_what_they_keep(tau: float, cap: int | None, near_lse: float, tail: int) -> None:
    from coattn.kernels.cuda.top_p import Work, largest, top_p

    seqs, kv_heads, group, n = 3, 2, 3, 20_000
    scores = torch.randn(seqs, kv_heads, group, n, device="cuda") * 3
    tokens = torch.tensor([n, 0, 17_001], dtype=torch.int32, device="cuda")
    near = torch.full((seqs, 1, kv_heads * group), near_lse, device="cuda")
    near[:, :, ::3] += 30  # one head of each group needs nothing but what is near
    work = Work(scores.device)
    made = []
    for together in (False, True, True):
        largest(scores, tokens, work.of(seqs * kv_heads * group)[2])
        made.append(top_p(scores, tokens, near, tau, cap, tail, n, work, together))
    alone, found, again = made
    assert torch.equal(found.count, alone.count)
    for seq, many in enumerate(tokens.tolist()):
        for head in range(kv_heads):
            count = int(found.count[seq, head])
            at = found.index[seq, head, :count].long()
            assert torch.equal(at, alone.index[seq, head, :count].long())
            for g in range(group):
                row, own = head * group + g, scores[seq, head, g, :many].double()
                kept = own[at].logsumexp(0) if count else torch.tensor(-torch.inf)
                norm = kept if tail else own.logsumexp(0) if many else torch.tensor(-torch.inf)
                if tail == 1:
                    assert found.others[seq, row] == -torch.inf
                elif many:
                    left = torch.ones_like(own, dtype=torch.bool)
                    left[at] = False
                    rest = (own[left].logsumexp(0) - own.logsumexp(0)).exp() if left.any() else torch.zeros(())
                    share = (found.others[seq, row].double() - own.logsumexp(0)).exp()
                    torch.testing.assert_close(share.cpu(), rest.double().cpu(), atol=1e-4, rtol=1e-2)
                torch.testing.assert_close(
                    found.lse[seq, row].double().cpu(), norm.double().cpu(), atol=2e-3, rtol=1e-3
                )
                weights = found.weights[seq, row, :count]
                assert torch.equal(weights, again.weights[seq, row, :count])
                torch.testing.assert_close(weights.double(), (own[at] - norm).exp(), atol=1e-6, rtol=6e-3)


@pytest.mark.gpu
def test_what_is_kept_is_sent_to_host_memory() -> None:
    from coattn.kernels.cuda.top_p import Work, largest, send, top_p

    scores = torch.randn(2, 2, 4, 9000, device="cuda")
    tokens = torch.tensor([9000, 33], dtype=torch.int32, device="cuda")
    work = Work(scores.device)
    largest(scores, tokens, work.of(16)[2])
    chosen = top_p(scores, tokens, None, 0.3, None, 1, 9000, work)
    there = (chosen.index, chosen.weights, chosen.count)
    index, weights, count = (torch.zeros_like(x, device="cpu").pin_memory() for x in there)
    send(*there, index, weights, count)
    torch.cuda.synchronize()
    assert torch.equal(count, chosen.count.cpu())
    for seq in range(2):
        for head in range(2):
            n = int(count[seq, head])
            assert 0 < n < 9000
            assert torch.equal(index[seq, head, :n], chosen.index[seq, head, :n].cpu())
            rows = slice(4 * head, 4 * head + 4)
            assert torch.equal(weights[seq, rows, :n], chosen.weights[seq, rows, :n].cpu())
