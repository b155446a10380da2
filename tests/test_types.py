from coattn.types import Phase, Step


def test_the_phase_follows_from_the_lengths() -> None:
    assert Step.of((0, 1), (0, 0), (5, 3)).phase is Phase.PREFILL
    assert Step.of((0, 1), (5, 3), (1, 1)).phase is Phase.DECODE
    assert Step.of((0, 1), (5, 3), (1, 2)).phase is Phase.EXTEND
    assert Step.of((0, 1), (5, 0), (0, 4)).phase is Phase.EXTEND
    assert Step.of((0, 1), (5, 3), (1, 0)).phase is Phase.EXTEND


def test_tokens_are_packed_sequence_after_sequence() -> None:
    step = Step.of((0, 1, 2), (4, 0, 9), (2, 0, 3))
    assert step.lengths == (6, 0, 12)
    assert step.spans == ((0, 2), (2, 2), (2, 5))
    assert step.tokens == 5
