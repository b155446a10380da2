"""Sketches of keys: scores by planes are scores of coded keys, and bits go where queries need them."""

import torch

from coattn.kernels.quantise.sketch import Sketcher, fit, spread_of, unpack
from coattn.kernels.sketch import lost as distance

HEADS, D = 2, 32


def keys_and_queries() -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    mix = torch.randn(HEADS, D, D, generator=draws) * torch.logspace(0, -1.5, D)
    keys = torch.einsum("nhd,hed->nhe", torch.randn(2000, HEADS, D, generator=draws), mix)
    spread = torch.logspace(0, -2, D)[torch.randperm(D, generator=draws)]
    return keys + torch.randn(HEADS, D, generator=draws), torch.randn(400, HEADS, 3, D, generator=draws) * spread


def moment(q: torch.Tensor) -> torch.Tensor:
    return torch.einsum("nhgd,nhge->hde", q, q) / (q.shape[0] * q.shape[2])


def lost(sketcher: Sketcher, keys: torch.Tensor, q: torch.Tensor) -> float:
    """Of the scores' variance over keys, what their estimates lack."""
    worth, base = sketcher.queries(q)
    found = torch.einsum("nhp,rhgp->rhgn", unpack(sketcher.encode(keys)), worth) + base[..., None]
    true = torch.einsum("nhd,rhgd->rhgn", keys, q)
    return float((found - true).var() / (true - true.mean(-1, keepdim=True)).var())


def test_more_bits_lose_less_and_unseen_keys_are_coded_as_well() -> None:
    keys, q = keys_and_queries()
    errors = [lost(fit(spread_of(keys[:1000], moment(q)), planes), keys[1000:], q[:20]) for planes in (32, 64, 128)]
    assert errors[0] < 0.25
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2


def test_what_queries_say_of_directions_counts() -> None:
    keys, q = keys_and_queries()
    heard, deaf = (fit(spread_of(keys, m), 64) for m in (moment(q), None))
    assert lost(heard, keys, q[:20]) < 0.7 * lost(deaf, keys, q[:20])


def test_tables_of_zeros_score_zero() -> None:
    nothing = Sketcher.zeros(HEADS, 64, D, torch.float32, torch.device("cpu"))
    assert not nothing.encode(torch.randn(5, HEADS, D)).any()
    assert Sketcher.bytes(HEADS, 64, D, torch.float32) == sum(x.numel() * 4 for x in nothing.tensors())


def test_keys_that_are_all_alike() -> None:
    made = fit(spread_of(torch.ones(100, HEADS, D), None), 64)
    assert all(x.isfinite().all() for x in made.tensors())


def test_lost_is_the_distance_of_a_key_from_its_code() -> None:
    keys, q = keys_and_queries()
    keys = keys[:288]
    keys[7] *= 5
    made = fit(spread_of(keys, moment(q)), 64)
    words = made.encode(keys)
    told = torch.einsum("nhp,hpd->nhd", unpack(words), made.worth) + made.base
    kept = words.view(18, 16, HEADS, -1).transpose(1, 2).flip(0)
    found = distance(keys, kept, torch.arange(17, -1, -1), made).T
    torch.testing.assert_close(found, (keys - told).norm(dim=-1))
    assert found.argmax(0).tolist() == [7, 7]  # bits are dealt out for the others
