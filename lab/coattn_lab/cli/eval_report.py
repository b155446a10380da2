"""`coattn-lab eval report`: a folder of results as one Markdown page."""

from __future__ import annotations

from pathlib import Path

import click

from coattn.cli.output import err, writable
from coattn_lab.cli.groups import evaluate


@evaluate.command()
@click.argument("folder", metavar="DIR")
@click.option("--out", "target", metavar="FILE", help="The Markdown file; default: report.md in the folder.")
def report(folder: str, target: str | None) -> None:
    """Turn the results of a folder, of `eval` and of `bench`, into a Markdown page with tables and figures."""
    from coattn_lab.evaluate.report import page, read_folder

    found = read_folder(Path(folder))
    path = writable(target or str(Path(folder) / "report.md"))
    assert path is not None
    path.write_text(page(found, path.parent), encoding="utf-8")
    err.print(f"wrote {path}: {len(found.results)} result(s)")
    for name, reason in found.left_out:
        err.print(f"left out {name}: {reason}")
