"""Every kind of figure: labels that are unique, short and do not touch each other, legends off what is drawn."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from coattn.parts.handover.span import Span
from coattn.step.trace.figure import timeline_figure
from coattn.step.trace.step import Crossing, StepTrace
from coattn_lab.bench import figures as bench
from coattn_lab.evaluate import attention_figures, figures, heatmap, sweep_figure
from coattn_lab.evaluate.drawing import tokens, wrap
from coattn_lab.evaluate.wording import deciding, describe, host_dtype, share

HARDWARE = {"hardware": {"cpu": "Intel(R) Xeon(R) Processor", "cores": 16, "gpu": "NVIDIA H200"}}
SIMULATED = ["random weights", "random keys and values", "assumed lists: 1.6% of DRAM's entries kept"]


def speed(method: str, batch: int, context: int, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "shapes": "qwen3-14b", "batch": batch, "context": context, "params": {}, "settings": {},
        "ms_per_step": ms, "p99_ms": 1.1 * ms, "floor_ms": ms / 2, "tokens_per_s": 1e3 * batch / ms,
        "simulated": SIMULATED, "layer_us": {"gpu": 5.0, "cpu": 340.0, "wait": 335.0}, **more,
    }  # fmt: skip


HGCA = {
    "params": {"window_blocks": 32, "block": 32, "capacity": 0.039841269841269844, "kept": [0.015873015873015872]},
    "settings": {"window_blocks": 32, "block": 32, "beta": 1, "capacity": 0.039841269841269844},
    "kept_share": 0.015873015873015872,
}
LONG = {
    "budget": 2048,
    "block": 32,
    "schedule": "same_layer",
    "recall_interval": 0,
    "whole_pool": True,
    "ahead_from": 3,
}
SPEED = [
    case
    for context in (8192, 16384, 32768, 65536)
    for case in (
        speed("full", 1, context, 9.9 + context / 65536, params={"block": 32}),
        speed("hgca", 9, context, 25.7 * context / 8192, **HGCA),
        speed("scout", 10, context, 15.4, params=LONG),
        speed("transformers-offload", 4, context, 1061.4, floor_ms=None),
    )
]
OPS = [
    {"kernel": "attend", "isa": isa, "dtype": dtype, "group": group, "head_size": size, "threads": 16, "gbps": 100.0,
     "torch_gbps": 40.0, "limit_gbps": 140.0}
    for isa in ("amx", "avx512") for dtype in ("bf16", "int8") for group in (1, 4, 8) for size in (64, 128)
]  # fmt: skip
SWEEP = [
    {"row": f"hcattention,codebook=t{groups}.safetensors,tau={tau},window_blocks=4,union=false",
     "method": "hcattention", "ratio": 1.0 + 0.01 * i, "ratio_95": [0.99 + 0.01 * i, 1.03 + 0.01 * i],
     "attended_gpu": 900.0, "attended_host": 4000.0,
     "params": {"block": 32, "window_blocks": 4, "codebook": f"t{groups}.safetensors", "tau": tau, "union": False}}
    for i, (groups, tau) in enumerate(itertools.product((16, 32), (0.9, 0.95, 0.99)))
]  # fmt: skip
NEEDLE = {
    "model": "smollm2", "method": "scout", "params": {"budget": 2048, "block": 32, "window_blocks": 2}, "found": 9,
    "total": 110, "cells": [{"length": 1024 * n, "depth": d / 10, "found": d < n} for n in range(1, 11)
                            for d in range(11)],
    "by_length": [{"length": 1024 * n, "read_share": min(1.0, 2.1 / n)} for n in range(1, 11)],
}  # fmt: skip
WINDOWS = {
    "method": "streaming", "model": "smollm2", "params": {"recent": 960}, "prefill": 2048,
    "windows": [{"start": 8192 * i, "kl_steps": [0.1, 5.0, 0.2], "losses": [1.0, 2.0], "losses_full": [1.0, 1.5]}
                for i in range(8)],
    "layers": {"cosine": [0.9] * 30, "mass": [0.8] * 30},
}  # fmt: skip
SHARES = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
LOCALITY = {"mass": 0.99, "share": [[0.1] * 32] * 36, "curve": {"mass": [[0.5] * 7] * 36, "shares": SHARES}}
DRIFT = {"budget": 1024, "block": 32, "mass": {"layers": [0.1, 0.2]}, "bound": {"layers": [0.1, 0.1]}}
QUERY = {name: {"layers": [0.1, 0.9, 0.8]} for name in ("norm_rope", "norm", "rope", "neither")}
STEP = StepTrace(
    0, 10_000_000, (Span(0, 1500, 2000, 5_000_000, 1600, 4_800_000),), (Crossing("layer 1", 6_000_000, 9_000_000),),
    sequences=2, weight_bytes=1, hbm_bytes=10_000, pcie_bytes=100, dram_bytes=5_000,
)  # fmt: skip
KINDS: dict[str, Callable[[], Figure]] = {
    "decode": lambda: bench.decode_figure({"rows": SPEED, **HARDWARE}),
    "one bar": lambda: bench.decode_figure({"rows": SPEED[:1], **HARDWARE}),
    "ops": lambda: bench.ops_figure({"rows": OPS, **HARDWARE}),
    "hgca 11": lambda: bench.hgca_figure({"figure": "11", "rows": SPEED[:6], **HARDWARE}),
    "hgca 13": lambda: bench.hgca_figure({"figure": "13", "rows": SPEED, **HARDWARE}),
    "sweep": lambda: sweep_figure.sweep(
        {"rows": SWEEP, "model": "smollm2", "dtype": "float32", "length": 8192, "text": {"name": "pride.txt"}}
    ),
    "needle": lambda: heatmap.grid(NEEDLE),
    "fidelity": lambda: figures.fidelity_figure(WINDOWS),
    "perplexity": lambda: figures.perplexity_figure(WINDOWS),
    "locality": lambda: attention_figures.locality(LOCALITY),
    "drift": lambda: attention_figures.drift(DRIFT),
    "query ahead": lambda: attention_figures.query_ahead(QUERY),
    "timeline": lambda: timeline_figure(STEP, "hcattention, qwen3-14b, batch 10, 1,048,576 tokens"),
}


@pytest.fixture(params=KINDS, scope="module")
def figure(request: pytest.FixtureRequest) -> Any:
    made = KINDS[request.param]()
    made.canvas.draw()
    yield made
    pyplot.close(made)


def ticks(axis: Any) -> list[Any]:
    low, high = sorted(axis.get_view_interval())
    own = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [tick.label1 for tick in own if tick.label1.get_visible() and tick.label1.get_text()]


def test_ticks_do_not_touch_and_labels_fit(figure: Figure) -> None:
    page = figure.bbox.padded(1)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            boxes = [label.get_window_extent() for label in ticks(axis)]
            for one, other in itertools.pairwise(boxes):
                assert not one.overlaps(other)
            for box in boxes:
                assert page.contains(box.x0, box.y0)
                assert page.contains(box.x1, box.y1)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts):
            box = text.get_window_extent()
            assert not text.get_text() or (page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1))


def test_legends_are_off_what_is_drawn(figure: Figure) -> None:
    own = [axes.get_legend() for axes in figure.axes]
    for legend in [*figure.legends, *(found for found in own if found is not None)]:
        box = legend.get_window_extent()
        for axes in figure.axes:
            assert not box.overlaps(axes.get_window_extent().padded(-1))
        assert figure.bbox.padded(1).contains(box.x0, box.y0)
        assert figure.bbox.padded(1).contains(box.x1, box.y1)


def test_no_raw_floats(figure: Figure) -> None:
    words = [text.get_text() for axes in figure.axes for text in axes.findobj(pyplot.Text)]
    words += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert [word for word in words if re.search(r"\d\.\d{5,}|\de[-+]\d|\\times|\{", word)] == []


def test_names_of_bars_are_unique() -> None:
    for names in (bench.decode_names(SPEED), bench.ops_names(OPS), sweep_figure.row_names({"rows": SWEEP})):
        assert len(set(names)) == len(names)
    assert bench.decode_names(SPEED)[1] == "hgca, batch 9, 8k\nwindow 1,024, kept 1.6%"
    assert bench.decode_names(SPEED)[2].startswith("scout, batch 10, 8k\nbudget 2,048, schedule same_layer,")
    assert max(len(line) for name in bench.decode_names(SPEED) for line in name.split("\n")) <= 46
    assert "budget 1,024" in sweep_figure.row_names({"rows": [{"method": "scout", "params": {"budget": 1024}}]})[0]
    twins = [{**SWEEP[0], "row": f"hcattention,cap={n}"} for n in (1, 2)]
    assert sweep_figure.row_names({"rows": twins}) == ["hcattention, cap=1", "hcattention, cap=2"]


def test_simulations_stand_over_the_bars() -> None:
    assert "assumed lists: 1.6%" in bench.simulated(SPEED)
    assert "random weights" in bench.decode_figure({"rows": SPEED, **HARDWARE}).axes[0].get_title()


@pytest.mark.parametrize(
    ("value", "said"), [(0.039841269841269844, "4.0%"), (0.25, "25%"), (0.07, "7%"), (1, "100%"), (0.0004, "0.0%")]
)
def test_shares(value: float, said: str) -> None:
    assert share(value) == said


@pytest.mark.parametrize(("count", "said"), [(32768, "32k"), (1 << 20, "1m"), (300, "300"), (33000, "33,000")])
def test_lengths(count: int, said: str) -> None:
    assert tokens(count) == said


def test_lines_end_after_commas() -> None:
    assert wrap("window 128, tau 0.95, recall interval 8", 28) == "window 128, tau 0.95,\nrecall interval 8"
    assert wrap("one part alone that is longer than a line", 20) == "one part alone that\nis longer than a\nline"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"method": "full"}, "full"),
        ({"method": "hgca", **HGCA}, "hgca, window 1,024, kept 1.6%"),
        ({"method": "hgca", "params": {"window_blocks": 4, "beta": 16, "alpha": 0.1}}, "hgca, window 128, beta 16"),
        ({"method": "scout", "params": {"budget": 2048, "host_dtype": "int8"}, "ms_per_step": 1.0},
         "scout, budget 2,048, DRAM int8"),
        ({"method": "hcattention", "params": {"groups": 32, "tau": 0.95, "host_dtype": "int4", "code_bits": 13}},
         "hcattention, tau 0.95, 32 groups, codes of 13 bits, DRAM int4"),
        ({"method": "hcattention", "params": {"groups": 0, "tau": 1.0, "cap": 9, "tail": "none"}},
         "hcattention, tau 1, at most 9 entries, exact keys, left out: none"),
        ({"method": "streaming", "gpu_share": 0.125}, "streaming, GPU 12.5% of the KV"),
        ({"method": "cpu", "params": {"handover": True, "window_blocks": 258}, "ms_per_step": 1.0},
         "cpu, window 8,256, handover"),
    ],
)  # fmt: skip
def test_what_decides_is_said(row: dict[str, Any], said: str) -> None:
    assert describe(row) == said
    assert deciding(row) == (said.split(", ")[1:] if ", " in said else [])


def test_the_numbers_in_dram() -> None:
    assert host_dtype({"host_kv_bytes": 0}) == ""
    assert host_dtype({"host_kv_bytes": 1, "dtype": "bfloat16", "settings": {"host_dtype": "model"}}) == "bfloat16"
    assert host_dtype({"host_kv_bytes": 1, "settings": {"host_dtype": "int4"}}) == "int4"
