"""How long a user waits at the end of a prompt, and for a second question about a long text; methods take turns.

    python lab/scripts/second_token.py OUT [--shapes qwen3-8b] [--prompts 16384,32768] [--text 65536]

Weights and tokens are random. OUT is JSON, written anew after each turn of a method; the table has medians of turns.
`first`, `second`: seconds from submission to these tokens, of several requests the slowest one's. `gap`: the longest
time between two tokens of another sequence from a prompt's submission until its last token; `found_tokens`, in OUT:
those that were stored already.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch

from coattn.engine.llm import LLM
from coattn.hf.forward import Session
from coattn.hf.load import choose_device, choose_dtype
from coattn.hf.sketches import measure
from coattn.kernels.quantise.layer_file import TextOrigin
from coattn.kernels.quantise.sketch import SPREADS
from coattn.method.table import find_method
from coattn.provenance import provenance
from coattn_lab.bench.random_model import random_model
from coattn_lab.bench.requests import play, prompts_of
from coattn_lab.bench.stream import Item

NEW_TOKENS, QUESTION_TOKENS = 4, 64
OTHER, AFTER_SECONDS = Item(0, 2048, 600), 0.5
"""What decodes while a prompt is read, and when that comes."""


def write_sketch(model: Any, path: Path) -> None:
    """The file that an engine makes of a real model, from random tokens."""
    ids = torch.tensor(prompts_of([Item(0, 16_384, 1)], model.config.vocab_size, 0)[0])
    with Session(model) as session:
        origin = TextOrigin("random", "random", "", len(ids), tuple(shape.mark for shape in session.layers))
        SPREADS.save(path, measure(session, ids, None), origin)


def turn(llm: LLM, prompts: list[int], together: int, text: int, seed: int) -> dict[str, dict[str, float]]:
    """Every case once, each with tokens of its own."""
    book, rows = prompts_of([Item(0, text, 1)], llm.vocabulary, seed)[0], {}
    cases: dict[str, list[Item]] = {}
    for tokens in prompts:
        item = Item(AFTER_SECONDS, tokens, NEW_TOKENS)
        cases |= {f"{tokens}": [item], f"{together} x {tokens}": [item] * together, f"{tokens} beside": [OTHER, item]}
    cases |= {f"{n} question on {text}": [Item(0, QUESTION_TOKENS, NEW_TOKENS)] for n in ("first", "second")}
    for name, items in cases.items():
        own = prompts_of(items, llm.vocabulary, seed + len(rows) + 1)
        known = llm.report()["cached_tokens"]
        tracks = play(llm, items, [book + ids if "question" in name else ids for ids in own], time.perf_counter())
        times = [track.tokens or [] for track in tracks if track.item is not OTHER]
        first, second = (max(each[i] for each in times) - tracks[-1].arrived for i in (0, 1))
        rows[name] = {"first": first, "second": second, "found_tokens": llm.report()["cached_tokens"] - known}
        if OTHER in items:
            seen = [at for at in tracks[0].tokens or () if tracks[1].arrived <= at <= times[0][-1]]
            rows[name]["gap"] = max(b - a for a, b in pairwise(seen))
    return rows


@click.command()
@click.argument("out", type=Path)
@click.option("--shapes", default="qwen3-8b")
@click.option("--methods", default="full,auto")
@click.option("--prompts", default="16384,32768")
@click.option("--text", default=65_536)
@click.option("--together", default=4)
@click.option("--turns", default=2)
@click.option("--host-kv", default="24GiB")
@click.option("--device", default="auto")
def main(out: Path, shapes: str, methods: str, prompts: str, text: int, together: int, turns: int, **more: str) -> None:
    """Runs every turn, prints a table."""
    device, names, lengths = choose_device(more["device"]), methods.split(","), [int(n) for n in prompts.split(",")]
    model = random_model(shapes, device, choose_dtype("auto", device))
    longest = max(text + QUESTION_TOKENS, *lengths, OTHER.prompt_tokens + OTHER.new_tokens) + NEW_TOKENS
    room = {"max_batch": together, "sizes": [1, 2, together], "max_length": longest, "host_kv": more["host_kv"]}
    found: list[tuple[str, dict[str, dict[str, float]]]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_sketch(model, Path(folder) / "sketch")
        for name in names * turns:
            own = {"sketch": f"{folder}/sketch"} if find_method(name).index == "sketch" else {}
            with LLM((model, None), name, **room, **own) as llm:
                llm.warm_up()
                if len(found) < len(names):  # kernels are compiled, which is not measured
                    turn(llm, lengths[:1], together, lengths[0], 1000)
                found.append((name, turn(llm, lengths, together, text, 100 * len(found))))
            out.write_text(json.dumps({"shapes": shapes, "turns": found, **provenance()}, indent=1) + "\n")
    for case, row in found[0][1].items():
        for what in sorted(row.keys() - {"found_tokens"}):
            times = {name: statistics.median(rows[case][what] for n, rows in found if n == name) for name in names}
            shown = (f"{name} {s:.3f} s ({s / times[names[0]]:.2f})" for name, s in times.items())
            print(f"{case:>26} {what:>6}", *shown, sep="  ")


if __name__ == "__main__":
    main()
