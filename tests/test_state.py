import pytest
import torch

from coattn.state import AttnState, merge

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


def state_of(scores: torch.Tensor, values: torch.Tensor) -> AttnState:
    """scores `[heads, n]`, values `[n, d]`."""
    if scores.shape[1] == 0:
        return AttnState.empty(torch.empty(len(scores), values.shape[1]))
    return AttnState((scores.softmax(-1) @ values).float(), scores.logsumexp(-1).float())


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    spread=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 10_000),
)
def test_merge_is_attention_over_the_union(sizes: list[int], spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, sum(sizes), generator=generator, dtype=torch.float64) * spread
    values = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    parts = [state_of(s, v) for s, v in zip(scores.split(sizes, 1), values.split(sizes), strict=True)]
    whole = state_of(scores, values)
    for order in (parts, parts[::-1]):
        merged = merge(*order)
        torch.testing.assert_close(merged.out, whole.out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(merged.lse, whole.lse, atol=2e-6, rtol=1e-6)


def test_merge_is_associative() -> None:
    states = [state_of(torch.randn(2, 5), torch.randn(5, 4)) for _ in range(3)]
    left, right = merge(merge(*states[:2]), states[2]), merge(states[0], merge(*states[1:]))
    torch.testing.assert_close(left.out, right.out)
    torch.testing.assert_close(left.lse, right.lse)


def test_the_empty_set_is_the_identity() -> None:
    state = state_of(torch.randn(2, 5), torch.randn(5, 4))
    for merged in (merge(AttnState.empty(state.out), state), merge(state, AttnState.empty(state.out))):
        assert torch.equal(merged.out, state.out)
        assert torch.equal(merged.lse, state.lse)


def test_merging_empty_sets_gives_the_empty_set() -> None:
    empty = AttnState.empty(torch.empty(2, 4))
    merged = merge(empty, empty)
    assert torch.equal(merged.out, torch.zeros(2, 4))
    assert torch.equal(merged.lse, torch.full((2,), -torch.inf))


def test_merge_needs_a_state() -> None:
    with pytest.raises(ValueError, match="at least one"):
        merge()
