"""A ledger for each device: what one takes counts in the whole, and each has its own limit."""

import pytest

from coattn.cache.ledger import Ledger
from coattn.errors import BudgetError


def test_a_need_that_is_hardly_more_than_the_limit_does_not_look_like_it() -> None:
    ledger = Ledger(gpu=42_131_456)
    with pytest.raises(BudgetError, match=r"at least 40\.22 MiB .* but gpu_kv is 40\.18 MiB\."):
        ledger.require("gpu", 42_173_440, "It")


def divided() -> Ledger:
    ledger = Ledger(None, 1000)
    ledger.divide(("cuda:0", "cuda:1"), (500, None), (3, 1))
    return ledger


def test_what_is_taken_counts_twice_and_is_given_back() -> None:
    ledger = divided()
    one, two = ledger.parts
    one.take("gpu", 400, "a")
    two.take("gpu", 900, "b")
    two.take("host", 250, "c")
    assert ledger.held == {"gpu": 1300, "host": 250}
    assert (one.room("gpu"), two.room("gpu"), two.room("host"), one.room("host")) == (100, None, 0, 750)
    two.give("gpu", 900)
    assert ledger.held["gpu"] == 400
    assert ledger.peak["gpu"] == 1300
    assert two.describe() == {"gpu_kv_bytes": 0, "host_kv_bytes": 250, "gpu_kv_peak": 900, "host_kv_peak": 250}


def test_a_refusal_names_the_device_and_changes_nothing() -> None:
    ledger = divided()
    with pytest.raises(BudgetError, match="It needs at least 501 B of KV memory in the GPU tier of cuda:0, but"):
        ledger.part(0).take("gpu", 501, "It")
    assert ledger.held == ledger.part(0).held == {"gpu": 0, "host": 0}


def test_the_limit_of_dram_is_said_as_it_was_given() -> None:
    """A quarter of 1,000 bytes is the second device's: for 300 of it there would have to be 1,200."""
    ledger = divided()
    with pytest.raises(BudgetError, match=r"at least 1\.2 KiB of KV memory in DRAM, but host_kv is 1000 B") as caught:
        ledger.part(1).take("host", 300, "It")
    assert caught.value.least == 1200


def test_what_the_whole_has_taken_is_gone_for_the_parts() -> None:
    ledger = divided()
    ledger.take("host", 900, "A sequence that waits")
    assert ledger.part(0).room("host") == 100
    with pytest.raises(BudgetError):
        ledger.part(0).take("host", 200, "a")
    assert ledger.part(0).held["host"] == 0
    assert ledger.held["host"] == 900


def test_one_device_is_its_own_part() -> None:
    ledger = Ledger(5, 5)
    assert ledger.part(0) is ledger
