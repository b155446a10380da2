"""HCAttention: bytes that are held, codebooks that are made or read, values that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.methods.test_hcattention import BLOCK, KV, D, World
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError
from coattn.kernels.quantise.basis import Basis
from coattn.kernels.quantise.codebook import Codebook, fit
from coattn.kernels.quantise.file import Origin, save
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.index.codes.index import Codes
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step
from coattn_lab.bench.kv import fill_books, fill_randomly


@pytest.mark.parametrize(
    ("params", "share"),
    [
        ({"groups": 0}, 0.5),
        ({"groups": 64}, 0.25),
        ({"groups": 32}, 0.125),
        ({"groups": 32, "code_bits": 13, "window_blocks": 2}, 0.1015625),
    ],
    ids=["50", "25", "12.5", "13 bits"],
)
def test_the_gpu_tier_holds_the_stated_share(params: dict[str, Any], share: float) -> None:
    """A long context of the paper's head size in bfloat16, 8,192 centroids: what tensors hold, beside `full`.

    All of it: codes, the exact window of four blocks (with 13 bits two), a codebook (32 to 64 KB a layer, in 8 KV
    heads), and the sum of values.
    """
    tokens, shape = 65536, LayerShape(8, 8, 128, torch.bfloat16, torch.device("cpu"))

    def held(method: str, **params: Any) -> tuple[int, Runtime]:
        ledger = Ledger()
        runtime = Runtime([shape], compose(METHODS[method], **params), ledger, 1, tokens)
        running = runtime.begin(Step.of((0,), (0,), (tokens,)))
        if method == "hcattention":
            fill_books(cast("Codes", runtime.groups[0].index).books)
        runtime.commit(running)
        return ledger.held["gpu"], runtime

    full, plain = held("full")
    own, runtime = held("hcattention", **params)
    group = runtime.groups[0]
    index, cache = cast("Codes", group.index), group.cache
    codebooks = sum(book.centroids.nbytes for book in index.books.made.values())
    measured = cache.gpu.memory[0].nbytes + index.memory[0].nbytes + codebooks + index.means.sums[0].nbytes
    assert plain.groups[0].cache.gpu.memory[0].nbytes == full == tokens * shape.token_bytes
    assert measured == own, "what the ledger counts is what the tensors hold"
    assert measured / full == pytest.approx(share, rel=0.02)
    assert index.memory[0].nbytes / full == share
    assert cache.host.memory[0].nbytes == runtime.ledger.held["host"] == tokens * shape.token_bytes // 2
    runtime.release()
    assert runtime.ledger.held == {"gpu": 0, "host": 0}


@pytest.mark.parametrize(("groups", "tokens", "more"), [(64, 65536, 0.02), (32, 65536, 0.035), (32, 131072, 0.02)])
def test_with_a_basis_a_share_needs_a_longer_context(tmp_path: Path, groups: int, tokens: int, more: float) -> None:
    """The same with two matrices for each KV head: everything the tensors hold, over the stated share."""
    shape = LayerShape(8, 8, 128, torch.bfloat16, torch.device("cpu"))
    basis = Basis.of(torch.eye(128).repeat(8, 1, 1), torch.float32, shape.device)
    book = Codebook(torch.randn(1, 8192, 128 // groups), groups, basis=basis)
    save(tmp_path / "book", {0: book}, Origin("mine", "t", "0", groups, 8192, True, 128, (None,)))
    ledger = Ledger()
    runtime = Runtime([shape], compose(METHODS["hcattention"], codebook=str(tmp_path / "book")), ledger, 1, tokens)
    running = runtime.begin(Step.of((0,), (0,), (tokens,)))
    runtime.commit(running)
    group = runtime.groups[0]
    index = cast("Codes", group.index)
    tensors = [group.cache.gpu.memory[0], index.memory[0], index.means.sums[0], *held(index.books.made[0])]
    assert sum(x.nbytes for x in tensors) == ledger.held["gpu"]
    share = ledger.held["gpu"] / (tokens * shape.token_bytes) / (groups / 256)
    assert 1 < share < 1 + more
    runtime.release()


def test_packed_codes_take_what_they_say() -> None:
    for bits, size in ((12, 6), (13, 7), (16, 8)):
        world = World(groups=4, code_bits=bits)
        codes = cast("Codes", world.group.index).memory[0]
        assert codes.shape[-1] * codes.element_size() == size
        assert world.group.cache.gpu.bytes_for(BLOCK)["gpu"] == BLOCK * KV * size


def test_a_prompt_makes_its_own_codebook_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    world = World(groups=4)
    assert "No codebook was given" in caplog.text
    caplog.clear()
    world.step((40, 40))
    assert not caplog.text


def test_a_codebook_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "book"
    book = fit(torch.randn(500, D), 4, 32)
    save(path, {0: book}, Origin("mine", "t", "0", 4, 32, True, D, (None,)))
    world = World(codebook=str(path), centroids=None)
    index = cast("Codes", world.group.index)
    torch.testing.assert_close(index.books.made[0].centroids, book.centroids)
    assert (index.groups, index.centroids) == (4, 32)
    with pytest.raises(ConfigError, match="groups is 8, but the codebook"):
        compose(METHODS["hcattention"], codebook=str(path), groups=8)


def test_keys_are_coded_in_the_basis_of_the_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "book", torch.randn(500, KV, D)
    basis = Basis.of(torch.randn(KV, D, D) + 4 * torch.eye(D), torch.float32, torch.device("cpu"))
    book = replace(fit(basis.keys(seen).flatten(0, 1), 4, 64), basis=basis)
    save(path, {0: book}, Origin("mine", "t", "0", 4, 64, True, D, (None,)))
    world = World(codebook=str(path), centroids=None, tau=1)
    books = cast("Codes", world.group.index).books
    assert books.made[0].basis is not None
    assert books.bytes == sum(x.nbytes for x in held(books.made[0]))
    for new in ((1, 1), (12, 5), (1, 1)):
        q, out, _ = world.step(new)
    for seq in range(2):
        torch.testing.assert_close(out[seq].double(), world.attended(seq, q[seq]), atol=5e-5, rtol=1e-3)


def held(book: Codebook) -> list[Tensor]:
    """Every tensor of a codebook."""
    return [book.centroids, book.basis.to, book.basis.back]


def test_groups_that_do_not_divide_the_head_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups is 5, which does not divide the head size 16"):
        World(groups=5)


def test_exact_only_where_nothing_is_lost() -> None:
    def exact(**params: Any) -> bool:
        return compose(METHODS["hcattention"], **params).exact

    assert exact(groups=0, tau=1)
    assert not exact(tau=1)
    assert not exact(groups=0)
    assert not exact(groups=0, tau=1, cap=100)


def test_a_step_reads_codes_on_the_gpu_and_values_in_dram() -> None:
    """Per token of 2 x 2 x 16 floats: codes are 2 x 4 x 2 bytes of its 256; the traced bytes follow."""
    world = World((90, 90), groups=4, tau=0.8)
    _, _, picked = world.step((1, 1))
    said = world.runtime.report(Step.of((0, 1), (90, 90), (1, 1)))
    taken = picked.rows.count.sum().item() / KV
    assert said["attended_gpu"] == pytest.approx(2 * 3 + 2 * 88 * 8 / 128)
    assert said["attended_host"] == pytest.approx(taken)
    assert said["kept_mean"] == pytest.approx(taken / 176)
    assert 0 < taken < 176


def test_random_contents_can_be_decoded() -> None:
    world = World((90, 90), groups=4, centroids=256, code_bits=13, tau=0.8)
    fill_randomly(world.runtime)
    assert world.step((1, 1))[1].isfinite().all()
