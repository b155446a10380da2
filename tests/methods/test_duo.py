"""DuoAttention: retrieval heads see all, the others the first and the newest tokens; labels by needle mass."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.run import coattn
from tests.dense import dense
from tests.engine.small import small
from tests.tools.evaluate.tiny import save_model
from torch import Tensor

from coattn.baselines.duo.head_labels import HeadLabels, read_labels, retrieval_heads
from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError, InputError
from coattn.hf.architectures import describe_layers
from coattn.hf.attach import attach
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.tools.calibrate.heads import Prompt, make_prompt, needle_mass, score_heads
from coattn.types import LayerShape, Step

HEADS, KV_HEADS, DIM, SCALE = 6, 3, 16, 0.4
GROUP = HEADS // KV_HEADS
LABELS = [[True, False, True], [False, False, True]]


def labels(path: Path, marks: Any = (None, None), retrieval: Any = LABELS) -> str:
    HeadLabels("some model", list(marks), 4, 6, 0.5, [[0.0] * 3] * 2, retrieval).save(path)
    return str(path)


def seen(position: int, retrieval: bool, block: int, sinks: int, recent: int) -> list[int]:
    """Positions that a head attends to, one by one: in whole blocks, of a list that begins with the first token."""
    found = []
    for p in range(position + 1):
        first = p // block * block < sinks
        newest = p // block * block + block > position + 1 - recent
        if retrieval or first or newest:
            found.append(p)
    return found


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("block", "sinks", "recent"), [(1, 4, 6), (4, 4, 6), (8, 3, 9), (4, 0, 1)])
def test_heads_attend_to_what_their_label_says(
    tmp_path: Path, block: int, sinks: int, recent: int, captured: bool
) -> None:
    shape = LayerShape(HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
    own = {"block": block, "sinks": sinks, "recent": recent, "heads": labels(tmp_path / "heads.json")}
    runtime = Runtime([shape] * 2, compose(METHODS["duo"], **own), Ledger(), 4, 96, True, True)
    kept = [[torch.empty(0, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)] for _ in range(4)]  # layer * 2 + sequence
    lengths = (30, 5)
    for new in ((30, 5), *[(1, 1)] * 25):
        history = tuple(0 if sum(new) > 2 else n for n in lengths)
        step = Step.of((0, 1), history, new)
        running = runtime.begin(step)
        for layer in range(2):
            made = [torch.randn(sum(new), n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
            for i, (start, end) in enumerate(step.spans):
                at = layer * 2 + i
                kept[at] = [torch.cat([a, b[start:end]]) for a, b in zip(kept[at], made, strict=True)]
            if captured and any(history):
                wide = [torch.cat([x, torch.ones(2, *x.shape[1:])]) for x in made]
                capture = runtime.begin_capture(4, host=False)
                out = runtime.attend(capture, layer, *wide, SCALE)[:2]
            else:
                out = runtime.attend(running, layer, *made, SCALE)
            for i in range(2) if any(history) else ():
                torch.testing.assert_close(
                    out[i].double(), wanted(kept[layer * 2 + i], layer, own), atol=1e-5, rtol=1e-5
                )
        runtime.commit(running)
        lengths = tuple(len(kept[i][1]) for i in range(2))
    share = sum(not head for layer in LABELS for head in layer) / 6
    gaps = [len(k[1]) - len(seen(len(k[1]) - 1, False, block, sinks, recent)) for k in kept[:2]]
    report = runtime.report(step)
    assert report["attended_gpu"] == pytest.approx(sum(lengths) - share * sum(gaps))
    assert report["needed_gpu_bytes"] == round(report["attended_gpu"] * 2 * shape.token_bytes)


def wanted(kept: list[Tensor], layer: int, own: dict[str, Any]) -> Tensor:
    q, k, v = kept
    outs = []
    for head, retrieval in enumerate(LABELS[layer]):
        some = seen(len(k) - 1, retrieval, own["block"], own["sinks"], own["recent"])
        mine = q[-1:, GROUP * head : GROUP * (head + 1)]
        outs.append(dense(mine, k[some, head, None], v[some, head, None], SCALE)[0])
    return torch.cat(outs)


def test_needle_mass_is_what_the_slow_rule_says() -> None:
    q, k = torch.randn(50, HEADS, DIM), torch.randn(50, KV_HEADS, DIM)
    prompt = Prompt(torch.arange(50), torch.tensor([38, 44, 49]), torch.tensor([[2, 9], [30, 36], [30, 42]]))
    found = needle_mass(q, k, prompt, SCALE, None, sinks=4, recent=6)
    for kv_head in range(KV_HEADS):
        best = 0.0
        for head in range(GROUP * kv_head, GROUP * (kv_head + 1)):
            mass = 0.0
            for asking, (first, last) in zip(prompt.asking.tolist(), prompt.wanted.tolist(), strict=True):
                weights = ((k[: asking + 1, kv_head] @ q[asking, head]) * SCALE).softmax(0)
                mass += sum(float(weights[p]) for p in range(first, last) if p >= 4 and p <= asking - 6)
            best = max(best, mass / 3)
        assert float(found[kv_head]) == pytest.approx(best, rel=1e-4)


class Letters:
    """A tokenizer with a token for each letter."""

    def __call__(self, text: str, **options: Any) -> Any:
        return type("Encoded", (), {"input_ids": [ord(letter) % 250 for letter in text]})


def test_a_prompt_has_its_answers_where_it_says() -> None:
    text = [7] * 4000
    prompt = make_prompt(Letters(), text, 3000, random.Random(1))
    assert len(prompt.ids) == 3000
    spans = sorted({tuple(pair) for pair in prompt.wanted.tolist()})
    assert 4 <= len(spans) <= 10
    for asking, (first, last) in zip(prompt.asking.tolist()[::50], prompt.wanted.tolist()[::50], strict=True):
        assert last <= asking
        needle = "".join(map(chr, prompt.ids[first:last].tolist()))
        assert needle.startswith("\nRemember this sequence of words")
        around = "".join(map(chr, prompt.ids[asking + 1 : asking + 4].tolist()))
        assert around in needle, "what is predicted next stands in the pass key"
    with pytest.raises(InputError, match="too few for a pass key and a text"):
        make_prompt(Letters(), text, 100, random.Random(1))


def test_the_best_share_of_all_heads_retrieves() -> None:
    scores: list[list[float | None]] = [[0.1, 0.5], [None, None], [0.4, 0.2]]
    assert retrieval_heads(scores, 0.5) == [[False, True], [False, False], [True, False]]
    assert retrieval_heads(scores, 0.0) == [[False, True], [False, False], [False, False]]


def test_a_model_needs_labels_of_its_own(tmp_path: Path) -> None:
    model = small()
    shapes = describe_layers(model)
    scores = score_heads(model, [Prompt(torch.arange(40), torch.tensor([30]), torch.tensor([[8, 12]]))], 2, 4)
    assert [len(layer) for layer in scores] == [shape.kv_heads for shape in shapes]
    path = str(tmp_path / "heads.json")
    marks = [shape.mark for shape in shapes]
    HeadLabels("small", marks, 2, 4, 0.5, scores, retrieval_heads(scores, 0.5)).save(Path(path))
    assert read_labels(path).scores == scores

    def run(**params: Any) -> None:
        with attach(model, "duo", **params), torch.inference_mode():
            model(torch.arange(20)[None])

    run(heads=path)
    run(heads="alternate")
    with pytest.raises(ConfigError, match="needs labels of the model's heads") as error:
        run()
    assert "coattn calibrate duo" in error.value.hint
    HeadLabels("other", [mark + 1 for mark in marks if mark], 2, 4, 0.5, scores, read_labels(path).retrieval).save(
        Path(path)
    )
    with pytest.raises(ConfigError, match="were made for other, not for the model in use"):
        run(heads=path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "There is no file"),
        ("not json", "it is not a JSON file"),
        ("[]", "of this version"),
        ('{"format": "coattn-heads-1"}', "is damaged"),
        ("retrieval", "is damaged"),
    ],
)
def test_a_bad_file_is_refused_in_a_sentence(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "heads.json"
    if content == "retrieval":
        data = json.loads(Path(labels(path)).read_text())
        path.write_text(json.dumps({**data, "retrieval": [[1, 0, "x"]]}))
    elif content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        compose(METHODS["duo"], heads=str(path))
    assert "coattn calibrate duo" in error.value.hint


def test_the_command_writes_labels_that_the_method_reads(tmp_path: Path) -> None:
    folder, path = save_model(tmp_path / "model"), tmp_path / "heads.json"
    made = coattn("calibrate", "duo", "--model", str(folder), "--samples", "1", "--length", "512", "--out", str(path))
    assert made.returncode == 0, made.stderr
    found = read_labels(str(path))
    assert found.prompts == 1
    assert (found.sinks, found.recent, found.method) == (64, 256, "needle mass")
    generate = ("generate", "Hello", "--model", str(folder), "--max-new-tokens", "3", "--method", "duo")
    used = coattn(*generate, "--set", f"heads={path}")
    assert used.returncode == 0, used.stderr
    bare = coattn(*generate)
    assert bare.returncode == 2
    assert "coattn calibrate duo" in bare.stderr
