"""The groups of commands of `coattn-lab`, and options that they share."""

from __future__ import annotations

import click
from rich.table import Table

from coattn.cli.output import err
from coattn.errors import CoattnError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True})
def lab() -> None:
    """Measurements of coattn: papers' figures, task suites, peers, driven benchmarks.

    Results name the commit they were made from. COATTN_COMMIT=SHA says it where the source was copied without its
    history.
    """


@lab.group()
def bench() -> None:
    """Measure speed, beside the limits of this machine."""


@lab.group("eval")
def evaluate() -> None:
    """Measure what methods cost in quality."""


def empty_table(title: str, texts: str, figures: str) -> Table:
    """For people: columns of texts, then columns of figures, which stand on the right; ` | ` between their names."""
    table = Table(title=title)
    for name in texts.split(" | "):
        table.add_column(name)
    for name in figures.split(" | "):
        table.add_column(name, justify="right")
    return table


def raise_failed(failed: dict[str, CoattnError]) -> None:
    """Says which rows failed, and ends as the first of them."""
    for name, error in failed.items():
        err.print(f"row {name} failed: {error}", soft_wrap=True, highlight=False)
    if failed:
        raise next(iter(failed.values()))
