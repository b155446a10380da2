"""Linear layers in 4 and 8 bits: their plain meaning."""

import pytest
import torch
from tests.kernels.quantised_weights import FORMS, bytes_of_codes, random_packed

from coattn.kernels import packed_linear as module
from coattn.kernels.packed_linear import packed_embedding, packed_linear
from coattn.kernels.quantise.weights import can_join, join_packed, unpack

CPU = torch.device("cpu")


@pytest.mark.parametrize("form", FORMS)
def test_unpacking_gives_the_numbers(form: str) -> None:
    weight, want = random_packed(FORMS[form], 48, 192, CPU)
    torch.testing.assert_close(unpack(weight, torch.float64), want, rtol=1e-6, atol=1e-9)
    assert torch.equal(unpack(weight, torch.float32, 16, 40), unpack(weight, torch.float32)[16:40])
    high = 0 if weight.high is None else weight.high.nbytes
    assert weight.codes.nbytes + high == bytes_of_codes(FORMS[form], 48, 192)


@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_that_of_the_numbers_tile_by_tile(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 16)
    seen = []
    own = module.unpack
    monkeypatch.setattr(module, "unpack", lambda *args: seen.append(own(*args)) or seen[-1])
    weight, numbers = random_packed(FORMS[form], 40, 128, CPU)
    x, bias, residual = torch.randn(2, 3, 128), torch.randn(40), torch.randn(2, 3, 40)
    order = torch.randperm(128).int()
    got = packed_linear(x, weight._replace(order=order), bias, residual)
    want = (x[..., order].double() @ numbers.T + bias + residual).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    assert [len(rows) for rows in seen] == [16, 16, 8]


@pytest.mark.parametrize("form", FORMS)
def test_matrices_become_one_where_they_are_stored_alike(form: str) -> None:
    pairs = [random_packed(FORMS[form], n, 128, CPU, seed=n) for n in (32, 16, 48)]
    parts = [weight for weight, _ in pairs]
    assert can_join(parts) == (form != "fp8"), "which has one scale each"
    if form == "fp8":
        return
    joined = join_packed(parts)
    want = torch.cat([numbers for _, numbers in pairs])
    torch.testing.assert_close(unpack(joined, torch.float64), want, rtol=1e-6, atol=1e-9)
    first = joined.between(0, 32)
    assert torch.equal(unpack(first, torch.float64), unpack(pairs[0][0], torch.float64))
    assert torch.equal(unpack(joined.between(32, 48), torch.float64), unpack(pairs[1][0], torch.float64))
    assert first.codes.data_ptr() == joined.codes.data_ptr()
    assert not can_join([parts[0], parts[1]._replace(order=torch.arange(128).int())])


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if form.rows == 1])
def test_an_embedding_gives_rows_in_any_order(form: str) -> None:
    weight, numbers = random_packed(FORMS[form], 48, 512, CPU)
    ids = torch.tensor([[47, 0, 3], [3, 3, 20]])
    got = packed_embedding(ids, weight, torch.float64)
    assert got.shape == (2, 3, 512)
    torch.testing.assert_close(got, numbers[ids], rtol=1e-6, atol=1e-9)
