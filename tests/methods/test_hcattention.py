"""HCAttention: codes that score, the mass that is selected, weights that are merged."""

from typing import Any, cast

import pytest
import torch
from tests.cache.integrity import check_blocks
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.index.codes.index import Codes
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Selection, Step

SCALE, BLOCK, KV, GROUP, D = 0.5, 8, 2, 3, 16


class World:
    """A runtime of one layer with two sequences; every key and value it was given is kept."""

    def __init__(self, lengths: tuple[int, int] = (90, 37), **params: Any) -> None:
        self.draws = torch.Generator().manual_seed(1)
        self.shape = LayerShape(
            KV * GROUP, KV, D, torch.float32, torch.device("cpu"), softcap=params.pop("softcap", None)
        )
        self.ledger = Ledger()
        given = {"block": BLOCK, "window_blocks": 1, "centroids": 64, "union": False, "tail": "none", **params}
        self.runtime = Runtime([self.shape], compose(METHODS["hcattention"], **given), self.ledger, 2, None)
        self.group = self.runtime.groups[0]
        self.k, self.v = ([torch.empty(0, KV, D)] * 2 for _ in "kv")
        self.lengths = (0, 0)
        self.table: Any = None
        """Of the last decode step."""
        self.step(lengths)

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.draws)

    def step(self, new: tuple[int, ...]) -> tuple[Tensor, Tensor, Selection | None]:
        step = Step.of((0, 1), self.lengths, new)
        q, k, v = (self.randn(step.tokens, heads, D) for heads in (KV * GROUP, KV, KV))
        picked: list[Selection] = []
        pick = self.group.select.pick
        self.group.select.pick = lambda *a: picked.append(pick(*a)) or picked[0]  # type: ignore[method-assign,func-returns-value]
        running = self.runtime.begin(step)
        out = self.runtime.attend(running, 0, q, k, v, SCALE)
        self.runtime.commit(running)
        self.table = running.tables.get(0, self.table)
        self.group.select.pick = pick  # type: ignore[method-assign]
        for i, (start, end) in enumerate(step.spans):
            self.k[i], self.v[i] = torch.cat([self.k[i], k[start:end]]), torch.cat([self.v[i], v[start:end]])
        self.lengths = step.lengths
        return q, out, picked[0] if picked else None

    def take_back(self, keep: int) -> None:
        """Of the first sequence."""
        self.runtime.truncate(0, self.lengths[0], keep)
        self.k[0], self.v[0] = self.k[0][:keep], self.v[0][:keep]
        self.lengths = (keep, self.lengths[1])

    def weights(self, seq: int, q: Tensor) -> Tensor:
        """q `[q_heads, d]` -> the scores to select by, `[q_heads, n]` float64: coded keys, then exact ones."""
        index, keys = cast("Codes", self.group.index), self.k[seq].clone()
        far = self.far(seq)
        if index.books.groups and self.first(seq) < far:
            book = index.books.made[0]
            first = self.first(seq)
            keys[first:far] = book.decode(book.encode(keys[first:far]))
        scores = torch.einsum("hd,nhd->hn", q.double(), keys.double().repeat_interleave(GROUP, 1)) * SCALE
        if self.shape.softcap is not None:
            scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
        return scores

    def attended(self, seq: int, q: Tensor) -> Tensor:
        """q `[q_heads, d]` -> the output `[q_heads, d]` float64 where every token counts."""
        return torch.einsum(
            "hn,nhd->hd", self.weights(seq, q).softmax(-1), self.v[seq].double().repeat_interleave(GROUP, 1)
        )

    def far(self, seq: int) -> int:
        return (self.lengths[seq] - 1) // BLOCK * BLOCK

    def first(self, seq: int) -> int:
        """Tokens before it stay on the GPU."""
        return min(self.far(seq), self.group.cache.gpu.sinks * BLOCK)


def expected(world: World, seq: int, q: Tensor, tau: float, cap: int | None, tail: str = "none") -> Tensor:
    """One sequence's output `[q_heads, d]`, written out head by head."""
    far, first, out = world.far(seq), world.first(seq), []
    scores = world.weights(seq, q)
    for head in range(KV * GROUP):
        weights = scores[head].softmax(0)
        order = first + weights[first:far].argsort(descending=True)
        mass, kept = float(weights[far:].sum() + weights[:first].sum()), []
        for i in order.tolist():
            if mass >= tau or len(kept) == cap:
                break
            kept.append(i)
            mass += float(weights[i])
        attended = torch.tensor([*range(first), *kept, *range(far, len(weights))])
        chosen = weights[attended] if tail == "zero" else scores[head][attended].softmax(0)
        out.append(chosen @ world.v[seq][attended, head // GROUP].double())
    return torch.stack(out)


@pytest.mark.parametrize("tail", ["none", "zero"])
@pytest.mark.parametrize(
    ("groups", "tau", "cap"), [(8, 0.8, None), (4, 0.6, None), (0, 0.7, None), (8, 1, 5), (8, 1, None)]
)
def test_equals_the_method_written_out(groups: int, tau: float, cap: int | None, tail: str) -> None:
    world = World(groups=groups, tau=tau, cap=cap, tail=tail)
    for _ in range(20):
        q, out, _ = world.step((1, 1))
        for seq in range(2):
            wanted = expected(world, seq, q[seq], tau, cap, tail)
            torch.testing.assert_close(out[seq].double(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("sinks", [1, 3])
def test_first_blocks_can_stay_as_they_are(sinks: int) -> None:
    world = World((90, 4), groups=4, tau=0.7, sink_blocks=sinks)
    for new in (*[(1, 1)] * 12, (9, 2), *[(1, 1)] * 20):
        q, out, _ = world.step(new)
        if new == (1, 1):
            for seq in range(2):
                wanted = expected(world, seq, q[seq], 0.7, None)
                torch.testing.assert_close(out[seq].double(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("params", [{"code_bits": 12}, {"code_bits": 13}, {"window_blocks": 3}])
def test_forms_of_codes_give_the_same_as_codes_of_16_bits(params: dict[str, Any]) -> None:
    world, plain = World(groups=4, tau=0.8, **params), World(groups=4, tau=0.8)
    for _ in range(10):
        one, two = world.step((1, 1))[1], plain.step((1, 1))[1]
        if "window_blocks" not in params:
            torch.testing.assert_close(one, two)
    if "window_blocks" in params:  # more is exact, so it differs, and is nearer to full
        assert not torch.allclose(one, two)


@pytest.mark.parametrize(("form", "error"), [("int8", 0.02), ("int4", 0.3)])
def test_values_in_few_bits_are_near(form: str, error: float) -> None:
    world, plain = World(groups=4, tau=0.8, host_dtype=form), World(groups=4, tau=0.8)
    for _ in range(20):
        one, two = world.step((1, 1))[1], plain.step((1, 1))[1]
        assert 0 < (one - two).abs().max() < error
    assert world.ledger.held["host"] < plain.ledger.held["host"]
    assert world.runtime.attended(Step.of((0, 1), world.lengths, (1, 1)))[1] < 2 * 120
    one, two = world.step((30, 3))[1], plain.step((30, 3))[1]
    assert (one - two).abs().max() < error


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_prompt_in_pieces_shorter_than_a_block(form: str) -> None:
    world, plain = World((4, 3), groups=4, tau=0.8, host_dtype=form), World((4, 3), groups=4, tau=0.8)
    for new in ((3, 1), (2, 9), (1, 1)):
        one, two = world.step(new)[1], plain.step(new)[1]
        torch.testing.assert_close(one, two, atol=0.3, rtol=0)


def test_soft_capped_scores_are_selected_by() -> None:
    world = World(groups=8, tau=1, softcap=0.9)
    q, out, _ = world.step((1, 1))
    torch.testing.assert_close(out[0].double(), world.attended(0, q[0]), atol=2e-5, rtol=1e-4)


def test_each_query_head_has_its_mass_and_not_an_entry_more() -> None:
    world = World(groups=8, tau=0.75)
    q, _, picked = world.step((1, 1))
    assert picked.rows is not None
    for seq in range(2):
        weights, far = world.weights(seq, q[seq]).softmax(-1), world.far(seq)
        for head in range(KV * GROUP):
            chosen = picked.rows.weights[seq, head] > 0
            at = picked.rows.index[seq, head // GROUP][chosen].long()
            mass = weights[head, far:].sum() + weights[head, at].sum()
            assert mass >= 0.75 - 1e-6
            if len(at):
                assert mass - weights[head, at].min() < 0.75 + 1e-6


@pytest.mark.parametrize("tail", ["none", "mean"])
def test_heads_of_a_group_attend_to_what_any_of_them_keeps(tail: str) -> None:
    given: dict[str, Any] = {"groups": 8, "tau": 0.6, "tail": tail}
    world, apart = World(**given, union=True), World(**given)
    (q, out, picked), (_, _, alone) = world.step((1, 1)), apart.step((1, 1))
    assert torch.equal(picked.rows.index, alone.rows.index), "no value more is read"
    for seq in range(2):
        coded, far = world.weights(seq, q[seq]), world.far(seq)
        values = world.v[seq].double()
        for head in range(KV * GROUP):
            count = int(picked.rows.count[seq, head // GROUP])
            at = picked.rows.index[seq, head // GROUP, :count].long()
            scores = coded[head].clone()
            left = torch.ones(far, dtype=torch.bool)
            left[at] = False
            if tail == "none":
                scores[:far][left] = -torch.inf
            weights = scores.softmax(0)
            own = values[:, head // GROUP].clone()
            # the mean is over all blocks that were full before the step
            own[:far][left] = own[:far].mean(0)
            wanted = weights @ own
            torch.testing.assert_close(out[seq, head].double(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["model", "int8"])
def test_the_mean_value_is_that_of_what_is_stored(form: str) -> None:
    world = World(groups=4, tail="mean", host_dtype=form)
    means = cast("Codes", world.group.index).means

    def check(error: float) -> None:
        for seq in range(2):
            full = world.lengths[seq] // BLOCK * BLOCK
            found = means.of(0, world.table, world.shape)[seq, ::GROUP]
            wanted = world.v[seq][:full].mean(0) if full else torch.zeros(KV, D)
            torch.testing.assert_close(found, wanted, atol=error, rtol=0)

    for new in ((1, 1), (12, 3), *[(1, 1)] * 9):
        world.step(new)
        check(1e-5)
    step = Step.of((0, 1), world.lengths, (30, 9))
    running = world.runtime.begin(step)
    world.runtime.attend(running, 0, *(world.randn(39, heads, D) for heads in (KV * GROUP, KV, KV)), SCALE)
    world.runtime.abort(running)
    world.step((1, 1))
    check(1e-5 if form == "model" else 0.02)
    world.take_back(43)
    check(1e-5 if form == "model" else 0.02)
    world.runtime.truncate(1, world.lengths[1], 0)
    assert not means.sums[0][1].any()


def test_appended_turns_see_the_decoded_history() -> None:
    world = World(groups=8, tau=0.9)
    world.step((1, 1))
    before = world.lengths
    q, out, _ = world.step((70, 3))
    book, start = cast("Codes", world.group.index).books.made[0], 0
    for seq, new in enumerate((70, 3)):
        far = (before[seq] - 1) // BLOCK * BLOCK
        keys = world.k[seq].clone()
        keys[:far] = book.decode(book.encode(keys[:far]))
        scores = torch.einsum(
            "thd,nhd->htn", q[start : start + new].double(), keys.double().repeat_interleave(GROUP, 1)
        )
        seen = torch.arange(len(keys))[None] <= before[seq] + torch.arange(new)[:, None]
        weights = (scores * SCALE).masked_fill(~seen, -torch.inf).softmax(-1)
        wanted = torch.einsum("htn,nhd->thd", weights, world.v[seq].double().repeat_interleave(GROUP, 1))
        torch.testing.assert_close(out[start : start + new].double(), wanted, atol=2e-5, rtol=1e-4)
        start += new
    world.step((1, 1))


@pytest.mark.parametrize("sinks", [0, 1, 6])
def test_tokens_can_be_taken_back(sinks: int) -> None:
    world = World(groups=0, tau=1, window_blocks=2, sink_blocks=sinks)
    for _ in range(30):
        world.step((1, 1))
    world.take_back(41)
    for new in ((1, 1), (9, 2), *[(1, 1)] * 12):
        q, out, _ = world.step(new)
    for seq in range(2):
        torch.testing.assert_close(out[seq].double(), world.attended(seq, q[seq]), atol=2e-5, rtol=1e-4)
    check_blocks(world.group.cache.host.table)
