"""The picture: everything in the frame, no text over another."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.text import Text

from coattn.tools.demo import picture
from coattn.tools.demo.prompt import FACT
from coattn.tools.demo.run import BINS, SHOWN


def row(method: str, **other: Any) -> dict[str, Any]:
    flat = [0.5] * BINS
    return {
        "method": method,
        "exact": True,
        "gpu_share": 0.125,
        "attended": 1.0,
        "found": False,
        "lies": {"gpu": flat, "dram": flat},
        "seen": {"gpu": flat, "pulled": [0.0] * BINS, "cpu": flat},
        **other,
    }


@pytest.mark.parametrize("at", [0.02, 0.4, 0.7])
def test_texts_are_inside_and_apart(at: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    tokens = 3000
    start = int(tokens * at)
    result = {"document_tokens": tokens, "fact_start": start, "fact_end": start + 20, "gpu_share": 0.125}
    result |= {"fact": FACT, "model": "smollm2"}
    picture.draw({**result, "rows": [row(name) for name in SHOWN]}, tmp_path / "x.png")
    (figure,) = kept
    assert (tmp_path / "x.png").stat().st_size < 200_000
    figure.canvas.draw()
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    assert len(texts) > 5 * len(SHOWN)
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    for text, box in boxes:
        assert min(box.x0, box.y0) >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    for i, (text, box) in enumerate(boxes):
        assert [other for other, its in boxes[i + 1 :] if box.overlaps(its)] == [], text
    titles = [(text, box) for text, box in boxes if text.endswith(":")]
    assert len(titles) == len(figure.legends) == 2
    for legend in figure.legends:
        assert legend.get_window_extent().x1 <= figure.bbox.x1
        assert [text for text, box in titles if box.overlaps(legend.get_window_extent())] == []


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0%"), (0.001, "<1%"), (0.125, "12%"), (0.999, ">99%"), (1.0, "100%"), (1.005, "100%")]
)
def test_percent(share: float, text: str) -> None:
    assert picture.percent(share) == text
