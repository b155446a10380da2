"""`coattn eval table`: result folders of tasks as one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from coattn.cli.evaluate import evaluate
from coattn.cli.options import json_option
from coattn.cli.output import err, print_json, writable


@evaluate.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
@click.option("--out", "target", metavar="FILE", help="Write the JSON there, and Markdown and a figure beside it.")
@json_option
def table(folders: tuple[str, ...], target: str | None, as_json: bool) -> None:
    """Merge folders of `coattn eval tasks run` into one table: score, interval, GPU bytes, tokens to the answer.

    Results of several seeds or lengths add up. Every row stands beside `full` on the same prompts. Sweeps in the
    folders (`coattn eval sweep --out`) add the KL of rows of the same name. Without --out the table is printed.
    """
    path = writable(target)

    from coattn.evaluate.results import write_json
    from coattn.evaluate.tasks.table import lines, page, read_results
    from coattn.provenance import provenance

    rows = read_results([Path(folder) for folder in folders])
    found = lines(rows)
    faults = [why for row in rows for why in row.faults]
    result: dict[str, Any] = {"evaluation": "table", "lines": found, "faults": faults, **provenance()}
    if path is not None:
        from coattn.evaluate.tasks.table_figure import draw

        picture = path.with_suffix(".png")
        write_json(path, result)
        draw(found, picture)
        path.with_suffix(".md").write_text(page(found, rows, picture.name), encoding="utf-8")
        err.print(f"wrote {path}, {path.with_suffix('.md')} and {picture}", soft_wrap=True)
    if as_json:
        print_json(result)
    elif path is None:
        click.echo(page(found, rows, None), nl=False)
