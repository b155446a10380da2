"""`coattn-lab eval longbench` and `coattn-lab eval ruler`: public benchmarks, scored by their own rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from coattn.cli.eval_answers import answer_options, composed_method, open_asker
from coattn.cli.options import Count
from coattn.cli.output import err, out, print_json, writable
from coattn_lab.cli.answers import PLAIN, answer_all, shared_config
from coattn_lab.cli.groups import evaluate

if TYPE_CHECKING:
    from coattn_lab.evaluate.bench_item import Item
    from coattn_lab.evaluate.data import Table as Data


def bench_options(command: Any) -> Any:
    """--data, --tasks, --limit, and what every evaluation with answers has."""
    for option in (
        answer_options(PLAIN),
        click.option("--limit", type=Count(1), help="Only so many items of each dataset, the first ones."),
        click.option("--tasks", metavar="NAMES", help="Only these datasets, with commas."),
        click.option("--data", required=True, metavar="DIR", help="A folder of JSONL files, or a hub name."),
    ):
        command = option(command)
    return command


@evaluate.command()
@bench_options
@click.option(
    "--max-length",
    type=Count(2),
    help="Tokens of a prompt; default: 3,500 of 4,096 positions, 7,500 of 8,192 ...",
)
def longbench(**options: Any) -> None:
    """LongBench: its prompts, its truncation in the middle, its scores in percent, and their mean."""
    from coattn_lab.evaluate import longbench as bench

    run("longbench", options, bench.read_tables, bench.items, bench.longest_prompt)


@evaluate.command()
@bench_options
@click.option("--max-length", type=Count(2), help="Tokens of a prompt; default: what the model has positions for.")
@click.option(
    "--raw", is_flag=True, help="No chat template: the files were made with the model's own, or for a base model."
)
def ruler(**options: Any) -> None:
    """RULER: files made by its own scripts, string match in percent, and the mean."""
    from coattn_lab.evaluate import ruler as bench

    chat = not options["raw"]
    run(
        "ruler",
        options,
        bench.read_tables,
        lambda table: bench.items(table, chat),
        lambda positions: positions or 1 << 30,
    )


def run(
    kind: str,
    options: dict[str, Any],
    read: Callable[[Any, Sequence[str]], list[Data]],
    items_of: Callable[[Data], list[Item]],
    longest: Callable[[int | None], int],
) -> None:
    """Both benchmarks: read, ask, score, report."""
    composed, target = composed_method(options), writable(options["target"])

    from coattn.engine.sampling.params import SamplingParams
    from coattn.hf.generate import positions
    from coattn.tools.evaluate.asking import Ask
    from coattn_lab.evaluate.bench_item import encode, judge, summarise
    from coattn_lab.evaluate.data import digest, find_folder
    from coattn_lab.evaluate.results import Results

    names = [name.strip() for name in (options["tasks"] or "").split(",") if name.strip()]
    tables = read(find_folder(options["data"]), names)
    items = {item.name: item for table in tables for item in items_of(table)[: options["limit"]]}
    asker = open_asker(options, composed)
    most = options["max_length"] or longest(positions(asker.loaded))
    asks = [
        Ask(item.name, encode(item, asker.loaded.tokenizer, most), SamplingParams(item.new_tokens, stop=item.stop))
        for item in items.values()
    ]
    config = {
        "data": {"name": options["data"], "sha256": digest(tables)},
        "datasets": [table.name for table in tables],
        "limit": options["limit"],
        "max_length": most,
        "raw": bool(options.get("raw")),
        **shared_config(kind, options, asker, composed, asks),
    }
    results = Results(target, config, summarise, items="items", key="item")
    result = answer_all(kind, asker, asks, results, lambda name, answer: judge(items[name], answer))
    if target is not None:
        err.print(f"wrote {target}")
    if options["as_json"]:
        print_json(result)
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """The scores for people."""
    table = Table(title=f"{result['evaluation']}, {result['model']}, {result['method']}")
    for name in ("dataset", "items", "score"):
        table.add_column(name, justify="left" if name == "dataset" else "right")
    for task in result["tasks"]:
        table.add_row(task["task"], str(task["items"]), f"{task['score']:.2f}")
    table.add_row("mean", "", f"{result['mean']:.2f}")
    out.print(table)
