"""What fits, over a pretended memory."""

import pytest
from tests.engine.memory import GPU, HOST, Blocks

from coattn.engine.admission import Admission, Excess
from coattn.engine.request import Request
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import BudgetError, InputError


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    room = Admission(Blocks(None, 100 * 10), 200)
    request = Request(0, [0] * 30, SamplingParams(), 80)
    with pytest.raises(BudgetError, match=r"30 tokens with up to 50 new ones needs 1\.9 KiB .* in DRAM") as caught:
        room.check(request)
    assert "host_kv" in caught.value.hint
    with pytest.raises(InputError, match="200 tokens, but a sequence has at most 200"):
        room.check(Request(0, [0] * 200, SamplingParams(), 200))


def test_of_several_devices_the_fullest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocks, "fullest", lambda *_: ("cuda:1", 0.25))
    room = Admission(Blocks(100 * 2, None), 200)
    with pytest.raises(BudgetError, match=r"needs 100 B .* of cuda:1 to itself, but 50 B are left"):
        room.check(Request(0, [0] * 30, SamplingParams(), 80))


@pytest.mark.parametrize("blocks", [0, 1, 7, 1000])
def test_the_longest_sequence_fits_and_one_token_more_does_not(blocks: int) -> None:
    """The last token of a sequence is never stored."""
    room = Admission(Blocks(None, 100 * blocks), 200)
    assert room.most() == min(200, HOST * blocks + HOST)


def test_growing_sequences_take_what_they_do_not_hold_yet() -> None:
    memory = Blocks(100 * 4, 100 * 5)
    room = Admission(memory, 200)
    memory.store(0, 0, 12)
    assert room.excess([]) is None
    assert room.excess([(12, 16)]) is None, "a block in DRAM, and none on the GPU"
    assert room.excess([(12, 2 * GPU + 1), (0, GPU - 1)]) is None
    assert room.excess([(12, 16), (0, 2 * HOST)]) == Excess("host", 300, 200)
    assert room.excess([(12, 17), (0, 2 * GPU)]) == Excess("gpu", 300, 200), "the GPU comes first"


def test_a_newcomer_fits_beside_those_that_grow() -> None:
    memory = Blocks(None, 100 * 5)
    room = Admission(memory, 200)
    memory.store(0, 0, 12)
    assert room.fits(8, {}, [])
    assert not room.fits(8, {}, [(12, 16)])
    assert room.fits(8, {"host": 100}, [(12, 16)]), "a block of it is there anyway"
