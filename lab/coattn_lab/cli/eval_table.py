"""`coattn-lab eval table`: the table of a model, or of result folders that are there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.evaluate import load_to_compare
from coattn.cli.options import Count, Number, json_option, model_options, numbers, parse_settings
from coattn.cli.output import err, print_json, progress, writable
from coattn.errors import CoattnError, ConfigError, InputError
from coattn.text import read_text
from coattn.units import parse_bytes
from coattn_lab.cli.groups import evaluate, raise_failed

if TYPE_CHECKING:
    from coattn_lab.evaluate.tasks.run import Progress

LENGTH, DEPTHS = 2048, 5
ROWS = (
    "full",
    "auto",
    "scout",
    "hcattention",
    "hgca",
    "quest",
    "snapkv",
    "duo",
    "streaming",
    "h2o",
    "tova",
    "infinigen",
    "pqcache",
    "oracle",
)
"""What is compared where nobody names rows; a row may have parameters, as in `scout,budget=1024`."""
UNFINISHED = 3
"""How the command ends where `--minutes` were over before all rows were through."""
RUNS = ("rows", "budget", "prompts")
"""Any of these options runs rows; without them results are only merged."""


@evaluate.command()
@click.argument("folders", nargs=-1, metavar="[DIR]...")
@click.option("--rows", multiple=True, help=f"Run these rows, with commas.  [default: {','.join(ROWS)}]")
@click.option(
    "--budget",
    help="Set each row's size so that its KV on the GPU is this share: 6.25%,12.5%,own; own leaves it as written.",
)
@click.option(
    "--prompts",
    multiple=True,
    metavar="FILE",
    help="Prompts of `coattn-lab eval tasks make`, one file after the other; default: needles, made now.",
)
@click.option(
    "--length", callback=numbers, help=f"Tokens of prompts, with commas.  [default: {LENGTH}, or all of --prompts]"
)
@click.option(
    "--limit",
    callback=numbers,
    help="Only so many prompts of each task and length, the first ones; with commas, of each file of --prompts.",
)
@click.option("--modes", default="fed,read", show_default=True, help="Question fed as steps; read with the prompt.")
@click.option("--batch", default=4, show_default=True, type=Count(1), help="Prompts that are answered at a time.")
@click.option("--hold", metavar="SIZE", help="KV of prompts held at a time; default: 75% of the free GPU memory.")
@click.option(
    "--kl",
    default=32,
    show_default=True,
    type=Count(0),
    help="Tokens of full attention's answers: rows are compared along them, and their steps timed.",
)
@click.option(
    "--minutes",
    type=Number(0, min_open=True),
    help=f"Begin no row after so many minutes and end with {UNFINISHED}; the same command goes on from there.",
)
@click.option("--tasks", metavar="NAMES", help="Only these tasks, with commas.")
@click.option("--whole", is_flag=True, help="Let answers run to their end, also when their score is known.")
@click.option("--raw", is_flag=True, help="No chat template: for a base model.")
@click.option(
    "--text",
    "text_file",
    metavar="FILE",
    help="What is calibrated on, and needles lie in; default: the help topics of Python.",
)
@click.option("--files", metavar="DIR", help="Where what is calibrated lies; default: in the folder of the results.")
@model_options
@click.option("--out", "target", metavar="FILE", help="Write the JSON there, and Markdown beside it.")
@json_option
def table(folders: tuple[str, ...], target: str | None, as_json: bool, **options: Any) -> None:
    """One table of many rows: tasks, KL, milliseconds of a step, GPU bytes, tokens read. Runs them, or merges results.

    With --rows, --budget or --prompts it runs the rows on your model and keeps their results in the folder FILE without
    its ending, from where a run that was cut off goes on. At a budget each row's own size parameters are set so that
    its KV in GPU memory is that share of all; a row that cannot meet it says why. What a row has to know beforehand
    (heads of duo, the skew of infinigen, the codebook of hcattention) is made where no file is given.

    \b
    coattn-lab eval table --budget 12.5%,25% --limit 1 --out table.json
    coattn-lab eval table --rows full,auto,scout --model model.gguf --prompts p.jsonl.gz --out table.json

    Folders of other runs are merged with it. Results of several seeds or lengths add up. Every row is
    compared with `full` on the same prompts. Sweeps in the folders (`coattn-lab eval sweep --out`) add the KL of
    rows of the same name. Without --out the merged table is printed.

    """
    path = writable(target)
    runs = any(options[name] for name in RUNS)
    if not runs and not folders:
        raise ConfigError("There is nothing to make a table of.", "Give folders of results, or --rows or --budget.")
    failed: dict[str, CoattnError] = {}
    whole = True
    if runs:
        if path is None:
            raise ConfigError("--out is missing: rows that are run are kept there.", "Give --out table.json.")
        folder = path.with_suffix("")
        failed, whole = run_rows(folder, options)
        folders = (*folders, str(folder))

    from coattn.provenance import provenance
    from coattn_lab.evaluate.results import write_json
    from coattn_lab.evaluate.tasks.table import lines, overall, page, read_results

    rows = read_results([Path(each) for each in folders])
    found = lines(rows)
    faults = [why for row in rows for why in row.faults]
    result: dict[str, Any] = {
        "evaluation": "table",
        "lines": found,
        "overall": overall(rows),
        "faults": faults,
        **provenance(),
    }
    if path is not None:
        write_json(path, result)
        path.with_suffix(".md").write_text(page(found, rows), encoding="utf-8")
        err.print(f"wrote {path} and {path.with_suffix('.md')}", soft_wrap=True)
    if as_json:
        print_json(result)
    elif path is None or runs:
        click.echo(page(found, rows), nl=False)
    raise_failed(failed)
    if not whole:
        err.print("--minutes are over: run the same command again to go on.", soft_wrap=True, highlight=False)
        click.get_current_context().exit(UNFINISHED)


def words(text: str) -> list[str]:
    """Of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def run_rows(folder: Path, options: dict[str, Any]) -> tuple[dict[str, CoattnError], bool]:
    """Runs what the options ask for into a folder -> rows that failed, and why; whether all rows were through."""
    from coattn_lab.evaluate.tasks.budget import parse_budgets
    from coattn_lab.evaluate.tasks.leaderboard import Asked, make_needles, run_all
    from coattn_lab.evaluate.tasks.prompts import read_prompts
    from coattn_lab.evaluate.tasks.run import PausedError, Stage, parse_rows

    rows = parse_rows(options["rows"] or ROWS, parse_settings)
    if not any(row.name == "full" for row in rows):
        rows = [*parse_rows(("full",), parse_settings), *rows]
    budgets = parse_budgets(options["budget"]) if options["budget"] else []
    text = read_text(options["text_file"])
    given = [read_prompts(Path(each)) for each in options["prompts"]]
    limits = options["limit"] or [None]
    if len(limits) not in (1, max(1, len(given))) or any(each is not None and each < 1 for each in limits):
        raise ConfigError(
            f"--limit has {len(limits)} numbers for {len(given)} files of --prompts.",
            "Give one from 1 on, or one for each.",
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, but results are to be kept there.", "Choose another --out.")
    hold = parse_bytes(options["hold"], "hold")
    loaded = load_to_compare(options)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = options["length"] or ([] if given else [LENGTH])
    files = given or [make_needles(loaded, text, lengths, DEPTHS, 42, folder / "prompts.jsonl.gz")]
    plan = {
        "modes": words(options["modes"]),
        "tasks": words(options["tasks"] or ""),
        "whole": options["whole"],
        "batch": options["batch"],
        "chat": not options["raw"],
        "hold": hold,
        "stage": None if options["minutes"] is None else Stage(time.monotonic() + 60 * options["minutes"]),
    }
    calibrated = None if options["files"] is None else Path(options["files"])
    failed: dict[str, CoattnError] = {}
    with progress("table", None) as bar:

        def started(total: int) -> Progress:
            bar.reset(bar.task_ids[0], total=total)
            return lambda what, by: bar.update(bar.task_ids[0], description=what, advance=by)

        def say(said: str) -> None:
            err.print(said, soft_wrap=True, highlight=False)

        for prompts, limit in zip(files, limits * len(files), strict=False):
            own = {**plan, "limit": limit}
            asked = Asked(rows, budgets, lengths, text, options["kl"], own, calibrated)
            try:
                failed |= run_all(loaded, prompts, asked, folder, say, started)
            except PausedError:
                return failed, False
    return failed, True
