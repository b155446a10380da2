"""The demo on a random model: what it answers has no meaning, but where KV lies and what is attended has."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.engine.small import small, tokenizer

from coattn.cli.demo import why
from coattn.errors import InputError
from coattn.hf.load import Loaded
from coattn.hf.prefilled import prefill
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.step.runtime import LayerGroup, Runtime
from coattn.tools.demo.prompt import FACT, plant
from coattn.tools.demo.run import SHOWN, DemoRun, run_demo
from coattn.tools.demo.seen import Names, Seen
from coattn.types import Selection

TOKENS, ANSWER, SHARE = 900, 6, 0.25


def loaded() -> Loaded:
    model = small()
    model.config.max_position_embeddings = 2048
    return Loaded(model, tokenizer(), "small", None)


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """A larger share of a shorter document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coattn.tools.demo.run.GPU_SHARE", SHARE)
        yield


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    calls: list[tuple[str, int, int]] = []
    found = run_demo(loaded(), TOKENS, ANSWER, lambda *call: calls.append(call))
    return {**found, "calls": calls}


def test_the_document_is_read_once(result: dict[str, Any]) -> None:
    read = [call for call in result["calls"] if call[0] == "reading the document"]
    assert read == [("reading the document", i, 2) for i in range(3)]
    assert [row["method"] for row in result["rows"]] == list(SHOWN)


def test_exact_rows_answer_like_full_and_attend_to_everything(result: dict[str, Any]) -> None:
    rows = {row["method"]: row for row in result["rows"]}
    assert {name for name, row in rows.items() if row["exact"]} == {"full", "offload", "cpu"}
    for name in ("full", "offload", "cpu"):
        assert rows[name]["answer"] == rows["full"]["answer"]
        assert rows[name]["attended"] == pytest.approx(1)
    assert max(rows["full"]["seen"]["cpu"] + rows["full"]["seen"]["pulled"]) == 0
    assert max(rows["offload"]["seen"]["cpu"]) == 0 < max(rows["offload"]["seen"]["pulled"])
    assert max(rows["cpu"]["seen"]["pulled"]) == 0 < max(rows["cpu"]["seen"]["cpu"])


def test_caps_are_kept(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["capped"] == (row["method"] != "full")
        assert row["gpu_kv"] <= result["gpu_cap"] or not row["capped"]
        assert row["gpu_share"] == pytest.approx(row["gpu_kv"] / result["rows"][0]["gpu_kv"])
    assert result["rows"][0]["gpu_share"] == 1


def test_streaming_forgets_the_fact_and_nobody_else_does(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert (row["fact_kept"] == 0) == (row["method"] == "streaming")
    row = next(row for row in result["rows"] if row["method"] == "streaming")
    # the ring drops a token a step, five in all: one piece or two of the document are seen and no longer there
    differ = [abs(seen - held) for seen, held in zip(row["seen"]["gpu"], row["lies"]["gpu"], strict=True)]
    assert sum(share > 0.01 for share in differ) <= 2
    assert row["fact_attended"] == 0 < row["seen"]["gpu"][0]


def test_lossy_rows_attend_to_a_part(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if not row["exact"]:
            assert 0 < row["attended"] < 1 - 1e-6, row["method"]
        dram = {"full": 0, "streaming": 0, "hcattention": 0.5}.get(row["method"], 1)  # codes save the keys
        assert row["lies"]["dram"][:-10] == [dram] * (len(row["lies"]["dram"]) - 10), row["method"]


class Counting(Seen):
    """Counts what the lists say, beside what was recognised."""

    listed = 0
    last: "Counting"

    def open(self, runtime: Runtime) -> None:
        super().open(runtime)
        Counting.last = self

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        super().selected(group, call, selection, states)
        for part in (selection.gpu, selection.host):
            if part is not None:
                self.listed += int(part.tokens[0].expand(call.shape.kv_heads).sum())
        if selection.rows is not None:
            self.listed += int(selection.rows.count.sum())


@pytest.mark.parametrize("name", SHOWN)
def test_every_entry_that_is_attended_is_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn.tools.demo.run.Seen", Counting)
    own = loaded()
    planted = plant(own, TOKENS, ANSWER)
    document = prefill(own.model, planted.ids)
    own.model.generation_config.eos_token_id = -1  # no answer ends early
    DemoRun(own, document, planted, Names(document), ANSWER).answer(name, lambda *_: None)
    layers, heads = 2, 2
    new = sum(range(1, ANSWER)) * layers * heads  # of the answer, in every step all that is there: never in DRAM
    assert sum(float(count.sum()) for count in Counting.last.seen.values()) == Counting.last.listed - new


def test_names_find_positions() -> None:
    own = loaded()
    document = prefill(own.model, list(range(3, 120)))
    names, order = Names(document), torch.randperm(117, generator=torch.Generator().manual_seed(0))
    for layer, (k, _) in enumerate(document.kv):
        assert torch.equal(names.find(layer, k[order].transpose(0, 1)), order.expand(2, -1))
        assert (names.find(layer, k.transpose(0, 1) + 1) == 117).all()
        block = k[5:9].transpose(0, 1)[None, :, None]
        assert names.among(layer, block).nonzero()[:, 1].tolist() == [5, 6, 7, 8] * 2


def test_the_fact_is_where_it_is_said_to_be() -> None:
    own = loaded()
    planted = plant(own, TOKENS, ANSWER)
    assert len(planted.ids) == TOKENS
    assert own.tokenizer.decode(planted.ids[planted.start : planted.end]).strip() == FACT


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="need 2,064 positions, but small has 2,048") as refused:
        plant(loaded(), 2040, 24)
    assert refused.value.hint == "Give at most 2,024 tokens."


def test_a_miss_is_explained() -> None:
    full, lost = {"exact": True, "found": True}, {"exact": False, "found": False, "fact_kept": 0, "fact_attended": 0}
    assert "nothing of the fact is left" in why(lost, {"rows": [full, lost]})
    assert "12% of layers" in why({**lost, "fact_kept": 1, "fact_attended": 0.12}, {"rows": [full, lost]})
    assert "model is too weak" in why(lost, {"rows": [{**full, "found": False}, lost]})
    assert "please report" in why({**full, "found": False}, {"rows": [full]})
